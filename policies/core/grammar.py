"""The syntax of policies as text (policies/README.md); what the names mean is known to `policies.core.spec` alone.

A class in a user's file is named `path/my_file.py:MyPolicy`. What follows the last / is an admission if it is the name
of one, what follows the / before it, or the last one, is a placement likewise. The first @ begins the scope and the
first + before it divides the halves, so no path on the left of either has one. Commas divide lists.
"""

import itertools
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from typing import Any

_IN_A_FILE = re.compile(r"(?P<name>[^=]+?\.py:[^:]*)(?::(?P<options>.*))?", re.DOTALL)
_ALTERNATIVES = re.compile(r"(?<==)[^:+@,]*\|[^:+@,]*")

Pairs = tuple[tuple[str, str | None], ...]
"""Options as written: name and value, None where no = follows the name."""


@dataclass(frozen=True)
class Term:
    """One name with its options: an eviction policy, a prefetcher, a scope or a preset."""

    name: str
    options: Pairs = ()

    def __str__(self) -> str:
        return ":".join([self.name, *(key if value is None else f"{key}={value}" for key, value in self.options)])

    def having(self, key: str, value: Any) -> "Term":
        """Return the same term with this option, behind the others."""
        others = tuple(pair for pair in self.options if pair[0] != key)
        return replace(self, options=(*others, (key, value_text(value))))


@dataclass(frozen=True)
class Expression:
    """A whole policy as written."""

    halves: tuple[Term, ...]  # one or two
    scope: Term | None = None  # None: it names none
    placement: Term | None = None
    admission: Term | None = None

    def __str__(self) -> str:
        scope = f"@{self.scope}" if self.scope else ""
        last = (f"/{term}" for term in (self.placement, self.admission) if term)
        return "+".join(map(str, self.halves)) + scope + "".join(last)


def read(text: str, placements: Container[str] = (), admissions: Container[str] = ()) -> Expression:
    """Return the expression that `text` writes; any text is one. placements, admissions: names of such."""
    text, admission = _split_last(text, admissions)
    text, placement = _split_last(text, placements)
    policy, at, scope = text.partition("@")
    halves = tuple(map(read_term, policy.split("+", 1)))
    return Expression(halves, read_term(scope) if at else None, placement, admission)


def _split_last(text: str, names: Container[str]) -> tuple[str, Term | None]:
    """Return what stands before the last /, and the term behind it if that has one of these names."""
    before, slash, last = text.rpartition("/")
    term = read_term(last)
    return (before, term) if slash and term.name in names else (text, None)


def read_term(text: str) -> Term:
    """Return the term that `text` writes; any text is one."""
    if found := _IN_A_FILE.fullmatch(text.strip()):
        return Term(found["name"], read_options(found["options"] or ""))
    name, _, options = text.strip().partition(":")
    return Term(name, read_options(options))


def read_options(text: str) -> Pairs:
    parts = (part.partition("=") for part in map(str.strip, text.split(":")) if part)
    return tuple((key, value if equals else None) for key, equals, value in parts)


def value_text(value: Any) -> str:
    """Return the value of an option as it is written; a + would begin the other half."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).replace("e+", "e") if isinstance(value, float) else str(value)


def file_and_class(name: str) -> tuple[str, str] | None:
    """Return the file and the class, which may be missing, that `name` is of; None for a registered name."""
    if name.endswith(".py"):
        return name, ""
    if not _IN_A_FILE.fullmatch(name):
        return None
    file, _, cls = name.rpartition(":")
    return file, cls


def split_list(text: str | None) -> tuple[str, ...]:
    """Return what stands between the commas, without empty items."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def alternatives(text: str) -> Iterator[str]:
    """Yield a policy once for each combination of the alternatives that its options list."""
    between = _ALTERNATIVES.split(text)
    for chosen in itertools.product(*(values.split("|") for values in _ALTERNATIVES.findall(text))):
        yield between[0] + "".join(value + rest for value, rest in zip(chosen, between[1:], strict=True))


def split_size(text: str, scopes: Container[str]) -> tuple[str, str]:
    """Return policy and size of `policy@size`, each empty where not named; scopes: names that are no sizes."""
    policy, at, size = text.rpartition("@")
    return (policy, size) if at and read_term(size).name not in scopes else (text, "")


def policy_title(text: str, oracle: bool) -> str:
    """Return a policy as results show it: one that sees the future is marked."""
    return f"{text} (oracle)" if oracle else text


def pieces(text: str) -> list[str]:
    """Return the pieces of a policy, before each of which a line may be broken."""
    return re.split(r"(?=[:+@])", text)
