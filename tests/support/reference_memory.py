"""The memories of the oracle `tests.reference`: what they hold, and what leaves them for what comes.

Rules 5 to 8 for GPU memory, rule 17 for host memory, rule 19 for both: written from docs/contract.md
alone, slow and obvious, importing nothing of this project.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

NEVER = 10**18

Case = dict[str, Any]


def bytes_of(case: Case, expert: int) -> int:
    """The bytes of an expert (rule 19: those of its layer)."""
    by_layer = case.get("layer_bytes")
    return int(by_layer[expert // case["E"]] if by_layer else case["expert_bytes"])


class Memory:
    """Room for experts, counted in slots or in bytes. An expert that is neither loading nor ready is ABSENT."""

    def __init__(self, case: Case, slots: int | None, capacity_bytes: int | None, partitions: list[int] | None) -> None:
        self.case = case
        self.slots, self.capacity_bytes, self.partitions = slots, capacity_bytes, partitions
        self.loading: set[int] = set()
        self.ready: set[int] = set()
        self.evictions: list[int] = []

    def size(self, expert: int) -> int:
        return 1 if self.capacity_bytes is None else bytes_of(self.case, expert)

    def share_room(self, one: int, other: int) -> bool:
        return self.partitions is None or one // self.case["E"] == other // self.case["E"]

    def free_for(self, expert: int) -> int:
        room = self.slots if self.capacity_bytes is None else self.capacity_bytes
        if self.partitions is not None:
            room = self.partitions[expert // self.case["E"]]
        assert room is not None
        return room - sum(self.size(other) for other in self.loading | self.ready if self.share_room(expert, other))

    def make_room(self, expert: int, candidates: Iterable[int]) -> bool:
        """Evict candidates in their order until `expert` has room; evict none if all of them are not enough."""
        missing = self.size(expert) - self.free_for(expert)
        victims = []
        for candidate in candidates:
            if missing > 0 and self.share_room(expert, candidate):
                victims.append(candidate)
                missing -= self.size(candidate)
        if missing > 0:
            return False
        for victim in victims:
            self.evictions.append(victim)
            self.leave(victim)
        return True

    def leave(self, expert: int) -> None:
        self.loading.discard(expert)
        self.ready.discard(expert)


class GpuMemory(Memory):
    """GPU memory with its eviction policy (rules 5 to 8)."""

    def __init__(self, case: Case) -> None:
        super().__init__(case, case.get("slots"), case.get("capacity_bytes"), case.get("partitions"))
        self.pinned: set[int] = set()
        self.unused_prefetch: set[int] = set()  # prefetched and not looked up since
        self.proposal: set[int] = set()  # the latest one, for protection
        self.bytes_wasted = 0
        self.staged: set[int] = set()  # rule 21: in the slots beside the cache
        self.staged_loading: set[int] = set()  # of these

        # The numbers that rule 8 speaks of.
        self.event_number = 0  # of the latest event, from 1
        self.transfer_number = 0
        self.last_lookup: dict[int, int] = {}
        self.recency: dict[int, int] = {}
        self.started: dict[int, int] = {}
        self.lookups: dict[int, int] = {}
        self.uses = uses_one_request_after_another(case)

    def observe(self, experts: Iterable[int], on_host: set[int]) -> None:
        """Rule 3. A lookup that is computed on the host is the last lookup, but not counted (rule 8)."""
        self.event_number += 1
        for expert in experts:
            self.last_lookup[expert] = self.recency[expert] = self.event_number
            if expert not in on_host:
                self.lookups[expert] = self.lookups.get(expert, 0) + 1

    def take_room(self, expert: int, priority: float | None) -> bool:
        """Whether there is room now for `expert`, if need be by evictions. A demand has no priority."""
        candidates, protected = self.may_leave()
        if priority is None:
            candidates += protected
        elif self.case.get("one_scale") and priority > -NEVER:
            candidates = [other for other in candidates if self.keep_score(other)[0] < priority]
        return self.make_room(expert, candidates)

    def may_leave(self) -> tuple[list[int], list[int]]:
        """Who is evictable, in order: what is not protected, and what is (rule 6)."""
        evictable = self.ready - self.pinned
        protected = evictable & self.unused_prefetch & self.proposal
        return self.in_order(evictable - protected), self.in_order(protected)

    def is_worth_its_slot(self, expert: int) -> bool:
        """Rule 21, `score`: there is room, or who would leave first for a demand of `expert` has a smaller score."""
        if self.free_for(expert) >= self.size(expert):
            return True
        unprotected, protected = self.may_leave()
        leaving = [other for other in unprotected + protected if self.share_room(expert, other)]
        return bool(leaving) and self.keep_score(expert) > self.keep_score(leaving[0])

    def has_staging_room(self, expert: int) -> bool:
        """Rule 21: whether a staging slot is free; under rule 19 the slots are bytes, each of the largest expert's."""
        slots = self.case.get("staging")
        if slots is None:
            requests = self.case["requests"]
            slots = max([1, *(len(event) for request in requests for step in request for event in step)])
        sized = self.capacity_bytes is not None
        room = slots * max(self.case["layer_bytes"]) if sized else slots
        return sum(map(self.size, self.staged)) + self.size(expert) <= room

    def in_order(self, experts: set[int]) -> list[int]:
        return sorted(experts, key=lambda expert: (self.keep_score(expert), expert))

    def keep_score(self, expert: int) -> tuple[int, ...]:
        if self.case["evict"] == "lru":
            return (self.recency[expert],)
        if self.case["evict"] == "fifo":
            return (self.started.get(expert, 0),)
        if self.case["evict"] == "lfu":
            return (self.lookups.get(expert, 0), self.last_lookup.get(expert, -1))
        next_uses = [number for number in self.uses.get(expert, []) if number > self.event_number]
        return (-min(next_uses, default=NEVER),)

    def start_loading(self, expert: int, prefetched: bool) -> None:
        self.loading.add(expert)
        self.transfer_number += 1
        self.started[expert] = self.transfer_number
        self.recency[expert] = self.event_number
        if prefetched:
            self.unused_prefetch.add(expert)

    def leave(self, expert: int) -> None:
        super().leave(expert)
        self.lookups[expert] = 0
        if expert in self.unused_prefetch:
            self.unused_prefetch.remove(expert)
            self.bytes_wasted += bytes_of(self.case, expert)


class HostMemory(Memory):
    """Host memory above a disk (rule 17): an expert that is READING is among the loading."""

    def __init__(self, case: Case) -> None:
        super().__init__(case, case.get("host_slots"), case.get("host_capacity_bytes"), None)
        self.serial = 0
        self.recency: dict[int, int] = {}

    def touch(self, expert: int) -> None:
        """A read, a link transfer or a host compute of `expert` starts."""
        self.serial += 1
        self.recency[expert] = self.serial

    def take_room(self, expert: int, kept: set[int]) -> bool:
        """Whether there is room now for `expert`, if need be by evictions of what is not `kept`."""
        return self.make_room(expert, sorted(self.ready - kept, key=lambda other: (self.recency[other], other)))


def uses_one_request_after_another(case: Case) -> dict[int, list[int]]:
    """For each expert the numbers of the events that use it, over the whole run."""
    uses: dict[int, list[int]] = {}
    number = 1
    for request in case["requests"]:
        for step in request:
            for layer, event in enumerate(step):
                for expert, _tokens in event:
                    uses.setdefault(layer * case["E"] + expert, []).append(number)
                number += 1
    return uses
