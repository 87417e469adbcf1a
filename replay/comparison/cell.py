"""Simulator against device: the same cell played on both, and how far they lie apart.

A cell is a policy at a cache size in a mode. In `closed-loop` the policy decides on the device as things happen, and
the simulator plays the same cell on that machine's profile: they differ in time, and therefore in what is decided. In
`lockstep` the device executes what the simulator decided; neither side is charged for the policy's own work, and all
that is left to differ is time.

The machine is described once for all cells, by a calibrated profile or as measured just before, and never touched
afterwards: a prediction that needs its own cell's measurement is none.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from policies.core.policy import Int
from replay.comparison import errors
from replay.comparison.lockstep import Lockstep, LoopRecorder
from replay.run import Choice, bookkeeping_us, moved
from replay.warmup import undisturbed
from sim.engines import engine
from sim.engines.simpy_engine import SimpyDevice
from sim.loop.device import Device
from sim.loop.driver import Driver, LoopObserver
from sim.loop.log import RunLog, StepRow, joined
from sim.loop.run import Run
from sim.loop.session import Decider
from sim.profiles.measured import MeasuredTiming
from sim.profiles.timing import Link, Timing
from sim.results.metrics import Row, summarise
from traces.errors import InputError, unknown
from traces.steps import DECODE

if TYPE_CHECKING:
    from replay.devices.stage import Stage

CLOSED_LOOP, LOCKSTEP = "closed-loop", "lockstep"
MODES = (CLOSED_LOOP, LOCKSTEP)

FIGURES = (
    *("lookups", "hits", "late", "misses", "hit_rate"),
    *("bytes_demand", "bytes_prefetch", "bytes_wasted", "prefetch_precision"),
    *("ttft_mean_ms", "tpot_mean_ms", "tpot_p50_ms", "tpot_p95_ms", "tpot_p99_ms", "tpot_max_ms", "tokens_per_s"),
    *(f"stall_{cause}_ms" for cause in ("demand", "late", "behind_prefetch", "slot", "predictor")),
    *("gpu_idle_ms", "link_busy_ms", "compute_busy_ms", "overlap"),
)
"""Of `sim.results.metrics`, for both sides."""

WITHOUT_HOST = ("tpot_mean_ms", "tpot_p50_ms", "tpot_p95_ms", "tpot_p99_ms")

OnStep = Callable[[StepRow], None]


@dataclass(frozen=True)
class Played:
    """One run: its log, and the experts that each request evicted, by the request's place in the trace."""

    log: RunLog
    evictions: Mapping[int, Int]
    host_us_per_layer: float | None = None


@dataclass(frozen=True)
class CellOutcome:
    """One cell on both sides. Figures are those of `sim.results.metrics`, errors and divergence of `errors`."""

    choice: Choice
    mode: str
    measured: Played  # of several plays the one in the middle, by TPOT mean
    predicted: Played
    measured_row: Row
    predicted_row: Row
    predicted_without_host: Row | None  # None: the timing knows no host
    errors: dict[str, float]
    divergence: dict[str, float]
    noise: float | None  # (greatest - least) / mean TPOT mean of several plays; None of a single one

    def figures(self) -> Row:
        """What `replay.comparison.record` keeps of the cell, beside what it is."""
        decoded = self.measured.log.phase == DECODE
        return {
            "tokens": int((decoded & counted_steps(self.choice, self.measured.log)).sum()),
            "measured": self.measured_row,
            "predicted": self.predicted_row,
            "predicted_without_host": self.predicted_without_host,
            "errors": self.errors,
            "divergence": self.divergence,
            "noise": self.noise,
        }

    def per_token(self) -> pd.DataFrame:
        """A row for each step played: times and decisions of both sides; `counted` is false for warm-up."""
        measured, predicted = self.measured.log, self.predicted.log
        columns: dict[str, NDArray[Any]] = {
            "request": measured.request,
            "phase": measured.phase,
            "tokens": measured.tokens,
            "counted": counted_steps(self.choice, measured),
            "measured_ns": measured.step_ns,
            "predicted_ns": predicted.step_ns,
        }
        for name in errors.DECIDED:
            columns |= {f"measured_{name}": getattr(measured, name), f"predicted_{name}": getattr(predicted, name)}
        return pd.DataFrame(columns)


def check_mode(mode: str) -> None:
    """InputError for a mode that there is not."""
    if mode not in MODES:
        raise unknown("mode", mode, MODES)


def play_cell(
    choice: Choice,
    mode: str,
    timing: Timing,
    link: Link,
    stage: "Stage | None" = None,
    on_step: OnStep | None = None,
    repeat: int = 1,
) -> CellOutcome:
    """Play a cell on the stage's device, `repeat` times, and in the simulator on a machine of this timing and link.

    stage: open for the choice's needs; None for the virtual device. `timing` charges what the policy's own work takes.
    InputError where the device cannot, or where the trace decodes nothing that counts.
    """
    check_mode(mode)
    script: Decider | None = None
    timing = WithoutPolicy(timing) if mode == LOCKSTEP else timing
    run = choice.on(timing, link)
    if mode == LOCKSTEP:
        recorder = LoopRecorder()
        predicted = play_on(run, SimpyDevice(timing, link), observer=recorder)
        script = Lockstep(run, recorder.script)
    else:
        predicted = _simulate(run)
    decoded = counted_steps(choice, predicted.log) & (predicted.log.phase == DECODE)
    if not decoded.any():
        raise InputError(f"{choice.loaded.setup.trace} decodes no token that counts: --as-decode plays prefills so")

    def play_once() -> Played:  # so that nothing refers to a device when the next one is made
        with _device(choice, stage, timing, link) as device, undisturbed(run if stage else None):
            return play_on(run, device, script, on_step)

    plays = [play_once() for _ in range(repeat)]
    means = [float(played.log.step_ns[decoded].mean()) for played in plays]
    measured = plays[sorted(range(repeat), key=means.__getitem__)[(repeat - 1) // 2]]
    rows = (
        figures_of(choice, measured, timing, link, on_stage=stage is not None),
        figures_of(choice, predicted, timing, link),
    )
    without = _without_host(choice, timing, link, script)
    return CellOutcome(
        choice=choice,
        mode=mode,
        measured=measured,
        predicted=predicted,
        measured_row=rows[0],
        predicted_row=rows[1],
        predicted_without_host=without,
        errors=_errors(measured, predicted, decoded, *rows, without),
        divergence=_divergence(measured, predicted, decoded, _warmup(choice)),
        noise=(max(means) - min(means)) / mean(means) if repeat > 1 and mean(means) else None,
    )


def _errors(
    measured: Played, predicted: Played, decoded: NDArray[np.bool_], row: Row, foretold: Row, without: Row | None
) -> dict[str, float]:
    found = errors.time_errors(measured.log.step_ns[decoded], predicted.log.step_ns[decoded])
    if row["ttft_mean_ms"] is not None:
        found["ttft_mean"] = errors.relative(foretold["ttft_mean_ms"], row["ttft_mean_ms"])
    if without:
        found["measured_over_without_host"] = row["tpot_mean_ms"] / without["tpot_mean_ms"]
    return found


def _divergence(measured: Played, predicted: Played, decoded: NDArray[np.bool_], first: int) -> dict[str, float]:
    """`first`: of the requests whose evictions count."""
    counted = [
        {request: of for request, of in run.evictions.items() if request >= first} for run in (measured, predicted)
    ]
    return {
        "steps": errors.steps_differ(measured.log, predicted.log, decoded),
        "evictions": errors.evictions_differ(*counted),
    }


def counted_steps(choice: Choice, log: RunLog) -> NDArray[np.bool_]:
    """bool[S]: all but warm-up."""
    return log.request >= _warmup(choice)


def _warmup(choice: Choice) -> int:
    return choice.loaded.setup.warmup_requests


class WithoutPolicy:
    """A timing that charges nothing for the policy's own work."""

    predictor_ns = 0

    def __init__(self, timing: Timing) -> None:
        self.timing = timing
        self.dense_ns, self.expert_ns = timing.dense_ns, timing.expert_ns
        self.combine_ns, self.head_ns = timing.combine_ns, timing.head_ns


# Both sides


def play_on(
    run: Run,
    device: Device,
    decider: Decider | None = None,
    on_step: OnStep | None = None,
    observer: LoopObserver | None = None,
) -> Played:
    """One run on a device; `decider` decides, if not the run's policy."""
    driver = Driver(run, device, decider, observer)
    evicted: dict[int, int] = {}  # up to the end of each request

    def ended(row: StepRow) -> None:
        evicted[row.shares[0].request] = len(driver.session.pump.evictions)
        if on_step:
            on_step(row)

    log = driver.run(ended)
    parts = np.split(log.evictions, list(evicted.values()))
    return Played(log, dict(zip(evicted, parts, strict=False)), bookkeeping_us(driver, log))


def _simulate(run: Run) -> Played:
    parts: list[RunLog] = []
    engine.play(engine.AUTO, run, parts.append)
    return Played(joined(parts), {int(part.request[0]): part.evictions for part in parts})


def _without_host(choice: Choice, timing: Timing, link: Link, script: Decider | None) -> Row | None:
    """TPOT of the same cell, in lockstep of the same decisions, where the host takes no time."""
    known = timing.timing if isinstance(timing, WithoutPolicy) else timing
    if not isinstance(known, MeasuredTiming):
        return None
    free = known.without_host()
    run = choice.on(free, link)
    played = play_on(run, SimpyDevice(free, link), script) if script else _simulate(run)
    row = figures_of(choice, played, free, link)
    return {name: row[name] for name in WITHOUT_HOST}


@contextmanager
def _device(choice: Choice, stage: "Stage | None", timing: Timing, link: Link) -> Iterator[Device]:
    if stage is None:
        yield SimpyDevice(timing, link)
        return
    with stage.device(choice.slots, choice.contexts, choice.verify) as device:
        yield device


def figures_of(choice: Choice, played: Played, timing: Timing, link: Link, on_stage: bool = False) -> Row:
    """Figures of a run: of one on a stage, the host's too."""
    log = played.log
    loaded = choice.loaded
    cell = replace(loaded.cell(choice.policy, choice.slots), predictor_us=timing.predictor_ns / 1_000)
    summary = summarise(log, cell, loaded.trace.requests)[0]
    row: Row = {name: summary[name] for name in FIGURES}
    row["copy_gbps"] = moved(log, choice.run, link)["copy_gb_per_s"]
    if on_stage:
        alone_ns = log.step_ns - log.stall_ns.sum(axis=1) - log.compute_busy_ns
        row["host_ms"] = int(alone_ns[counted_steps(choice, log)].sum()) / 1e6
        row["host_us_per_layer"] = played.host_us_per_layer
    return row


# Of several cells

SAME = ("model", "trace", "requests", "mode", "cache_experts")
"""Of cells whose policies are ranked."""


def rankings(cells: Sequence[Row], least_noise: float = 0.0) -> list[Row]:
    """How policies are ordered where all else is the same, as measured and as predicted, of cells recorded.

    Noise is the greatest of the cells that were played more than once, and at least what is known of the machine.
    """
    groups: dict[tuple[object, ...], list[Row]] = {}
    for cell in cells:
        if cell.get("measured") and cell.get("predicted"):
            groups.setdefault(tuple(cell[name] for name in SAME), []).append(cell)
    found = []
    for same, group in groups.items():
        if len(group) < 2:
            continue
        measured, predicted = ([cell[side]["tpot_mean_ms"] for cell in group] for side in ("measured", "predicted"))
        noises = [cell["noise"] for cell in group if cell.get("noise") is not None]
        right, differ = errors.ordered_pairs(measured, predicted, max([least_noise, *noises]))
        found.append(
            {
                **dict(zip(SAME, same, strict=True)),
                "cache_fraction": group[0]["cache_fraction"],
                "policies": len(group),
                "spearman": errors.spearman(measured, predicted),
                "noise": max(noises, default=None),
                "pairs_that_differ": differ,
                "pairs_as_measured": right,
            }
        )
    return found
