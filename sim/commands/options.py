"""Options that several commands of moe-sim and moe-replay have, each declared once.

Those of a run are the fields of `sim.experiment.Experiment`: a command names which of them it takes, and gets a dict of
those that were typed. Others stand here, some in groups, which are dataclasses (`terminal.options`).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from policies.core.spec import PolicySpec, parse
from sim.defaults import CACHE_SIZE, CACHE_SIZES, POLICIES, POLICY
from sim.experiment import OPTIONS, SIZES, Experiment, options_of
from sim.loaded import Loaded
from terminal import console
from terminal.options import Fields, option, typed
from terminal.tables import FORMATS, formatted
from traces import demo_trace
from traces.errors import InputError, with_flags
from traces.location import name_of
from traces.output import check_file

if TYPE_CHECKING:
    from rich.table import Table


FIGURES = (".pdf", ".svg", ".png")

_POLICY_HELP = "as in lru, lru+eamc (eviction policy + prefetcher) or FILE.py:CLASS."
_CACHE_SIZES_HELP = "Cache sizes: shares (25%), experts (64), slots a layer (12/layer) or bytes (8GiB)."

Trace = Annotated[str | None, typer.Argument(help="Folder or URL of a trace. Default: the shipped trace.")]
Policies = Annotated[str, typer.Option(help=f"Policies, {_POLICY_HELP}")]
SomePolicies = Annotated[str | None, typer.Option(help=f"Policies, {_POLICY_HELP} Default: {POLICIES}.")]
Scope = Annotated[
    str | None,
    typer.Option(help="What shares the slots, for policies without @: global, layer or layer:profile=TRACE."),
]
Admission = Annotated[
    str | None,
    typer.Option(
        help="Which misses enter the cache, for policies that name no admission: always, never, score, second:window=W "
        "or own; each takes insert_cap=N (background copies a step) and staging=N (slots). Default: always."
    ),
]
CacheSizes = Annotated[str, typer.Option("--cache-sizes", "--cache-size", help=_CACHE_SIZES_HELP)]
SomeCacheSizes = Annotated[str | None, typer.Option(help=f"{_CACHE_SIZES_HELP} Default: {CACHE_SIZES}.")]
Workers = Annotated[int | None, typer.Option(min=1, max=1024, help="Number of processes. Default: one per core.")]
Resume = Annotated[bool, typer.Option("--resume", help="Resume the run that --out holds: keep what is finished.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a file that is already there.")]
TrustFolder = Annotated[
    bool, typer.Option("--trust-folder", help="Open URLs and run policies of Python files that the folder names.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Figure = Annotated[
    Path | None, typer.Option(help="File for the main figure, with intervals (.pdf, .svg or .png). Default: none.")
]
Form = Annotated[
    Literal["csv", "md", "latex"] | None,
    typer.Option("--format", help=f"Print tables as {', '.join(FORMATS)}, texts on standard error. Default: to read."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print warnings and errors only.")]

Stated = dict[str, Any]


def some(*names: str, of: type = Experiment, defaults: Mapping[str, Any] = MappingProxyType({}), **help: str) -> Fields:
    """Return these fields of a dataclass as options, with another help or a default for those that have one here."""
    described, hints = options_of(of), get_type_hints(of)
    kinds = {name: str if described[name].read else hints[name] for name in names}
    helps = {name: help.get(name) or described[name].help for name in names}
    return Fields({name: option(name, kinds[name], helps[name], defaults.get(name)) for name in names})


def all_but(*names: str) -> Fields:
    return some(*(name for name, each in OPTIONS.items() if each.help and name not in names))


@dataclass(frozen=True)
class CellOptions:
    """One policy at one cache size over one trace."""

    trace: Trace = None
    policy: Annotated[str | None, typer.Option(help=f"Policy, {_POLICY_HELP} Default: {POLICY}.")] = None
    cache_size: Annotated[str | None, typer.Option(help=f"Cache size: {SIZES}. Default: {CACHE_SIZE}.")] = None

    @property
    def size(self) -> str:
        return self.cache_size or CACHE_SIZE

    def chosen(self, loaded: Loaded, admission: str | None = None) -> tuple[PolicySpec, int]:
        """Return the policy, with an admission, and the slots. Raise InputError where the trace cannot be run so."""
        policy = parse(self.policy or POLICY).with_part("admission", admission)
        return policy, loaded.slots_for(policy, self.size)

    def taken(self, experiment: Experiment, stated: Mapping[str, Any]) -> list[str]:
        return taken(
            {
                f"the shipped trace {experiment.trace}": not self.trace,
                f"policy {POLICY}": not self.policy,
                f"cache size {CACHE_SIZE}": not self.cache_size,
                f"hardware {experiment.hardware}": "hardware" not in stated and not experiment.untimed,
            }
        )


@dataclass(frozen=True)
class OutputOptions:
    """What is printed."""

    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False
    form: Form = None
    quiet: Quiet = False

    def note(self, *texts: str) -> None:
        for text in () if self.quiet else texts:
            console.note(with_flags(text, OPTIONS))

    def show(self, value: Callable[[], object], parts: "Callable[[], Iterable[str | Table]]") -> None:
        """Print the value as JSON or, unless quiet, the parts for people."""
        if self.as_json:
            console.say_json(value())
        elif not self.quiet:
            for part in parts():
                self._show(part)

    def _show(self, part: "str | Table") -> None:
        """Print a text or a table; with a format the table in it, and texts on standard error."""
        if self.form is None:
            console.say(part)
        elif isinstance(part, str):
            console.note(part)
        else:
            print(formatted(part, self.form))


@dataclass(frozen=True)
class ResultOptions(OutputOptions):
    """What is printed, and where the results go."""

    out: Annotated[
        Path | None, typer.Option(help="Folder for the results. Default: one in results/, named by the trace.")
    ] = None

    def folder(self, trace: str, suffix: str) -> Path:
        return self.out or Path("results") / f"{name_of(trace)}{suffix}"


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


def check_figure(file: Path | None, overwrite: bool) -> None:
    if file is None:
        return
    if file.suffix.lower() not in FIGURES:
        raise InputError(f"--figure {file}: use a name that ends in {', '.join(FIGURES)}")
    check_file(file, overwrite)


def warn(text: str) -> None:
    console.warn(with_flags(text, OPTIONS))


def taken(defaults: Mapping[str, bool]) -> list[str]:
    texts = [text for text, is_taken in defaults.items() if is_taken]
    return [f"taking {', '.join(texts)}"] if texts else []


def experiment(stated: Mapping[str, Any], trace: str | None = None, **others: Any) -> Experiment:
    """Return the experiment of these options, of the shipped trace where none is named. Raise InputError."""
    return Experiment.of({"trace": trace or str(demo_trace()), **stated, **typed(**others)})


def written(files: Iterable[Path | str], folder: Path) -> str:
    return f"wrote {', '.join(Path(file).name for file in files)} to {folder}"
