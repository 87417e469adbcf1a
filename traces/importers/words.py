"""The words of dumps: which key or column is the request, the step, the token, the layer, the expert, the weight.

The words stand in words.toml, and are looked up without case, underscores and dots. A format whose words mean something
else is an entry there; a single dump's are stated with `--columns`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from traces.errors import unknown
from traces.files import read_toml
from traces.steps import DECODE, PREFILL

WORDS: dict[str, dict[str, Any]] = read_toml(Path(__file__).with_suffix(".toml"))
ROLES: dict[str, str] = WORDS["roles"]

PHASE_ROLES = ("is_prefill", "is_decode", "forward_mode", "phase")
"""Roles of which each is the phase: by its name, as answers to a question, or by SGLang's numbers."""

HIT_ROLES = ("hit", "miss")
"""Whether the engine had an expert in its cache when a token chose it, as an answer to one question or the other."""

ANSWERS = {word: answer == "yes" for answer, words in WORDS["answers"].items() for word in words.split()}

STACKS = {"encoder", "decoder"}
"""Stacks of layers that are numbered each from 0."""


@dataclass(frozen=True)
class Format:
    """A kind of dump whose words mean something else than in ROLES.

    has: names by which it is known. example: a file in tests/traces/formats, or in a public repository. columns: role
    -> name. phase: of all its tokens. note: what else is to know.
    """

    has: str
    example: str
    columns: Mapping[str, str] = field(default_factory=dict)
    phase: str | None = None
    note: str | None = None


FORMATS = {name: Format(**stated) for name, stated in WORDS["formats"].items()}

KNOWN = ("vLLM", "SGLang", *FORMATS)
"""What is read by name: servers and recorders (`traces.importers.answers`, `recorder`), and FORMATS."""

SHORT = {"expert": {"", "e", "exp", "top", "sel", "slot", "k"}, "weight": {"wt", "g", "pr"}}
"""Names of columns with numbers, beside those of the roles."""

LIKE = (("weight", "weight|prob|gate|score"), ("expert", "expert|topk"), ("layer", "layer"))
"""A role, and parts of names that show it: for names that ROLES does not list and that hold no word of OTHER."""
OTHER = set(WORDS["other"]["words"].split())

UNSURE = 999
"""The rank of such a name: behind those in ROLES."""


@lru_cache(8_192)
def _like(name: object) -> str | None:
    text = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", str(name)).lower()
    if OTHER & set(re.findall(r"[a-z]+", text)) or re.search(r"[#\d]", text):
        return None
    return next((role for role, part in LIKE if re.search(part, text)), None)


@lru_cache(8_192)
def plain(name: object) -> str:
    return re.sub(r"[^a-z0-9]", "", str(name).lower())


def _by_name(table: Mapping[str, str]) -> dict[str, tuple[int, str]]:
    """Return the place of each plain name in its list, and whose it is."""
    rows = [(role, names.split()) for role, names in reversed(list(table.items()))]
    return {plain(name): (place, role) for role, names in rows for place, name in enumerate(names)}


_ROLE, _FACT, _PHASE = (_by_name(WORDS[table]) for table in ("roles", "facts", "phases"))


@dataclass(frozen=True)
class Columns:
    """Finds the role of a name: `stated` ones (role -> name) go first, and their roles have no other name."""

    stated: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def parse(text: str | None) -> "Columns":
        """Read `layer=l,expert=e`. Raises InputError for an unknown role."""
        pairs = [part.partition("=")[::2] for part in filter(None, (text or "").split(","))]
        if odd := next((role for role, _ in pairs if role.strip() not in ROLES), None):
            raise unknown("column", odd, ROLES)
        return Columns({role.strip(): name.strip() for role, name in pairs})

    def role(self, name: object) -> str | None:
        stated = next((role for role, own in self.stated.items() if own == str(name)), None)
        found = _ROLE.get(plain(name), (UNSURE, _like(name)))[1]
        return stated or (None if found in self.stated else found)

    def pick(self, names: Iterable[Any]) -> dict[str, Any]:
        """Return the name of each role among these; of several the plainest."""
        ranked = [
            (-1 if str(name) in self.stated.values() else _ROLE.get(plain(name), (UNSURE,))[0], str(name), name)
            for name in names
            if self.role(name)
        ]
        return {str(self.role(name)): name for _, _, name in sorted(ranked, key=lambda one: one[:2], reverse=True)}

    def numbered(self, names: Iterable[object], role: str) -> list[str]:
        """Return the columns e0, e1, ... of a role in the order of their numbers; none where there are not two."""
        groups: dict[str, list[tuple[int, str]]] = {}
        for name in map(str, names):
            match = re.fullmatch(r"(.*?)[_.\- \[]*(\d+)\]?", name)
            if match and (self.role(match[1]) == role or plain(match[1]) in SHORT.get(role, ())):
                groups.setdefault(match[1], []).append((int(match[2]), name))
        found = max(groups.values(), key=len, default=[])
        return [name for _, name in sorted(found)] if len(found) > 1 else []


def fact(name: object) -> str | None:
    return _FACT.get(plain(name), (0, None))[1]


def format_of(names: Iterable[object]) -> tuple[str, Format] | None:
    """Return the format whose names are all there."""
    there = {plain(name) for name in names}
    return next((one for one in FORMATS.items() if {plain(n) for n in one[1].has.split()} <= there), None)


def answer_of(word: str) -> bool | None:
    """Return the answer that a cell gives to its column's question; of a number whether it is above 0."""
    text = word.strip().lower().removesuffix(".0")
    return int(text) > 0 if text.isdecimal() else ANSWERS.get(text)


def phase_of(word: str, role: str = "phase") -> int | None:
    """Return PREFILL or DECODE of a cell of a column of one of PHASE_ROLES; None if it is neither."""
    text = plain(word.removesuffix(".0")) if word[:1].isalnum() else ""
    if role == "forward_mode":
        return {"1": PREFILL, "2": DECODE}.get(text)
    if role != "phase" and text in ANSWERS:
        return DECODE if ANSWERS[text] == (role == "is_decode") else PREFILL
    return {"prefill": PREFILL, "decode": DECODE}.get(_PHASE.get(text, (0, ""))[1])


LAYER = re.compile(r"(?:^|[^a-z0-9])(?:layers?|blk|block|l)[_.\- ]?(\d+)(?![0-9])", re.IGNORECASE)


def layer_number(text: object) -> int | None:
    """Return the layer in a name, such as `model.layers.3.mlp`, `blk.3` or `moe_layer3`; a number as it is."""
    found = layer_name(text)
    return None if found is None else found[1]


def layer_name(text: object) -> tuple[str, int] | None:
    """Return what stands before the layer in a name, and the layer; nothing before a number."""
    found = LAYER.search(str(text))
    if found:
        return str(text)[: found.start()], int(found[1])
    number = str(text).strip().removesuffix(".0")
    return ("", int(number)) if number.isdecimal() else None
