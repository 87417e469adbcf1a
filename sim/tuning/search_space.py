"""Where options of a policy are searched: `capacity=10..1000:matches=1..5:cosine=flat|rows`, or what it declares.

`NAME=LOW..HIGH` is a range, of whole numbers or decimals by the option's type, on a logarithmic scale where HIGH is at
least ten times LOW; `NAME=A|B|C` are choices. By default, each option that was not typed is searched: numbers from an
eighth to eight times their default, as far as the policy accepts that, booleans, and texts whose choices the module of
the policy lists (`CHOICES`). Left alone is what has no scale or no list: 0, which often stands for all, infinity,
numbers below 0, seeds, and names of files.
"""

import math
import sys
from dataclasses import dataclass
from typing import Any

from policies.core.grammar import read_options, value_text
from policies.core.policy import Shape
from policies.core.spec import Option, PolicySpec
from sim.tuning.journal import optuna
from traces.errors import InputError, unknown

LOGARITHMIC = 10
"""High over low from which a range is searched on a logarithmic scale."""

DIGITS = 4
"""Of decimals drawn from a range."""

MOST = 2**53
"""Of a default that is searched: optuna draws floats, which leave some whole numbers out beyond."""

DOWN, UP = (1 / 8, 1 / 4, 1 / 2), (8, 4, 2)
"""From the default to the ends of a range that is not stated: the first that the policy accepts."""


@dataclass(frozen=True)
class Dimension:
    """An option, and the distribution of optuna from which its values are drawn."""

    option: Option
    distribution: Any

    @property
    def text(self) -> str:
        """Return the dimension as a search states it."""
        if hasattr(self.distribution, "choices"):
            return f"{self.option.name}={'|'.join(map(value_text, self.distribution.choices))}"
        return f"{self.option.name}={self.distribution.low}..{self.distribution.high}"

    def value(self, drawn: Any) -> Any:
        """Return what is run for what was drawn: decimals of a range are short."""
        if hasattr(self.distribution, "choices") or isinstance(drawn, int):
            return drawn
        return min(max(float(f"{drawn:.{DIGITS}g}"), self.distribution.low), self.distribution.high)


Space = tuple[Dimension, ...]


def space_of(policy: PolicySpec, shape: Shape, search: str | None) -> Space:
    """Return the stated space, or the declared one. Raise InputError for one that the policy does not have."""
    known = {option.name: option for option in policy.declared()}
    if not known:
        raise InputError(f"{policy.text} has no options to search")
    if not search:
        return _declared(policy, shape)
    space: dict[str, Dimension] = {}
    for name, values in read_options(search):
        if name not in known:
            raise unknown(f"option of {policy.text}", name, known)
        try:
            space[name] = _stated(known[name], values or "")
        except (ValueError, KeyError) as error:
            example = f"{name}=LOW..HIGH or {name}=A|B|C"
            raise InputError(f"--search {name}={values or ''}: {error}; write {example}") from None
    return tuple(space.values())


def _stated(option: Option, text: str) -> Dimension:
    kind = type(option.value)

    def read(value: str) -> Any:
        return {"true": True, "false": False}[value.strip().lower()] if kind is bool else kind(value.strip())

    if ".." in text and option.numeric:
        low, high = map(read, text.split("..", 1))
        if -math.inf < low < high < math.inf:
            return _range(option, low, high)
        raise ValueError("a range is from a number to a higher one")
    return _choices(option, tuple(dict.fromkeys(map(read, text.split("|")))))


def _range(option: Option, low: float, high: float) -> Dimension:
    distributions = optuna().distributions
    kind = distributions.IntDistribution if isinstance(low, int) else distributions.FloatDistribution
    return Dimension(option, kind(low, high, log=low > 0 and high / low >= LOGARITHMIC))


def _choices(option: Option, values: tuple[Any, ...]) -> Dimension:
    return Dimension(option, optuna().distributions.CategoricalDistribution(values))


def _declared(policy: PolicySpec, shape: Shape) -> Space:
    listed: dict[str, tuple[str, ...]] = {}
    for half in policy.build(shape):
        listed |= getattr(sys.modules[type(half.options).__module__], "CHOICES", {})
    space: list[Dimension] = []
    for option in policy.declared():
        if option.stated:
            continue
        if isinstance(option.value, bool):
            space.append(_choices(option, (False, True)))
        elif option.numeric and 0 < option.value < math.inf:
            low, high = _farthest(policy, option, DOWN), _farthest(policy, option, UP)
            space += [_range(option, low, high)] if low < high else []
        elif option.key in listed:
            space.append(_choices(option, listed[option.key]))
    if not space:
        raise InputError(f"no option of {policy.text} has a scale to search on: name some with --search NAME=LOW..HIGH")
    return tuple(space)


def _farthest(policy: PolicySpec, option: Option, factors: tuple[float, ...]) -> Any:
    """Return the value times the first of `factors` that the policy accepts; whole numbers at least 1."""
    for factor in factors:
        moved = option.value * factor
        if moved > MOST:
            continue
        value = max(1, round(moved)) if isinstance(option.value, int) else float(f"{moved:.{DIGITS}g}")
        try:
            policy.with_options({option.name: value})
        except InputError:
            continue
        return value
    return option.value
