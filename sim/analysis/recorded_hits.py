"""Which policy and cache size count the hits that the recorded engine counted itself (the column `hits` of a trace).

An expert that several tokens of a step choose in a layer is looked up once, so the first of them says whether it was
there. For each eviction policy the size with as many hits in all is searched, as more memory gives more hits; of the
best few, sizes near it whose hits differ least, summed over the steps.
"""

import itertools
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.core.policy import Int
from policies.core.registry import is_pair, tables
from policies.core.spec import PolicySpec, parse
from sim.loaded import Loaded
from sim.quantities import show_mib
from traces.errors import InputError
from traces.reader import open_folder
from traces.stream import pieces
from traces.trace import Trace

REPRODUCED = 0.002
"""The share of lookups that may differ: engines break ties between experts of one age in other ways."""

ROUNDS, FEW, NEAR = 10, 3, (0.02, 0.005, 0.001)
"""Runs that search a size, at most; how many policies are compared near it, and how far away, as a share of it."""


@dataclass(frozen=True)
class Match:
    """A policy with the cache sizes at which its hits are nearest to the engine's."""

    policy: str
    cache_experts: tuple[int, int]  # from, to
    cache_bytes: tuple[int, int] | None
    hits: int
    differ: int  # hits by which its steps differ from the engine's, summed


@dataclass(frozen=True)
class Recorded:
    """What the engine said, of the steps in which it said so of all lookups; and what comes nearest, best first."""

    lookups: int
    hits: int
    matches: list[Match]

    def sentence(self) -> str:
        best, engine = self.matches[0], f"The recorded engine counted {self.hits:,} hits in {self.lookups:,} lookups"
        size = f"{_span(best.cache_experts, str)} experts"
        if best.cache_bytes is not None:
            size = f"{_span(best.cache_bytes, show_mib)} MiB ({size})"
        if best.differ <= REPRODUCED * self.lookups:
            said = f"{best.policy} with a cache of {size} reproduces them"
        else:
            said = f"no policy here reproduces them, and {best.policy} with a cache of {size} comes nearest"
        return f"{engine} ({self.hits / self.lookups:.2%}): {said}: {best.hits:,} hits, {best.differ:,} in other steps."


def _span(bounds: tuple[int, int], show: Callable[[int], str]) -> str:
    return " to ".join(dict.fromkeys(map(show, bounds)))


def stated(trace: Trace) -> tuple[Int, Int]:
    """Return the lookups of each step, and the hits among them; -1 hits where the engine left some out."""
    assert trace.hits is not None
    request = np.repeat(np.arange(len(trace.requests)), np.diff(trace.offsets))
    new = np.ones(len(request), bool)
    new[1:] = (np.diff(request) != 0) | (np.diff(trace.step.astype(np.int64)) != 0)
    step = np.cumsum(new) - 1
    row, layer, slot = np.nonzero(trace.experts != trace.sentinel)
    expert = (step[row] * trace.layers + layer) * trace.num_experts + trace.experts[row, layer, slot]
    _, first = np.unique(expert, return_index=True)
    of, hit = step[row[first]], trace.hits[row, layer, slot][first]
    kinds = (np.ones(len(hit), bool), hit > 0, hit < 0)
    lookups, hits, unsaid = (np.bincount(of, kind, int(new.sum())).astype(np.int64) for kind in kinds)
    return lookups, np.where(unsaid > 0, -1, hits)


def of_trace(loaded: Loaded) -> Recorded | None:
    """Return `find` of the trace that is counted; None where it has no such column, or a part of it is run."""
    experiment = loaded.experiment
    part = experiment.requests is not None or experiment.as_decode or experiment.decode_only
    if part or "hits" not in open_folder(experiment.trace).optional:
        return None
    return find(loaded, pieces(experiment.trace, ("hits",)))


def find(loaded: Loaded, traces: Iterable[Trace]) -> Recorded | None:
    """Return what reproduces the hits of a trace in pieces, which `loaded` counts; None where no step states them."""
    lookups, hits = map(np.concatenate, zip(*map(stated, traces), strict=True))
    said = hits >= 0
    if not (lookups * said).sum():
        return None
    searches = list[_Search]()
    enough = REPRODUCED * lookups[said].sum()
    scoped = itertools.product(("", "@layer"), tables()[0].items())
    for policy in (parse(f"{name}{scope}") for scope, (name, cls) in scoped if not (cls.oracle or is_pair(name))):
        search = _Search(loaded, policy, hits, said)
        with suppress(InputError):  # it needs a file, or more slots than there are
            search.by_total()
            searches.append(search)
            if search.differ(search.best) <= 10 * enough and search.near().differ <= enough:
                break
    searches.sort(key=lambda search: search.differ(search.best))
    matches = sorted((search.near() for search in searches[:FEW]), key=lambda match: match.differ)
    return Recorded(int(lookups[said].sum()), int(hits[said].sum()), matches)


class _Search:
    """Looks for the cache size at which a policy's hits are the engine's: slots, or bytes where experts differ."""

    def __init__(self, loaded: Loaded, policy: PolicySpec, hits: Int, said: NDArray[np.bool_]) -> None:
        self.best = 0
        self._loaded, self._policy, self._hits, self._said = loaded, policy, hits, said
        self._runs: dict[int, NDArray[np.int32]] = {}
        self._least = loaded.trace.layers * (1 if loaded.sizes is None else int(loaded.sizes.max()))

    def run(self, room: int) -> NDArray[np.int32]:
        """Return the hits of each step that counts. Raise InputError where the policy cannot run."""
        if room not in self._runs:
            self._loaded.require(self._policy, room)
            parts: list[NDArray[np.int32]] = []
            self._loaded.play(self._policy, room, lambda log: parts.append(log.hits.astype(np.int32)))
            self._runs[room] = np.concatenate(parts)[self._said]
        return self._runs[room]

    def differ(self, room: int) -> int:
        return int(np.abs(self.run(room) - self._hits[self._said]).sum())

    def by_total(self) -> None:
        """Find a size with as many hits in all: half way between two sizes, or on the line between their hits."""
        target, low, high = int(self._hits[self._said].sum()), self._least, self._loaded.whole_slots
        for n in range(ROUNDS):
            fewer, more = (int(self.run(room).sum()) for room in (low, high))
            middle = round(low + (high - low) * ((target - fewer) / max(more - fewer, 1) if n % 2 else 0.5))
            hits = int(self.run(middle).sum())
            if abs(hits - target) <= REPRODUCED * target / 2:
                break
            low, high = (middle, high) if hits < target else (low, middle)
        self.best = min(self._runs, key=self.differ)

    def near(self) -> Match:
        for share in NEAR:
            around = {round(self.best * (1 + share * n / 4)) for n in range(-4, 5)}
            self.best = min(
                (room for room in around if self._least <= room <= self._loaded.whole_slots), key=self.differ
            )
        least, loaded = self.differ(self.best), self._loaded
        rooms = sorted(room for room in self._runs if self.differ(room) == least)
        span, each = (rooms[0], rooms[-1]), loaded.expert_bytes
        experts = loaded.experts_in(span[0]), loaded.experts_in(span[1])
        size = span if loaded.sizes is not None else each and (span[0] * each, span[1] * each)
        return Match(self._policy.text, experts, size or None, int(self.run(self.best).sum()), least)
