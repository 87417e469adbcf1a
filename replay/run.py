"""One replay: open the device, measure it, run the trace in closed loop, and ask the simulator for the same cell.

What a real device is compared with is the simulator on this machine as measured just before and just after, not on the
profile named by `--hardware`, which describes another one; that prediction is told beside it. How far both calibrations
disagree is the interval of the prediction. Policy overhead differs likewise:
on a real device it is done, on this host, and predicted from what its first events took; for a profile, and on its
logical clock, it takes what the simulator charges (`sim.profiles.policy_overhead`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from policies.core.policy import Int
from policies.core.spec import PolicySpec
from replay.calibration.pace import Pace, pausing
from replay.devices.pinning import REQUIRE
from replay.devices.pinning import check as check_pin
from replay.model import DENSE
from replay.warmup import undisturbed
from sim.engines import engine
from sim.engines.simpy_engine import SimpyDevice
from sim.loop.device import Device
from sim.loop.driver import Driver
from sim.loop.log import PREDICTOR, RunLog, StepRow
from sim.loop.run import Run
from sim.profiles.measured import MeasuredModel
from sim.profiles.timing import Link, Timing, experts_per_layer
from sim.results.metrics import Cell, summarise
from sim.results.metrics import Row as ResultRow
from sim.sweeps.setup import Loaded, Requests
from sim.timeline import simulated
from sim.timeline import window as timeline_window
from sim.timeline.file import Timeline
from sim.timeline.observer import TimelineObserver
from traces.errors import InputError, unknown
from traces.shards import Shards

if TYPE_CHECKING:
    from replay.devices.stage import Needs

DEVICES = ("auto", "virtual", "cpu", "disk", "cuda")

DEFAULT_STEPS = 1_000
"""By default, a real device runs the first requests that hold this many steps."""

DISK_TOKENS = 100

TIMED_BYTES = 1_000_000
"""Of an expert that threads copy and compute in a time that is worth predicting."""

MOST_THREADS = 256
"""More of them is taken as a typo."""

PREDICTED = ("tpot_mean_ms", "tpot_p99_ms", "ttft_mean_ms", "hit_rate")
"""Figures of the simulator that stand in a replay's row."""


Described = tuple[Timing, Link]
"""A machine, as the simulator takes it."""


@dataclass(frozen=True)
class Choice:
    """What is replayed, and on what."""

    loaded: Loaded
    policy: PolicySpec
    slots: int
    device: str  # one of DEVICES but auto
    host_dedup: int | None = None  # distinct host buffers; None: one for each expert
    verify: bool = False
    dense: str = "real"  # one of DENSE
    weights: Path | None = None  # a checkpoint; None: random ones
    pin: str = REQUIRE  # host memory for a GPU
    store: Path | None = None  # the file of experts that a disk reads
    lanes: int | None = None  # threads that read it; None: as many as it takes
    threads: int | None = None  # that compute on a CPU; None: one less than torch takes
    nvtx: bool = False

    def __post_init__(self) -> None:
        check_pin(self.pin)
        simulated = self.loaded.simulated_alone(self.policy)
        if simulated:
            raise InputError(f"moe-replay does not run {simulated} on hardware so far: moe-sim simulates it")
        if self.dense not in DENSE:
            raise unknown("`dense`", self.dense, DENSE)
        ignored = {"`host_dedup`": self.host_dedup is not None, "`verify`": self.verify, "`weights`": self.weights}
        ignored["`dense` none"] = self.dense != DENSE[0]
        if self.device == "virtual" and (given := [option for option, value in ignored.items() if value]):
            raise InputError(f"{given[0]}: the virtual device moves and computes nothing; leave it out")
        self._check_disk()
        of_a_gpu = {"`nvtx`": self.nvtx, f"`pin` {self.pin}": self.pin != REQUIRE}
        if self.device != "cuda" and (given := [option for option, value in of_a_gpu.items() if value]):
            raise InputError(f"{given[0]} needs the device cuda, not {self.device}")

    def _check_disk(self) -> None:
        """InputError for options of another device, and for numbers of threads that there cannot be."""
        if self.device == "disk":
            if self.store is None:
                name = self.loaded.profile.name if self.loaded.profile else "NAME"
                raise InputError(
                    "`device` disk reads experts from a file: write it with "
                    f"moe-replay store FILE --model-profile {name}, and name it with `store`"
                )
            if self.host_dedup is not None:
                raise InputError("`host_dedup` is for experts in host memory: for a file, use moe-replay store --dedup")
        elif given := [name for name, value in {"`store`": self.store, "`lanes`": self.lanes}.items() if value]:
            raise InputError(f"{given[0]} needs the device disk, not {self.device}")
        if self.threads and self.device in ("virtual", "cuda"):
            raise InputError(f"`threads` compute on the CPU, and the device is {self.device}")
        for name, value in {"`lanes`": self.lanes, "`threads`": self.threads}.items():
            if value is not None and not 1 <= value <= MOST_THREADS:
                raise InputError(f"{name} {value}: must be 1 to {MOST_THREADS}")

    @property
    def machine(self) -> str | None:
        """What the device is called; None: nothing real."""
        if self.device == "virtual":
            return None
        from replay.devices.device_facts import machine_name

        return machine_name(self.device)

    @property
    def key(self) -> str:
        """Of all that decides what is measured: sixteen hexadecimal digits."""
        from replay.comparison.record import key_of
        from sim.sweeps import grid

        return key_of(cell=grid.key(self.loaded, self.policy, self.slots), device=[self.machine, *self.how])

    @property
    def how(self) -> list[object]:
        """All options of the device that decide what is measured."""
        device = [self.device, self.host_dedup, self.verify, self.dense, self.weights, self.pin]
        return [*device, self.store, self.lanes, self.threads]

    @property
    def needs(self) -> "Needs":
        """For the stage."""
        from replay.devices.stage import Needs

        assert self.loaded.profile
        return Needs(
            profile=self.loaded.profile,
            device=self.device,
            most_tokens=self.most_tokens,
            most_context=self.most_context,
            seed=self.loaded.setup.seed,
            host_dedup=self.host_dedup,
            dense=self.dense,
            weights=self.weights,
            pin=self.pin,
            store=self.store,
            lanes=self.lanes,
            threads=self.threads,
        )

    @property
    def run(self) -> Run:
        """The run, on the machine of the hardware profile."""
        return self.loaded.run(self.policy, self.slots)

    def on(self, timing: Timing, link: Link) -> Run:
        """Return the run on a machine with this timing and link."""
        return self.run.on(timing, link, self.window(timing, link))

    def felt(self, model: MeasuredModel, predictor_ns: int) -> Described:
        """Return the machine of that model as this run's decoded tokens feel it, contention included."""
        from replay.calibration.contention import felt

        chunk_bytes = self.loaded.setup.chunk_bytes

        def play(on: MeasuredModel) -> RunLog:
            return engine.simulate(engine.AUTO, self.on(on.timing(predictor_ns), on.link(chunk_bytes)))

        found = felt(model, play)
        return found.timing(predictor_ns), found.link(chunk_bytes)

    def window(self, timing: Timing, link: Link) -> float:
        """What a prefetch budget is a share of, on that machine."""
        return experts_per_layer(timing, link, self.loaded.trace.layers, self.loaded.trace.top_k)

    @cached_property
    def steps(self) -> Int:
        """The distinct (tokens, context) of all steps: int64[n, 2], ascending."""
        requests = Requests(self.loaded.trace)
        each = [np.unique(np.stack([request.tokens, request.context], axis=1), axis=0) for request in requests]
        return np.unique(np.concatenate([np.ones((1, 2), np.int64), *each]), axis=0)

    @property
    def most_tokens(self) -> int:
        """Of the longest step."""
        return int(self.steps[:, 0].max())

    @property
    def most_context(self) -> int:
        """Of the longest KV cache."""
        return int(self.steps[:, 1].max())

    @property
    def contexts(self) -> list[int]:
        """At which single tokens are decoded."""
        found: list[int] = self.steps[self.steps[:, 0] == 1, 1].tolist()
        return found


@dataclass(frozen=True)
class Prediction:
    """What the simulator says of the same cell."""

    machine: str
    row: ResultRow
    interval_ms: tuple[float, float] | None = None  # of its TPOT mean, by either of two calibrations


@dataclass(frozen=True)
class Outcome:
    """What a replay found. Rows are those of `sim.results.metrics`; the device's facts stand in the row as well."""

    row: ResultRow
    log: RunLog
    requests: pa.Table  # rows of requests.parquet
    predictions: list[Prediction]  # the one to compare with first


def choose_device(text: str) -> str:
    """`auto` is CUDA where there is one, else the CPU. Raise InputError for a device that is not available."""
    if text not in DEVICES:
        raise unknown("device", text, DEVICES)
    if text in ("virtual", "cpu", "disk"):
        return text
    import torch

    if text == "auto" and not torch.cuda.is_available():
        return "cpu"
    require_cuda("cpu")
    return "cuda"


def require_cuda(instead: str) -> None:
    """Raise InputError where there is no GPU; instead: a device that needs none."""
    import torch

    if not torch.cuda.is_available():
        built = "torch finds no GPU" if torch.version.cuda else f"torch {torch.__version__} is built without CUDA"
        raise InputError(f"`device` cuda: {built}; `device` {instead} needs none")


def first_steps(loaded: Loaded, steps: int) -> Loaded:
    """The first requests, as many as hold `steps` steps and all that are warm-up and one more."""
    trace = loaded.trace
    played = np.cumsum(np.diff(trace.offsets) - trace.prompts + (trace.prompts > 0))
    enough = max(int(np.searchsorted(played, steps)) + 1, loaded.setup.warmup_requests + 1)
    if enough >= len(trace.requests):
        return loaded
    return replace(loaded, trace=trace.head(enough), setup=replace(loaded.setup, requests=enough))


def first_part(loaded: Loaded, device: str) -> Loaded:
    """Return what a device runs by default: all on a logical clock, else about DEFAULT_STEPS steps.

    A disk is so slow that it decodes DISK_TOKENS tokens.
    """
    if device == "virtual":
        return loaded
    if device == "disk" and loaded.trace.phases != "prefill":
        return first_tokens(loaded, DISK_TOKENS)
    return first_steps(loaded, DEFAULT_STEPS)


def first_tokens(loaded: Loaded, tokens: int) -> Loaded:
    """The first requests, the last one cut off, so that just so many tokens are decoded; all, where there are fewer."""
    decoded = np.cumsum(np.diff(loaded.trace.offsets) - loaded.trace.prompts)
    enough = min(int(np.searchsorted(decoded, tokens)) + 1, len(decoded))
    setup = replace(loaded.setup, requests=enough)
    trace = loaded.trace.head(enough)
    more = int(decoded[enough - 1]) - tokens
    if more > 0:
        held = replace(loaded, setup=setup).whole if isinstance(trace, Shards) else trace
        trace = held.without_last(more)
    return replace(loaded, trace=trace, setup=setup)


def replay(
    choice: Choice,
    on_step: Callable[[StepRow], None] | None = None,
    timeline: Timeline | None = None,
    slots: bool = True,
    done: Sequence[StepRow] = (),
) -> Outcome:
    """Run a choice on its device. InputError where the machine cannot: no memory, no device, weights that it cannot
    multiply.

    done: rows of the first requests, from a run cut off; what follows is run.

    timeline: shows the run and what was predicted of it; `slots`: with a track for each slot.
    """
    loaded, run = choice.loaded, choice.run
    assert loaded.hardware
    cell = loaded.cell(choice.policy, choice.slots)
    with open_device(choice) as (opened, facts), undisturbed(None if choice.device == "virtual" else run):
        device = opened
        calibrations: Sequence[MeasuredModel] = ()
        paces: list[Pace] = []
        if choice.device != "virtual":
            from replay.calibration.measure import Around, measure_model, under_policy

            before = measure_model(device, run, choice.most_tokens, "this machine")
            timing, link = under_policy(before.model, run, device)
            cell = replace(cell, hardware=str(facts["device_name"]), predictor_us=timing.predictor_ns / 1_000)
            run = choice.on(timing, link)
        if choice.nvtx:
            from replay.devices.nvtx import marked

            device = marked(device)
        observer = _observer(choice, run, timeline, slots) if timeline else None
        driver = _driver(run, device, done, observer)
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
        _show_prediction(choice, run, timeline, slots)
    predictions = _predict(choice, cell, calibrations)
    first = predictions[0]
    row["predicted_for"] = first.machine
    row |= {f"predicted_{name}": first.row[name] for name in PREDICTED}
    row["predicted_tpot_low_ms"], row["predicted_tpot_high_ms"] = first.interval_ms or (None, None)
    return Outcome(row, log, by_request, predictions)


def _driver(run: Run, device: Device, done: Sequence[StepRow], observer: TimelineObserver | None) -> Driver:
    """Return the driver of a run, which continues behind the requests of `done`."""
    if not done:
        return Driver(run, device, observer=observer)
    driver = Driver(run, SimpyDevice(run.timing, run.gpu.link))
    driver.resume(done, device)
    return driver


def bookkeeping_us(driver: Driver, log: RunLog, resumed: int = 0) -> float | None:
    """Return what the host took for a layer of the run that has just ended, policy overhead left out.

    None on a logical clock, where this time is not counted.
    """
    steps = len(log.step_ns) - resumed
    if not (driver.session.device.inside_ns and steps):
        return None
    policy_ns = int(log.stall_ns[resumed:, PREDICTOR].sum())
    return (driver.outside_ns - policy_ns) / 1_000 / (steps * driver.layers)


def _observer(choice: Choice, run: Run, timeline: Timeline, slots: bool) -> TimelineObserver:
    """Show a short run whole, of a longer one the beginning, as `moe-sim run` does."""
    names = choice.loaded.trace.requests["id"].astype(str).tolist()
    return TimelineObserver(timeline, run, "measured", names, timeline_window.unasked(run.requests), slots)


def _show_prediction(choice: Choice, run: Run, timeline: Timeline, slots: bool) -> None:
    """Show the same part of the simulated run, on the machine as measured, else as its profile says."""
    window = replace(timeline_window.unasked(run.requests), stops=True)
    names = choice.loaded.trace.requests["id"].astype(str).tolist()
    simulated.play(run, lambda log: None, timeline, names, window, slots)


def copy_gb_per_s(log: RunLog, run: Run) -> float | None:
    """Return the link's rate over the time in which it was busy."""
    busy_ns = int(log.link_busy_ns.sum())
    transfers = int(log.demand_transfers.sum() + log.prefetch_transfers.sum())
    return transfers * run.gpu.link.expert_bytes / busy_ns if busy_ns else None


def host_ms(log: RunLog, counted: NDArray[np.bool_]) -> float:
    """Return the time of the counted steps in which nothing was submitted and nothing awaited."""
    alone_ns = log.step_ns - log.stall_ns.sum(axis=1) - log.compute_busy_ns
    return int(alone_ns[counted].sum()) / 1e6


@contextmanager
def open_device(choice: Choice) -> Iterator[tuple[Device, ResultRow]]:
    """The device and facts about it; closed afterwards, whatever happens."""
    if choice.device == "virtual":
        yield SimpyDevice(choice.loaded.timing(choice.policy), choice.loaded.link), {"device_name": None}
        return
    from replay.devices.stage import open_stage

    with open_stage(choice.needs) as stage, stage.device(choice.slots, choice.contexts, choice.verify) as device:
        yield device, stage.facts


def _predict(choice: Choice, cell: Cell, calibrations: Sequence[MeasuredModel]) -> list[Prediction]:
    """Return what the simulator says on this machine as measured, and on the hardware profile.

    calibrations: as fast as the machine may have been, as it was found, and as slow; none on a logical clock.
    """
    loaded = choice.loaded
    assert loaded.hardware

    def predicted(timing: Timing, link: Link, machine: str) -> ResultRow:
        there = replace(cell, hardware=machine, predictor_us=timing.predictor_ns / 1_000)
        log = engine.simulate(engine.AUTO, choice.on(timing, link))
        return summarise(log, there, loaded.trace.requests)[0]

    profile = loaded.hardware.name
    found = [Prediction(profile, predicted(loaded.timing(choice.policy), loaded.link, profile))]
    if calibrations:
        here = "this machine as measured"
        predictor_ns = round((cell.predictor_us or 0.0) * 1_000)
        fastest, during, slowest = (predicted(*choice.felt(each, predictor_ns), here) for each in calibrations)
        interval = None
        if during["tpot_mean_ms"] is not None:
            low, high = sorted((fastest["tpot_mean_ms"], slowest["tpot_mean_ms"]))
            interval = low, high
        found.insert(0, Prediction(here, during, interval))
    return found
