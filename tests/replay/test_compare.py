"""Simulator against device: nothing differs on the virtual one, structure holds on the CPU's, and nothing is lost."""

import dataclasses
import json
import math
import re
import shutil
from functools import cache, partial
from math import hypot, sqrt
from pathlib import Path
from statistics import stdev
from typing import Any

import numpy as np
import pandas as pd
import pytest

from policies.core.spec import parse
from replay import commands as cli
from replay.calibration.measure import DIFFER, NOISE, Around, Factors, Measurement, middle
from replay.choice import Choice
from replay.comparison import sweep as comparison
from replay.comparison.cell import (
    CLOSED_LOOP,
    LOCKSTEP,
    MODES,
    Lockstep,
    LoopRecorder,
    WithoutPolicy,
    counted_steps,
    run_cell,
    under_contention,
)
from replay.comparison.errors import DECIDED, accuracy, in_words, rankings
from replay.device_choice import DeviceChoice
from replay.devices.waiting import Pace
from sim.engines import compiled_engine
from sim.engines.simpy_engine import SimpyDevice
from sim.experiment import Experiment
from sim.loaded import TimedRun
from sim.loop.device import Device
from sim.loop.driver import Driver
from sim.loop.schedule import Step
from sim.profiles.measured import MeasuredModel
from sim.profiles.timing import Link, Timing
from tests.support.command import Ended, run
from tests.support.driven import play
from tests.support.short_calibrations import shorten
from traces import DECODE, InputError, demo_trace
from traces.output import MARKER


@pytest.fixture
def command(command):
    """Run `moe-replay compare` in an empty folder: its exit status, stdout and stderr."""
    return partial(command, "compare")


@cache
def loaded(**setup: Any) -> TimedRun:
    return TimedRun.of(Experiment(str(demo_trace()), requests=4, **setup))


def chosen(policy: str, slots: int = 40, **setup: Any) -> Choice:
    return Choice(loaded(**setup), parse(policy), slots, DeviceChoice("virtual"))


def machine(choice: Choice) -> tuple[Timing, Link]:
    return choice.loaded.timing(choice.policy), choice.loaded.link


# Cells


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("policy", "chunk_bytes"),
    [
        *(("lru", None), ("eamc-blend", 9_000), ("belady+oracle1", None)),
        *(("clock", 9_000), ("lru+popular:n=8@layer", 9_000)),
    ],
)
def test_on_the_virtual_device_nothing_differs(policy: str, mode: str, chunk_bytes: int | None) -> None:
    choice = chosen(policy, cold=chunk_bytes is not None, chunk_bytes=chunk_bytes)
    found = run_cell(choice, mode, *machine(choice), repeat=2)
    assert set(found.errors.values()) == {0.0}
    assert found.divergence == {"steps": 0.0, "evictions": 0.0}
    assert found.noise == 0
    assert found.measured.row == found.predicted.row
    assert sum(map(len, found.measured.evictions.values())) == len(found.measured.log.evictions) > 0
    if mode == CLOSED_LOOP:
        simulated = compiled_engine.simulate(choice.loaded.run(choice.policy, choice.slots))
        np.testing.assert_array_equal(found.measured.log.step_ns, simulated.step_ns)


def test_lockstep_charges_neither_side_for_the_policys_own_work() -> None:
    choice = chosen("eamc")
    timing, link = machine(choice)
    assert timing.predictor_ns > 0
    rows = {mode: run_cell(choice, mode, timing, link).predicted.row for mode in MODES}
    assert rows[CLOSED_LOOP]["stall_predictor_ms"] > 0 == rows[LOCKSTEP]["stall_predictor_ms"]
    free = WithoutPolicy(timing)
    assert free.predictor_ns == 0
    assert [free.dense_ns(1, 1, 9), free.expert_ns(2), free.combine_ns(3), free.head_ns(1)] == [
        timing.dense_ns(1, 1, 9),
        timing.expert_ns(2),
        timing.combine_ns(3),
        timing.head_ns(1),
    ]


def test_a_device_that_is_slower_than_predicted_shows_in_errors_below_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = chosen("eamc")
    timing, link = machine(choice)
    slower = dataclasses.replace(link, ns_per_byte_num=4 * link.ns_per_byte_num)
    monkeypatch.setattr("replay.comparison.cell._device", lambda *_: Opened(SimpyDevice(timing, slower)))
    found = run_cell(choice, LOCKSTEP, timing, link)
    assert found.errors["tpot_mean"] < -0.05
    assert found.divergence["steps"] > 0, "what was a hit is late"
    recorder = LoopRecorder()
    alone = WithoutPolicy(timing)
    plan = choice.on(timing, link)
    play(plan, SimpyDevice(alone, link), observer=recorder)
    same = play(plan, SimpyDevice(timing, slower), decider=Lockstep(plan, recorder.script))
    np.testing.assert_array_equal(found.measured.log.step_ns, same.step_ns)


class Late(SimpyDevice):
    """Has a host that takes its time between two steps."""

    late = 0
    completions = Device.completions

    def now(self) -> int:
        return super().now() + self.late


def test_errors_are_those_of_the_tpot_in_the_same_row(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = chosen("lru")
    timing, link = machine(choice)
    device, begin = Late(timing, link), Driver.begin

    def begin_late(driver: Driver, step: Step) -> None:
        device.late += 50_000 * (driver.session.device is device)
        begin(driver, step)

    monkeypatch.setattr(Driver, "begin", begin_late)
    monkeypatch.setattr("replay.comparison.cell._device", lambda *_: Opened(device))
    found = run_cell(choice, CLOSED_LOOP, timing, link)
    for figure, error in (("tpot_mean_ms", "tpot_mean"), ("tpot_p99_ms", "tpot_p99")):
        predicted, measured = (side.row[figure] for side in (found.predicted, found.measured))
        assert measured - predicted == pytest.approx(0.05)
        assert found.errors[error] == pytest.approx(predicted / measured - 1)
    tokens = found.per_token()
    decoded = tokens[tokens["counted"] & (tokens["phase"] == DECODE)]
    assert decoded["measured_ns"].mean() / 1e6 == pytest.approx(found.measured.row["tpot_mean_ms"])


class Opened:
    """A device as a context."""

    def __init__(self, device: SimpyDevice) -> None:
        self.device = device

    def __enter__(self) -> SimpyDevice:
        return self.device

    def __exit__(self, *_: object) -> None:
        pass


def measured_machine(loaded: TimedRun, turnaround_ns: int) -> TimedRun:
    """The same on a machine described by tables."""
    assert loaded.profile
    assert loaded.hardware
    flat = ((1, 1, 50_000), (64, 64, 60_000))
    model = MeasuredModel(
        model=loaded.profile.name,
        expert_bytes=loaded.profile.expert_bytes,
        transfer_ns=20_000,
        latency_ns=500,
        turnaround_ns=turnaround_ns,
        launch_ns=0,
        first_dense=flat,
        dense=flat,
        expert=((1, 5_000), (64, 9_000)),
        combine=((1, 700),),
        head=((1, 8_000),),
        predictor_us={"lru": 0.0},
    )
    return dataclasses.replace(loaded, hardware=dataclasses.replace(loaded.hardware, measured=(model,)))


def test_what_transfers_and_compute_cost_each_other_counts_where_they_overlap() -> None:
    def tpot_ms(slots: int, **slowed: Any) -> float:
        base = chosen("lru", slots)
        known = measured_machine(base.loaded, turnaround_ns=0)
        choice = dataclasses.replace(base, loaded=known)
        assert known.measured
        described = under_contention(choice, dataclasses.replace(known.measured, **slowed), predictor_ns=0)
        mean: float = run_cell(choice, CLOSED_LOOP, *described).predicted.row["tpot_mean_ms"]
        return mean

    for slots in (80, 160):
        alone = tpot_ms(slots)
        compute, transfer = tpot_ms(slots, compute_slowed=2.0), tpot_ms(slots, transfer_slowed=1.5)
        assert alone < compute < 2 * alone
        assert alone < transfer < 1.5 * alone
        assert tpot_ms(slots, compute_slowed=1.0, transfer_slowed=1.0) == alone
    resident = 320  # nothing is transferred once all is there
    assert tpot_ms(resident, compute_slowed=2.0) == pytest.approx(tpot_ms(resident), rel=0.2)


@pytest.mark.parametrize("reads", [None, 1.5])
def test_a_cell_is_predicted_between_the_calibrations_on_both_sides_of_it_at_the_pace_of_the_run(
    reads: float | None,
) -> None:
    """Where a device tells no pace, what either calibration says is the interval."""
    base = chosen("lru", slots=80)
    slow, fast = (measured_machine(base.loaded, turnaround_ns=ns) for ns in (60_000, 20_000))
    assert slow.measured
    assert fast.measured
    for mode in MODES:
        choice = dataclasses.replace(base, loaded=slow)
        before, after = (Measurement(each, 0.0, (Pace(100.0, 10.0),)) for each in (slow.measured, fast.measured))
        paces = [Pace(100.0 * reads * of, 10.0) for of in (0.9, 1.1)] if reads else []
        around = Around.of(before, after, paces)
        cell = run_cell(choice, mode, *under_contention(choice, slow.measured, 0))
        found = cell.predicted_again(around, partial(under_contention, choice, predictor_ns=0))
        assert found.interval_ms
        assert found.calibrations_ms
        low, high = found.interval_ms
        expected_ms = found.predicted.row["tpot_mean_ms"]
        assert low < expected_ms < high
        by_slow, by_fast = found.calibrations_ms
        assert by_slow - by_fast == pytest.approx(40_000e-6 * choice.loaded.trace.layers, rel=0.05)
        assert found.disagreement == pytest.approx(2 * (by_slow - by_fast) / (by_slow + by_fast))
        assert found.figures()["predicted_interval_ms"] == (low, high)
        assert found.figures()["calibration_paces_ns"] == [[[100, 10]], [[100, 10]]]
        if reads:
            slowed = dataclasses.replace(middle([slow.measured, fast.measured]), transfer_ns=0, latency_ns=0)
            factors = [Factors.of(before.paces, after.paces, paces, errors).reads for errors in (0.0, 1.0)]
            expected = [round(factor * slow.measured.transfer_ns) for factor in factors]
            assert [around.during.transfer_ns, around.slowest.transfer_ns] == expected
            assert 1 < factors[0] < reads < factors[1]
            assert dataclasses.replace(around.during, transfer_ns=0, latency_ns=0) == slowed
            assert expected_ms > (by_slow + by_fast) / 2
        else:
            assert (low, high) == (by_fast, by_slow)


def test_factors_are_how_the_pace_of_a_run_compares_less_noise() -> None:
    before, after = [Pace(19.0, 4.0), Pace(21.0, 4.0)], [Pace(20.0, 4.0)] * 2
    now = [Pace(28.0, 2.0), Pace(32.0, 2.0)]
    spread = stdev([28, 32]) / 30 / sqrt(2)
    error = 1.5 * hypot(spread, DIFFER / 2)  # four passes
    found = Factors.of(before, after, now)
    assert found.reads == pytest.approx(1.5 - (NOISE**2 + error**2) / 0.5)
    error_of_computes = 0.5 * hypot(DIFFER / sqrt(2), DIFFER / 2)
    assert found.computes == pytest.approx(0.5 + (NOISE**2 + error_of_computes**2) / 0.5)
    assert Factors.of(before, after, now, 1.0).reads == pytest.approx(found.reads + error)
    alike = [Pace(20.0 * (1 + NOISE / 2), 4.0 * (1 - NOISE / 2))]
    assert Factors.of(before, after, alike) == Factors()


def test_one_pause_of_twelve_hardly_counts_and_shows_in_the_interval() -> None:
    then, now = [Pace(20.0, 4.0)] * 3, [*[Pace(20.0, 4.0)] * 11, Pace(60.0, 4.0)]
    low, found, high = (Factors.of(then, then, now, errors).reads for errors in (-1.0, 0.0, 1.0))
    assert 1 <= found < 1.06 < (11 * 20 + 60) / 12 / 20
    assert low < found - 0.1 < found + 0.1 < high
    standing_still = [*[Pace(20.0, 4.0)] * 11, Pace(10**9, 4.0)]
    assert Factors.of(then, then, standing_still).reads == found


def test_factors_scale_all_that_was_measured() -> None:
    known = measured_machine(chosen("lru").loaded, turnaround_ns=7).measured
    assert known
    scaled = Factors(1.5, 0.5).scale(known)
    assert (scaled.transfer_ns, scaled.latency_ns) == (round(1.5 * known.transfer_ns), round(1.5 * known.latency_ns))
    assert scaled.expert == tuple((tokens, round(0.5 * ns)) for tokens, ns in known.expert)
    assert scaled.dense == tuple((tokens, context, round(0.5 * ns)) for tokens, context, ns in known.dense)
    assert scaled.turnaround_ns == 7
    assert Factors().scale(known) == known


@pytest.mark.parametrize("mode", MODES)
def test_without_the_host_a_prediction_is_shorter_by_its_turnaround_where_nothing_else_waits(mode: str) -> None:
    base = chosen("lru", slots=320)
    choice = dataclasses.replace(base, loaded=measured_machine(base.loaded, turnaround_ns=30_000))
    found = run_cell(choice, mode, *machine(choice))
    assert found.predicted_without_host
    saved = found.predicted.row["tpot_p50_ms"] - found.predicted_without_host["tpot_p50_ms"]
    assert saved == pytest.approx(30_000e-6 * choice.loaded.trace.layers)
    ratio = found.measured.row["tpot_mean_ms"] / found.predicted_without_host["tpot_mean_ms"]
    assert ratio > 1
    assert found.errors["measured_over_without_host"] == pytest.approx(ratio)
    free = dataclasses.replace(base, loaded=measured_machine(base.loaded, turnaround_ns=0))
    without = run_cell(free, mode, *machine(free))
    alone = without.predicted_without_host
    assert alone
    assert alone == {name: without.predicted.row[name] for name in alone}


def test_warm_up_counts_in_no_figure() -> None:
    choice = chosen("lru", warmup_requests=2)
    found = run_cell(choice, CLOSED_LOOP, *machine(choice))
    counted = counted_steps(choice, found.measured.log)
    assert counted.sum() < len(counted)
    decoded = counted & (found.measured.log.phase == 1)
    assert found.figures()["tokens"] == decoded.sum()
    assert found.measured.row["tpot_mean_ms"] == found.measured.log.step_ns[decoded].mean() / 1e6
    assert found.per_token()["counted"].tolist() == counted.tolist()


def cell(policy: str, measured: float, predicted: float, noise: float | None = None, slots: int = 8) -> dict:
    sides = {"measured": {"tpot_mean_ms": measured}, "predicted": {"tpot_mean_ms": predicted}}
    same = {"model": "m", "trace": "t", "requests": 1, "mode": "lockstep", "cache_experts": slots}
    return {**same, "cache_fraction": slots / 16, "policy": policy, "noise": noise, **sides}


def test_policies_are_ranked_among_their_like_and_differences_within_the_noise_do_not_count() -> None:
    cells = [cell("a", 1.0, 1.0), cell("b", 2.0, 1.5, 0.1), cell("c", 2.1, 1.4), cell("d", 9.0, 1.0, slots=4)]
    (found,) = rankings(cells)
    assert (found["policies"], found["cache_experts"], found["noise"]) == (3, 8, 0.1)
    assert found["spearman"] == pytest.approx(0.5)
    assert (found["pairs_as_measured"], found["pairs_that_differ"]) == (2, 2)
    assert rankings([{"mode": "resident", "measured": {}}, *cells[:1], *cells[3:]]) == []


def test_where_no_cell_was_repeated_the_noise_is_what_calibrations_disagree_by() -> None:
    cells = [cell("a", 1.0, 1.0), cell("b", 2.0, 1.5), cell("c", 2.1, 1.4)]
    disagree = [dict(each, calibrations_disagree=share) for each, share in zip(cells, (0.01, 0.3, 0.1), strict=True)]
    repeated = [*disagree[1:], dict(cells[0], noise=0.0)]
    for given, noise, differ in ((cells, None, 3), (disagree, 0.1, 2), (repeated, 0.0, 3)):
        (found,) = rankings(given)
        assert (found["noise"], found["pairs_that_differ"]) == (noise, differ)


def test_accuracy_counts_cells_within_5_percent_and_within_what_calibrations_disagree_by() -> None:
    errors = (0.05, -0.051, 0.074, -0.076, 0.2)
    cells = [{"errors": {"tpot_mean": each}} for each in errors]
    assert accuracy([{"mode": "resident"}]) is None
    assert accuracy(cells) == {"cells": 5, "within_5_percent": 1, "calibrations_disagree": None, "within_noise": 1}
    apart = (0.01, 0.07, 0.0, 0.05, 0.05)  # 1.5 times their root mean square is 6.7%
    found = accuracy([dict(cell, calibrations_disagree=each) for cell, each in zip(cells, apart, strict=True)])
    assert found is not None
    assert found["calibrations_disagree"] == pytest.approx(math.sqrt(0.002))
    assert found["within_noise"] == 2
    far = accuracy([dict(cells[0], calibrations_disagree=1e200)])
    assert far is not None
    assert far["calibrations_disagree"] == 1e200
    assert in_words(found).startswith("1 of 5 TPOT means are predicted within 5%, 2 within 5% or 1.5 times")


# The command


def read(folder: Path) -> Any:
    return json.loads((folder / "compare.json").read_text())


def test_the_command_writes_the_record_and_tokens_and_says_the_worst_last(command, tmp_path: Path) -> None:
    status, out, err = command("--device", "virtual", "--requests", "3", "--policies", "lru,eamc", "--out", "here")
    assert status == 0, err
    found = read(tmp_path / "here")
    assert [(one["policy"], one["cache_fraction"], one["mode"]) for one in found["cells"]] == [
        (policy, size, mode) for size in (0.1, 0.25, 0.5) for policy in ("lru", "eamc") for mode in MODES
    ]
    for one in found["cells"]:
        assert set(one["errors"].values()) == {0}
        assert one["divergence"] == {"steps": 0, "evictions": 0}
        tokens = pd.read_csv(tmp_path / "here" / one["per_token"])
        decoded = tokens[tokens["phase"] == 1]
        assert len(decoded) == one["tokens"]
        assert decoded["measured_ns"].mean() / 1e6 == pytest.approx(one["measured"]["tpot_mean_ms"])
        assert {f"{side}_{name}" for side in ("measured", "predicted") for name in DECIDED} < set(tokens.columns)
    assert {ranking["spearman"] for ranking in found["rankings"]} == {1.0}
    assert found["hardware"]["name"] == "a5000"
    assert found["device"] == "virtual"
    assert [out.count(size) >= 6 for size in ("32 (10%)", "80 (25%)", "160 (50%)")] == [True] * 3
    last = out.splitlines()[-1]
    assert re.search(r"worst: .*TPOT mean predicted ([\d.]+) ms, measured \1 ms \(\+0\.0%\)", last)
    assert {"compare.json", "tokens", MARKER} == {path.name for path in (tmp_path / "here").iterdir()}


SMALL = ("--requests", "2", "--cache-sizes", "25%", "--policies", "lru,fifo")


CPU = (
    *(str(demo_trace()), "--device", "cpu", "--requests", "1", "--cache-sizes", "40"),
    *("--policies", "belady,eamc", "--repeat", "2", "-q"),
)


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """A comparison on the CPU whose error may be 0%: its folder, and how it ended."""
    folder = tmp_path_factory.mktemp("cpu")
    with pytest.MonkeyPatch.context() as changed:
        shorten(changed.setattr)
        return folder, run(cli.main, "compare", *CPU, "--max-error", "0", "--out", folder)


def test_an_error_above_the_limit_ends_with_status_1_and_one_line(command, on_the_cpu: tuple[Path, Ended]) -> None:
    assert command("--device", "virtual", *SMALL, "--max-error", "0", "-q")[0] == 0, "nothing is off"
    folder, ended = on_the_cpu
    assert ended.returncode == 1
    assert re.search(r"4 of 4 cells exceed --max-error 0; worst: ", ended.stderr)
    assert ended.stderr.count("\n") == 1
    shutil.copytree(folder, "cpu")
    status, _, _ = command(*CPU, "--out", "cpu", "--max-error", "1000000", "--resume")
    assert status == 0


def test_on_the_cpu_both_modes_have_the_simulators_structure(on_the_cpu: tuple[Path, Ended]) -> None:
    found = read(on_the_cpu[0])
    assert found["machine"]
    assert found["torch"]
    assert found["ceiling_gb_per_s"] > 0 < found["copy_gb_per_s"]
    assert found["hardware"]["name"] == "this machine as measured"
    cells = {(one["policy"], one["mode"]): one for one in found["cells"]}
    assert len(cells) == 4
    for (policy, mode), one in cells.items():
        measured, predicted = one["measured"], one["predicted"]
        assert measured["lookups"] == measured["hits"] + measured["late"] + measured["misses"] == predicted["lookups"]
        assert measured["tpot_mean_ms"] > 0
        assert measured["host_us_per_layer"] > 0
        assert one["host_experts"] == 320
        low, high = one["tpot_means_ms"]
        assert one["noise"] == pytest.approx((high - low) / (high + low) * 2)
        assert one["measured"]["tpot_mean_ms"] == pytest.approx(low)
        assert one["predicted_without_host"]["tpot_mean_ms"] > 0
        if mode == LOCKSTEP and policy != "eamc":  # demand alone: what is not scripted cannot happen
            assert measured["misses"] == predicted["misses"]
            assert one["divergence"] == {"steps": 0, "evictions": 0}
        if mode == LOCKSTEP:
            assert measured["bytes_demand"] == predicted["bytes_demand"]
            assert measured["bytes_prefetch"] <= predicted["bytes_prefetch"]


def test_a_cell_that_fails_is_recorded_the_others_are_run_and_it_alone_is_run_again(
    command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def failing(choice: Choice, mode: str, *rest: Any):
        ran.append(choice.policy.text)
        if choice.policy.text == "lru" and len(ran) < 5:
            raise InputError("the device is stuck")
        return run_cell(choice, mode, *rest)

    monkeypatch.setattr(comparison, "run_cell", failing)
    arguments = ("--device", "virtual", *SMALL, "--out", "here")
    status, out, err = command(*arguments)
    assert status == 1
    assert "2 of 4 cells failed, the first: lru, 80 (25%), closed-loop: the device is stuck" in err
    assert "failed: lru" in out
    assert [one.get("error") for one in read(tmp_path / "here")["cells"]] == ["the device is stuck"] * 2 + [None] * 2
    assert ran == ["lru", "lru", "fifo", "fifo"]
    assert command(*arguments, "--resume", "-q")[0] == 0
    assert ran[4:] == ["lru", "lru"]
    assert not [one for one in read(tmp_path / "here")["cells"] if "error" in one]
    assert command(*arguments, "--resume", "-q")[0] == 0
    assert len(ran) == 6, "nothing was left to run"


def test_finished_cells_are_neither_lost_nor_mixed_with_others_unasked(command, tmp_path: Path) -> None:
    arguments = ("--device", "virtual", *SMALL, "--out", "here", "-q")
    assert command(*arguments)[0] == 0
    before = read(tmp_path / "here")
    status, _, err = command(*arguments)
    assert status == 2
    assert "holds 4 finished cells: continue with --resume" in err
    status, _, err = command(*arguments, "--resume", "--warmup-requests", "1")
    assert status == 2
    assert "4 cells that this comparison does not have" in err
    assert read(tmp_path / "here") == before
    assert command(*arguments, "--resume", "--policies", "lru,fifo,lfu")[0] == 0
    found = read(tmp_path / "here")
    assert found["cells"][:4] == before["cells"]
    assert len(found["cells"]) == 6
    assert command(*arguments, "--overwrite")[0] == 0
    assert len(read(tmp_path / "here")["cells"]) == 4
