"""The options of a policy as typed: which there are, what they are now, and the same policy with others.

An option goes by its own name, or by `evict.NAME` and `prefetch.NAME` where both halves of a pair declare it. Of a
preset, and of halves that share what they learn, it is one option that both take.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from policies.core.registry import PolicySpec, parse
from policies.core.user_file import divide

HALVES = ("evict", "prefetch")

SEED = "seed"
"""An option of that name is no quantity: no value is better than another."""


@dataclass(frozen=True)
class Option:
    """One option of a policy, and the value that it has there."""

    name: str  # as told
    key: str  # as declared
    places: tuple[int, ...]  # halves, as typed, that it is written in
    value: Any
    stated: bool  # typed, not a default

    @property
    def numeric(self) -> bool:
        """Whether it is a quantity that can be more or less."""
        return isinstance(self.value, int | float) and not isinstance(self.value, bool) and self.key != SEED


def options(policy: PolicySpec) -> list[Option]:
    """All options of both halves, in the order in which they are declared."""
    resolved = policy.resolved()
    declared = [{key: value for key, value in resolved[half].items() if key != "name"} for half in HALVES]
    halves, _ = _divided(policy.text)
    stated = [{option.partition("=")[0] for option in given} for _, given in halves]
    if len(halves) == 1 or policy.shares:
        places, typed = tuple(range(len(halves))), set().union(*stated)
        return [Option(key, key, places, value, key in typed) for key, value in (declared[1] | declared[0]).items()]
    both = declared[0].keys() & declared[1].keys()
    return [
        Option(f"{half}.{key}" if key in both else key, key, (place,), value, key in stated[place])
        for place, half in enumerate(HALVES)
        for key, value in declared[place].items()
    ]


def having(policy: PolicySpec, values: Mapping[Option, Any]) -> PolicySpec:
    """The same policy with options of these values, as it would be typed. InputError for one that it refuses."""
    halves, scope = _divided(policy.text)
    for option, value in values.items():
        for place in option.places:
            _, given = halves[place]
            given[:] = [each for each in given if each.partition("=")[0] != option.key]
            given.append(f"{option.key}={written(value)}")
    return parse("+".join(":".join([name, *given]) for name, given in halves) + scope)


def written(value: Any) -> str:
    """A value as an option of a policy takes it; a + would begin the other half."""
    return str(value).lower() if isinstance(value, bool) else str(value).replace("e+", "e")


def _divided(text: str) -> tuple[list[tuple[str, list[str]]], str]:
    """The halves as typed, each its name and its options; and the scope, with its @."""
    policy, at, scope = text.partition("@")
    halves = [divide(half) for half in policy.split("+", 1)]
    return [(name, [option for option in given.split(":") if option]) for name, given in halves], at + scope
