"""What is stated about a dump beside the dump itself: options of the command, and facts in a JSON file.

The JSON's schema is `Facts`; keys that it does not name are ignored. Where two sources state one number, they must
agree.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from traces.defects import Finding
from traces.errors import InputError, refuse
from traces.facts import parse_json
from traces.files import unpacked_name
from traces.importers.words import ROLES, Columns, phase_of
from traces.models.profile import ModelProfile, known
from traces.schema import Size
from traces.typed import Natural, Option, Positive

Count = Annotated[int, Meta(ge=0, lt=2**31)]
Nanoseconds = Annotated[int, Meta(ge=0, lt=2**63 - 1)]
Label = str | int  # ids and tasks are often numbered


@dataclass(frozen=True)
class Options:
    """What the user states about a dump on the command line. None: nothing."""

    phase: Annotated[
        str | None, Option("decode or prefill, where the dump does not say.", shown="first word of the JSON's")
    ] = None
    experts: Annotated[Positive | None, Option("Experts of a layer, where nothing else says it.")] = None
    layers: Annotated[Positive | None, Option("Layers that a dump of flat ids counts, dense ones too.")] = None
    top_k: Annotated[Positive | None, Option("Experts of a token, where a dump does not say it.")] = None
    layer_map: Annotated[
        str | None,
        Option(
            "Which of the dump's layers are MoE layers: 1-26, 3:, or 0,2,4-8.",
            shown="all; refused where one looks dense",
        ),
    ] = None
    start: Annotated[
        Natural | None, Option("Leading tokens that the server left out (routed_experts_start_len).", shown="0")
    ] = None
    token_ids: Annotated[
        Path | None, Option("Ids of all tokens, where they lie apart: .npz with token_ids, or .npy.")
    ] = None
    columns: Annotated[
        str | None,
        Option(
            "Names of columns or keys, as in layer=l,expert=e; a number is that value in all rows. Of: "
            f"{', '.join(ROLES)}.",
            shown="found by their names",
        ),
    ] = None
    axes: Annotated[
        str | None, Option("Axes of nested lists before the last, k: token,layer or layer,token.", shown="found")
    ] = None
    fix: Annotated[bool, Option("Fix what `moe-trace check` says can be fixed.")] = False


@dataclass(frozen=True)
class Request:
    """What is known of one request. None: unknown."""

    id: Label | None = None
    dataset: Label | None = None
    task: Label | None = None
    category: Label | None = None  # another name of `task`
    prompt_tokens: Count | None = None
    output_tokens: Count | None = None
    arrival_ns: Nanoseconds | None = None
    start: Count | None = None  # position of its first row

    def __str__(self) -> str:
        return str(self.id)


@dataclass(frozen=True)
class Facts:
    """What the JSON beside a dump may state."""

    model: str | None = None
    moe_layers: Size | None = None
    experts: Size | None = None
    top_k: Size | None = None
    first_moe_layer: Count | None = None
    layer_names: tuple[str, ...] | None = None
    expert_bytes: Size | None = None
    layer_expert_bytes: tuple[Size, ...] = ()
    dtype: str | None = None
    revision: str | None = None
    hidden_size: Size | None = None
    expert_intermediate_size: Size | None = None
    phase: str | None = None  # its first word counts
    dataset: Label | None = None
    requests: list[Request] | Count | None = None
    start: Count | None = None
    concurrency: Size | None = None  # requests that were sent at a time
    offsets: list[Count] | None = None  # of a .npy


@dataclass(frozen=True)
class Source:
    """A dump to import, and all that is stated about it."""

    path: Path
    facts: Facts = Facts()
    facts_path: Path | None = None
    options: Options = Options()
    load_pt: Callable[[Path], Any] | None = None  # reads a torch file as plain dicts and numpy arrays
    columns: Columns = field(default_factory=Columns)
    found: list[str] = field(default_factory=list)  # which columns are what, one line each
    notes: list[str] = field(default_factory=list)  # what was assumed, one line each
    findings: list[Finding] = field(default_factory=list)  # defects of the recorder
    stated: dict[str, Any] = field(default_factory=dict)  # facts that stand beside the routing in the dump

    @staticmethod
    def of(path: Path, facts_path: Path | None, options: Options, load_pt: Callable[[Path], Any] | None) -> "Source":
        """Read the JSON at `facts_path`, if there is one."""
        source = Source(path, Facts(), facts_path, options, load_pt, Columns.parse(options.columns))
        if facts_path is None:
            return source
        content = parse_json(facts_path.read_bytes(), str(facts_path))
        try:
            return replace(source, facts=msgspec.convert(content, Facts))
        except msgspec.ValidationError as error:
            raise InputError(f"{facts_path}: {error}") from None

    @property
    def stem(self) -> str:
        return unpacked_name(self.path).stem

    @property
    def model(self) -> str:
        return str(self.facts.model or self.stated.get("model") or "")

    @property
    def profile(self) -> ModelProfile | None:
        """Return that of the model that the dump or its JSON names; None if none is known."""
        return known(self.model)

    @property
    def phase(self) -> int | None:
        """PREFILL or DECODE, where one of them is stated of all tokens beside the routing."""
        stated = self.options.phase or self.facts.phase or self.stated.get("phase")
        word = next(iter(re.findall(r"\w+", stated or "")), None)
        code = None if word is None else phase_of(word)
        refuse((word is not None and code is None, f"phase {word!r} is neither prefill nor decode"))
        return code

    def experts_of(self, ids: NDArray[np.integer]) -> int:
        """Return the number of experts of the model, or by the largest id, where nothing states it, and note so."""
        E = int(ids.max(initial=-1)) + 1
        if self.profile is not None and self.profile.experts >= E:
            return self.profile.experts
        self.notes.append(f"the number of experts is taken from the largest id: {E} (--experts says otherwise)")
        return E

    @property
    def start(self) -> int:
        """Leading tokens that the server left out of each request that states nothing else."""
        return self.options.start if self.options.start is not None else self.facts.start or 0

    def agreed(self, name: str, dumped: int | None = None) -> int | None:
        """Return the number `name` that the dump, the JSON and the option state; None if none does."""
        stated = {
            f"{self.path} has": dumped,
            f"{self.path} states": self.stated.get(name),
            f"{self.facts_path} says": getattr(self.facts, name, None),
            f"--{name.replace('_', '-')} says": getattr(self.options, name, None),
        }
        numbers = {who: number for who, number in stated.items() if isinstance(number, int)}
        if len(set(numbers.values())) > 1:
            raise InputError(f"{name}: {', '.join(f'{who} {number}' for who, number in numbers.items())}")
        return next(iter(numbers.values()), None)

    def requests(self, dumped: Sequence[Request]) -> list[Request]:
        """Return the dump's requests, completed by the JSON's: by id where both have ids, else in their order."""
        listed = self.facts.requests if self.facts.requests is not None else len(dumped)
        stated = [Request()] * listed if isinstance(listed, int) else listed
        if len(stated) != len(dumped):
            raise InputError(f"{self.facts_path} lists {len(stated)} requests, but {self.path} holds {len(dumped)}")
        if all(one.id is not None for one in [*dumped, *stated]):
            by_id = {str(one.id): one for one in stated}
            stated = [by_id[str(one.id)] for one in dumped]
        requests = []
        for number, (own, beside) in enumerate(zip(dumped, stated, strict=True)):
            default = Request(number, self.facts.dataset or "", beside.category or "", start=self.start)
            held = [*asdict(default).items(), *asdict(own).items(), *asdict(beside).items()]
            known = {key: value for key, value in held if value is not None}
            requests.append(Request(**known | {key: str(known[key]) for key in ("id", "dataset", "task")}))
        return requests
