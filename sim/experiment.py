"""What is run: the one description of a run, from which all that names an option is read off.

Policy and cache size are not among its fields: it is what cells of different policies and cache sizes have in common.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from msgspec import Meta

from policies.core.grammar import split_list
from sim.defaults import HARDWARE
from sim.profiles import hardware_profile
from sim.quantities import CacheSize, cache_text, parse_bytes
from traces.drafts import Drafts
from traces.errors import InputError, refuse, unknown
from traces.location import absolute, is_url
from traces.models.names import is_precision
from traces.models.profile import MODELS
from traces.typed import typed

CLOSED, TRACE, POISSON = ARRIVALS = ("closed", "trace", "poisson")
"""When requests arrive, where several run at a time: as soon as one may begin, as recorded, drawn."""

MOST = 2**63 - 1
SIZES = "a share (25%), experts (64), slots a layer (12/layer) or bytes (8GiB)"

Natural = Annotated[int, Meta(ge=0, le=MOST)]
Positive = Annotated[int, Meta(ge=1, le=MOST)]
Text = Annotated[str, Meta(min_length=1)]


@dataclass(frozen=True)
class Option:
    """What there is to know of a field beside its type, limits and default.

    help: as commands print it. key: whether a cell's key holds it as it stands. timed: whether it needs a clock. names:
    all values that it may have. read: makes a value of its name and of what a user wrote, of the types of its parameter
    `value`. resolved: makes a path or name, relative to a folder, that holds wherever one stands.
    """

    help: str = ""
    key: bool = True
    timed: bool = False
    names: tuple[str, ...] = ()
    read: Callable[[str, Any], Any] | None = None
    resolved: Callable[[str, Path], str] | None = None


def _bytes(name: str, value: int | str | None) -> Any:
    return parse_bytes(value, f"`{name}`") if isinstance(value, str) else value


def _sizes(text: str, base: Path = Path()) -> str:
    return text if is_precision(text) else absolute(text, base)


def _overheads(name: str, value: float | str | Mapping[str, float] | None) -> Any:
    """Return the microseconds of all policies or, of a mapping or its text, `POLICY=US,POLICY=US`."""
    try:
        if isinstance(value, str) and "=" not in value:
            return float(value)
        if isinstance(value, str | Mapping):
            return overheads_text(overheads(value) if isinstance(value, str) else value)
    except ValueError as error:
        raise InputError(f"invalid `{name}` {value!r}: use 2.5 for all, or FILE.py:CLASS=2.5 for one policy") from error
    return value


def overheads(text: str) -> dict[str, float]:
    """Return the microseconds an event by policies. Raise ValueError for another text."""
    pairs = (each.rpartition("=") for each in split_list(text))
    return {policy: float(us) for policy, _, us in pairs}


def overheads_text(us: Mapping[str, float]) -> str:
    """Return what `overheads` reads. Raise ValueError for what is no time."""
    if not all(policy and 0 <= each < math.inf for policy, each in us.items()):
        raise ValueError(us)
    return ",".join(f"{policy}={each:.12g}" for policy, each in us.items())


RECORDED = "recorded"
"""In results the acceptance of drafts as the trace states them."""


def _acceptance(name: str, value: float | str | list[int] | tuple[int, ...] | None) -> Any:
    """Return a probability or, of a sequence or its text, `2,0,1`."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value)) + "," * (len(value) == 1)
    if isinstance(value, str) and "," not in value:
        with suppress(ValueError):
            return float(value)
    return float(value) if isinstance(value, int) else value


def accepted(acceptance: float | str | None) -> float | tuple[int, ...] | None:
    """Return a probability, or the tokens that each step accepts. Raise InputError for another text."""
    if not isinstance(acceptance, str):
        return acceptance
    lengths = [each.strip() for each in acceptance.split(",") if each.strip()]
    if not lengths or not all(each.isdecimal() for each in lengths):
        raise InputError(f"invalid `acceptance` {acceptance!r}: use 0.7, or 2,0,1 for the tokens accepted by each step")
    return tuple(map(int, lengths))


def _size(name: str, value: CacheSize | None) -> Any:
    return cache_text(value) if isinstance(value, int | float) else value


@dataclass(frozen=True)
class Experiment:
    """What all cells of a table of results share, by names and paths. InputError for options that contradict."""

    trace: Annotated[Text, Option(key=False, resolved=absolute)]  # a folder or a URL
    hardware: Annotated[
        Text,
        Option(
            f"Hardware profile, a GPU's name, or TOML file. Default: {HARDWARE}.",
            key=False,
            resolved=hardware_profile.absolute,
        ),
    ] = HARDWARE
    model_profile: Annotated[
        Text | None,
        Option("Model profile or TOML file. Default: by the trace's model.", key=False, resolved=MODELS.absolute),
    ] = None
    requests: Annotated[Positive | None, Option("Run the first N requests only. Default: all.")] = None
    warmup_requests: Annotated[Natural, Option("Run the first N requests without counting them. Default: 0.")] = 0
    as_decode: Annotated[bool, Option("Run a prefill token by token.")] = False
    decode_only: Annotated[bool, Option("Leave prompts out: they bypass the cache.")] = False
    cold: Annotated[bool, Option("Empty the cache between requests.")] = False
    untimed: Annotated[bool, Option("Count hits and misses exactly, without times.")] = False
    seed: Annotated[Natural, Option()] = 0  # of arrivals and weights, and in Python of policies that name none
    chunk_bytes: Annotated[
        Positive | None,
        Option("Size after which a prefetch may be interrupted (4MiB). Default: never.", timed=True, read=_bytes),
    ] = None
    predictor_us: Annotated[
        Annotated[float, Meta(ge=0, le=1e15)] | Text | None,
        Option(
            "Policy overhead per layer step, in microseconds: of one policy (FILE.py:CLASS=12.5, several with commas), "
            "or of all (2.5). Default: the measured table, and of your own policies what is measured now.",
            key=False,
            timed=True,
            read=_overheads,
        ),
    ] = None
    host_memory: Annotated[  # rule 17
        Text | None,
        Option(
            f"Host memory for experts, over the disk: {SIZES}. Default: it holds all experts.", timed=True, read=_size
        ),
    ] = None
    expert_sizes: Annotated[  # rule 19
        Text | None,
        Option(
            "Precision (q4_k_m), or GGUF or safetensors file or folder whose headers give experts' sizes by layer. "
            "Default: as the trace states, else the model's.",
            resolved=_sizes,
        ),
    ] = None
    max_batch: Annotated[  # rule 18
        Positive | None,
        Option("Requests that run at the same time, their tokens decoded together. Default: one by one.", timed=True),
    ] = None
    arrivals: Annotated[
        str,
        Option(
            "When requests arrive, with --max-batch: closed (as soon as there is room), trace (as recorded), "
            "poisson (at --arrival-rate). Default: closed.",
            names=ARRIVALS,
        ),
    ] = CLOSED
    arrival_rate: Annotated[
        Annotated[float, Meta(gt=0, le=1e15)] | None,
        Option("Requests a second that arrive at random (Poisson), at the same times in each run."),
    ] = None
    draft: Annotated[Natural, Option("Tokens drafted for each decode step. Default: 0.")] = 0  # rule 20
    acceptance: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | Text | None,
        Option(
            "Share of drafted tokens that is accepted (0.7), or how many each step of a request accepts (2,0,1). "
            "Default: as the trace was recorded, if with drafts.",
            read=_acceptance,
        ),
    ] = None
    draft_us: Annotated[
        Annotated[float, Meta(ge=0, le=1e9)] | None,
        Option("Microseconds that drafting a token takes. Default: 0, as of a lookup.", timed=True),
    ] = None
    draft_model: Annotated[
        Text | None,
        Option(
            "Model profile or TOML file of the model that drafts, on the same GPU.",
            key=False,
            timed=True,
            resolved=MODELS.absolute,
        ),
    ] = None
    routing: Annotated[  # rule 22
        Text | None,
        Option(
            "Rule that bends the routing, at a loss: drop:below=0.75/k leaves out absent experts of low weight, "
            "substitute:bonus=0.15 prefers present ones, commit:layers=1 takes what an earlier layer foresees. "
            "Default: as routed."
        ),
    ] = None
    prefill_chunk: Annotated[Positive | None, Option("Tokens of a prompt that are run as one step. Default: all.")] = (
        None
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "trace", str(self.trace))
        for name, each in OPTIONS.items():
            if each.names and getattr(self, name) not in each.names:
                raise unknown(name, getattr(self, name), each.names)
        timed = [f"`{name}`" for name, each in OPTIONS.items() if each.timed and getattr(self, name) is not None]
        refuse(
            (
                self.arrivals != CLOSED and self.max_batch is None,
                "`arrivals` and `arrival_rate` need `max_batch`, how many requests run at a time",
            ),
            (
                (self.arrivals == POISSON) != (self.arrival_rate is not None),
                "`arrivals` poisson and `arrival_rate`, in requests per second, need each other",
            ),
            (
                self.as_decode and self.decode_only,
                "`as_decode` runs prompts and `decode_only` leaves them out: leave one out",
            ),
            (
                self.draft_us is not None and self.draft_model is not None,
                "`draft_us` and `draft_model` both say what drafting takes: leave one out",
            ),
            (self.untimed and timed, f"`untimed` counts without a clock: it cannot have {' or '.join(timed)}"),
        )

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str = "") -> "Experiment":
        """Return the experiment of options as users write them: sizes as texts or numbers, paths of any kind.

        Raise InputError, beginning with `where`, for an unknown name, a value of another type and one outside limits.
        """
        read = {name: _read(name, value) for name, value in values.items()}
        if read.get("arrival_rate") is not None:
            read.setdefault("arrivals", POISSON)
        return typed(cls, read, where)

    @property
    def drafts(self) -> Drafts | None:
        """What is drafted for each decode step; None: nothing. Raise InputError for a text that is no acceptance."""
        return Drafts(self.draft, accepted(self.acceptance), self.seed) if self.draft else None

    @property
    def acceptance_text(self) -> str | None:
        if self.draft and self.acceptance is None:
            return RECORDED
        return None if self.acceptance is None else str(self.acceptance)

    def overhead_us(self, policy: str) -> float | None:
        """Return the policy overhead that `predictor_us` states of a policy, or of all; None: it states none."""
        stated = self.predictor_us
        return overheads(stated).get(policy) if isinstance(stated, str) else stated

    def charging(self, us: Mapping[str, float]) -> "Experiment":
        """Return the same, with the overhead of more policies, whose overhead nothing states so far."""
        stated = overheads(self.predictor_us) if isinstance(self.predictor_us, str) else {}
        return replace(self, predictor_us=overheads_text({**stated, **us})) if us else self

    def resolved(self) -> dict[str, Any]:
        """Return the options that have a value, with paths that hold wherever one stands."""
        values = {name: resolve(name, getattr(self, name)) for name in OPTIONS}
        return {name: value for name, value in values.items() if value is not None}

    def key(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name, each in OPTIONS.items() if each.key}


def options_of(described: type) -> dict[str, Option]:
    hints = get_type_hints(described, include_extras=True)
    return {name: next(each for each in get_args(kind) if isinstance(each, Option)) for name, kind in hints.items()}


OPTIONS: dict[str, Option] = options_of(Experiment)


def _read(name: str, value: Any) -> Any:
    read = OPTIONS[name].read if name in OPTIONS else None
    return read(name, value) if read else str(value) if isinstance(value, Path) else value


def resolve(name: str, value: Any, base: Path = Path()) -> Any:
    """Return the value of an option; if it is a path or the name of a profile, one that holds wherever one stands."""
    resolved = OPTIONS[name].resolved
    return resolved(value, base) if resolved and isinstance(value, str) else value


def from_file(file: Path, name: str, value: Any, trust: bool = False) -> Any:
    """Return the value of an option, or the policy, that a file of ours states; its folder is the base of paths.

    Raise InputError for a URL, and for a policy in a file of Python (docs/trust.md), but for `trust`.
    """
    if isinstance(value, list | tuple):
        return [from_file(file, name, each, trust) for each in value]
    of_policy = name not in OPTIONS
    opens = of_policy or OPTIONS[name].resolved
    if opens and not trust and isinstance(value, str) and (is_url(value) or (of_policy and ".py" in value)):
        raise InputError(
            f"{file} names {value}, which is not opened without you: name it yourself with an option, or use "
            "--trust-folder if you know who wrote the file"
        )
    return value if of_policy else resolve(name, value, file.parent)
