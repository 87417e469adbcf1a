"""How far predictions were off, by what was known of the machine: what the interval of a prediction follows from.

`data/errors.toml` holds measured / predicted of every speed and latency, without a fitted parameter, as `python -m
benchmarks.planner --write` writes it. Each machine counts as one, however many rows it has.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.prediction.case import Case
from sim.prediction.tables import table

CALIBRATED, MEASURED, DATA_SHEET, UNKNOWN = "calibrated", "measured", "data sheet", "engine unknown"
"""Classes: a parameter was fitted on the machine; memory, link or disk was measured, whichever the experts come from;
it is its data sheet's; or nothing is known of the engine."""

NARROWER = {
    CALIBRATED: "nothing but the measured run itself",
    MEASURED: "one measured speed of the machine (fit = true, or moe-sim plan --calibrate)",
    DATA_SHEET: "a measured bandwidth (STREAM of the host's memory, copies over the link, reads of the disk)",
    UNKNOWN: "what the engine takes a layer and a miss (engine, us_per_layer)",
}
"""What would narrow the interval of each class."""

CONFIDENCE = 0.8
"""Share of machines whose measured speed lies in the interval of its prediction."""

LEFT_OUT = 1.6
"""Errors of machines that no factor was chosen with are so many times as large as of those that were: of the median
machine 1.0 to 1.3, of rows 1.3 (blind tests) to 3.5. So widened, the others' interval holds 85% of machines that are
left out, as `python -m benchmarks.factors` prints."""


@dataclass(frozen=True)
class Interval:
    """measured / predicted: between these in so many of the back-test's rows and machines of that class."""

    kind: str
    low: float
    high: float
    median: float
    rows: int
    machines: int

    @property
    def narrower(self) -> str:
        return NARROWER[self.kind]


def class_of(case: Case) -> str:
    """Return what is known of the machine and the engine of a row, calibration aside."""
    machine, setting = case.row.machine, case.row.setting
    assert machine
    if case.engine.get("unknown"):
        return UNKNOWN
    if setting.misses_from == "disk" or setting.host_cache:
        return MEASURED if machine.disk_gb_per_s else DATA_SHEET
    on_gpu = setting.all_on == "gpu" or setting.host_layers == 0
    host = machine.host_stream_gb_per_s or machine.host_gb_per_s
    measured = (
        machine.gpu_read_gb_per_s or machine.gpu_gb_per_s
        if on_gpu
        else machine.link_gb_per_s
        if setting.policy and not case.policy.uses_host
        else host
    )
    return MEASURED if measured else DATA_SHEET


@cache
def interval(kind: str) -> Interval:
    return of_rows(kind, table("errors")[kind])


def of_rows(kind: str, rows: list[dict[str, Any]], left_out: float = LEFT_OUT) -> Interval:
    """Return the interval of rows, each machine with weight 1, as if one machine more were to come."""
    names = [row["machine"] for row in rows]
    logs: NDArray[np.float64] = np.log([row["ratio"] for row in rows])
    weights = np.array([1 / names.count(name) for name in names])
    order = np.argsort(logs)
    places = np.cumsum(weights[order]) - weights[order] / 2
    machines = len(set(names))
    at = [(1 - CONFIDENCE) / 2, 0.5, (1 + CONFIDENCE) / 2]
    low, median, high = np.interp([share * (machines + 1) - 0.5 for share in at], places, logs[order]).tolist()
    low, high = median - (median - low) * left_out, median + (high - median) * left_out
    low, median, high = np.exp([low, median, high]).tolist()
    return Interval(kind, low, high, median, len(rows), machines)
