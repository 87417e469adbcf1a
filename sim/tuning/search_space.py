"""Where options of a policy are searched: `capacity=10..1000:matches=1..5:cosine=flat|rows`, or what it declares.

`NAME=LOW..HIGH` is a range, of whole numbers or decimals by the option's type, on a logarithmic scale where HIGH is at
least ten times LOW; `NAME=A|B|C` are choices. Unasked, each option that was not typed is searched: numbers from an
eighth to eight times their default, as far as the policy accepts that, booleans, and texts whose choices the module of
the policy lists (`CHOICES`). Left alone is what has no scale or no list: 0, which often stands for all, infinity,
numbers below 0, seeds, and names of files.
"""

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from policies.core.grammar import read_options, split_alternatives, value_text
from policies.core.policy import Shape
from policies.core.spec import Option, PolicySpec
from traces.errors import InputError, unknown

LOGARITHMIC = 10
"""High over low from which a range is searched on a logarithmic scale."""

DIGITS = 4
"""Of decimals drawn from a range."""

MOST = 2**53
"""Of whole numbers, either way: optuna draws floats, which leave some out beyond."""

DOWN, UP = (1 / 8, 1 / 4, 1 / 2), (8, 4, 2)
"""From the default to the ends of a range that is not given: the first that the policy accepts."""


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both whole or both decimals."""

    option: Option
    low: float
    high: float

    @property
    def log(self) -> bool:
        """Whether the scale is logarithmic."""
        return self.low > 0 and self.high / self.low >= LOGARITHMIC

    @property
    def text(self) -> str:
        """Return it as given."""
        return f"{self.option.name}={self.low}..{self.high}"

    def distribution(self, optuna: Any) -> Any:
        """For optuna."""
        whole = isinstance(self.low, int)
        kind = optuna.distributions.IntDistribution if whole else optuna.distributions.FloatDistribution
        return kind(self.low, self.high, log=self.log)

    def value(self, drawn: Any) -> Any:
        """What is run for what was drawn."""
        return drawn if isinstance(drawn, int) else min(max(float(f"{drawn:.{DIGITS}g}"), self.low), self.high)


@dataclass(frozen=True)
class Choices:
    """Some values."""

    option: Option
    values: tuple[Any, ...]

    @property
    def text(self) -> str:
        """Return it as given."""
        return f"{self.option.name}={'|'.join(map(value_text, self.values))}"

    def distribution(self, optuna: Any) -> Any:
        """For optuna."""
        return optuna.distributions.CategoricalDistribution(self.values)

    def value(self, drawn: Any) -> Any:
        """What is run for what was drawn."""
        return drawn


Space = tuple[Range | Choices, ...]


def space_of(policy: PolicySpec, shape: Shape, search: str | None) -> Space:
    """The space as given, or the declared one; InputError for one that the policy does not have."""
    known = {option.name: option for option in policy.declared()}
    if not known:
        raise InputError(f"{policy.text} has no options to search")
    listed = _listed(policy, shape)
    if search is None:
        return _declared(policy, known.values(), listed)
    found: dict[str, Range | Choices] = {}
    for name, values in read_options(search):
        if name not in known:
            raise unknown(f"option of {policy.text}", name, known)
        if not values:
            raise InputError(f"--search {name}: write {name}=LOW..HIGH or {name}=A|B|C")
        if name in found:
            raise InputError(f"--search names {name} twice")
        option = known[name]
        found[name] = _range(option, values) if ".." in values else _choices(option, values, listed.get(option.key))
    if not found:
        raise InputError("--search names no option: write capacity=10..1000:cosine=flat|rows")
    return tuple(found.values())


def _range(option: Option, text: str) -> Range:
    if not option.numeric:
        raise InputError(f"--search {option.name}={text}: {option.name} is no quantity, write {option.name}=A|B|C")
    low, high = (_read(option, end) for end in text.split("..", 1))
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise InputError(f"--search {option.name}={text}: a range is from a number to a higher one")
    return Range(option, low, high)


def _choices(option: Option, text: str, listed: tuple[str, ...] | None) -> Choices:
    values = tuple(dict.fromkeys(_read(option, value) for value in split_alternatives(text)))
    for value in values:
        if listed and value not in listed:
            raise unknown(f"{option.name} in --search", value, listed)
    return Choices(option, values)


def _read(option: Option, text: str) -> Any:
    """The value that `text` writes, of the option's type."""
    kind, text = type(option.value), text.strip()
    try:
        value = {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
    except (ValueError, KeyError):
        wanted = {int: "a whole number", float: "a number", bool: "true or false"}[kind]
        raise InputError(f"--search {option.name}: {text!r} is not {wanted}, which {option.name} is") from None
    if kind is int and abs(value) > MOST:
        raise InputError(f"--search {option.name}: {text} is beyond 2**53, which is the most")
    return value


def _listed(policy: PolicySpec, shape: Shape) -> dict[str, tuple[str, ...]]:
    """Choices of text options, as far as the modules of both halves list them."""
    found: dict[str, tuple[str, ...]] = {}
    for half in policy.build(shape):
        found |= getattr(sys.modules[type(half.options).__module__], "CHOICES", {})
    return found


def _declared(policy: PolicySpec, known: Iterable[Option], listed: dict[str, tuple[str, ...]]) -> Space:
    found: list[Range | Choices] = []
    for option in known:
        if option.stated:
            continue
        if isinstance(option.value, bool):
            found.append(Choices(option, (False, True)))
        elif option.numeric and 0 < option.value < math.inf:
            low, high = _farthest(policy, option, DOWN), _farthest(policy, option, UP)
            found += [Range(option, low, high)] if low < high else []
        elif option.key in listed:
            found.append(Choices(option, listed[option.key]))
    if not found:
        raise InputError(f"no option of {policy.text} has a scale to search on: name some with --search NAME=LOW..HIGH")
    return tuple(found)


def _farthest(policy: PolicySpec, option: Option, factors: tuple[float, ...]) -> Any:
    """The value times the first of `factors` that the policy accepts; whole numbers at least 1."""
    for factor in factors:
        moved = option.value * factor
        if not moved <= MOST:
            continue
        value = max(1, round(moved)) if isinstance(option.value, int) else float(f"{moved:.{DIGITS}g}")
        try:
            policy.with_options({option.name: value})
        except InputError:
            continue
        return value
    return option.value
