"""The CUDA device: over streams that run in any order which their events allow, and over a GPU where there is one."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from policies.core.policy import Shape
from policies.core.spec import parse
from replay.device_choice import DeviceChoice
from replay.devices import cuda
from replay.devices.cuda import Launches
from replay.devices.gpu import Gpu, pinned
from replay.devices.stage import open_stage
from replay.devices.store import HostMemory, HostStore
from replay.model.network import Network
from sim.engines.untimed import count
from sim.loop.log import RunLog
from sim.loop.requests import Requests
from tests.support.devices import Watch, run_of
from tests.support.driven import play
from tests.support.fake_gpu import FakeGpu
from tests.support.tiny import PROFILE, SIZE, E, K, L
from tests.support.watched import WatchedCuda, watched
from traces import InputError
from traces.models.profile import ModelProfile
from traces.synthetic import synthetic

PACKED = replace(PROFILE, expert_bytes_per_parameter=0.25)


@contextmanager
def device(gpu: Gpu, slots: int, profile: ModelProfile = PROFILE) -> Iterator[WatchedCuda]:
    with torch.inference_mode():
        network = Network(profile, gpu.device, max_tokens=16, max_context=64, seed=0)
        store = HostStore.of(L * E, profile.expert_bytes, seed=0)
        with pinned(store.memory, gpu, is_required=True):
            watch = Watch(Shape(L, E), slots, profile.expert_bytes, profile.expert_bytes // 8)
            device = WatchedCuda(store, network, slots, gpu, Launches(gpu, network), verify=True)
            with watched(device, watch) as made:
                yield made


@pytest.fixture(params=[0, 1, "cuda"])
def gpu(request: pytest.FixtureRequest) -> Gpu:
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        return Gpu()
    return FakeGpu(request.param)


@pytest.fixture(params=[False, True], ids=["matmul", "fused"])
def fused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many experts went into each fused launch; the fused one is a loop here, unless the GPU is real."""
    sizes: list[int] = []
    if not request.param:
        return sizes

    def made(network: Network) -> cuda.Fused:
        def run(pool: torch.Tensor, slots: Sequence[int]) -> None:
            sizes.append(len(slots))
            for slot in slots:
                network.expert(network.weights(pool[slot]), 1)

        return run

    monkeypatch.setattr(cuda, "fused", made)
    return sizes


def replay(made: WatchedCuda, policy: str, cold: bool = False, prompt: int = 5, top_k: int = K) -> RunLog:
    trace = synthetic(3, 12, layers=L, experts=E, top_k=top_k, seed=1, prompt_tokens=prompt)
    requests = Requests(trace)
    made.prepare({int(context) for request in requests for context in request.context[request.tokens == 1]})
    size = made.store.expert_bytes
    plan = run_of(requests, Shape(L, E), len(made.pool), parse(policy), size, size // 3, cold)
    return play(plan, made)


@pytest.mark.parametrize("policy", ["lru", "eamc", "lru+popular:n=4"])
@pytest.mark.parametrize(("slots", "cold"), [(1, False), (9, False), (9, True), (L * E, False)])
def test_every_slot_holds_its_expert_whenever_it_computes(
    gpu: Gpu, fused: list[int], policy: str, slots: int, cold: bool
) -> None:
    """With packed experts where nothing else differs, in runs that end cold."""
    with device(gpu, slots, PACKED if cold else PROFILE) as made:
        log = replay(made, policy, cold)
        assert made.watch.computed == (log.hits + log.late + log.misses).sum()
    assert log.demand_transfers.sum() == log.misses.sum() > 0
    assert not fused or slots == 1 or max(fused) == K, "experts at hand go in one launch"


def test_without_prefetch_hits_and_misses_are_those_of_the_untimed_analysis(gpu: Gpu) -> None:
    expected = count(Requests(synthetic(3, 12, layers=L, experts=E, top_k=1, seed=1)), L, E, 7, parse("lru"))
    with device(gpu, 7) as made:
        log = replay(made, "lru", prompt=0, top_k=1)
    np.testing.assert_array_equal(log.hits, expected.hits)
    np.testing.assert_array_equal(log.misses, expected.misses)


def test_what_routing_does_not_decide_runs_as_graphs_and_the_host_waits_for_nothing_on_the_hot_path() -> None:
    """Graph launches alone for decoded tokens, no synchronise but at opening and closing, events that are reused."""
    gpu = FakeGpu(3)
    with device(gpu, 9) as made:
        before = gpu.counts.copy()
        log = replay(made, "eamc", prompt=0)
        spent = gpu.counts - before
    assert spent["replay"] == len(log.step_ns) * (2 * L + 1)
    assert spent["synchronize"] == 0
    assert spent["event"] <= 16
    assert gpu.counts["synchronize"] == 2, "at opening and at closing"


@pytest.mark.parametrize("fused", [True], indirect=True)
def test_where_everything_hits_a_layer_takes_three_launches_and_one_event(fused: list[int]) -> None:
    gpu = FakeGpu(5)
    with device(gpu, L * E) as made:
        made._verify = False  # which launches as well
        trace = synthetic(2, 12, layers=L, experts=E, top_k=K, seed=1, prompt_tokens=0)
        made.prepare(range(1, 64))
        size, calls = made.store.expert_bytes, list[Counter[str]]()
        plan = run_of(Requests(trace), Shape(L, E), L * E, parse("lru"), size, size, False)
        log = play(plan, made, lambda row: calls.append(gpu.counts.copy()))
    ended = np.array([[each[name] for name in ("run", "record", "wait")] for each in calls])
    spent, misses = np.diff(ended, axis=0).sum(axis=1), log.misses[1:]
    all_hit = misses == 0
    assert all_hit.any()
    assert (spent[all_hit] == 4 * L + 2).all()
    # a body, a tail and the events behind them, the wait for it, and its launch
    assert (spent <= 4 * L + 2 + 6 * misses).all()


def test_nothing_is_copied_to_the_gpu_but_by_the_pump_and_nothing_pinned_by_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bytes that the device copies are those that the pump asked for; torch's own ways are barred."""
    copied: list[int] = []
    real = torch.Tensor.copy_

    def copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if non_blocking:
            copied.append(source.nbytes)
        return real(self, source)

    def barred(*_: object, **__: object) -> None:
        raise AssertionError("not on the hot path")

    gpu = FakeGpu(4)
    with device(gpu, 9) as made:
        monkeypatch.setattr(torch.Tensor, "copy_", copy_)
        for name in ("pin_memory", "cuda", "item", "tolist"):
            monkeypatch.setattr(torch.Tensor, name, barred)
        monkeypatch.setattr(torch, "tensor", barred)
        log = replay(made, "lru+popular:n=4", prompt=0)
        monkeypatch.undo()
    assert sum(copied) == (log.demand_transfers + log.prefetch_transfers).sum() * SIZE - made_under_way(made)


def made_under_way(made: WatchedCuda) -> int:
    """Bytes of the last transfer that were not submitted when the run ended."""
    return sum(SIZE - sent for _, sent in made.watch.submitted.values())


def test_a_gpu_on_which_nothing_ends_is_told_in_one_line_and_left_alone() -> None:
    gpu = FakeGpu(5, halt=60)
    with device(gpu, 4) as made:
        made.watchdog_s = 0.2
        with pytest.raises(InputError, match=r"stuck: nothing has ended for 0\.2 s, under way since: ") as caught:
            replay(made, "lru")
    assert "\n" not in str(caught.value)
    assert gpu.registered, "memory that it may still read stays registered"


@pytest.mark.parametrize("refused", [0, 2])
def test_pinning_refused_half_way_gives_everything_back(refused: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replay.devices.store.SLAB_BYTES", 4 * SIZE)
    memory, gpu = HostMemory(11, SIZE, seed=0), FakeGpu(0, refuse=refused)
    assert len(memory.slabs) == 3
    with (
        pytest.raises(InputError, match=rf"after {refused} of 3 slabs.*--host-dedup"),
        pinned(memory, gpu, is_required=True),
    ):
        pass
    assert gpu.registered == []
    with pinned(memory, gpu) as is_pinned:
        assert not is_pinned
        assert gpu.registered == []


def test_output_that_is_not_finite_is_refused() -> None:
    with (
        open_stage(DeviceChoice("cuda"), PROFILE, 1, 8, gpu=FakeGpu(0)) as stage,
        pytest.raises(InputError, match="not finite"),
        stage.device(9, [1]),
    ):
        stage.network.hidden[0, 3] = float("nan")


def test_copies_never_go_to_the_stream_that_computes_although_torch_deals_streams_in_a_ring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dealt, current, seen = itertools.count(), [-1], list[int]()
    monkeypatch.setattr(torch.cuda, "Stream", lambda: next(dealt) % 32)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: current.__setitem__(0, stream))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    gpu = Gpu()
    for _ in range(40):
        compute, copies = gpu.compute_stream(), gpu.copy_stream()
        for stream in (compute, copies, compute):
            stream.run(lambda: seen.append(current[0]))
        assert seen[-3] == seen[-1] != seen[-2]
    assert next(dealt) == 3


@pytest.mark.parametrize("what", ["CUDA graphs", "fused kernel"])
def test_without_graphs_or_the_fused_kernel_it_computes_the_same_and_says_so(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError("operation not\npermitted")

    owner, name = (FakeGpu, "capture") if what == "CUDA graphs" else (cuda, "fused")
    monkeypatch.setattr(owner, name, failing)
    gpu = FakeGpu(6)
    with open_stage(DeviceChoice("cuda"), PROFILE, 16, 64, gpu=gpu) as stage:
        trace = synthetic(2, 6, layers=L, experts=E, top_k=K, seed=1)
        plan = run_of(Requests(trace), Shape(L, E), 9, parse("lru"), SIZE)
        with stage.device(9, range(1, 7), verify=True) as made:
            log = play(plan, made)
        assert (log.hits + log.misses).sum() == sum(len(request.experts) for request in Requests(trace))
        assert what in str(stage.facts["fallbacks"])
        assert "operation not permitted" in str(stage.facts["fallbacks"])
