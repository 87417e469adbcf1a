"""`load_model` and `attach`: everything that `generate` does gives what it gives with the whole model, to the bit."""

import gc
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from replay import attach, device_choice, load_model
from replay.devices.gpu import Gpu
from replay.live import opening
from replay.live.layout import ShardStore
from replay.live.model import LiveModel
from sim.loop.log import COLUMNS
from tests.replay.test_live import ARCHITECTURES, GPU, OTHERS
from tests.support.fake_gpu import FakeGpu
from tests.support.live_models import logits, prompt, saved, saved_in_few_bits, saved_in_int4, whole_model
from tracer.answers import LoadedModel, Runner
from tracer.hook import ExpertsHook
from tracer.observed import Answers, Wanted
from traces import InputError, Trace

BATCH = {
    "input_ids": torch.cat([prompt(9, seed=1), prompt(9, seed=2)]),
    "attention_mask": torch.tensor([[1] * 9, [0] * 4 + [1] * 5]),
}
ONE = {"input_ids": prompt(7, seed=4), "attention_mask": torch.ones(1, 7, dtype=torch.int64)}


@pytest.fixture(autouse=True)
def _small() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("tiny"), "qwen3_moe", "bfloat16")


@pytest.fixture(scope="module")
def whole(folder: Path) -> Any:
    return whole_model(folder)


@pytest.fixture
def model(folder: Path) -> Iterator[Any]:
    torch.set_num_threads(1)
    with load_model(folder, cache_size="25%", lanes=1) as model:
        yield model


def generated(model: Any, **settings: Any) -> Any:
    torch.manual_seed(5)
    settings = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0, **settings}
    return model.generate(output_logits=True, return_dict_in_generate=True, **settings)


def assert_same(model: Any, whole: Any, **settings: Any) -> None:
    ours, theirs = generated(model, **settings), generated(whole, **settings)
    assert torch.equal(ours.sequences, theirs.sequences)
    for place, (mine, yours) in enumerate(zip(ours.logits, theirs.logits, strict=True)):
        assert torch.equal(mine, yours), f"logits differ at token {place}"


@pytest.mark.parametrize("architecture", ["olmoe", "deepseek_v3", "gpt_oss"])
def test_the_next_routers_run_on_the_current_states_and_change_nothing(architecture: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", architecture, "float32")
    whole, batch = whole_model(folder), {**BATCH, "max_new_tokens": 4}
    with load_model(folder, "lru+gate:distance=2", "50%", lookahead=2, lanes=1) as model:
        assert_same(model, whole, **batch)
        trace, counters = model.expert_cache.trace, model.expert_cache.counters
    assert counters["prefetch_used"] > 0
    assert trace.lookahead is not None
    with ExpertsHook(whole, Wanted(lookahead=(1, 2))) as hook:
        hook.probe()
        generated(whole, **batch)
        seen = [seen.lookahead for seen in hook.passes if seen.lookahead is not None]
    rows = [np.concatenate([each.reshape(2, -1, *each.shape[1:])[row] for each in seen]) for row in (0, 1)]
    picks = np.concatenate([rows[0], rows[1][4:]])[..., : trace.top_k]  # four tokens are padding
    assert np.array_equal(trace.meta.stored(picks), trace.lookahead)


@pytest.mark.parametrize("architecture", ["gpt_oss", "deepseek_v3"])
def test_every_way_to_generate_gives_what_the_whole_model_gives(architecture: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", architecture, "bfloat16")
    assistant = whole_model(saved(tmp_path / "assistant", architecture, "bfloat16", num_hidden_layers=2))
    whole = whole_model(folder)
    with load_model(folder, policy="eamc-blend", cache_size="30%", lanes=2) as model:
        for batch in (ONE, BATCH):
            assert_same(model, whole, **batch)
            assert_same(model, whole, **batch, do_sample=True)
            assert_same(model, whole, **batch, num_beams=3)
            assert_same(model, whole, **batch, cache_implementation="static")
        assert_same(model, whole, **ONE, prompt_lookup_num_tokens=3)
        assert_same(model, whole, **ONE, assistant_model=assistant)
        assert_same(model, whole, **ONE, do_sample=True, assistant_model=assistant)
        assert model.expert_cache.counters["misses"] > 0


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *OTHERS])
def test_each_architecture_answers_a_batch_as_the_whole_model_does_loaded_or_attached(
    architecture: str, tmp_path: Path
) -> None:
    latent: dict[str, Any] = {"moe_latent_size": 16} if architecture == "nemotron_h" else {}  # narrower than the model
    folder = saved(tmp_path, architecture, "float32" if architecture in ARCHITECTURES else "bfloat16", **latent)
    whole, held = whole_model(folder), whole_model(folder)
    with load_model(folder, policy="lru", cache_size="30%", lanes=1) as model:
        assert_same(model, whole, **BATCH, max_new_tokens=5)
        misses = model.expert_cache.counters["misses"]
    with attach(held, policy="lru", cache_size="30%") as model:
        assert model is held
        assert_same(model, whole, **BATCH, max_new_tokens=5)
        assert model.expert_cache.counters["misses"] == misses > 0
    assert type(held) is type(whole)
    assert_same(held, whole, **BATCH, max_new_tokens=5)
    assert not hasattr(held, "expert_cache")


@pytest.mark.parametrize(
    ("architecture", "save", "sizes"),
    [
        ("gpt_oss", saved_in_few_bits, {"hidden_size": 64, "intermediate_size": 32}),
        ("deepseek_v3", saved_in_few_bits, {"hidden_size": 32}),
        ("qwen3_moe", saved_in_int4, {"hidden_size": 32, "moe_intermediate_size": 32}),
    ],
    ids=["MXFP4", "fp8", "int4"],
)
def test_experts_in_few_bits_stay_packed_and_give_what_transformers_dequantised_ones_give(
    architecture: str, save: Callable[..., Path], sizes: dict[str, int], tmp_path: Path
) -> None:
    """MXFP4, fp8 with a scale of each block, and 4-bit integers of compressed-tensors."""
    folder = save(tmp_path, architecture, **sizes)
    whole = whole_model(folder)
    unpacked = {name: weight for name, weight in whole.named_parameters() if ".layers.1.mlp.experts." in name}
    for policy, size in (("lru", "1"), ("eamc-blend", "30%"), ("lru", "100%")):
        with load_model(folder, policy=policy, cache_size=size, lanes=2) as model:
            assert_same(model, whole, **BATCH)
            assert_same(model, whole, **ONE)
            cache: LiveModel = model.expert_cache
            assert isinstance(cache.device.store, ShardStore)
            assert cache.trace.meta.expert_bytes == cache.run.gpu.link.expert_bytes
            assert cache.run.gpu.link.expert_bytes < 0.6 * sum(weight[0].nbytes for weight in unpacked.values())


@pytest.mark.parametrize("is_real", [False, pytest.param(True, marks=GPU)], ids=["simulated", "real"])
@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_on_a_gpu_batches_and_packed_experts_are_the_whole_models_too(
    architecture: str, is_real: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [Gpu() if is_real else FakeGpu(seed) for seed in range(2)]
    monkeypatch.setattr(opening, "require_cuda", lambda instead: None)
    monkeypatch.setattr(device_choice, "require_cuda", lambda instead: None)
    monkeypatch.setattr(opening, "Gpu", lambda: gpus.pop())
    folder = saved_in_few_bits(tmp_path, architecture, hidden_size=64, intermediate_size=32)
    device = gpus[0].device
    batch = {name: each.to(device) for name, each in BATCH.items()}
    whole = whole_model(folder).to(device)
    for policy, size in (("lru", "1"), ("eamc-blend", "30%")):
        with load_model(folder, policy, size, device="cuda") as model:
            assert model.expert_cache.device.name == "cuda"
            assert_same(model, whole, **batch)
            assert_same(model, whole, **batch, num_beams=2, do_sample=True)
            assert_same(model, whole, **batch, cache_implementation="static", disable_compile=True)


def test_all_numbers_of_mxfp4_are_those_that_transformers_makes(tmp_path: Path) -> None:
    """Those of each scale too, of which some are infinite or none."""
    folder, drawn = saved_in_few_bits(tmp_path, "gpt_oss", hidden_size=64, intermediate_size=32), torch.Generator()
    with load_model(folder, "lru", "1", lanes=1) as model:
        layer = model.expert_cache._layers[0]._layer
        views = {row.name: torch.randint(0, 256, (1, *row.shape), generator=drawn) for row in layer.stored}
        views = {row.name: views[row.name].to(row.dtype) for row in layer.stored}
        for name in ("gate_up_proj", "down_proj"):
            blocks, scales = (views[f"{name} {name}_{part}"] for part in ("blocks", "scales"))
            found, wanted = layer.packing.unpacked(views)[name], convert_moe_packed_tensors(blocks, scales)
            assert torch.equal(found.view(torch.int16), wanted.view(torch.int16))


def test_it_is_transformers_own_model_with_streamers_and_stopping_criteria(model: Any, whole: Any) -> None:
    put: list[torch.Tensor] = []

    class Streamer:
        def put(self, value: torch.Tensor) -> None:
            put.append(value.flatten())

        def end(self) -> None:
            put.append(torch.tensor([-1]))

    def stops(ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.full((len(ids),), ids.shape[1] == 12)

    assert isinstance(model, type(whole))
    found = generated(model, **ONE, streamer=Streamer(), stopping_criteria=[stops]).sequences
    assert found.shape == (1, 12)
    assert torch.cat(put).tolist() == [*found[0].tolist(), -1]


def test_counters_report_and_trace_are_of_what_ran(model: Any, whole: Any) -> None:
    generated(model, **BATCH)
    cache: LiveModel = model.expert_cache
    counters, report, trace = cache.counters, cache.report(), cache.trace
    assert counters["steps"] == len(report.steps) == 8
    assert counters["tokens"] == 2 * (9 + 7)
    for name in ("hits", "late", "misses"):
        assert counters[name] == report[name] == report.steps[name].sum()
    assert counters["hits"] + counters["late"] + counters["misses"] <= 2 * counters["tokens"] * trace.layers
    assert counters["demand_bytes"] == counters["demand_transfers"] * cache.run.gpu.link.expert_bytes
    assert trace.requests.prompt_tokens.tolist() == [9, 5]
    assert trace.requests.output_tokens.tolist() == [8, 8]
    cache.clear()
    assert set(cache.counters.values()) == {0}
    with pytest.raises(InputError, match="no pass has been run"):
        cache.trace  # noqa: B018  it is asked for


def test_the_trace_of_a_batch_is_what_the_tracer_records(model: Any, whole: Any) -> None:
    tokens = [ids[mask.bool()].tolist() for ids, mask in zip(*BATCH.values(), strict=True)]
    generated(model, **BATCH)
    with ExpertsHook(whole) as hook:
        hook.probe()
        answers = Runner(LoadedModel("whole", whole, None), hook, lambda rows: None).generate(tokens, 8, Answers())
        wanted = [np.concatenate([part.ids[rows] for part, rows in answer.routed]) for answer in answers]
    trace: Trace = model.expert_cache.trace
    assert trace.token_id is not None
    for request, answer in enumerate(answers):
        own = slice(trace.offsets[request], trace.offsets[request + 1])
        assert trace.token_id[own].tolist() == [*answer.prompt, *answer.output[:-1]]
        np.testing.assert_array_equal(np.sort(trace.experts[own]), np.sort(wanted[request]))


def test_what_an_assistant_guessed_wrong_is_not_in_the_trace(model: Any, whole: Any, tmp_path: Path) -> None:
    assistant = whole_model(saved(tmp_path, "qwen3_moe", "bfloat16", num_hidden_layers=2))
    traces = []
    for more in (
        {},
        {"assistant_model": assistant},
        {"prompt_lookup_num_tokens": 2},
        {"cache_implementation": "static"},
    ):
        found = generated(model, **ONE, **more).sequences[0].tolist()
        traces.append(model.expert_cache.trace)
        assert traces[-1].token_id[: len(found) - 1].tolist() == found[:-1]
        model.expert_cache.clear()
    for other in traces[1:]:
        rows = len(traces[0].experts)
        np.testing.assert_array_equal(np.sort(other.experts[:rows]), np.sort(traces[0].experts))


def test_a_trace_has_all_tokens_of_a_static_cache_with_a_window(tmp_path: Path) -> None:
    folder, traces = saved(tmp_path, "mixtral", "bfloat16", sliding_window=6), []
    with load_model(folder, cache_size="25%", lanes=1) as model:
        for implementation in ("dynamic", "static"):
            generated(model, **BATCH, cache_implementation=implementation)
            traces.append(model.expert_cache.trace)
            model.expert_cache.clear()
    for trace in traces:
        assert trace.requests.prompt_tokens.tolist() == [9, 5]
        np.testing.assert_array_equal(trace.token_id, traces[0].token_id)
        np.testing.assert_array_equal(np.sort(trace.experts), np.sort(traces[0].experts))


def test_experts_that_no_text_runs_through_are_refused_and_so_are_models_of_no_passes(tmp_path: Path) -> None:
    with load_model(
        saved(tmp_path / "images", "ernie4_5_vl_moe"), cache_size="25%", lanes=1, store=tmp_path / "s"
    ) as model:
        of_images = model.get_submodule("model.language_model.layers.1.mlp.vision_moe.experts")
        with pytest.raises(InputError, match=r"text does not run through .*vision_moe\.experts"):
            of_images(torch.zeros(1, 32), torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2))
    with pytest.raises(InputError, match="it denoises blocks of tokens"):
        load_model(saved(tmp_path / "blocks", "diffusion_gemma"))


def test_two_models_and_threads_at_once_give_what_each_gives_alone(folder: Path, whole: Any, model: Any) -> None:
    prompts = [prompt(5 + seed, seed=seed) for seed in range(4)]
    wanted = [logits(whole, ids, 4) for ids in prompts]
    with load_model(folder, policy="lru", cache_size="1", lanes=1) as other, ThreadPoolExecutor(4) as threads:
        asked = [(each, ids) for ids in prompts for each in (model, other)]
        found = list(threads.map(lambda one: logits(one[0], one[1], 4), asked))
        for place, mine in enumerate(found):
            assert all(torch.equal(*pair) for pair in zip(mine, wanted[place // 2], strict=True))
    assert model.expert_cache.counters["steps"] == 4 * 5


def test_a_closed_model_and_another_process_get_one_clear_error(folder: Path, whole: Any) -> None:
    with load_model(folder, cache_size="25%", lanes=1) as model:
        if (child := os.fork()) == 0:
            try:
                model(**ONE)
            except InputError as error:
                os._exit(7 if "was loaded in another process" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        with pytest.raises(InputError, match="has a cache of experts already"):
            attach(model)
        assert_same(model, whole, **ONE)
    model.expert_cache.close()  # once more does nothing
    assert model.expert_cache.counters["steps"] == 8
    with pytest.raises(InputError, match="was closed: load it again"):
        model(**ONE)


def test_a_model_that_is_dropped_leaves_no_thread_and_no_open_file(folder: Path) -> None:
    def left() -> tuple[int, int]:
        gc.collect()
        for thread in threading.enumerate():
            if thread.name.startswith("lane"):
                thread.join(timeout=60)
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    load_model(folder, cache_size="25%", lanes=2)(**ONE)
    before = left()
    for _ in range(3):
        load_model(folder, cache_size="25%", lanes=2)(**ONE)
    assert left() == before


def test_every_row_of_a_batch_is_a_request_to_the_policy(folder: Path, tmp_path: Path) -> None:
    """Rule 18."""
    (tmp_path / "spy.py").write_text(
        "from policies import ScorePolicy\nclass Spy(ScorePolicy):\n    heard = []\n"
        "    def observe(self, event):\n"
        "        own = [counts.sum() for *_, counts in event.by_request()]\n"
        "        self.heard.append((event.batch_slots.tolist(), event.counts.sum(), own))\n"
    )
    with load_model(folder, policy=f"{tmp_path / 'spy.py'}:Spy", cache_size="50%", lanes=1) as model:
        generated(model, **BATCH, num_beams=2, max_new_tokens=3)
        heard = model.expert_cache.run.policy.evict.cls.heard[-9:]
        shares = [[share.request for share in row.shares] for row in model.expert_cache.rows]
    for number, (slots, total, own) in enumerate(heard):
        tokens = 2 * (9 if number < 3 else 1)
        assert (slots, total, own) == ([0, 1, 2, 3], 4 * tokens, [tokens] * 4)
    assert shares[-1] == [0, 1, 2, 3]
    assert len(COLUMNS) == len(model.expert_cache.rows[0].numbers)
