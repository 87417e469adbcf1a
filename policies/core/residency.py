"""The residency machine: which expert is where, what is pinned, what moves next. Rules 1, 2 and 4 to 10 live here.

Whatever decides about slots belongs to this machine; whatever takes time belongs to an engine. The machine knows no
clock, no bytes and no device: an engine tells it what happened, it answers what to do, and all engines (the SimPy
model, its compiled twin, the replay harness) drive this one.

Theory of operation. An expert is ABSENT, QUEUED (a proposed prefetch), DEMANDED (a queued miss), LOADING or READY:

    ABSENT --propose--> QUEUED --start--> LOADING --arrived--> READY --evicted--> ABSENT
       '------route----> DEMANDED --start----^

One transfer is on the link at a time, and on a device another behind the last bytes of the first. An engine calls

    route        when a router is known                      (rules 1 to 3)
    propose      with the prefetcher's answer                (rule 4)
    next_transfer whenever the link is free and after each of the other calls   (rules 5 and 6)
    interrupt    at a chunk boundary of a prefetch           (rule 5)
    land         when the rest of a transfer is sent, and the link takes more behind it (devices alone)
    arrived      when a transfer has ended, the one that landed first
    computed     when an expert's compute in its event has ended (rule 2)
    end_request  after the last head of a request            (rule 10)

A score policy is served wholly by the compiled core; any other names its victims in Python, at the same moments.

The slots may be divided into partitions, one for each layer (`policies.core.scope`). Then "a slot" in rule 5 is one of
the expert's partition, and of the queued prefetches the link takes the best that can have one; a demand is first in any
case. With one partition that is the best queued prefetch or none, as the rule says.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from policies.core import residency_compiled as core
from policies.core.policy import Float, Int, RetentionPolicy, ScorePolicy, Shape
from policies.core.residency_compiled import BLOCKED, NO_EXPERT


class Residency:
    """The machine over one cache under one retention policy.

    partitions: slots of each, in the order of the experts that share them: one for all layers or one for each.
    one_scale: keep scores and prefetch priorities compare, so a prefetch never evicts what is worth as much (rule 6);
    it has no meaning for a policy without scores.

    The calls of the hot path are attributes, bound once: `route(experts, first, last) -> hits`,
    `propose(experts, priorities)`, `next_transfer() -> (expert, victim, is a prefetch)`, `interrupt() -> (expert,
    victim)`, `arrived() -> awaited`, `arrived_and_next()` (both at once), `computed_hits(first, last)`;
    see `policies.core.residency_compiled`.
    """

    def __init__(
        self, shape: Shape, partitions: Sequence[int], policy: RetentionPolicy, one_scale: bool = False
    ) -> None:
        if len(partitions) not in (1, shape.layers) or min(partitions) < 1:
            raise ValueError(f"a cache needs at least one slot for all layers or for each, not {tuple(partitions)}")
        self.policy = policy
        self.one_scale = one_scale
        scored = isinstance(policy, ScorePolicy)
        self.keep = keep = policy.keep if isinstance(policy, ScorePolicy) else np.zeros((3, shape.total))
        self.rule = rule = policy.rule if isinstance(policy, ScorePolicy) else 0
        self.m = m = core.new(shape.total, partitions, vars(type(policy)).get("listed", False))
        self.propose: Callable[[Int, Float], None] = partial(core.propose, m, keep)
        self.arrived: Callable[[], bool] = partial(core.arrived, m)
        self.land: Callable[[], None] = partial(core.land, m)
        self._wanted = m[core.WANTED]
        self.computed_hits: Callable[[int, int], None] = partial(core.computed_hits, m)
        self.route: Callable[[Int, int, int], int] = (
            partial(core.route, m, keep, rule) if scored else self._route_in_python
        )
        self.next_transfer: Callable[[], tuple[int, int, bool]] = (
            partial(core.next_transfer, m, keep, rule, one_scale) if scored else self._next_in_python
        )
        self.arrived_and_next: Callable[[], tuple[bool, int, int, bool]] = (
            partial(core.arrived_and_next, m, keep, rule, one_scale)
            if scored
            else lambda: (self.arrived(), *self._next_in_python())
        )
        self.interrupt: Callable[[], tuple[int, int]] = (
            partial(core.interrupt, m, keep, rule) if scored else self._interrupt_in_python
        )

    # What an engine asks

    def hits(self, n: int) -> list[int]:
        """The `n` hits of the event, ascending."""
        found: list[int] = self.m[core.HITS, :n].tolist()
        return found

    def is_prefetch(self, expert: int) -> bool:
        """Whether `expert` came, or comes, by a prefetch and was not looked up since."""
        return bool(self.m[core.UNUSED, expert])

    def awaited(self, expert: int) -> bool:
        """Whether the current event looked `expert` up and has not computed it yet."""
        return bool(self._wanted[expert])

    def slot(self, expert: int) -> int:
        """The slot that `expert` holds, or NO_EXPERT."""
        return int(self.m[core.SLOT, expert])

    @property
    def serial(self) -> int:
        """The number of the latest event."""
        return int(self.m[core.ONE, core.SERIAL])

    def counters(self) -> list[int]:
        """Hits, late, misses, demand transfers, prefetch transfers, prefetches used, prefetches wasted, so far."""
        counts: list[int] = self.m[core.ONE, core.COUNTERS].tolist()
        return counts

    def resident(self) -> Int:
        """Ascending ids of the experts that hold a slot, those still LOADING included."""
        held = self.m[core.HELD, : self.m[core.ONE, core.SLOTS]]
        return np.sort(held[held != NO_EXPERT])

    def computed(self, expert: int) -> None:
        """The compute of `expert` in its event has ended: unpin it (rule 2)."""
        self._wanted[expert] = 0

    def end_request(self, cold: bool) -> None:
        """Rule 10: queued prefetches are dropped; `cold` empties the cache and frees the link."""
        core.clear_queue(self.m)
        if cold:
            for expert in core.empty_cache(self.m, self.keep, self.rule).tolist():
                self.policy.on_evict(expert)

    # The same transitions for a policy that names its victims in Python

    def _route_in_python(self, experts: Int, first: int, last: int) -> int:
        here = [e for e in experts[first:last].tolist() if self.m[core.STATE, e] in (core.LOADING, core.READY)]
        hits = core.route(self.m, self.keep, self.rule, experts, first, last)
        for expert in here:
            self.policy.on_hit(expert, self.serial)
        return int(hits)

    def _next_in_python(self) -> tuple[int, int, bool]:
        one = self.m[core.ONE]
        if one[core.NEXT_DEMAND] < one[core.LAST_DEMAND]:
            started = self._start_demand()
            if started[0] >= 0 or one[core.PAUSED] == NO_EXPERT:
                return *started, False
        if one[core.PAUSED] != NO_EXPERT:
            return int(core.resume(self.m)), NO_EXPERT, True
        one[core.ATTEMPT] += 1
        answer = NO_EXPERT
        while (expert := int(core.best_queued(self.m, self.keep))) != NO_EXPERT:
            answer, victim = self._start(expert, may_break_protection=False)
            if answer != BLOCKED:
                return answer, victim, True
            self.m[core.SHUT, self.m[core.PARTITION, expert]] = one[core.ATTEMPT]
        return answer, NO_EXPERT, True

    def _interrupt_in_python(self) -> tuple[int, int]:
        one = self.m[core.ONE]
        running = int(one[core.ACTIVE])
        if self.awaited(running) or one[core.NEXT_DEMAND] == one[core.LAST_DEMAND]:
            return NO_EXPERT, NO_EXPERT
        started = self._start_demand()
        if started[0] >= 0:
            one[core.PAUSED] = running
        return started

    def _start_demand(self) -> tuple[int, int]:
        expert = int(self.m[core.DEMANDS, self.m[core.ONE, core.NEXT_DEMAND]])
        return self._start(expert, may_break_protection=True)

    def _start(self, expert: int, may_break_protection: bool) -> tuple[int, int]:
        victim, partition = NO_EXPERT, int(self.m[core.PARTITION, expert])
        if self.m[core.FREE, partition] == 0:
            offered = core.evictable(self.m, partition, False)
            if len(offered) == 0 and may_break_protection:
                offered = core.evictable(self.m, partition, True)
            if len(offered) == 0:
                return BLOCKED, NO_EXPERT
            victim = self.policy.victim(offered)
            if victim not in offered:
                raise ValueError(f"policy {self.policy.name!r} named victim {victim}, which was not offered")
            self.policy.on_evict(victim)
        core.start(self.m, self.keep, self.rule, expert, victim)
        self.policy.on_insert(expert, self.serial, int(self.m[core.ONE, core.STARTS]))
        return expert, victim
