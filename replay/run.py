"""One replay: open the device, measure it, run the trace in closed loop, and predict the same cell.

What a real device is compared with is the simulator on this machine as measured just before and just after, not on the
profile named by `--hardware`, which describes another one; that prediction stands beside it. How far both calibrations
disagree is the interval of the prediction.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from policies.core.spec import PolicySpec
from replay.calibration.in_loop import effective
from replay.calibration.pace import pausing
from replay.choice import Choice, Described
from replay.devices.waiting import Pace
from replay.warmup import undisturbed
from sim.engines import compiled_engine
from sim.engines.simpy_engine import SimpyDevice
from sim.loop.driver import Driver
from sim.loop.log import PREDICTOR, RunLog, StepRow, counting
from sim.probe import busy
from sim.profiles.measured import MeasuredModel
from sim.results.metrics import Cell, Row, summarise
from sim.timeline import window as timeline_window
from sim.timeline.file import Timeline
from sim.timeline.observer import TimelineObserver
from sim.timeline.observer import play as play_simulated

CALLS = ("copy", "dense", "experts", "combine", "head")
"""Calls of a device that submit work."""

PREDICTED = ("tpot_mean_ms", "tpot_p99_ms", "ttft_mean_ms", "hit_rate")
"""Figures of the simulator that stand in a replay's row."""


@dataclass(frozen=True)
class Prediction:
    """What the simulator says of the same cell."""

    machine: str
    row: Row
    interval_ms: tuple[float, float] | None = None  # of its TPOT mean, by either of two calibrations


@dataclass(frozen=True)
class Outcome:
    """What came of a replay. Rows are those of `sim.results.metrics`; the device's facts stand in the row as well."""

    row: Row
    log: RunLog
    requests: pa.Table  # rows of requests.parquet
    predictions: list[Prediction]  # the one to compare with first
    layer_bytes: tuple[int, ...] = ()  # of an expert of each layer, where they differ


def replay(
    choice: Choice,
    on_step: Callable[[StepRow], None] | None = None,
    timeline: Timeline | None = None,
    slots: bool = True,
    done: Sequence[StepRow] = (),
) -> Outcome:
    """Run a choice on its device. Raise InputError where the machine cannot: no memory, no device.

    done: rows of the first requests, from a run cut off. timeline: shows the same part of the run and of what was
    predicted, a short run whole; `slots`: with a track each.
    """
    loaded, run = choice.loaded, choice.run
    names, window = loaded.trace.requests["id"].astype(str).tolist(), timeline_window.first_steps(run.requests)
    cell = loaded.cell(choice.policy, choice.slots)
    with choice.opened() as (device, facts), undisturbed(None if choice.device == "virtual" else run):
        calibrations: Sequence[MeasuredModel] = ()
        paces = list[Pace]()
        if choice.device != "virtual":
            from replay.calibration.measure import Around, measure_model, under_policy

            before = measure_model(device, run, choice.most_tokens, "this machine")
            timing, link = under_policy(before.model, run, device)
            cell = replace(cell, hardware=str(facts["device_name"]), predictor_us=timing.predictor_ns / 1_000)
            run = choice.on(timing, link)
        observer = TimelineObserver(timeline, run, "measured", names, window, slots) if timeline else None
        driver = Driver(run, SimpyDevice.of(run) if done else device, observer=observer)
        if done:
            driver.resume(done, device)
        others = busy.Others()
        with counting(run):
            log = driver.run(pausing(device, paces, on_step or (lambda row: None)), done)
        beside = others.seen()
        if observer:
            observer.close()
        if choice.device != "virtual":
            device.discard_copies()  # a prefetch may be under way
            around = Around.of(before, measure_model(device, run, choice.most_tokens, "this machine"), paces)
            calibrations = [around.fastest, around.during, around.slowest]
    row, by_request = summarise(log, cell, loaded.trace.requests)
    link = run.gpu.link
    row |= {"device": choice.device, **facts, "chunk_bytes": link.chunk_bytes or link.expert_bytes}
    row["copy_gb_per_s"] = copy_gb_per_s(log)
    row["host_ms"] = host_ms(log, log.request >= cell.warmup_requests)
    if calibrations:
        row["others_processors"], row["other_program"] = beside
        row["copy_gb_per_s_alone"] = link.expert_bytes / max(1, link.used_ns(link.expert_bytes))
        row |= host_us(driver, log, len(done))
        row["resumed_steps"] = len(done)
    if timeline:
        play_simulated(run, lambda log: None, timeline, names, replace(window, stops=True), slots)
    predictions = predict(choice, cell, calibrations)
    first, lru = predictions[0], replace(choice, policy=PolicySpec.of("lru"))
    described = under_contention(lru, calibrations[1], 0) if calibrations else lru.described
    row["predicted_lru_tpot_ms"] = simulated_row(lru, cell, described, first.machine)["tpot_mean_ms"]
    row["predicted_for"] = first.machine
    row |= {f"predicted_{name}": first.row[name] for name in PREDICTED}
    row["predicted_tpot_low_ms"], row["predicted_tpot_high_ms"] = first.interval_ms or (None, None)
    return Outcome(row, log, by_request, predictions, link.layer_bytes or ())


def host_us(driver: Driver, log: RunLog, resumed: int = 0) -> Row:
    """Return the host's us for a layer of the run that has just ended; nothing on a logical clock.

    host_us_per_layer: bookkeeping, without the policy. By call of the device that submits work: what it takes.
    """
    layers = (len(log.step_ns) - resumed) * driver.layers
    if not (driver.inside_ns and layers):
        return {}
    policy_ns = int(log.stall_ns[resumed:, PREDICTOR].sum())
    took_ns = {"host": driver.outside_ns - policy_ns, **{call: driver.inside_ns[call] for call in CALLS}}
    return {f"{part}_us_per_layer": ns / 1_000 / layers for part, ns in took_ns.items()}


def copy_gb_per_s(log: RunLog) -> float | None:
    busy_ns = int(log.link_busy_ns.sum())
    return int(log.demand_bytes.sum() + log.prefetch_bytes.sum()) / busy_ns if busy_ns else None


def host_ms(log: RunLog, counted: NDArray[np.bool_]) -> float:
    """Return the time of the counted steps in which nothing was submitted and nothing awaited."""
    alone_ns = log.step_ns - log.stall_ns.sum(axis=1) - log.compute_busy_ns
    return int(alone_ns[counted].sum()) / 1e6


def under_contention(choice: Choice, model: MeasuredModel, predictor_ns: int) -> Described:
    """Return the machine of that model as this run's decoded tokens experience it, contention included."""
    chunk_bytes = choice.loaded.experiment.chunk_bytes

    def simulate(on: MeasuredModel) -> RunLog:
        return compiled_engine.simulate(choice.on(on.timing(predictor_ns), on.link(chunk_bytes)))

    slowed = effective(model, simulate)
    return slowed.timing(predictor_ns), slowed.link(chunk_bytes)


def predict(choice: Choice, cell: Cell, calibrations: Sequence[MeasuredModel]) -> list[Prediction]:
    """Return what the simulator says on this machine as measured, and on the hardware profile.

    calibrations: as fast as the machine may have been, as it was measured, and as slow; none on a logical clock.
    """
    profile = choice.loaded.hardware.name
    predictions = [Prediction(profile, simulated_row(choice, cell, choice.described, profile))]
    if calibrations:
        here = "this machine as measured"
        predictor_ns = round((cell.predictor_us or 0.0) * 1_000)
        machines = (under_contention(choice, each, predictor_ns) for each in calibrations)
        fastest, during, slowest = (simulated_row(choice, cell, machine, here) for machine in machines)
        interval = None
        if during["tpot_mean_ms"] is not None:
            low, high = sorted((fastest["tpot_mean_ms"], slowest["tpot_mean_ms"]))
            interval = low, high
        predictions.insert(0, Prediction(here, during, interval))
    return predictions


def simulated_row(choice: Choice, cell: Cell, described: Described, machine: str) -> Row:
    timing, link = described
    there = replace(cell, hardware=machine, predictor_us=timing.predictor_ns / 1_000)
    return summarise(compiled_engine.simulate(choice.on(timing, link)), there, choice.loaded.trace.requests)[0]
