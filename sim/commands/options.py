"""Declare each option that several commands of moe-sim and moe-replay have once: its type, help text and default.

A command takes options in groups, which are dataclasses; `expanded` shows their fields to typer as the command's own.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sim.defaults import CACHE_SIZE, CACHE_SIZES, HARDWARE, POLICIES, POLICY
from traces import demo_trace
from traces.commands import console
from traces.commands.options import expanded as expanded
from traces.errors import InputError, with_flags

if TYPE_CHECKING:
    from rich.table import Table

    from policies.core.spec import PolicySpec
    from sim.sweeps.setup import Loaded, Setup

MOST_WORKERS = 1024

_POLICY_HELP = "as in lru, lru+eamc (eviction policy + prefetcher) or FILE.py:CLASS."
_SIZES = "a share (25%), experts (64) or bytes (8GiB)"
_CACHE_SIZES_HELP = "Cache sizes: shares (25%), experts (64) or bytes (8GiB)."

Trace = Annotated[str | None, typer.Argument(help="Folder or URL of a trace. Default: the shipped trace.")]
Policies = Annotated[str, typer.Option(help=f"Policies, {_POLICY_HELP}")]
SomePolicies = Annotated[str | None, typer.Option(help=f"Policies, {_POLICY_HELP} Default: {POLICIES}.")]
Scope = Annotated[
    str | None,
    typer.Option(help="What shares the slots, for policies without @: global, layer or layer:profile=TRACE."),
]
CacheSizes = Annotated[str, typer.Option("--cache-sizes", "--cache-size", help=_CACHE_SIZES_HELP)]
SomeCacheSizes = Annotated[str | None, typer.Option(help=f"{_CACHE_SIZES_HELP} Default: {CACHE_SIZES}.")]
WarmupRequests = Annotated[int | None, typer.Option(help="Run the first N requests without counting them. Default: 0.")]
MaxBatch = Annotated[
    int | None,
    typer.Option(help="Requests that run at the same time, their tokens decoded together. Default: one by one."),
]
Untimed = Annotated[bool, typer.Option("--untimed", help="Count hits and misses exactly, without times.")]
PredictorUs = Annotated[
    float | None, typer.Option(help="Policy overhead per layer step, in microseconds. Default: the measured table.")
]
Engine = Annotated[
    str | None,
    typer.Option(
        help="Engine of timed runs: auto, simpy, or compiled (same results, faster, built-in policies). Default: auto."
    ),
]
Workers = Annotated[int | None, typer.Option(help="Number of processes. Default: one per core.")]
Resume = Annotated[bool, typer.Option("--resume", help="Resume the run that --out holds: keep what is finished.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a file that is already there.")]
NoSlots = Annotated[bool, typer.Option("--no-slots", help="Write a timeline without a track for each slot.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print warnings and errors only.")]


@dataclass(frozen=True)
class RequestOptions:
    """Which requests are run, and with which model's sizes."""

    model_profile: Annotated[
        str | None, typer.Option(help="Model profile or TOML file. Default: by the trace's model.")
    ] = None
    requests: Annotated[int | None, typer.Option(help="Run the first N requests only. Default: all.")] = None
    as_decode: Annotated[bool, typer.Option("--as-decode", help="Run a prefill token by token.")] = False


@dataclass(frozen=True)
class TimedOptions(RequestOptions):
    """How they are run."""

    cold: Annotated[bool, typer.Option("--cold", help="Empty the cache between requests.")] = False
    chunk_bytes: Annotated[
        str | None, typer.Option(help="Size after which a prefetch may be interrupted (4MiB). Default: never.")
    ] = None


@dataclass(frozen=True)
class SimulatedOptions(TimedOptions):
    """How they are simulated."""

    warmup_requests: WarmupRequests = None
    predictor_us: PredictorUs = None
    host_memory: Annotated[
        str | None,
        typer.Option(help=f"Host memory for experts, over the disk: {_SIZES}. Default: it holds all experts."),
    ] = None
    expert_sizes: Annotated[
        str | None, typer.Option(help="GGUF or safetensors file or folder whose headers give experts' sizes by layer.")
    ] = None
    arrivals: Annotated[
        str | None,
        typer.Option(
            help="When requests arrive, with --max-batch: closed (as soon as there is room), trace (as recorded), "
            "poisson (at --arrival-rate). Default: closed."
        ),
    ] = None
    arrival_rate: Annotated[
        float | None,
        typer.Option(help="Requests a second that arrive at random (Poisson), at the same times in each run."),
    ] = None


@dataclass(frozen=True)
class CellOptions:
    """One policy at one cache size over one trace on one machine."""

    trace: Trace = None
    policy: Annotated[str | None, typer.Option(help=f"Policy, {_POLICY_HELP} Default: {POLICY}.")] = None
    cache_size: Annotated[
        str | None,
        typer.Option(help=f"Cache size: {_SIZES}. Default: {CACHE_SIZE}."),
    ] = None
    hardware: Annotated[str | None, typer.Option(help=f"Hardware profile or TOML file. Default: {HARDWARE}.")] = None

    @property
    def size(self) -> str:
        """Return the cache size, typed or not."""
        return self.cache_size or CACHE_SIZE

    def chosen(self, loaded: "Loaded") -> "tuple[PolicySpec, int]":
        """Return the policy and the slots. Raise InputError where the trace cannot be run so."""
        from policies.core.spec import parse

        policy, slots = parse(self.policy or POLICY), loaded.slots(self.size)
        loaded.require(policy, slots)
        return policy, slots

    def announce(self, loaded: "Loaded", policy: "PolicySpec", slots: int, output: "OutputOptions") -> None:
        """Print which defaults were taken, and the warnings about the cell."""
        from sim.sweeps import report
        from sim.sweeps.grid import Grid

        output.note(*self.taken(loaded.setup))
        for warning in report.warnings(loaded, Grid((policy,), {self.size: slots})):
            warn(warning)

    def taken(self, setup: "Setup") -> list[str]:
        """Return the note on the defaults that were taken, if any was."""
        return taken(
            {
                f"the shipped trace {setup.trace}": not self.trace,
                f"policy {POLICY}": not self.policy,
                f"cache size {CACHE_SIZE}": not self.cache_size,
                f"hardware {setup.hardware}": not self.hardware and not setup.untimed,
            }
        )


@dataclass(frozen=True)
class OutputOptions:
    """What is printed."""

    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False
    quiet: Quiet = False

    def note(self, *texts: str) -> None:
        """Print lines on standard error, unless quiet."""
        for text in () if self.quiet else texts:
            console.note(text)

    def show(self, value: Callable[[], object], parts: "Callable[[], Iterable[str | Table]]") -> None:
        """Print the value as JSON or, unless quiet, the parts for people."""
        if self.as_json:
            console.say_json(value())
        elif not self.quiet:
            for part in parts():
                console.say(part)


@dataclass(frozen=True)
class ResultOptions(OutputOptions):
    """What is printed, and where the results go."""

    out: Annotated[
        Path | None, typer.Option(help="Folder for the results. Default: one in results/, named by the trace.")
    ] = None

    def folder(self, trace: str, suffix: str) -> Path:
        """Return the folder for the results. Raise InputError for a name that none can have."""
        from traces.location import name_of

        folder = self.out or Path("results") / f"{name_of(trace)}{suffix}"
        try:
            folder.exists()
        except OSError as error:  # too long
            raise InputError(f"cannot write {folder}: {error.strerror}; name another folder with --out") from error
        return folder


@dataclass(frozen=True)
class ResumableOptions(ResultOptions):
    """The same of a run that may be resumed."""

    resume: Resume = False
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Drop the cells or steps that --out holds; replace a timeline.")
    ] = False

    def __post_init__(self) -> None:
        if self.resume and self.overwrite:
            raise InputError("--resume keeps what is finished and --overwrite drops it: leave one out")


def warn(text: str) -> None:
    """Print a warning, in which parameters of a run stand as flags."""
    from sim.sweeps.setup import Options

    console.warn(with_flags(text, Options.__annotations__))


def taken(defaults: Mapping[str, bool]) -> list[str]:
    """Return the note on those defaults that were taken, if any was."""
    texts = [text for text, is_taken in defaults.items() if is_taken]
    return [f"taking {', '.join(texts)}"] if texts else []


def typed(*groups: object, **others: Any) -> dict[str, Any]:
    """Return the options that were typed, of these groups and others, as Setup and Config take them."""
    from sim.quantities import parse_bytes

    values = {name: value for group in groups for name, value in vars(group).items()} | others
    given = {name: value for name, value in values.items() if value is not None and value is not False}
    if "chunk_bytes" in given:
        given["chunk_bytes"] = parse_bytes(given["chunk_bytes"], "--chunk-bytes")
    if "arrival_rate" in given:
        given.setdefault("arrivals", "poisson")
    return given


def setup_fields(*groups: object, **others: Any) -> dict[str, Any]:
    """Return those of them that are fields of Setup."""
    from sim.sweeps.setup import Setup

    names = {field.name for field in fields(Setup)}
    return {name: value for name, value in typed(*groups, **others).items() if name in names}


def setup_of(*groups: object, **others: Any) -> "Setup":
    """Return the setup that these options ask for. Raise InputError."""
    from sim.sweeps.setup import Setup

    return Setup(**{"trace": str(demo_trace()), "hardware": HARDWARE, **setup_fields(*groups, **others)})


def require_clock(untimed: bool, hardware: str | None) -> None:
    """Raise InputError for hardware of an untimed run."""
    if untimed and hardware is not None:
        raise InputError("--untimed counts without a clock: it cannot have --hardware")


def processes(workers: int | None) -> int:
    """Return the number of processes. Raise InputError for none and for too many."""
    if workers is not None and not 1 <= workers <= MOST_WORKERS:
        raise InputError(f"--workers must be at least 1 and at most {MOST_WORKERS:,}, not {workers}")
    return workers or os.cpu_count() or 1
