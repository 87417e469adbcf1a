"""Simulator against device: the same cell (a policy at a cache size in a mode) run on both, and how far they lie apart.

In `closed-loop` the policy decides on the device as things happen. In `lockstep` the device executes what the simulator
decided (`policies.core.script`), neither side is charged for policy overhead, and only time may differ. The machine is
described once for all cells: a prediction must not use the measurement that it is compared with.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from policies.core.policy import NOTHING, Event, Float, Int
from policies.core.residency import PolicyResidency
from policies.core.script import Recorder, Script, ScriptedResidency
from replay.calibration.in_loop import effective
from replay.calibration.pace import OnStep, pausing
from replay.choice import Choice, Described
from replay.comparison import errors
from replay.devices.waiting import Pace
from replay.warmup import undisturbed
from sim.engines import compiled_engine
from sim.engines.simpy_engine import SimpyDevice
from sim.loop.device import Device
from sim.loop.driver import Driver
from sim.loop.log import PREDICTOR, RunLog, StepRow, counting, joined
from sim.loop.observer import LoopObserver
from sim.loop.requests import Requests
from sim.loop.run import Run
from sim.loop.session import Decider
from sim.probe import busy
from sim.profiles.derived import Derived
from sim.profiles.measured import MeasuredModel, MeasuredTiming
from sim.profiles.timing import Link, Timing
from sim.results.metrics import Row, summarise
from traces.errors import InputError
from traces.steps import DECODE

if TYPE_CHECKING:
    from replay.calibration.measure import Around
    from replay.devices.stage import Stage

CLOSED_LOOP, LOCKSTEP = "closed-loop", "lockstep"
MODES = (CLOSED_LOOP, LOCKSTEP)

CALLS = ("copy", "dense", "experts", "combine", "head")
"""Calls of a device that submit work."""

FIGURES = (
    *("lookups", "hits", "late", "misses", "hit_rate"),
    *("bytes_demand", "bytes_prefetch", "bytes_wasted", "prefetch_precision"),
    *("ttft_mean_ms", "tpot_mean_ms", "tpot_p50_ms", "tpot_p95_ms", "tpot_p99_ms", "tpot_max_ms", "tokens_per_s"),
    *(f"stall_{cause}_ms" for cause in ("demand", "late", "behind_prefetch", "slot", "predictor")),
    *("gpu_idle_ms", "link_busy_ms", "compute_busy_ms", "overlap", "copy_gb_per_s", "host_ms"),
    *(f"{part}_us_per_layer" for part in ("host", *CALLS)),
)
"""Columns of a replay's row, for both sides; from `host_ms` on of real devices alone."""

Observing = Callable[[], AbstractContextManager[LoopObserver | None]]
"""Opens what observes a run."""

WITHOUT_HOST = ("tpot_mean_ms", "tpot_p50_ms", "tpot_p95_ms", "tpot_p99_ms")


@dataclass(frozen=True)
class Side:
    """One run: its log, its rows, and the experts that each request evicted, by the request's place in the trace."""

    log: RunLog
    row: Row  # of `sim.results.metrics`, with the link's rate; of a real device also what the host took
    requests: pa.Table
    evictions: Mapping[int, Int]
    paces: tuple[Pace, ...] = ()  # of the device in the run's pauses

    @property
    def latency_ns(self) -> Int:
        """Return the ns of the only request of each step (rule 18), so with the host's time between two: int64[S]."""
        return self.log.by_request.latency_ns

    @property
    def figures(self) -> Row:
        return {name: self.row[name] for name in FIGURES if name in self.row}


@dataclass(frozen=True)
class CellOutcome:
    """One cell on both sides."""

    choice: Choice
    measured: Side  # of several runs the one in the middle, by TPOT mean
    means_ms: tuple[float, ...]  # TPOT means of all runs, ascending
    machine: Described  # that it is predicted on
    decider: Decider | None = None  # of a run in lockstep: the decisions
    interval_ms: tuple[float, float] | None = None  # TPOT mean as predicted, as far as its errors go
    calibrations_ms: tuple[float, float] | None = None  # TPOT mean as predicted by the calibration before, and after
    around: "Around | None" = None  # what was measured before, after and during it

    @cached_property
    def predicted(self) -> Side:
        return self.simulated(*self.machine)

    @cached_property
    def predicted_without_host(self) -> Row | None:
        """Return the TPOT where the host takes no time; None where the timing has no host."""
        timing, link = self.machine
        if not isinstance(timing, MeasuredTiming):
            return None
        row = self.simulated(timing.without_host(), link).row
        return {name: row[name] for name in WITHOUT_HOST}

    def simulated(self, timing: Timing, link: Link) -> Side:
        """Return the cell on another machine; a run in lockstep by the same decisions."""
        choice = self.choice
        if self.decider:
            run = choice.on(WithoutPolicy(timing), link)
            return run_on(choice, run, SimpyDevice.of(run), self.decider)
        run, parts = choice.on(timing, link), list[RunLog]()
        compiled_engine.play(run, parts.append)
        log = joined(parts)
        return Side(log, *_rows(choice, run, log), {int(part.request[0]): part.evictions for part in parts})

    @property
    def decoded(self) -> NDArray[np.bool_]:
        log = self.measured.log
        decoded: NDArray[np.bool_] = counted_steps(self.choice, log) & (log.phase == DECODE)
        return decoded

    @property
    def noise(self) -> float | None:
        """Return (greatest - least) / mean TPOT mean of several runs; None of a single one."""
        middle = mean(self.means_ms)
        return (self.means_ms[-1] - self.means_ms[0]) / middle if len(self.means_ms) > 1 and middle else None

    @property
    def errors(self) -> dict[str, float]:
        decoded, row = self.decoded, self.measured.row
        each = errors.time_errors(*(side.latency_ns[decoded] for side in (self.measured, self.predicted)))
        if row["ttft_mean_ms"] is not None:
            each["ttft_mean"] = errors.relative(self.predicted.row["ttft_mean_ms"], row["ttft_mean_ms"])
        if without := self.predicted_without_host:
            each["measured_over_without_host"] = row["tpot_mean_ms"] / without["tpot_mean_ms"]
        return each

    @property
    def divergence(self) -> dict[str, float]:
        sides, first = (self.measured, self.predicted), self.choice.loaded.experiment.warmup_requests
        evictions = [{request: of for request, of in side.evictions.items() if request >= first} for side in sides]
        return {
            "steps": errors.steps_differ(self.measured.log, self.predicted.log, self.decoded),
            "evictions": errors.evictions_differ(*evictions),
        }

    def predicted_again(self, around: "Around", described: Callable[[MeasuredModel], Described]) -> "CellOutcome":
        """Return the cell as what was measured around it predicts it. described: a machine under the cell's policy."""
        models = (around.before, around.after, around.fastest, around.slowest)
        before, after, *ends = (self.simulated(*described(model)).row["tpot_mean_ms"] for model in models)
        again = replace(self, machine=described(around.during), around=around)
        decodes = before is not None
        return replace(again, interval_ms=(min(ends), max(ends)), calibrations_ms=(before, after)) if decodes else again

    @property
    def disagreement(self) -> float | None:
        """Return how far apart the two calibrations predict, as a share."""
        if self.calibrations_ms is None:
            return None
        low, high = sorted(self.calibrations_ms)
        return 2 * (high - low) / (high + low)

    def figures(self) -> Row:
        paces = self.around.paces if self.around else ()
        return {
            "tokens": int(self.decoded.sum()),
            "measured": self.measured.figures,
            "predicted": self.predicted.figures,
            "predicted_without_host": self.predicted_without_host,
            "errors": self.errors,
            "divergence": self.divergence,
            "noise": self.noise,
            "tpot_means_ms": self.means_ms,
            "predicted_interval_ms": self.interval_ms,
            "predicted_by_calibrations_ms": self.calibrations_ms,
            "calibrations_disagree": self.disagreement,
            "paces_ns": _in_ns(self.measured.paces) or None,
            "calibration_paces_ns": list(map(_in_ns, paces)) if any(paces) else None,
        }

    def per_token(self) -> pd.DataFrame:
        """Return a row for each step: times and decisions of both sides; `counted` is false for warm-up."""
        measured, predicted = self.measured.log, self.predicted.log
        columns: dict[str, NDArray[Any]] = {
            "request": measured.request,
            "phase": measured.phase,
            "tokens": measured.tokens,
            "counted": counted_steps(self.choice, measured),
            "measured_ns": self.measured.latency_ns,
            "predicted_ns": self.predicted.latency_ns,
        }
        for name in errors.DECIDED:
            columns |= {f"measured_{name}": getattr(measured, name), f"predicted_{name}": getattr(predicted, name)}
        return pd.DataFrame(columns)


class LoopRecorder(Recorder, LoopObserver):
    """Writes down what a run of the loop decides."""


class FixedOrder(Decider):
    """A decider of what was decided before: it ignores all events and proposes nothing."""

    silent = True
    idle = at_start = False

    def __init__(self, residency: PolicyResidency) -> None:
        self._residency = residency

    def residency(self, slots: int, sizes: Int | None = None) -> PolicyResidency:
        return self._residency

    def begin_request(self, ordinal: int, batch_slot: int = 0) -> None: ...

    def observe(self, event: Event) -> None: ...

    def propose(self, event: Event) -> tuple[Int, Float] | None:
        return None

    def end_request(self, batch_slot: int = 0) -> None: ...


class Lockstep(FixedOrder):
    """The decider of a run in lockstep: the script, in place of the run's policy."""

    silent = False

    def __init__(self, run: Run, script: Script) -> None:
        self._run = run
        self._script = script
        self.at_start = run.policy.prefetch.cls.at_start

    def residency(self, slots: int, sizes: Int | None = None) -> PolicyResidency:
        shape = self._run.shape
        return ScriptedResidency(shape, self._run.policy.divide(shape, slots, sizes), self._script, sizes)

    def propose(self, event: Event) -> tuple[Int, Float] | None:
        return NOTHING if self._script.proposes else None  # where the script's run had proposals, they take time


def _in_ns(paces: Sequence[Pace]) -> list[list[int]]:
    return [list(map(round, pace)) for pace in paces]


def run_cell(
    choice: Choice,
    mode: str,
    timing: Timing,
    link: Link,
    stage: "Stage | None" = None,
    on_step: OnStep | None = None,
    repeat: int = 1,
    observing: Observing = nullcontext,
    done: Sequence[StepRow] = (),
) -> CellOutcome:
    """Run a cell on the stage's device, `repeat` times, and in the simulator on a machine of this timing and link.

    stage: open for the choice; None for the virtual device. `timing` charges what policy overhead takes. done: rows of
    the first requests, from a run cut off. InputError where the device cannot.
    """
    script: Decider | None = None
    run = choice.on(WithoutPolicy(timing) if mode == LOCKSTEP else timing, link)
    if mode == LOCKSTEP:
        recorder = LoopRecorder()
        run_on(choice, run, SimpyDevice.of(run), observer=recorder)
        script = Lockstep(run, recorder.script)

    def run_once() -> Side:  # so that nothing refers to a device when the next one is made
        quiet = undisturbed(run if stage else None, script)
        with _device(choice, stage, run) as device, quiet, observing() as observer:
            paces, others = list[Pace](), busy.Others() if stage else None
            paused = pausing(device, paces, on_step or (lambda row: None))
            side = run_on(choice, run, device, script, paused, observer, done)
            if others:
                side.row["others_processors"], side.row["other_program"] = others.seen()
            return replace(side, paces=tuple(paces))

    runs = sorted([run_once() for _ in range(repeat)], key=lambda side: side.row["tpot_mean_ms"] or 0.0)
    means_ms = tuple(side.row["tpot_mean_ms"] or 0.0 for side in runs)
    return CellOutcome(choice, runs[(repeat - 1) // 2], means_ms, (timing, link), script)


def require_decoded(choice: Choice) -> None:
    """Raise InputError where the trace decodes nothing that counts."""
    counted = list(Requests(choice.loaded.trace))[choice.loaded.experiment.warmup_requests :]
    if not any((request.phase == DECODE).any() for request in counted):
        raise InputError(f"{choice.loaded.experiment.trace} decodes no token that counts: --as-decode runs prefills so")


def under_contention(choice: Choice, model: MeasuredModel, predictor_ns: int) -> Described:
    """Return the machine of that model as this run's decoded tokens experience it, contention included."""
    chunk_bytes = choice.loaded.experiment.chunk_bytes

    def simulate(on: MeasuredModel) -> RunLog:
        return compiled_engine.simulate(choice.on(on.timing(predictor_ns), on.link(chunk_bytes)))

    slowed = effective(model, simulate)
    return slowed.timing(predictor_ns), slowed.link(chunk_bytes)


def counted_steps(choice: Choice, log: RunLog) -> NDArray[np.bool_]:
    """Return all steps but warm-up: bool[S]."""
    return log.request >= choice.loaded.experiment.warmup_requests


class WithoutPolicy(Derived):
    """A timing that charges nothing for policy overhead."""

    predictor_ns = 0


# Both sides


def run_on(
    choice: Choice,
    run: Run,
    device: Device,
    decider: Decider | None = None,
    on_step: OnStep | None = None,
    observer: LoopObserver | None = None,
    done: Sequence[StepRow] = (),
) -> Side:
    """Run the choice once on a device, behind what is done; `decider` decides, if not the run's policy."""
    driver = Driver(run, SimpyDevice.of(run) if done else device, decider, observer)
    if done:
        driver.resume(done, device)
    evicted: dict[int, int] = {}  # up to the end of each request

    def ended(row: StepRow) -> None:
        evicted[row.shares[0].request] = driver.session.keep_evictions()
        if on_step:
            on_step(row)

    with counting(run):
        log = driver.run(ended, done)
    row, requests = _rows(choice, run, log)
    if bookkeeping := host_us(driver, log, len(done)):
        row |= {"host_ms": host_ms(log, counted_steps(choice, log)), **bookkeeping}
    parts = np.split(log.evictions, list(evicted.values()))
    return Side(log, row, requests, dict(zip(evicted, parts, strict=False)))


def _device(choice: Choice, stage: "Stage | None", run: Run) -> AbstractContextManager[Device]:
    if stage:
        return stage.device(choice.device_slots, choice.contexts, choice.target.verify)
    return nullcontext(SimpyDevice.of(run))


def _rows(choice: Choice, run: Run, log: RunLog) -> tuple[Row, pa.Table]:
    loaded = choice.loaded
    cell = replace(loaded.cell(choice.policy, choice.slots), predictor_us=run.timing.predictor_ns / 1_000)
    row, requests = summarise(log, cell, loaded.trace.requests)
    return {**row, "copy_gb_per_s": copy_gb_per_s(log)}, requests


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
