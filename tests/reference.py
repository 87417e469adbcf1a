"""An oracle for the engines: docs/contract.md, of residency and time, once more, slow and obvious.

Plain Python, written from the contract's text alone, importing nothing of this project: one heap of
events ordered by (time, kind, id, serial), where every end of compute and every chunk is an event
of its own. `run_case` answers a case of the conformance format with its result and the five parts
of the stall. Beyond the format, for fuzzing: evict "belady", one_scale (rule 6's end, by the first
part of a score), prefetch "scripted" with `proposals`: for each event its [id, priority] pairs, and
`partitions`: the slots of each layer, where layers share none; else all layers share `slots`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TRANSFER, COMPUTE, ROUTER = 0, 1, 2  # rule 15: the order of kinds within one nanosecond
PREDICTOR_RUNS, DEMAND_LOADS, LATE_LOADS, BEHIND_PREFETCH, NO_SLOT = range(5)
NEVER = 10**18


@dataclass
class Transfer:
    expert: int
    prefetched: bool  # what started it, for its bytes
    late: bool = False  # a prefetch that was looked up on its way
    moved: int = 0  # bytes

    @property
    def interruptible(self) -> bool:
        return self.prefetched and not self.late


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """The result of a case, and under `stalls` its stall by cause."""
    return Reference(case).run()


class Reference:
    def __init__(self, case: dict[str, Any]) -> None:
        self.case = case
        self.L, self.E = case["L"], case["E"]

        self.now = 0
        self.serial = 0
        self.heap: list[tuple[int, int, int, int, Callable[..., None], tuple[Any, ...]]] = []

        # Residency. An expert in none of these is ABSENT; QUEUED is in demands or prefetches.
        self.loading: set[int] = set()
        self.ready: set[int] = set()
        self.pinned: set[int] = set()
        self.unused_prefetch: set[int] = set()  # prefetched and not looked up since
        self.proposal: set[int] = set()  # the latest one, for protection

        # The link: at most one transfer moves and at most one prefetch is paused.
        self.demands: list[int] = []
        self.prefetches: list[tuple[float, int]] = []  # (-priority, expert), best first
        self.moving: Transfer | None = None
        self.paused: Transfer | None = None

        # The compute stream: what it does now, and the experts of the event.
        self.stream = "idle"
        self.tokens: dict[int, int] = {}
        self.to_compute: list[int] = []  # pinned, in the order of their compute
        self.awaited: set[int] = set()  # looked up, not READY yet

        # Where the run is, and the numbers that rule 8 speaks of.
        self.request = self.step = self.layer = 0
        self.event_number = 0  # of the latest event, from 1
        self.transfer_number = 0
        self.last_lookup: dict[int, int] = {}
        self.recency: dict[int, int] = {}
        self.started: dict[int, int] = {}
        self.lookups: dict[int, int] = {}
        self.events_used: dict[int, int] = {}  # the popular prefetcher's counts
        self.uses = self.future_uses()

        self.step_start = 0
        self.busy = 0
        self.stalls = [0] * 5
        self.result: dict[str, Any] = {
            "token_ns": [],
            "hits": 0,
            "late": 0,
            "misses": 0,
            "bytes_demand": 0,
            "bytes_prefetch": 0,
            "bytes_wasted": 0,
            "evictions": [],
        }

    def run(self) -> dict[str, Any]:
        self.begin_dense()
        while self.heap:
            time, _kind, _id, _serial, handle, arguments = heapq.heappop(self.heap)
            self.count_stall(time - self.now)
            self.now = time
            handle(*arguments)
            if self.request == len(self.case["requests"]):
                break  # the run ends with the last head
            self.use_link()
        stall = sum(self.result["token_ns"]) - self.busy
        return {**self.result, "stall_ns": stall, "stalls": self.stalls}

    def at(self, delay: int, kind: int, id: int, handle: Callable[..., None], *arguments: Any) -> None:
        self.serial += 1
        heapq.heappush(self.heap, (self.now + delay, kind, id, self.serial, handle, arguments))

    def count_stall(self, elapsed: int) -> None:
        if self.stream == "predictor":
            self.stalls[PREDICTOR_RUNS] += elapsed
        elif self.stream == "idle":
            if self.moving is None:
                cause = NO_SLOT
            elif not self.moving.prefetched:
                cause = DEMAND_LOADS
            else:
                cause = LATE_LOADS if self.moving.late else BEHIND_PREFETCH
            self.stalls[cause] += elapsed

    # The compute stream (rule 11)

    def compute(self, what: str, duration: int, handle: Callable[..., None], *arguments: Any) -> None:
        self.stream = what
        if what != "predictor":
            self.busy += duration
        kind = ROUTER if what == "dense" else COMPUTE
        self.at(duration, kind, arguments[0] if arguments else 0, handle, *arguments)

    def begin_dense(self) -> None:
        self.compute("dense", self.case["dense_ns"], self.on_router)

    def compute_next(self) -> None:
        """The event's next expert, or combine after its last, or nothing while experts are awaited."""
        if self.to_compute:
            expert = self.to_compute.pop(0)
            duration = self.case["expert_ns"] + self.tokens[expert] * self.case["expert_ns_per_token"]
            self.compute("expert", duration, self.on_expert_end, expert)
        elif self.awaited:
            self.stream = "idle"
        else:
            self.compute("combine", self.case["combine_ns"], self.on_combine_end)

    def on_expert_end(self, expert: int) -> None:
        self.pinned.remove(expert)
        self.compute_next()

    def on_combine_end(self) -> None:
        if self.layer + 1 < self.L:
            self.layer += 1
            self.begin_dense()
        else:
            self.compute("head", self.case["head_ns"], self.on_head_end)

    def on_head_end(self) -> None:
        self.result["token_ns"].append(self.now - self.step_start)
        self.step_start = self.now
        self.layer = 0
        self.step += 1
        if self.step == len(self.case["requests"][self.request]):
            self.step = 0
            self.request += 1
            if self.request == len(self.case["requests"]):
                return
            self.prefetches = []
            if self.case["cold"]:
                self.make_cold()
        self.begin_dense()

    # The router (rules 1 to 4)

    def on_router(self) -> None:
        event = self.case["requests"][self.request][self.step][self.layer]
        self.tokens = {self.layer * self.E + expert: tokens for expert, tokens in event}
        self.look_up(sorted(self.tokens))
        self.observe(sorted(self.tokens))
        proposal = self.ask_prefetcher()
        if self.case["predictor_ns"] > 0:
            self.compute("predictor", self.case["predictor_ns"], self.on_predictor_end, proposal)
        else:
            self.queue_prefetches(proposal)
            self.compute_next()

    def on_predictor_end(self, proposal: list[tuple[int, float]]) -> None:
        self.queue_prefetches(proposal)
        self.compute_next()

    def look_up(self, experts: list[int]) -> None:
        for expert in experts:
            if expert in self.ready:
                self.result["hits"] += 1
                self.pinned.add(expert)
                self.to_compute.append(expert)
            elif expert in self.loading:
                self.result["late"] += 1
                self.awaited.add(expert)
                for transfer in (self.moving, self.paused):
                    if transfer is not None and transfer.expert == expert:
                        transfer.late = True
            else:
                self.result["misses"] += 1
                self.awaited.add(expert)
                self.demands.append(expert)
                self.prefetches = [queued for queued in self.prefetches if queued[1] != expert]
            self.unused_prefetch.discard(expert)

    def observe(self, experts: list[int]) -> None:
        self.event_number += 1
        for expert in experts:
            self.last_lookup[expert] = self.recency[expert] = self.event_number
            self.lookups[expert] = self.lookups.get(expert, 0) + 1
            self.events_used[expert] = self.events_used.get(expert, 0) + 1

    def ask_prefetcher(self) -> list[tuple[int, float]]:
        if self.case["prefetch"] == "scripted":
            script = self.case["proposals"][self.request][self.step][self.layer]
            return [(expert, priority) for expert, priority in script]
        if self.case["prefetch"] == "none" or self.layer + 1 == self.L:
            return []
        first = (self.layer + 1) * self.E
        if self.case["prefetch"] == "oracle1":
            event = self.case["requests"][self.request][self.step][self.layer + 1]
            return [(first + expert, 1.0) for expert, _tokens in event]
        used = [expert for expert in range(first, first + self.E) if self.events_used.get(expert, 0) > 0]
        used.sort(key=lambda expert: (-self.events_used[expert], expert))
        return [(expert, self.events_used[expert]) for expert in used[: self.case["popular_n"]]]

    def queue_prefetches(self, proposal: list[tuple[int, float]]) -> None:
        self.proposal = {expert for expert, _priority in proposal}
        known = self.ready | self.loading | set(self.demands)
        self.prefetches = sorted((-priority, expert) for expert, priority in proposal if expert not in known)

    # The link (rules 5 and 12)

    def use_link(self) -> None:
        """Let a free link take what comes first, if a slot is to be had for it."""
        if self.moving is not None:
            return
        late = self.paused is not None and self.paused.late
        if self.demands and not late and self.take_slot(self.demands[0], None):
            self.start_transfer(Transfer(self.demands.pop(0), prefetched=False))
        elif self.paused is not None:
            self.moving, self.paused = self.paused, None
            self.move_chunk()
        elif not self.demands:
            for queued in self.prefetches:  # the best that can have a slot
                if self.take_slot(queued[1], -queued[0]):
                    self.prefetches.remove(queued)
                    self.start_transfer(Transfer(queued[1], prefetched=True))
                    break

    def start_transfer(self, transfer: Transfer) -> None:
        expert = transfer.expert
        self.moving = transfer
        self.loading.add(expert)
        self.transfer_number += 1
        self.started[expert] = self.transfer_number
        self.recency[expert] = self.event_number
        if transfer.prefetched:
            self.unused_prefetch.add(expert)
        self.result["bytes_prefetch" if transfer.prefetched else "bytes_demand"] += self.case["expert_bytes"]
        self.move_chunk()

    def move_chunk(self) -> None:
        transfer = self.moving
        assert transfer is not None
        before = self.link_ns(transfer.moved)
        chunk = self.case["chunk_bytes"] or self.case["expert_bytes"]
        transfer.moved = min(transfer.moved + chunk, self.case["expert_bytes"])
        self.at(self.link_ns(transfer.moved) - before, TRANSFER, transfer.expert, self.on_chunk_end, transfer)

    def link_ns(self, moved: int) -> int:
        if moved == 0:
            return 0
        num, den = self.case["link_ns_per_byte_num"], self.case["link_ns_per_byte_den"]
        return int(self.case["link_latency_ns"] + -(-moved * num // den))

    def on_chunk_end(self, transfer: Transfer) -> None:
        if transfer is not self.moving:
            return  # discarded by --cold
        if transfer.moved < self.case["expert_bytes"]:
            if transfer.interruptible:
                self.moving, self.paused = None, transfer
            else:
                self.move_chunk()
            return
        self.moving = None
        self.loading.remove(transfer.expert)
        self.ready.add(transfer.expert)
        if transfer.expert in self.awaited:
            self.awaited.remove(transfer.expert)
            self.pinned.add(transfer.expert)
            self.to_compute.append(transfer.expert)
            if self.stream == "idle":
                self.compute_next()

    # Slots and victims (rules 5 to 8)

    def share_slots(self, one: int, other: int) -> bool:
        return self.case.get("partitions") is None or one // self.E == other // self.E

    def take_slot(self, expert: int, priority: float | None) -> bool:
        """Whether a slot is free now for `expert`, if need be by an eviction. A demand has no priority."""
        partitions = self.case.get("partitions")
        slots = self.case["slots"] if partitions is None else partitions[expert // self.E]
        if sum(self.share_slots(expert, other) for other in self.ready | self.loading) < slots:
            return True
        evictable = {other for other in self.ready - self.pinned if self.share_slots(expert, other)}
        protected = evictable & self.unused_prefetch & self.proposal
        candidates = evictable - protected
        if priority is None and not candidates:
            candidates = protected
        if not candidates:
            return False
        victim = min(candidates, key=lambda expert: (self.keep_score(expert), expert))
        one_scale = self.case.get("one_scale", False)
        if one_scale and priority is not None and self.keep_score(victim)[0] >= priority:
            return False
        self.result["evictions"].append(victim)
        self.leave_cache(victim)
        return True

    def keep_score(self, expert: int) -> tuple[int, ...]:
        if self.case["evict"] == "lru":
            return (self.recency[expert],)
        if self.case["evict"] == "fifo":
            return (self.started[expert],)
        if self.case["evict"] == "lfu":
            return (self.lookups.get(expert, 0), self.last_lookup.get(expert, -1))
        next_uses = [number for number in self.uses.get(expert, []) if number > self.event_number]
        return (-min(next_uses, default=NEVER),)

    def future_uses(self) -> dict[int, list[int]]:
        """For each expert the numbers of the events that use it, over the whole run."""
        uses: dict[int, list[int]] = {}
        number = 1
        for request in self.case["requests"]:
            for step in request:
                for layer, event in enumerate(step):
                    for expert, _tokens in event:
                        uses.setdefault(layer * self.E + expert, []).append(number)
                    number += 1
        return uses

    def leave_cache(self, expert: int) -> None:
        self.ready.discard(expert)
        self.loading.discard(expert)
        self.lookups[expert] = 0
        if expert in self.unused_prefetch:
            self.unused_prefetch.remove(expert)
            self.result["bytes_wasted"] += self.case["expert_bytes"]

    def make_cold(self) -> None:
        for expert in self.ready | self.loading:
            self.leave_cache(expert)
        self.moving = self.paused = None
