"""Every token of a recording belongs to the right request and phase."""

import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.support.architectures import tiny
from tests.support.routing_oracle import EVERY
from tests.support.same import assert_same
from tracer.answers import LoadedModel, Runner
from tracer.hook import ExpertsHook
from tracer.observed import Answer, Answers
from tracer.prompts import Prompt
from tracer.record import Options, record
from traces import DECODE, PREFILL, InputError, Trace
from traces.edit import Source, join
from traces.reader import EXTRA
from traces.schema import Picks

TEXTS = ("What is a heron?", "Hi", "Count the boats in the harbour, twice.", "ok then")
PROMPTS = [Prompt(f"p{i}", "set", f"task{i % 2}", (text,)) for i, text in enumerate(TEXTS)]


TALKS = [*PROMPTS, Prompt("talk", "set", "task0", ("Hello", "And now?"))]


def recorded(loaded: LoadedModel, out: Path, prompts: Sequence[Prompt] = PROMPTS, **options: Any) -> Trace:
    record(loaded, prompts, out, Options(**{"max_new_tokens": 6, **options}))
    return Trace.read(out, EXTRA)


def at_most(tokens: int, batch_size: int = 1, **options: Any) -> Options:
    return Options(max_new_tokens=tokens, batch_size=batch_size, **options)


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
            ids = hook.passes[0].ids
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


def test_a_trace_says_what_it_was_recorded_from(tmp_path: Path) -> None:
    meta = recorded(tiny("qwen3_moe"), tmp_path / "t").meta
    assert (meta.model, meta.mode, meta.dtype) == ("qwen3_moe", "generate", "float32")
    assert (meta.hidden_size, meta.expert_intermediate_size) == (32, 16)
    assert meta.expert_bytes == 3 * 32 * 16 * 4
    assert meta.layer_names[0] == "model.layers.0.mlp.experts"
    assert {"torch", "transformers"} <= set(meta.tools)


@pytest.mark.parametrize("options", [{}, {"batch_size": 3}, {"batch_size": 2, "temperature": 1.0, "top_p": 0.9}])
def test_a_recording_goes_on_wherever_it_was_interrupted(tmp_path: Path, options: dict[str, Any]) -> None:
    whole = recorded(tiny("mixtral"), tmp_path / "whole", prompts=TALKS, **options)
    stopped, steps = 0, 0

    def interrupt(rows: int) -> None:
        nonlocal steps
        steps += 1
        if steps == 7:
            steps = 0
            raise KeyboardInterrupt

    made = partial(record, tiny("mixtral"), TALKS, tmp_path / "t", at_most(6, **options), resume=True)
    while True:
        try:
            made(on_step=interrupt if stopped < 2 else lambda rows: None)
        except KeyboardInterrupt:
            stopped += 1
        else:
            break
    assert stopped == 2
    assert_same(whole, Trace.read(tmp_path / "t", EXTRA), EXTRA)
    made()  # nothing is left to do
    assert_same(whole, Trace.read(tmp_path / "t", EXTRA), EXTRA)


def test_a_recording_killed_at_any_moment_goes_on_to_the_same_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("traces.writer.FLUSH_SECONDS", 0.0)
    loaded, options = tiny("olmoe"), at_most(6, 2, weights=True, temperature=1.0)
    prompts = [replace(prompt, id=f"{prompt.id}-{n}") for n in range(6) for prompt in TALKS]
    began = time.monotonic()
    record(loaded, prompts, tmp_path / "whole", options)
    took, kills, random = time.monotonic() - began, 0, Random(0)
    while True:
        child = multiprocessing.get_context("fork").Process(
            target=record, args=(loaded, prompts, tmp_path / "t", options), kwargs={"resume": True}
        )
        child.start()
        child.join(random.uniform(0, took / 8) if kills < 40 else None)
        if child.exitcode is not None:
            break
        child.kill()
        child.join()
        kills += 1
    assert child.exitcode == 0
    assert kills > 2, "it was hardly killed: the test shows nothing"
    assert_same(Trace.read(tmp_path / "whole", EXTRA), Trace.read(tmp_path / "t", EXTRA), EXTRA)


@pytest.mark.parametrize(("changed", "named"), [("mlp.gate", "routers"), ("self_attn.q_proj", "weights")])
def test_a_model_with_other_weights_does_not_go_on_with_a_recording(changed: str, named: str, tmp_path: Path) -> None:
    recorded(tiny("mixtral"), tmp_path / "t")
    other = tiny("mixtral")
    with torch.no_grad():
        other.model.model.layers[0].get_submodule(changed).weight *= 1.01
    with pytest.raises(InputError, match=rf"recorded otherwise: {named}_sha256 was"):
        record(other, PROMPTS, tmp_path / "t", at_most(6), resume=True)


def test_shards_joined_are_the_whole(tmp_path: Path) -> None:
    options = {"batch_size": 2, "temperature": 1.0}
    whole = recorded(tiny("mixtral"), tmp_path / "whole", prompts=TALKS, **options)
    for number in (1, 2):
        recorded(tiny("mixtral"), tmp_path / str(number), prompts=TALKS, shard=f"{number}/2", **options)
    join([Source.open(tmp_path / str(number)) for number in (1, 2)], tmp_path / "joined")
    joined = Trace.read(tmp_path / "joined", EXTRA)
    assert "shard" not in joined.meta.settings
    assert_same(replace(whole, meta=joined.meta), joined, EXTRA)


def test_a_forced_response_is_routed_as_its_generation_was(loaded: LoadedModel) -> None:
    prompts = [list(text.encode()) for text in TEXTS]
    with ExpertsHook(loaded.model) as hook:
        hook.probe()
        runner = Runner(loaded, hook, lambda rows: None)
        free = runner.generate(prompts, 6, Answers())
        forced = runner.force(prompts, [answer.output for answer in free])
    for generated, given in zip(free, forced, strict=True):
        assert (generated.prompt, generated.output) == (given.prompt, given.output)
        assert len(rows_of(given)) == len(given.prompt) + 5
        np.testing.assert_array_equal(rows_of(generated), rows_of(given))


def rows_of(answer: Answer) -> NDArray[np.int32]:
    return np.sort(np.concatenate([part.ids[rows] for part, rows in answer.routed]))


def test_forced_responses_are_recorded_as_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [replace(prompt, responses=("so it is",)) for prompt in PROMPTS]
    trace = recorded(tiny("mixtral"), tmp_path / "t", prompts=prompts, mode="teacher-forced", max_new_tokens=None)
    assert trace.meta.mode == "teacher-forced"
    assert trace.requests["output_tokens"].tolist() == [9] * 4  # with the end of sequence, which is not fed back
    assert trace.token_id is not None
    assert bytes(trace.token_id[: trace.offsets[1]].tolist()) == (TEXTS[0] + "so it is").encode()
    cut = recorded(tiny("mixtral"), tmp_path / "u", prompts=prompts, mode="teacher-forced", max_new_tokens=3)
    assert cut.requests["output_tokens"].tolist() == [3] * 4
    with pytest.raises(InputError, match=r"'p0' has no response to force; name a --response-column"):
        recorded(tiny("mixtral"), tmp_path / "v", mode="teacher-forced")
    monkeypatch.setattr(LoadedModel, "response_tokens", lambda *_: [])
    with pytest.raises(InputError, match=r"the response of 'p0' has no tokens"):
        recorded(tiny("mixtral"), tmp_path / "w", prompts=prompts, mode="teacher-forced")


def test_tokens_are_drawn_by_the_seed(tmp_path: Path) -> None:
    made: list[Any] = [
        recorded(tiny("mixtral"), tmp_path / str(n), temperature=temperature, seed=seed).token_id
        for n, (temperature, seed) in enumerate([(0.0, 0), (1.0, 0), (1.0, 0), (1.0, 1)])
    ]
    assert np.array_equal(made[1], made[2])
    assert not np.array_equal(made[0], made[1])
    assert not np.array_equal(made[1], made[3])


def test_each_turn_is_asked_with_all_that_was_said(tmp_path: Path) -> None:
    loaded = tiny("olmoe")
    trace = recorded(loaded, tmp_path / "t", prompts=TALKS[-1:])
    assert trace.requests["id"].tolist() == ["talk-turn-1", "talk-turn-2"]
    assert trace.token_id is not None
    with ExpertsHook(loaded.model) as hook:
        hook.probe()
        first = Runner(loaded, hook, lambda rows: None).generate([list(b"Hello")], 6, Answers())[0]
    answer = loaded.text(first.output)
    asked = f"Hello\n{answer}\nAnd now?".encode()
    assert trace.requests["prompt_tokens"].tolist() == [5, len(asked)]
    assert bytes(trace.token_id[trace.offsets[1] :][: len(asked)].tolist()) == asked


def test_a_chat_template_is_applied_if_the_tokenizer_has_one(tmp_path: Path) -> None:
    loaded = tiny("olmoe")
    loaded.tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<?>{% endif %}"
    )
    trace = recorded(loaded, tmp_path / "t", prompts=[Prompt("a", "", "", ("Hi",))])
    assert trace.token_id is not None
    assert bytes(trace.token_id[trace.phase == PREFILL].tolist()) == b"<user>Hi<?>"
    plain = recorded(loaded, tmp_path / "u", prompts=[Prompt("a", "", "", ("Hi",))], no_chat_template=True)
    assert plain.requests["prompt_tokens"].tolist() == [2]


def test_what_predictors_need_is_recorded_beside_the_routing(tmp_path: Path) -> None:
    trace = recorded(tiny("mixtral"), tmp_path / "t", weights=True, scores=EVERY, lookahead="1,2", batch_size=2)
    assert trace.scores is not None
    assert trace.weights is not None
    assert trace.lookahead is not None
    probabilities = np.exp(trace.scores.astype(float))
    chosen = probabilities[..., : trace.top_k]
    np.testing.assert_allclose(chosen / chosen.sum(-1, keepdims=True), trace.weights.astype(float), atol=2e-3)
    np.testing.assert_allclose(probabilities.sum(-1), 1.0, atol=5e-3)
    assert trace.lookahead_scores is not None
    assert trace.meta.lookahead == Picks((1, 2), 2 * trace.top_k)
    for place, far in enumerate((1, 2)):
        assert (trace.lookahead[:, :far, place] == trace.sentinel).all()
        assert (trace.lookahead[:, far:, place] < trace.num_experts).all()
        assert (np.diff(trace.lookahead_scores[:, far:, place].astype(float), axis=-1) <= 0).all()


@pytest.mark.parametrize(
    "settings",
    [
        {"max_time": 1e-9},
        {"min_new_tokens": 6, "num_return_sequences": 2, "num_beams": 2},
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


@pytest.mark.parametrize("architecture", ["longcat_flash", "dbrx"])
def test_the_bytes_of_an_expert_are_its_own_alone(tmp_path: Path, architecture: str) -> None:
    assert recorded(tiny(architecture), tmp_path / "t").meta.expert_bytes == 3 * 32 * 16 * 4


@pytest.mark.parametrize("changes", [{}, {"encoder_sparse_step": 0}, {"decoder_sparse_step": 0}])
@pytest.mark.parametrize("architecture", ["switch_transformers", "nllb_moe"])
def test_an_encoder_and_its_decoder_share_one_layer_space(
    tmp_path: Path, architecture: str, changes: dict[str, int]
) -> None:
    loaded = tiny(architecture, **changes)  # a step of 0: all layers of that stack are dense
    loaded.model.generation_config.decoder_start_token_id = 7
    notes: list[str] = []
    options = at_most(5, 4, weights=True, scores=EVERY, lookahead="1,2")
    record(loaded, PROMPTS, tmp_path / "t", options, on_note=notes.append)
    trace = Trace.read(tmp_path / "t", EXTRA)
    assert any("prompts run one at a time" in note for note in notes)
    assert trace.token_id is not None
    encoder = [name.startswith(("encoder", "model.encoder")) for name in trace.meta.layer_names]
    assert encoder == sorted(encoder, reverse=True), "the encoder's layers are not first"
    for r, text in enumerate(TEXTS):
        rows = slice(int(trace.offsets[r]), int(trace.offsets[r + 1]))
        tokens, ids, phase = trace.token_id[rows], trace.experts[rows], trace.phase[rows]
        n = len(text.encode())
        assert bytes(tokens[:n].tolist()) == text.encode()
        assert (tokens[n], len(tokens)) == (7, n + 1 + 4)
        assert phase.tolist() == [PREFILL] * (n + 1) + [DECODE] * 4
        assert (ids[:n, ~np.array(encoder)] == trace.sentinel).all()
        assert (ids[n:, encoder] == trace.sentinel).all()
        with ExpertsHook(loaded.model) as hook, torch.inference_mode():
            hook.probe()
            loaded.model(
                input_ids=torch.tensor(tokens[None, :n].astype(int)),
                decoder_input_ids=torch.tensor(tokens[None, n:].astype(int)),
            )
            both = np.concatenate([part.ids for part in hook.passes])
        np.testing.assert_array_equal(np.sort(np.where(both < 0, trace.sentinel, both)), np.sort(ids))


def test_a_model_that_looks_at_some_tokens_only_runs_prompts_alone(tmp_path: Path) -> None:
    notes: list[str] = []
    for size in (1, 4):
        record(
            tiny("deepseek_v32"),
            PROMPTS,
            tmp_path / str(size),
            at_most(5, size),
            on_note=notes.append,
        )
    assert notes == ["deepseek_v32 routes a prompt otherwise beside others: prompts run one at a time"]
    assert_same(Trace.read(tmp_path / "1", EXTRA), Trace.read(tmp_path / "4", EXTRA), EXTRA)
