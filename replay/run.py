"""One replay: open the device, measure it, run the trace in closed loop, and predict the same cell."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from replay.calibration.pace import pausing
from replay.choice import Choice
from replay.devices.waiting import Pace
from replay.prediction import PREDICTED, Prediction, predict
from replay.warmup import undisturbed
from sim.engines import engine
from sim.engines.simpy_engine import SimpyDevice
from sim.loop.driver import Driver
from sim.loop.log import PREDICTOR, RunLog, StepRow
from sim.loop.run import Run
from sim.profiles.measured import MeasuredModel
from sim.results.metrics import Row, summarise
from sim.timeline import simulated
from sim.timeline import window as timeline_window
from sim.timeline.file import Timeline
from sim.timeline.observer import TimelineObserver


@dataclass(frozen=True)
class Outcome:
    """What came of a replay. Rows are those of `sim.results.metrics`; the device's facts stand in the row as well."""

    row: Row
    log: RunLog
    requests: pa.Table  # rows of requests.parquet
    predictions: list[Prediction]  # the one to compare with first


def replay(
    choice: Choice,
    on_step: Callable[[StepRow], None] | None = None,
    timeline: Timeline | None = None,
    slots: bool = True,
    done: Sequence[StepRow] = (),
) -> Outcome:
    """Run a choice on its device. Raise InputError where the machine cannot: no memory, no device.

    done: rows of the first requests, from a run cut off; what follows is run.

    timeline: shows the same part of the run and of what was predicted, a short run whole; `slots`: with a track each.
    """
    loaded, run = choice.loaded, choice.run
    names, window = loaded.trace.requests["id"].astype(str).tolist(), timeline_window.unasked(run.requests)
    cell = loaded.cell(choice.policy, choice.slots)
    with choice.opened() as (opened, facts), undisturbed(None if choice.device == "virtual" else run):
        device = opened
        calibrations: Sequence[MeasuredModel] = ()
        paces: list[Pace] = []
        if choice.device != "virtual":
            from replay.calibration.around import Around
            from replay.calibration.measure import measure_model, under_policy

            before = measure_model(device, run, choice.most_tokens, "this machine")
            timing, link = under_policy(before.model, run, device)
            cell = replace(cell, hardware=str(facts["device_name"]), predictor_us=timing.predictor_ns / 1_000)
            run = choice.on(timing, link)
        if choice.target.nvtx:
            from replay.devices.nvtx import marked

            device = marked(device)
        observer = TimelineObserver(timeline, run, "measured", names, window, slots) if timeline else None
        driver = Driver(run, SimpyDevice(run.timing, run.gpu.link) if done else device, observer=observer)
        if done:
            driver.resume(done, device)
        with engine.counting(run):
            log = driver.run(pausing(opened, paces, on_step or (lambda row: None)), done)
        if observer:
            observer.close()
        if choice.device != "virtual":
            opened.discard_copies()  # a prefetch may be under way
            around = Around.of(before, measure_model(opened, run, choice.most_tokens, "this machine"), paces)
            calibrations = [around.fastest, around.during, around.slowest]
    row, by_request = summarise(log, cell, loaded.trace.requests)
    link = run.gpu.link
    row |= {"device": choice.device, **facts, "chunk_bytes": link.chunk_bytes or link.expert_bytes}
    row["copy_gb_per_s"] = copy_gb_per_s(log, run)
    row["host_ms"] = host_ms(log, log.request >= cell.warmup_requests)
    if calibrations:
        row["copy_gb_per_s_alone"] = link.expert_bytes / max(1, link.used_ns(link.expert_bytes))
        row["host_us_per_layer"] = bookkeeping_us(driver, log, len(done))
        row["resumed_steps"] = len(done)
    if timeline:
        simulated.play(run, lambda log: None, timeline, names, replace(window, stops=True), slots)
    predictions = predict(choice, cell, calibrations)
    first = predictions[0]
    row["predicted_for"] = first.machine
    row |= {f"predicted_{name}": first.row[name] for name in PREDICTED}
    row["predicted_tpot_low_ms"], row["predicted_tpot_high_ms"] = first.interval_ms or (None, None)
    return Outcome(row, log, by_request, predictions)


def bookkeeping_us(driver: Driver, log: RunLog, resumed: int = 0) -> float | None:
    """Return what the host took for a layer of the run that has just ended, policy overhead left out.

    None on a logical clock, where this time is not counted.
    """
    steps = len(log.step_ns) - resumed
    if not (driver.session.device.inside_ns and steps):
        return None
    policy_ns = int(log.stall_ns[resumed:, PREDICTOR].sum())
    return (driver.outside_ns - policy_ns) / 1_000 / (steps * driver.layers)


def copy_gb_per_s(log: RunLog, run: Run) -> float | None:
    """Return the link's rate over the time in which it was busy."""
    busy_ns = int(log.link_busy_ns.sum())
    transfers = int(log.demand_transfers.sum() + log.prefetch_transfers.sum())
    return transfers * run.gpu.link.expert_bytes / busy_ns if busy_ns else None


def host_ms(log: RunLog, counted: NDArray[np.bool_]) -> float:
    """Return the time of the counted steps in which nothing was submitted and nothing awaited."""
    alone_ns = log.step_ns - log.stall_ns.sum(axis=1) - log.compute_busy_ns
    return int(alone_ns[counted].sum()) / 1e6
