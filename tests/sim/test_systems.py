"""Systems: presets on both engines, options against closed forms, overheads, and bad input of the command."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks.table1 import TABLE
from policies.core.policy import Shape
from policies.core.spec import parse
from policies.core.systems import Overheads, systems
from sim.engines import compiled_engine, simpy_engine
from sim.experiment import Experiment
from sim.loaded import TimedRun
from sim.loop.run import gpu_run
from sim.profiles.derived import Blocking
from sim.profiles.hardware_profile import hardware
from sim.profiles.roofline import Roofline
from sim.profiles.timing import FixedTiming, Link
from sim.systems import transforms
from sim.systems.predict import CannotRunError, Setting, SystemRun, chosen
from tests.support.command import moe_sim
from tests.support.logs import assert_logs_equal
from tests.support.tiny import SIZES
from traces import DECODE
from traces.models.profile import model
from traces.synthetic import synthetic
from traces.writer import write_trace

TIMES = FixedTiming(dense=100, expert=7, expert_per_token=3, combine=11, head=13, hop_ns=5, host=40, host_per_token=10)
LINK = Link(latency_ns=9, ns_per_byte_num=3, ns_per_byte_den=2, expert_bytes=50)
L, E, K = 3, 16, 2

BLOCKING = systems()["mixtral-offloading"].overheads

REFUSED = {"resident": "room for"}
"""Systems that cannot run the tiny trace with half of its experts in GPU memory, and why."""


@pytest.fixture(scope="module")
def trace():
    made = synthetic(4, tokens=8, layers=L, experts=E, top_k=K, seed=3, prompt_tokens=3)
    return replace(made, meta=replace(made.meta, model="tiny", **SIZES))


@pytest.fixture(scope="module")
def home(tmp_path_factory, trace):
    home = tmp_path_factory.mktemp("home")
    write_trace(trace, home / "tiny")
    deepseek = synthetic(2, tokens=6, layers=26, experts=64, top_k=6, seed=1)
    write_trace(replace(deepseek, meta=replace(deepseek.meta, model="DeepSeek-V2-Lite")), home / "deepseek")
    prompts = synthetic(2, tokens=0, layers=L, experts=E, top_k=K, seed=3, prompt_tokens=3)
    write_trace(replace(prompts, meta=trace.meta), home / "prompts")
    return home


@pytest.fixture
def moe_sim_systems(home):
    """Runs the command; status, standard output, standard error."""
    return partial(moe_sim, "systems", cwd=home)


def setting_of(home, name="tiny", size="25%", **more):
    return Setting(TimedRun.of(Experiment(trace=str(home / name))), size, **more)


def played(requests, shape, slots, policy, timing, link):
    return compiled_engine.simulate(gpu_run(requests, shape, slots, parse(policy), timing, link))


@pytest.mark.parametrize("name", [system.name for system in chosen(()) if system.name not in REFUSED])
def test_each_system_plays_alike_on_both_engines(home, name):
    run = SystemRun.of(systems()[name], setting_of(home, size="50%")).run
    assert_logs_equal(simpy_engine.simulate(run), compiled_engine.simulate(run), name)


@pytest.mark.parametrize("name", REFUSED)
def test_a_system_that_cannot_run_says_why(home, name):
    with pytest.raises(CannotRunError, match=REFUSED[name]):
        SystemRun.of(systems()[name], setting_of(home, size="50%"))


def test_copying_back_doubles_the_time_of_a_transfer():
    back = transforms.copying_back(LINK)
    assert back.used_ns(50) == 2 * LINK.used_ns(50)


def test_with_copying_back_a_run_that_misses_always_waits_twice_as_long(trace):
    requests, shape = [trace.steps(0)], Shape(L, E)
    nothing = replace(TIMES, expert=0, expert_per_token=0)
    once = played(requests, shape, 1, "lru", nothing, LINK)
    twice = played(requests, shape, 1, "lru", nothing, transforms.copying_back(LINK))
    assert twice.stall_ns.sum() == 2 * once.stall_ns.sum()


def test_blocking_adds_the_compute_of_all_experts_behind_their_transfers(trace):
    steps = trace.steps(0)
    log = played([steps], Shape(L, E), 1, "lru", Blocking(TIMES, L, E, K), LINK)
    decoded = log.phase == DECODE
    moving = log.demand_transfers[decoded] * LINK.used_ns(50)
    expected = L * (100 + 11 + K * TIMES.expert_ns(1)) + 13 + moving
    np.testing.assert_array_equal(log.step_ns[decoded], expected)


@pytest.mark.parametrize("changed", [{"overheads": BLOCKING}, {"whole_layers": True, "buffers": 1}])
def test_the_link_carries_as_much_in_a_layer_whose_experts_are_computed_together(home, changed):
    """The experts of the last layer too are computed in their layer's time."""
    alone = replace(systems()["mixtral-offloading"], overheads=replace(BLOCKING, blocking=False))
    found = [SystemRun.of(each, setting_of(home, size="50%")).run.gpu for each in (alone, replace(alone, **changed))]
    times = [(gpu.experts_per_layer or 0) * gpu.link.used_ns(gpu.link.expert_bytes) for gpu in found]
    assert times[0] == pytest.approx(times[1])


def test_whole_layers_move_all_their_bytes_each_token_but_those_of_resident_layers(trace):
    steps, resident = trace.steps(0), 1
    streamed = transforms.streamed(steps, L, resident)
    link = transforms.of_whole_layers(LINK, E)
    log = played([streamed], Shape(L, 1), 1, "lru", Blocking(TIMES, L, E, K), link)
    assert link.expert_bytes == E * 50
    np.testing.assert_array_equal(log.demand_bytes, (L - resident) * E * 50)
    decoded = log.phase == DECODE
    expected = L * (100 + 11 + K * TIMES.expert_ns(1)) + 13 + (L - resident) * link.used_ns(E * 50)
    np.testing.assert_array_equal(log.step_ns[decoded], expected)


def test_streaming_ahead_hides_the_compute_of_the_layers_before(trace):
    """Every layer is copied while the one before computes, so where copies take longer they alone count."""
    streamed, link = transforms.streamed(trace.steps(0), L, 0), transforms.of_whole_layers(LINK, E)
    timing = Blocking(replace(TIMES, dense=1, combine=0, head=0), L, E, K)
    log = played([streamed], Shape(L, 1), 2, "fifo+oracle:horizon=1", timing, link)
    steady = log.step_ns[2:-1]
    np.testing.assert_array_equal(steady, L * link.used_ns(E * 50))


def test_zero_copy_reads_every_use_at_the_links_bandwidth_and_keeps_nothing(trace):
    timing = transforms.ZeroCopy(TIMES, LINK)
    log = played([trace.steps(0)], Shape(L, E), 4, f"lru/layers:n={L}", timing, LINK)
    decoded = log.phase == DECODE
    assert not log.demand_transfers.any()
    expected = L * (100 + 11 + K * (LINK.used_ns(50) - LINK.latency_ns)) + 13
    np.testing.assert_array_equal(log.step_ns[decoded], expected)


def test_preloaded_experts_are_hits_from_the_first_token_on(trace):
    shape, mark = Shape(L, E), 99
    first = transforms.preload(np.arange(L * E), L, E, mark)
    requests = transforms.Changed([trace.steps(0)], first=[first])
    log = played(requests, shape, L * E, "lru/split", transforms.Preloaded(TIMES, mark), LINK)
    assert log.demand_transfers.tolist() == [L * E] + [0] * (len(log.phase) - 1)
    assert not log.misses[1:].any()


def test_a_frameworks_overhead_is_paid_in_each_layer_for_each_expert_and_once_a_token(home):
    made_up = Overheads("made up", us_per_layer=10.0, us_per_expert=7.0, us_per_token=3.0)
    free, slower = (
        setting_of(home, size="100%").predicted(replace(systems()["resident"], overheads=overheads))
        for overheads in (Overheads("made up"), made_up)
    )
    assert (free.overhead_ms, slower.overhead_ms) == (0, pytest.approx((L * 10 + L * K * 7 + 3) / 1e3))
    assert slower.tpot_mean_ms - free.tpot_mean_ms == pytest.approx(slower.overhead_ms)


def test_blocking_computes_the_experts_of_an_encoder_in_prefills_alone():
    profile = model("nllb-moe-54b")
    plain = Roofline(hardware("h100"), profile)
    timing = Blocking(plain, 12, 128, 2)
    for tokens, layers, computed in ((16, 12, 32), (1, 6, 2)):
        dense = sum(timing.dense_ns(i, tokens, 16) - plain.dense_ns(i, tokens, 16) for i in range(12))
        more = dense + 12 * (timing.combine_ns(tokens) - plain.combine_ns(tokens))
        more += timing.head_ns(tokens) - plain.head_ns(tokens)
        assert more == layers * computed * plain.expert_ns(1)


def test_the_default_budget_is_what_dense_part_and_kv_cache_leave(home):
    setting = setting_of(home, "deepseek", size=None)
    profile = setting.model()
    left = 24 * 2**30 - profile.dense_bytes - 27 * 544 * 576 * 2
    assert setting.slots() == int(left // profile.expert_bytes) == 1336


def test_the_overheads_from_table_1_are_its_mean_less_idle_less_our_compute():
    machine, profile = hardware("a5000"), model("deepseek-v2-lite")
    for name in ("moe-infinity", "vllm", "deepspeed"):
        row, overheads = TABLE[name], systems()[name].overheads
        assert "Table 1" in overheads.source
        busy_ms = Roofline(machine.under(overheads), profile).token_ns(528) / 1e6
        assert busy_ms == pytest.approx(row["mean_ms"] - row["idle_ms"], abs=0.05), name


def test_the_streaming_rows_of_the_docs_are_what_the_command_prints(moe_sim_systems, home):
    """They depend on no routing, so that any trace of the model gives them."""
    text = (Path(__file__).parents[2] / "docs/systems.md").read_text("utf-8")
    names = ["vllm", "vllm-uva", "deepspeed", "ollama", "llama-cpp", "accelerate", "ktransformers", "resident-q4"]
    _, out, _ = moe_sim_systems(home / "deepseek", "--systems", ",".join(names), "--json")
    for row in json.loads(out)["systems"]:
        found = re.search(rf"^\| {row['system']} \| ([\d.,]+) \|", text, re.MULTILINE)
        assert found, row["system"]
        assert float(found[1].replace(",", "")) == pytest.approx(row["tpot_mean_ms"], rel=0.01)
