"""Every token of a recording belongs to the right request and phase."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tracer.conftest import tiny
from tracer.hook import ExpertsHook
from tracer.models import LoadedModel
from tracer.prompts import Prompt
from tracer.record import Options, record
from traces.errors import InputError
from traces.reader import EXTRA
from traces.steps import DECODE, PREFILL
from traces.trace import Trace

TEXTS = ("What is a heron?", "Hi", "Count the boats in the harbour, twice.", "ok then")
PROMPTS = [Prompt(f"p{i}", "set", f"task{i % 2}", (text,)) for i, text in enumerate(TEXTS)]


def recorded(loaded: LoadedModel, out: Path, **options: Any) -> Trace:
    record(loaded, PROMPTS, out, Options(**{"max_new_tokens": 6, **options}))
    return Trace.read(out, EXTRA)


def test_a_padded_batch_records_what_single_requests_record(loaded: LoadedModel, tmp_path: Path) -> None:
    single = recorded(loaded, tmp_path / "single")
    batch = recorded(loaded, tmp_path / "batch", batch_size=3)
    for name in ("offsets", "phase", "position", "token_id"):
        np.testing.assert_array_equal(getattr(single, name), getattr(batch, name), err_msg=name)
    np.testing.assert_array_equal(np.sort(single.experts), np.sort(batch.experts))


def test_routing_of_generated_tokens_is_that_of_one_prefill_over_all(loaded: LoadedModel, tmp_path: Path) -> None:
    trace = recorded(loaded, tmp_path / "t")
    assert trace.token_id is not None
    for r in range(len(PROMPTS)):
        rows = slice(int(trace.offsets[r]), int(trace.offsets[r + 1]))
        with ExpertsHook(loaded.model) as hook, torch.inference_mode():
            hook.probe()
            loaded.model(input_ids=torch.tensor(trace.token_id[rows][None].astype(np.int64)))
            ids, _ = hook.take(weights=False)
        np.testing.assert_array_equal(np.sort(np.where(ids < 0, trace.sentinel, ids)), np.sort(trace.experts[rows]))


def test_a_request_has_prompt_plus_new_tokens_less_one_rows(tmp_path: Path) -> None:
    trace = recorded(tiny("olmoe"), tmp_path / "t", batch_size=4)
    prompts = [len(text) for text in TEXTS]
    assert trace.requests["prompt_tokens"].tolist() == prompts
    assert np.diff(trace.offsets).tolist() == [length + 6 - 1 for length in prompts]
    assert [
        int((trace.phase[a:b] == PREFILL).sum()) for a, b in zip(trace.offsets, trace.offsets[1:], strict=False)
    ] == prompts
    assert trace.requests["output_tokens"].tolist() == [6] * 4
    assert trace.position[: prompts[0] + 5].tolist() == list(range(prompts[0] + 5))


def test_one_new_token_needs_no_decode(tmp_path: Path) -> None:
    assert recorded(tiny("mixtral"), tmp_path / "t", max_new_tokens=1).phases == "prefill"


def test_what_a_finished_row_is_fed_is_not_recorded(tmp_path: Path) -> None:
    free = recorded(tiny("olmoe"), tmp_path / "free", max_new_tokens=8)
    assert free.token_id is not None
    stop = int(free.token_id[free.offsets[1] - 5])  # a token that the first request generates early
    loaded = tiny("olmoe")
    loaded.model.generation_config.eos_token_id = stop
    trace = recorded(loaded, tmp_path / "t", max_new_tokens=8, batch_size=4)
    assert trace.token_id is not None
    lengths = trace.requests["output_tokens"].tolist()
    assert lengths[0] < 8, "no row finishes early: the test shows nothing"
    assert max(lengths) == 8, "all rows finish early: the test shows nothing"
    for r, n in enumerate(lengths):
        rows = slice(int(trace.offsets[r]), int(trace.offsets[r + 1]))
        decode = trace.phase[rows] == DECODE
        assert decode.sum() == n - 1
        assert stop not in trace.token_id[rows][decode]
        np.testing.assert_array_equal(
            np.sort(trace.experts[rows]), np.sort(free.experts[free.offsets[r] :][: rows.stop - rows.start])
        )


def test_steps_number_the_forward_passes(tmp_path: Path) -> None:
    trace = recorded(tiny("mixtral"), tmp_path / "t", batch_size=2, max_new_tokens=3)
    steps = [sorted(set(trace.step[a:b].tolist())) for a, b in zip(trace.offsets, trace.offsets[1:], strict=False)]
    assert steps == [[0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 5]]


def test_weights_descend_and_belong_to_their_experts(tmp_path: Path) -> None:
    trace = recorded(tiny("deepseek_v3"), tmp_path / "t", weights=True)
    assert trace.weights is not None
    assert (np.diff(trace.weights.astype(float), axis=-1) <= 0).all()
    assert recorded(tiny("deepseek_v3"), tmp_path / "u").weights is None


def test_token_ids_can_be_withheld(tmp_path: Path) -> None:
    trace = recorded(tiny("mixtral"), tmp_path / "t", token_ids=False)
    assert trace.token_id is not None
    assert (trace.token_id == -1).all()


def test_a_trace_says_what_it_was_recorded_from(tmp_path: Path) -> None:
    meta = recorded(tiny("qwen3_moe"), tmp_path / "t").meta
    assert (meta.model, meta.mode, meta.dtype) == ("qwen3_moe", "generate", "float32")
    assert (meta.hidden_size, meta.expert_intermediate_size) == (32, 16)
    assert meta.expert_bytes == 3 * 32 * 16 * 4
    assert meta.layer_names[0] == "model.layers.0.mlp.experts"
    assert {"torch", "transformers"} <= set(meta.tools)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_an_interrupted_recording_keeps_what_finished(tmp_path: Path, batch_size: int) -> None:
    steps = 0

    def interrupt(rows: int) -> None:
        nonlocal steps
        steps += 1
        if steps == 10:  # in the second prompt alone, or in the second pair
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record(tiny("mixtral"), PROMPTS, tmp_path / "t", Options(6, batch_size), on_step=interrupt)
    trace = Trace.read(tmp_path / "t")
    assert len(trace.requests) == batch_size
    whole = recorded(tiny("mixtral"), tmp_path / "whole", batch_size=batch_size).head(batch_size)
    np.testing.assert_array_equal(trace.experts, whole.experts)


def test_rows_that_finished_in_an_interrupted_batch_are_kept(tmp_path: Path) -> None:
    free = recorded(tiny("olmoe"), tmp_path / "free", max_new_tokens=8)
    assert free.token_id is not None
    loaded = tiny("olmoe")
    loaded.model.generation_config.eos_token_id = int(free.token_id[free.offsets[1] - 5])
    steps = 0

    def interrupt(rows: int) -> None:
        nonlocal steps
        steps += 1
        if steps == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record(loaded, PROMPTS, tmp_path / "t", Options(8, 4), on_step=interrupt)
    trace = Trace.read(tmp_path / "t")
    assert "p0" in trace.requests["id"].tolist()
    assert len(trace.requests) < 4
    assert not set(trace.requests["output_tokens"]) & {8}


def test_a_model_that_rereads_its_context_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny("mixtral")
    generate = loaded.model.generate
    monkeypatch.setattr(loaded.model, "generate", lambda **options: generate(**{**options, "use_cache": False}))
    with pytest.raises(InputError, match="one token at a time"):
        record(loaded, PROMPTS, tmp_path / "t", Options(4))
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"max_time": 1e-9},
        {"stop_strings": ["a", "e", "\x00"]},
        {"min_new_tokens": 6, "num_return_sequences": 2, "num_beams": 2},
        {"repetition_penalty": 9.0, "no_repeat_ngram_size": 1, "suppress_tokens": list(range(256))},
        {"do_sample": True, "temperature": 9.0, "use_cache": False, "forced_eos_token_id": 3},
        {"max_length": 3, "cache_implementation": "static", "return_dict_in_generate": True},
    ],
)
def test_generation_is_greedy_whatever_the_checkpoint_says(tmp_path: Path, settings: dict[str, Any]) -> None:
    plain = recorded(tiny("olmoe"), tmp_path / "plain")
    loaded = tiny("olmoe")
    loaded.model.generation_config.update(**settings)
    trace = recorded(loaded, tmp_path / "t")
    for name in ("offsets", "token_id", "experts"):
        np.testing.assert_array_equal(getattr(trace, name), getattr(plain, name), err_msg=name)
    assert all(getattr(loaded.model.generation_config, name) == value for name, value in settings.items())


def test_a_generation_that_ends_early_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny("mixtral")
    generate = loaded.model.generate
    monkeypatch.setattr(loaded.model, "generate", lambda **options: generate(**options, max_time=1e-9))
    with pytest.raises(InputError, match="mixtral stopped early in the prompts from 'p0' on"):
        record(loaded, PROMPTS, tmp_path / "t", Options(4))
    assert not (tmp_path / "t").exists()


def test_a_router_that_repeats_an_expert_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = ExpertsHook.take

    def repeating(hook: ExpertsHook, weights: bool) -> Any:
        ids, kept = take(hook, weights)
        ids[-1, 1] = ids[-1, 1, 0]
        return ids, kept

    monkeypatch.setattr(ExpertsHook, "take", repeating)
    with pytest.raises(InputError, match=r"model\.layers\.1\..* an expert is repeated"):
        recorded(tiny("mixtral"), tmp_path / "t")
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("error", [RuntimeError, IndexError, ValueError, TypeError, KeyError, torch.OutOfMemoryError])
def test_errors_of_the_model_are_bad_input(tmp_path: Path, error: type[Exception]) -> None:
    loaded = tiny("mixtral")
    calls = 0

    def fail(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 12:  # in the second prompt
            raise error("first line\nsecond line")

    loaded.model.lm_head.register_forward_hook(fail)
    reason = "out of memory" if error is torch.OutOfMemoryError else "first line"
    with pytest.raises(InputError, match=f"mixtral cannot be run on 1 prompts of 2 tokens: '?{reason}"):
        recorded(loaded, tmp_path / "t")
    assert len(Trace.read(tmp_path / "t").requests) == 1


def test_errors_of_the_recorder_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ExpertsHook, "_require_each_once")
    with pytest.raises(AttributeError):
        recorded(tiny("mixtral"), tmp_path / "t")


@pytest.mark.parametrize("architecture", ["longcat_flash", "dbrx"])
def test_the_bytes_of_an_expert_are_its_own_alone(tmp_path: Path, architecture: str) -> None:
    assert recorded(tiny(architecture), tmp_path / "t").meta.expert_bytes == 3 * 32 * 16 * 4
