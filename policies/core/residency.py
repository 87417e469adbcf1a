"""Residency: which expert is where, what is pinned, what moves next (rules 1, 2, 4 to 7, 9, 10).

The rules themselves are the compiled functions of `policies.core.residency_compiled`, to which this gives a class, for
who has a loop in Python. Whatever decides about slots belongs here; whatever takes time belongs to an engine.
docs/architecture.md (How the residency works) has the theory of operation.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np

from policies.core import dispatch
from policies.core import residency_compiled as core
from policies.core.admission import Admission
from policies.core.calling import HIT, INSERT, VICTIM, Asked, Held, Scores
from policies.core.compiled import entry_point
from policies.core.host_memory import HostMemory
from policies.core.policy import KEEP_ROWS, Float, Int, Policy, ScorePolicy, Shape
from policies.core.residency_compiled import BLOCKED as BLOCKED
from policies.core.residency_compiled import NO_EXPERT as NO_EXPERT


class ResidencyObserver:
    """Hears what happens to a residency; every method does nothing by default."""

    def routed(self, experts: Int, hits: list[int]) -> None:
        """An event was looked up (rule 1)."""

    def proposed(self, experts: Int, priorities: Float) -> None:
        """A proposal has arrived (rule 4)."""

    def turned_to(self, expert: int, victim: int, prefetch: bool) -> None:
        """The free link turns to a transfer that starts or resumes, or there is none (expert < 0)."""

    def interrupted(self, expert: int, victim: int) -> None:
        """A demand pauses a prefetch at its chunk boundary, or none does (expert < 0)."""

    def left(self, experts: list[int]) -> None:
        """These left for the transfer that has begun, where experts differ in size; its victim is the last of them."""

    def landed(self) -> None:
        """The rest of a transfer is sent, and the link takes more behind it."""

    def arrived(self) -> None:
        """A transfer has ended, the one that landed first."""

    def request_ended(self, cold: bool) -> None:
        """No request remains active (rule 10)."""


INT64 = np.dtype(np.int64)

HEARS = {core.HEARS_HIT: "on_hit", core.HEARS_INSERT: "on_insert", core.HEARS_EVICT: "on_evict"}
"""Which method of a policy that names its victims is called, if it has its own."""


class PolicyResidency:
    """The residency of one cache under one eviction policy.

    partitions: slots of each, in the order of the experts that share them: one for all layers or one for each.
    one_scale: keep scores and prefetch priorities compare, so a prefetch never evicts what is worth as much (rule 6);
    it has no meaning for a policy without scores. sizes: bytes of each expert, int64[L*E], where they differ; then
    `partitions` are bytes too (rule 19). admission: of rule 21, with its options.

    The calls of the hot path are attributes, bound once. scripted: the address of who decides, in its place, what the
    link takes (`policies.core.script.OrderedResidency`).
    """

    scripted = 0

    def __init__(
        self,
        shape: Shape,
        partitions: Sequence[int],
        policy: Policy,
        one_scale: bool = False,
        sizes: Int | None = None,
        admission: Admission | None = None,
    ) -> None:
        if len(partitions) not in (1, shape.layers) or min(partitions) < 1:
            raise ValueError(f"a cache needs at least one slot for all layers or for each, not {tuple(partitions)}")
        self.policy = policy
        scored = isinstance(policy, ScorePolicy)
        self.one_scale = one_scale and scored
        self._total = shape.total
        self.keep = keep = policy.keep[:] if isinstance(policy, ScorePolicy) else np.zeros((KEEP_ROWS, shape.total))
        self.proposals = core.new_proposals(shape.total)
        declared = vars(type(policy)).get("compiled")  # a class that inherits it may write scores of its own
        in_order = scored and bool(declared and declared.in_order) and not policy.observes
        staging = (admission.options.staging or shape.top_k) if admission else 0
        self.m = m = core.new(shape.total, partitions, in_order, sizes, staging)
        self.slots = int(m[core.ONE, core.SLOTS])
        self._wanted, self._hits = memoryview(m[core.WANTED]), m[core.HITS]
        self._one = memoryview(m[core.ONE])
        self._scores = Held(Scores(keep))
        m[core.ONE, core.SCORES] = self._scores.address
        if scored:
            m[core.ONE, core.HOOKS] = dispatch.hooks_of(policy)
        self.propose: Callable[[Int, Float], None] = partial(core.propose, m, self.proposals)
        self.slot: Callable[[int], int] = memoryview(m[core.SLOT]).__getitem__
        self.land: Callable[[], None] = partial(core.land, m)
        self.interrupt: Callable[[], tuple[int, int]] = partial(core.interrupt, m, keep, self.proposals)
        self._stages = admission is not None
        if admission:
            m[core.ONE, core.ADMITTING] = admission.numbers
        self._asked: Asked | None = None
        if not scored:
            self._asked = Asked(self._answer, self.failed, self._instead)
            m[core.ONE, core.ASKED] = self._asked.address
            for place, method in HEARS.items():
                m[core.ONE, place] = getattr(type(policy), method) is not getattr(Policy, method)
            self._offered = partial(entry_point(core.offered, m, self.proposals, 0), m, self.proposals)
            self.interrupt = self._checked(self.interrupt)

    # What only a loop in Python calls is compiled when it asks for it

    @cached_property
    def arrived(self) -> Callable[[], bool]:
        """A transfer has ended, the one that landed first: return whether the event waits for its expert."""
        return partial(entry_point(core.arrived, self.m), self.m)

    @cached_property
    def next_transfer(self) -> Callable[[], tuple[int, int, bool]]:
        """Choose what the free link takes (rules 5 and 6): (expert, victim or NO_EXPERT, is it a prefetch).

        In place of an expert: NO_EXPERT where nothing is queued, BLOCKED where no slot is available.
        """
        given = self.m, self.keep, self.proposals, self.one_scale
        return self._checked(partial(entry_point(core.next_transfer, *given), *given))

    @cached_property
    def _look_up(self) -> Callable[[Int, int, int], int]:
        m, keep = self.m, self.keep
        return self._checked(partial(entry_point(core.route, m, keep, m[0], 0, 0), m, keep))

    def route(self, experts: Int) -> tuple[list[int], int]:
        """Look up the experts of an event, ascending ids (rules 1 and 2); the hits, and how many demands are queued."""
        if experts.dtype is not INT64 or not experts.flags.c_contiguous:  # the entry point does not look
            experts = np.ascontiguousarray(experts, np.int64)
        hits = self._look_up(experts, 0, len(experts))
        return self._hits[:hits].tolist(), self._one[core.LAST_DEMAND]

    def computed(self, expert: int) -> None:
        """The compute of `expert` in its event has ended: unpin it (rule 2); it leaves its staging slot (rule 21)."""
        self._wanted[expert] = 0
        if self._stages:
            core.computed(self.m, expert)

    def begin_step(self) -> None:
        """A step begins (rule 21)."""
        core.begin_step(self.m)

    def admit(self, experts: Int, named: Int) -> int:
        """Decide what becomes of an event's misses after rule 3 (rule 21). Return how many demands are queued now.

        experts: of the event, ascending; named: those that the policy itself admits.
        """
        core.admit(self.m, self.keep, self.proposals, experts, 0, len(experts), named)
        return self._one[core.LAST_DEMAND]

    def next_demand(self) -> int:
        """Return the queued demand that the link takes first, or NO_EXPERT."""
        return int(core.next_demand(self.m))

    def misses(self, experts: Int) -> list[int]:
        """Return which of an event's experts, ascending ids, a lookup would miss now."""
        found: list[int] = experts[self.m[core.STATE, experts] < core.LOADING].tolist()
        return found

    def place_on_host(self, experts: Sequence[int]) -> None:
        """Have misses of the next lookup computed on the host (rule 13)."""
        self.m[core.WANTED, list(experts)] = core.ON_HOST

    def host_memory(self, room: int) -> HostMemory:
        """Return a host memory of so much room below this one, over a disk (rule 17). Once, at the start."""
        return HostMemory(self.m, self.proposals, self._total, room)

    def end_request(self, cold: bool) -> None:
        """No request remains active: drop queued prefetches; `cold` empties the cache and frees the link (rule 10)."""
        core.clear_queue(self.m)
        if cold:
            core.empty_cache(self.m, self.keep)
            self.check()

    def awaited(self, expert: int) -> bool:
        """Return whether the current event looked `expert` up and has not computed it on the GPU yet."""
        return bool(self._wanted[expert] == core.ON_GPU)

    def counters(self) -> list[int]:
        """Return what was counted so far, by `sim.loop.log.COUNTERS`."""
        counts: list[int] = self.m[core.ONE, core.COUNTERS].tolist()
        return counts

    def is_staged(self, expert: int) -> bool:
        """Return whether `expert` is in a staging slot, or waits for one (rule 21)."""
        return self._stages and bool(self.m[core.PARTITION, expert] == self._one[core.STAGING])

    def is_prefetch(self, expert: int) -> bool:
        """Return whether `expert` came, or comes, by a prefetch and was not looked up since."""
        return bool(self.m[core.UNUSED, expert])

    @property
    def serial(self) -> int:
        return int(self.m[core.ONE, core.SERIAL])

    @property
    def asks(self) -> bool:
        """Whether it asks Python, which may raise what `check` raises."""
        return self._asked is not None

    @property
    def states(self) -> Int:
        """State of every expert (`policies.core.residency_compiled`): int64[L*E], a view."""
        states: Int = self.m[core.STATE, : self._total]
        return states

    def resident(self) -> Int:
        """Return ascending ids of the experts that hold a slot, those still LOADING included."""
        held = self.m[core.HELD, : self.slots]
        return np.sort(held[held != NO_EXPERT])

    def priority(self, expert: int) -> float:
        """Return the priority of the latest proposal that queued `expert`."""
        return float(self.proposals[self.m[core.ONE, core.PROPOSAL] & 1, expert])

    def waiting(self) -> tuple[int, int, int]:
        """Return how many demands and prefetches are queued, and how many transfers are under way or paused."""
        one = self.m[core.ONE]
        under_way = one[[core.LANDING, core.ACTIVE, core.PAUSED]] != NO_EXPERT
        demands = int(one[core.LAST_DEMAND] - one[core.NEXT_DEMAND])
        return demands, core.queued_prefetches(self.m, self.proposals), int(under_way.sum())

    def check(self) -> None:
        """Raise what a policy that names its victims has raised."""
        if self._asked:
            self._asked.check()

    def failed(self, failed: bool) -> None:
        """Note whether a policy in Python has raised an error."""
        self._one[core.FAILED] = failed

    def _checked(self, call: Callable[..., Any]) -> Callable[..., Any]:
        if not self._asked:
            return call

        def checked(*given: Any) -> Any:
            answer = call(*given)
            self.check()
            return answer

        return checked

    def _answer(self, question: int, expert: int) -> int | None:
        """Have the policy name its victim for `expert`, or hear of it."""
        policy, one = self.policy, self._one
        if question == VICTIM:
            offered = self._offered(self.m[core.PARTITION, expert])
            policy.on_need(expert)
            victim = policy.victim(offered)
            if victim not in offered:
                raise ValueError(f"policy {policy.name!r} named victim {victim}, which was not offered")
            return int(victim)
        if question == HIT:
            policy.on_hit(expert, one[core.SERIAL])
        elif question == INSERT:
            policy.on_insert(expert, one[core.SERIAL], one[core.STARTS])
        else:
            policy.on_evict(expert)
        return None

    def _instead(self, question: int, expert: int) -> int:
        """After an error of the policy: any victim."""
        return int(self._offered(self.m[core.PARTITION, expert])[0]) if question == VICTIM else 0
