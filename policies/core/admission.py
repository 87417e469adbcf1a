"""Admission: what becomes of an expert that missed, beyond this use of it (rule 21).

`always` is what every policy does that names no admission. Any other is asked of each miss after rule 3: a miss that is
fetched and not admitted passes through a staging slot, one that the host computes and that is admitted is copied later.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from policies.core.policy import Options, bounded

ALWAYS, NEVER, SCORE, SECOND, OWN = range(5)
"""Admissions, as the compiled core knows them."""

UNLIMITED = -1


@dataclass(frozen=True)
class AdmissionOptions(Options, policy="an admission"):
    """insert_cap: background copies that start in a step, at most; -1: any number. staging: slots; 0: top-k."""

    insert_cap: int = bounded(UNLIMITED, least=UNLIMITED)
    staging: int = bounded(0, least=0)


class Admission:
    """Which misses are admitted to the cache."""

    name: ClassVar[str]
    number: ClassVar[int]
    Options: ClassVar[type] = AdmissionOptions

    def __init__(self, options: Any, others_on_host: bool) -> None:
        """others_on_host: the host computes what is not admitted (placement `admitted`)."""
        self.options, self.others_on_host = options, others_on_host

    @property
    def numbers(self) -> tuple[int, ...]:
        """The kind of admission, its window, its cap and its placement, as the compiled core knows them."""
        return self.number, getattr(self.options, "window", 0), self.options.insert_cap, self.others_on_host


class Always(Admission):
    """Admit what is fetched, and nothing that the host computes."""

    name, number, Options = "always", ALWAYS, Options


class Never(Admission):
    """Admit nothing: the cache holds what prefetches bring."""

    name, number = "never", NEVER


class Score(Admission):
    """Admit what has a greater keep score than the expert whose slot it would take."""

    name, number = "score", SCORE


@dataclass(frozen=True)
class SecondOptions(AdmissionOptions, policy="second"):
    """window: steps within which an expert has missed before."""

    window: int = bounded(1, least=1)


class Second(Admission):
    """Admit what missed before within so many steps."""

    name, number, Options = "second", SECOND, SecondOptions


class Own(Admission):
    """Admit what the eviction policy names in its own `admit`."""

    name, number = "own", OWN


ADMISSIONS: dict[str, type[Admission]] = {cls.name: cls for cls in (Always, Never, Score, Second, Own)}
