"""Experts whose size differs by layer (rule 19), replayed: the bytes that move, where they lie, what is predicted."""

import random
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open

from policies.core.policy import Shape
from policies.core.residency_compiled import places_of
from policies.core.spec import parse
from replay.calibration.measure import measure_model, policy_ns
from replay.devices.cuda import Launches
from replay.devices.expert_file import ExpertFile, write
from replay.devices.lanes import PAGE, page_up
from replay.devices.store import HostStore, Stamps, anonymous
from replay.model.network import Network
from sim.commands import main as simulator
from sim.engines import compiled_engine
from sim.engines.simpy_engine import SimpyDevice
from sim.loop.requests import Requests
from sim.loop.run import Run, gpu_run
from sim.planner import random_gguf
from sim.profiles.timing import FixedTiming, Link
from sim.results.metrics import RESULTS
from tests.support.command import run
from tests.support.devices import Watch
from tests.support.driven import play
from tests.support.fake_gpu import FakeGpu
from tests.support.logs import assert_logs_equal
from tests.support.profiles import HALF, plain
from tests.support.tiny import PROFILE, E, L
from tests.support.watched import WatchedCpu, WatchedCuda, watched
from traces import InputError
from traces.models.expert_sizes import expert_bytes_by_layer
from traces.models.profile import written
from traces.synthetic import synthetic
from traces.writer import write_trace

SIZES = (9_000, 2 * PAGE, 20_001)
"""Of an expert of each layer: not whole pages, whole ones, and the largest one last."""

SIZED = replace(PROFILE, name="sized", layer_expert_bytes=SIZES)
ROOM = 2 * sum(SIZES)


def run_of(policy: str, top_k: int, prompt: int = 0, cold: bool = False) -> Run:
    requests = Requests(synthetic(4, 12, layers=L, experts=E, top_k=top_k, seed=1, prompt_tokens=prompt))
    timing, link = FixedTiming(0, 0, 0, 0, 0), Link(0, 1, 1, max(SIZES), 5_000, SIZES)
    return gpu_run(requests, Shape(L, E), ROOM, parse(policy), timing, link, cold, experts_per_layer=1.0)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files") / "sized"
    write(path, SIZED, Stamps(L * E, max(SIZES), seed=0).write, "random weights, seed 0", L * E)
    return path


@contextmanager
def device(kind: str, run: Run, file: Path) -> Iterator[Any]:
    """Open a device that compares every expert with its store when it computes, with the slots that the run needs."""
    with ExitStack() as opened:
        opened.enter_context(torch.inference_mode())
        network = Network(SIZED, torch.device("cpu"), max_tokens=16, max_context=64, seed=0)
        sizes = [SIZED.bytes_of(expert // E) for expert in range(L * E)]
        host, watch = HostStore.of(L * E, max(SIZES), seed=0, sizes=sizes), Watch.of(run, tail_bytes=1_000)
        if kind == "cuda":
            gpu = FakeGpu(seed=1)
            made: Any = WatchedCuda(host, network, watch.slots, gpu, Launches(gpu, network), verify=True)
        elif kind == "disk":
            store = opened.enter_context(closing(ExpertFile(file, SIZED)))
            made = WatchedCpu(store, network, watch.slots, verify=True, lanes=2)
        else:
            made = WatchedCpu(host, network, watch.slots, verify=True)
        yield opened.enter_context(watched(made, watch))


def lru_by_layer(run: Run) -> list[int]:
    """Return the bytes that LRU, by itself, moves of each layer's experts, one expert an event."""
    held, moved = OrderedDict[int, int](), [0] * L
    for request in run.requests:
        for expert in request.experts.tolist():
            if expert not in held:
                size = SIZES[expert // E]
                while sum(held.values()) + size > ROOM:
                    held.popitem(last=False)
                moved[expert // E] += size
                held[expert] = size
            held.move_to_end(expert)
    return moved


@pytest.mark.parametrize("kind", ["cpu", "disk", "cuda"])
def test_a_device_moves_the_bytes_of_each_layer_that_the_traces_misses_have(kind: str, file: Path) -> None:
    run = run_of("lru", top_k=1)
    with device(kind, run, file) as made:
        log = play(run, made)
        assert made.watch.moved == lru_by_layer(run)
    assert log.demand_bytes.sum() == sum(made.watch.moved) < log.demand_transfers.sum() * max(SIZES)


@pytest.mark.parametrize("policy", ["lru", "eamc", "clock", "lru+popular:n=4", "lru@layer"])
@pytest.mark.parametrize("kind", ["cpu", "disk", "cuda"])
def test_every_slot_holds_its_expert_whenever_it_computes(kind: str, policy: str, file: Path) -> None:
    run = run_of(policy, top_k=2, prompt=3, cold=policy == "eamc")
    with device(kind, run, file) as made:
        if kind == "cuda":
            made.prepare([context for request in run.requests for context in request.context[request.tokens == 1]])
        log = play(run, made)
        assert made.watch.computed == (log.hits + log.late + log.misses).sum()
        discarded = 0 if run.cold else sum(made.watch.moved) - (log.demand_bytes + log.prefetch_bytes).sum()
        assert -max(SIZES) <= discarded <= 0, "at the end one prefetch may be under way"


def test_the_file_has_each_expert_in_its_own_size(file: Path) -> None:
    with safe_open(file, framework="np") as opened, closing(ExpertFile(file, SIZED)) as own:
        slot = anonymous(own.stride)
        for expert in range(L * E):
            size = SIZES[expert // E]
            tensor = opened.get_tensor(f"expert.{expert}")
            assert (len(tensor), own.bytes_of(expert)) == (page_up(size), size)
            slot.fill(7)
            own.read(expert, 0, size, slot)
            np.testing.assert_array_equal(slot[: len(tensor)], tensor)
            assert (slot[len(tensor) :] == 7).all(), "nothing of the next expert"
            assert own.holds(expert, slot[:size])
    assert file.stat().st_size - own.begin == E * sum(map(page_up, SIZES))


def test_a_file_of_other_sizes_is_refused_and_experts_of_several_sizes_share_none(file: Path, tmp_path: Path) -> None:
    for other in (replace(SIZED, layer_expert_bytes=(*SIZES[1:], SIZES[0])), replace(SIZED, layer_expert_bytes=())):
        with pytest.raises(InputError, match="24 experts of 8192 to 20001 bytes by layer"):
            ExpertFile(file, other)
    with pytest.raises(InputError, match="share none"):
        write(tmp_path / "few", SIZED, Stamps(3, max(SIZES), seed=0).write, "random weights", 3)


TIMING = FixedTiming(11, 5, 2, 3, 7)


@pytest.mark.parametrize("slots", [1, 2, 4, 24])
def test_measuring_a_simulated_device_gives_back_the_time_of_each_size(slots: int) -> None:
    link = Link(40, 3, 1, 400, layer_bytes=(400, 250, 301))
    requests = Requests(synthetic(2, 5, 3, 8, 2, seed=1))
    run = gpu_run(requests, Shape(3, 8), slots * 400, parse("lru"), TIMING, link, experts_per_layer=1.0)
    device = SimpyDevice(TIMING, link)
    found = measure_model(device, run, 1, "this machine").model
    timing, measured = found.timing(policy_ns(run, device)), found.link(run.gpu.link.chunk_bytes)
    assert [measured.used_ns(measured.bytes_of(layer)) for layer in range(3)] == [1240, 790, 943]
    assert (found.turnaround_ns, timing.expert_ns(1)) == (0, TIMING.expert_ns(1))
    predicted = compiled_engine.simulate(run.on(timing, measured, 1.0))
    assert_logs_equal(predicted, play(run, SimpyDevice(TIMING, link)))


def test_a_device_needs_a_slot_for_as_many_experts_as_ever_fit() -> None:
    for seed in range(50):
        integer = random.Random(seed).randint
        layer_bytes = tuple(integer(1, 9) for _ in range(L))
        room = max(layer_bytes) * integer(1, 9)
        sizes = np.repeat(np.array(layer_bytes, np.int64), E)
        slots = int(places_of(L * E, (room,), sizes).sum())
        assert sum(sorted(sizes)[:slots]) <= room
        assert slots == L * E or sum(sorted(sizes)[: slots + 1]) > room


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trace, a model's profile, a GGUF file of it that mixes types, and a sweep of all these."""
    pytest.importorskip("gguf", reason="needs the package gguf")
    folder = tmp_path_factory.mktemp("swept")
    profile = plain("mixed", "8 moe", experts=8, top_k=2, hidden_size=256, expert_intermediate_size=256, **HALF)
    (folder / "mixed.toml").write_text(written(profile, ""))
    random_gguf.write(folder / "mixed.gguf", random_gguf.of_profile(profile, "q4_k_m"))
    assert len(set(expert_bytes_by_layer(folder / "mixed.gguf", 8))) == 2
    write_trace(synthetic(3, 8, layers=8, experts=8, top_k=2, seed=1, prompt_tokens=4), folder / "trace")
    options = ["--model-profile", folder / "mixed.toml", "--expert-sizes", folder / "mixed.gguf"]
    options += ["--policies", "lru,eamc", "--cache-sizes", "50%", "--out", folder / "sweep"]
    done = run(simulator, "sweep", folder / "trace", *options)
    assert done.returncode == 0, done.stderr
    return folder


OF_A_SWEEP = {"policy", "cell", "commit", "belady_hit_rate", "gap_hits", "gap_latency", "resident_ms"}
"""Columns that say where a row stands, or set it beside others."""


def test_the_winner_of_a_sweep_is_the_same_on_the_virtual_device(swept: Path, command) -> None:
    status, out, err = command("--from", swept / "sweep", "--device", "virtual", "--out", "here")
    assert (status, "as in moe-sim" in out) == (0, True), err
    row = pd.read_parquet("here/results.parquet").iloc[0]
    cells = pd.read_parquet(swept / "sweep/results.parquet").set_index("policy")
    simulated = cells.loc[row["policy"]]
    for column in set(RESULTS.names) - OF_A_SWEEP:
        assert row[column] == simulated[column] or pd.isna([row[column], simulated[column]]).all(), column


@pytest.mark.parametrize("kind", ["cpu", "disk"])
def test_the_winner_of_a_sweep_is_replayed_with_its_own_bytes(swept: Path, command, kind: str) -> None:
    replayed = ["--from", swept / "sweep", "--device", kind, "--verify", "--requests", "2", "--out", "here"]
    if kind == "disk":
        status, _, err = command(*replayed)
        assert status == 2
        stated = err.split("moe-replay store FILE ")[1].split(", and name it")[0].split()
        assert command("store", "experts", *stated)[0] == 0
        replayed += ["--store", "experts", "--lanes", "1"]
    status, out, err = command(*replayed)
    assert status == 0, err
    assert "each, by layer; what is computed is bfloat16" in out
    row = pd.read_parquet("here/results.parquet").iloc[0]
    sizes = expert_bytes_by_layer(swept / "mixed.gguf", 8)
    assert row["expert_bytes"] == sizes.max()
    assert min(sizes) * row["misses"] < row["bytes_demand"] < max(sizes) * row["misses"]
    assert row["predicted_tpot_mean_ms"] > 0
