"""One replay: a cell in closed loop on a device, and what is predicted of it.

What a real device is compared with is the simulator on this machine as measured just before and just after, not on the
profile named by `--hardware`, which describes another one; that prediction stands beside it. How far both calibrations
disagree is the interval of the prediction.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pyarrow as pa

from policies.core.spec import PolicySpec
from replay.choice import Choice
from replay.comparison.cell import CLOSED_LOOP, run_cell, under_contention
from replay.comparison.sweep import Machine
from replay.warmup import undisturbed
from sim.loop.log import RunLog, StepRow
from sim.results.metrics import Row
from sim.timeline import window as timeline_window
from sim.timeline.file import Timeline
from sim.timeline.observer import TimelineObserver
from sim.timeline.observer import play as play_simulated

CALLS = ("copy", "dense", "experts", "combine", "head")
"""Calls of a device that submit work."""

PREDICTED = ("tpot_mean_ms", "tpot_p99_ms", "ttft_mean_ms", "hit_rate")
"""Figures of the simulator that stand in a replay's row."""


@dataclass(frozen=True)
class Outcome:
    """What came of a replay. Rows are those of `sim.results.metrics`; the device's facts stand in the row as well."""

    row: Row
    log: RunLog
    requests: pa.Table  # rows of requests.parquet
    predictions: dict[str, Row]  # the simulator's, by machine; the one to compare with first
    interval_ms: tuple[float, float] | None = None  # of its TPOT mean, by either of two calibrations
    layer_bytes: tuple[int, ...] = ()  # of an expert of each layer, where they differ


def replay(
    choice: Choice,
    on_step: Callable[[StepRow], None] | None = None,
    timeline: Timeline | None = None,
    done: Sequence[StepRow] = (),
) -> Outcome:
    """Run a choice on its device. Raise InputError where the machine cannot: no memory, no device.

    done: rows of the first requests, from a run cut off. timeline: shows the same part of the run and of what was
    predicted, a short run whole.
    """
    loaded, lru = choice.loaded, replace(choice, policy=PolicySpec.of("lru"))
    profile, described = loaded.hardware.name, lru.described
    names, window = loaded.trace.requests["id"].astype(str).tolist(), timeline_window.first_steps(loaded.requests)

    @contextmanager
    def observing() -> Iterator[TimelineObserver | None]:  # which knows the device, and so may not outlive it
        observer = TimelineObserver(timeline, choice.run, "measured", names, window) if timeline else None
        yield observer
        if observer:
            observer.close()

    facts: Row = {"device_name": None, "host_ms": 0.0}
    predictions = dict[str, Row]()
    if choice.device == "virtual":
        cell = run_cell(choice, CLOSED_LOOP, *choice.described, None, on_step, 1, observing)
    else:
        with choice.stage() as stage, undisturbed():
            here = Machine(choice, stage, is_calibrated=False, slots=choice.slots)
            cell = here.outcome(choice, CLOSED_LOOP, on_step, 1, observing, done)
            facts = {**stage.facts, "hardware": stage.facts["device_name"], "resumed_steps": len(done)}
        assert cell.around
        alone, described = cell.around.before, under_contention(lru, cell.around.during, 0)
        facts["copy_gb_per_s_alone"] = alone.expert_bytes / alone.transfer_ns
        predictions["this machine as measured"] = cell.predicted.row
    predictions[profile] = cell.simulated(*choice.described).row
    predictions = {machine: {**row, "hardware": machine} for machine, row in predictions.items()}
    if timeline:
        run = choice.on(*cell.machine)
        play_simulated(run, lambda log: None, timeline, names, replace(window, stops=True))
    (machine, first), *_ = predictions.items()
    link = cell.machine[1]
    row = {**cell.measured.row, "device": choice.device, **facts, "chunk_bytes": link.chunk_bytes or link.expert_bytes}
    row["predicted_lru_tpot_ms"] = replace(cell, choice=lru).simulated(*described).row["tpot_mean_ms"]
    row |= {f"predicted_{name}": first[name] for name in PREDICTED}
    low, high = cell.interval_ms or (None, None)
    row |= {"predicted_for": machine, "predicted_tpot_low_ms": low, "predicted_tpot_high_ms": high}
    measured = cell.measured
    return Outcome(row, measured.log, measured.requests, predictions, cell.interval_ms, link.layer_bytes or ())
