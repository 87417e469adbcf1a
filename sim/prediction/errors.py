"""How far predictions were off, by what was known of the machine: what the interval of a prediction follows from.

`data/errors.toml` holds measured / predicted of every speed and latency, without a fitted parameter, as `python -m
benchmarks.planner --write` writes it. docs/backtest.md says how intervals follow.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.catalogue.parts import thread_gflop_per_s
from sim.prediction.case import Case
from sim.prediction.described import Assumed, Machine
from sim.prediction.machine import cpu_class, peak_of
from sim.prediction.tables import FACTORS, table
from sim.profiles.hardware_profile import Hardware

CALIBRATED, MEASURED, DATA_SHEET = "calibrated", "measured", "data sheet"
MAPPED, UNKNOWN = "through mmap", "engine unknown"
"""Classes: a parameter was fitted on the machine; memory, link or disk was measured, whichever the experts come from;
it is its data sheet's; experts are read through the page cache; or nothing is known of the engine."""

NARROWER = {
    CALIBRATED: "nothing but the measured run itself",
    MEASURED: "one measured speed of the machine (fit = true, or moe-sim plan --calibrate)",
    DATA_SHEET: "a measured bandwidth (STREAM of the host's memory, copies over the link, reads of the disk)",
    MAPPED: "a run with the model's own file (moe-sim plan --verify)",
    UNKNOWN: "what the engine takes a layer and a miss (engine, us_per_layer)",
}
"""What would narrow the interval of each class."""

CONFIDENCE = 0.8
"""Share of machines whose measured speed lies in the interval of its prediction."""

LEFT_OUT = 1.3
"""Errors of machines that no factor was chosen with are so many times as large as of those that were: of the median
machine 1.0 to 1.3, of rows 1.3 (blind tests) to 3.5 (`python -m benchmarks.factors`)."""

THREADS, CORES, STREAM, MISSES = (0.4, 1.5), (0.6, 1.8), (0.62, 0.88), (1.7, 0.6)
DISK, FAULT, NODES = (0.6, 0.9), (2.4, 0.33), (0.27, 0.8)
"""Slowest and fastest, for facts that are not stated: the CPU's threads, times the usual number; what a thread of an
unknown CPU multiplies, likewise; STREAM of its memory's peak (0.62 to 0.88 on the back-test's machines); misses of
another model's routing, times the stand-in's (two traces of one model differ by as much); reads of a disk's data sheet;
the wait of a read through mmap, times the usual one; what memory of several nodes reaches of its rate."""


class Spread(NamedTuple):
    """How much slower and faster a run may be, as logarithms, both at least 0."""

    slower: float
    faster: float


NONE = Spread(0.0, 0.0)


@dataclass(frozen=True)
class Interval:
    """measured / predicted: between these on CONFIDENCE of the back-test's machines of that class."""

    kind: str
    low: float
    high: float
    rows: int
    machines: int

    def with_spread(self, spread: Spread) -> "Interval":
        """Return the interval where facts are assumed besides, whose errors are independent of its own."""
        low = math.exp(-math.hypot(math.log(self.low), spread.slower))
        return replace(self, low=low, high=math.exp(math.hypot(math.log(self.high), spread.faster)))


def assumed(case: Case) -> list[Assumed]:
    """Return what is not stated of a case's machine and run, and matters to it."""
    machine, setting, found = case.row.machine, case.row.setting, list[Assumed]()
    assert machine
    found += machine.assumed
    from_disk = setting.misses_from == "disk" or setting.host_cache
    on_gpu = setting.all_on == "gpu" or setting.host_layers == 0 or not (case.static or case.policy.uses_host)
    if not on_gpu and not machine.host_gb_per_s:
        if not machine.host_stream_gb_per_s and (peak := peak_of(machine)):
            text = f"host memory reaches {FACTORS.host_stream_of_peak:.0%} of its peak"
            option = "--cpu-bandwidth '60GB/s measured'"
            found.append(Assumed.times(text, option, "host_stream_gb_per_s", peak, STREAM))
        if machine.host_layout == "numa":
            usual = FACTORS.host_experts_of_stream / FACTORS.host_layouts["numa"]
            text = "memory of several nodes is not placed"
            found.append(Assumed.times(text, "host_gb_per_s", "host_experts_of_stream", usual, NODES))
        if not machine.host_gflop_per_s_per_thread:
            found += _assumed_cores(case, machine)
    if from_disk and machine.disk_peak_gb_per_s and not machine.disk_gb_per_s:
        text = f"reads of the disk reach {FACTORS.disk_of_peak:.0%} of its data sheet"
        found.append(Assumed.times(text, "--disk '3GB/s measured'", "disk_gb_per_s", machine.disk_peak_gb_per_s, DISK))
    if setting.mmap and not machine.page_fault_us:
        hardware = case.hardware or Hardware
        wait = hardware.page_fault_us
        text = f"a read of {hardware.read_ahead_kib:g} KiB through mmap waits {wait:g} us"
        found.append(Assumed.times(text, "moe-sim probe", "page_fault_us", wait, FAULT))
    if case.stand_in:
        text = f"experts are used again as in {case.stand_in} ({table('reuse')[case.stand_in]['source']})"
        found.append(Assumed.times(text, "a trace of the model", "misses", 1.0, MISSES))
    return found


def _assumed_cores(case: Case, machine: Machine) -> list[Assumed]:
    hardware = case.hardware
    assert hardware
    cpu = cpu_class(hardware.host_memory_bandwidth_gb_per_s)
    threads = machine.host_threads or cpu.threads
    known = thread_gflop_per_s(machine.cpu or machine.title) if machine.host_threads else 0.0
    each = known or cpu.gflop_per_s_per_thread
    if not machine.host_threads:
        what, option, between = f"the CPU has {threads} threads", "--threads", THREADS
    elif not known:
        what, option, between = f"a thread multiplies {each:g} GFLOP/s", "--cpu", CORES
    else:
        return []
    return [Assumed.times(what, option, "host_gflop_per_s_per_thread", each, between)]


def effect(fact: Assumed, seconds: float, otherwise: Callable[[Mapping[str, Any]], float]) -> Spread:
    """Return what one fact may change. seconds: as assumed; otherwise: of a run with other values."""
    changes = [math.log(otherwise(fields) / seconds) for fields in (fact.low, fact.high) if fields]
    return Spread(max(0.0, *changes), max(0.0, *(-change for change in changes)))


def together(spreads: Iterable[Spread]) -> Spread:
    slower, faster = zip(NONE, *spreads, strict=True)
    return Spread(math.hypot(*slower), math.hypot(*faster))


def spread_of(case: Case) -> Spread:

    def seconds(fields: Mapping[str, Any]) -> float:
        changed = case.changed(fields)
        return changed.simulated(changed.hardware).seconds or math.nan

    as_assumed = seconds({})
    return together(effect(fact, as_assumed, seconds) for fact in assumed(case))


def class_of(case: Case) -> str:
    machine, setting = case.row.machine, case.row.setting
    assert machine
    if case.engine.is_unknown:
        return UNKNOWN
    if setting.mmap:
        return MAPPED
    if setting.misses_from == "disk" or setting.host_cache:
        return MEASURED if machine.disk_gb_per_s else DATA_SHEET
    on_gpu = setting.all_on == "gpu" or setting.host_layers == 0
    has_gpu = machine.gpu or machine.gpus or machine.profile or machine.gpu_data_sheet_gb_per_s or machine.gpu_gb_per_s
    host = machine.host_stream_gb_per_s or machine.host_gb_per_s
    measured = (
        machine.gpu_read_gb_per_s or machine.gpu_gb_per_s
        if on_gpu
        else machine.link_gb_per_s
        if has_gpu and setting.policy and not case.policy.uses_host
        else host
    )
    return MEASURED if measured else DATA_SHEET


@cache
def interval(kind: str) -> Interval:
    return of_rows(kind, table("errors")[kind])


def of_rows(kind: str, rows: Sequence[Mapping[str, Any]], left_out: float = LEFT_OUT) -> Interval:
    """Return the interval where nothing is assumed. rows: ratio, machine, and the row's own spread.

    What is left of an error beside its row's spread counts, each machine with weight 1, as if one more were to come.
    """
    names = [row["machine"] for row in rows]
    weights = np.array([1 / names.count(name) for name in names])
    machines = len(set(names))
    logs = [math.log(row["ratio"]) for row in rows]
    slower = [_beside(-log, row["slower"]) for log, row in zip(logs, rows, strict=True)]
    faster = [_beside(log, row["faster"]) for log, row in zip(logs, rows, strict=True)]
    low, high = (left_out * _quantile(np.array(sizes), weights, machines) for sizes in (slower, faster))
    return Interval(kind, math.exp(-low), math.exp(high), len(rows), machines)


def _beside(size: float, spread: float) -> float:
    """Return what is left of an error to one side, which a spread explains as far as it goes."""
    return math.sqrt(max(size * abs(size) - spread**2, 0.0))


def _quantile(sizes: NDArray[np.float64], weights: NDArray[np.float64], machines: int) -> float:
    order = np.argsort(sizes)
    places = np.cumsum(weights[order]) - weights[order] / 2
    return float(np.interp((1 + CONFIDENCE) / 2 * (machines + 1) - 0.5, places, sizes[order]))
