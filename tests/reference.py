"""An oracle for the engines: docs/contract.md, of residency and time, once more, slow and obvious.

Plain Python, written from the contract's text alone, importing nothing of this project but its own two
parts, of memories and of users: one heap of events ordered by (time, kind, id, serial), where every end
of compute and every chunk is an event of its own. `run_case` answers a case of the conformance format
(docs/cases.md) with its result, and with `stalls`: the stall by cause, in the order of CAUSES.

Beyond the format a case may have, for fuzzing:
- evict "belady" (only without `max_batch`), and one_scale (rule 6's end, by the first part of a score);
- prefetch "scripted" with `proposals`: for each event its [id, priority] pairs; in a batch those of all
  its requests, an expert at the highest of its priorities; with `at_start` one more a step, made when it starts;
- `partitions`: the slots of each layer, where layers share none; else all layers share `slots`;
- `admission`, with `window`, `insert_cap` and `staging` (rule 21; by default as many slots as the most
  experts of an event of one request); `own` admits even ids;
- placement "layers": the misses of the first `host_layers` layers are computed on the host;
- `bent`: a rule that bends the routing (rule 22, `tests.support.reference_bent`);
- `layer_bytes`, `capacity_bytes` and `host_capacity_bytes` (rule 19), in place of `expert_bytes`,
  `slots` and `host_slots`. Of prefetches (and of reads for them) the best that can have room is taken.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.support.reference_batch import Batch
from tests.support.reference_bent import Bent
from tests.support.reference_memory import GpuMemory, HostMemory, bytes_of

LINK, DISK, COMPUTE, HOST, ROUTER, WAKE_UP = range(6)  # rule 15: the order of kinds within one nanosecond
CAUSES = ("predictor", "demand", "late", "behind_prefetch", "disk", "host", "slot")


@dataclass
class Transfer:
    expert: int
    bytes: int
    prefetched: bool  # what started it, for its bytes
    copy: bool = False  # in the background (rule 21): as a prefetch on the link
    late: bool = False  # a prefetch that was looked up on its way
    moved: int = 0  # bytes, at the end of the present chunk
    chunk_end: int = 0  # time

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

        # An expert that is neither LOADING nor READY in GPU memory is QUEUED if it is in demands or prefetches.
        self.gpu = GpuMemory(case)
        disk = case.get("host_slots") is not None or case.get("host_capacity_bytes") is not None
        self.host_memory = HostMemory(case) if disk else None

        # The link: at most one transfer moves and at most one prefetch is paused.
        self.demands: list[int] = []
        self.prefetches: list[tuple[float, int]] = []  # (-priority, expert), best first
        self.moving: Transfer | None = None
        self.paused: Transfer | None = None

        # Admission.
        self.step_number = 0
        self.missed_in: dict[int, int] = {}  # the step of each expert's last miss
        self.bypassed: set[int] = set()  # fetched and not admitted, not computed yet
        self.copies: list[int] = []  # in the background, in order
        self.copies_started = 0  # in the step

        # The disk.
        self.demanded_reads: list[int] = []  # in order; also the one under way, until it is READY
        self.reading: int | None = None

        # The compute stream: what it does now, and the experts of the event.
        self.stream = "off"
        self.tokens: dict[int, int] = {}
        self.to_compute: list[int] = []  # pinned, in the order of their compute
        self.awaited: set[int] = set()  # looked up, to be computed here, not READY yet

        # The host stream.
        self.host_stream = "free"
        self.on_host: set[int] = set()  # placed there, not computed yet
        self.to_compute_on_host: list[int] = []  # of these the ones in host memory, in the order of their compute

        # Where the run is.
        self.batch = Batch(case)
        self.bent = Bent(case) if case.get("bent") else None
        self.layer = 0
        self.step_start = 0
        self.events_used: dict[int, int] = {}  # the popular prefetcher's counts

        self.step_ns = self.busy_ns = 0
        self.stalls = dict.fromkeys(CAUSES, 0)
        counted = ("hits", "late", "misses", "on_host", "bytes_demand", "bytes_prefetch", "reads_demand")
        self.counts = dict.fromkeys((*counted, "reads_prefetch"), 0)
        self.admits = case.get("admission") not in (None, "always")
        if self.admits:
            self.counts |= dict.fromkeys(("admitted", "bypassed", "copied_bytes"), 0)

    def run(self) -> dict[str, Any]:
        self.next_step()
        self.use_link()
        self.use_disk()
        while not self.batch.is_over():  # the run ends with the last head
            time, _kind, _id, _serial, handle, arguments = heapq.heappop(self.heap)
            self.count_stall(time - self.now)
            self.now = time
            handle(*arguments)
            self.use_link()
            self.use_disk()
            self.use_compute()
            self.use_host()
        return {
            **self.counts,
            "token_ns": [latency for tokens in self.batch.token_ns for latency in tokens],
            "wait_ns": None if self.case.get("max_batch") is None else self.batch.wait_ns,
            "bytes_wasted": self.gpu.bytes_wasted,
            "evictions": self.gpu.evictions,
            "host_evictions": self.host_memory.evictions if self.host_memory else [],
            "end_ns": self.now,
            "stall_ns": self.step_ns - self.busy_ns,
            "stalls": list(self.stalls.values()),
            **({"bent": self.bent.counts} if self.bent else {}),
        }

    def given(self, key: str) -> int:
        """A number of the case, 0 where it is absent."""
        return int(self.case.get(key) or 0)

    def at(self, delay: int, kind: int, id: int, handle: Callable[..., None], *arguments: Any) -> None:
        self.serial += 1
        heapq.heappush(self.heap, (self.now + delay, kind, id, self.serial, handle, arguments))

    def count_stall(self, elapsed: int) -> None:
        if self.stream in ("predictor", "waiting"):
            self.stalls[self.cause_of_stall()] += elapsed

    def cause_of_stall(self) -> str:
        """The first that holds."""
        if self.stream == "predictor":
            return "predictor"
        if self.moving is not None and not self.moving.prefetched:
            return "demand"
        if self.moving is not None and self.moving.late:
            return "late"
        if self.moving is not None and any(self.is_below(expert) for expert in self.demands):
            return "behind_prefetch"
        if self.demanded_reads:
            return "disk"
        if self.host_stream != "free":
            return "host"
        return "slot"

    # Steps and requests (rules 10 and 18)

    def next_step(self) -> None:
        self.batch.admit(self.now)
        if self.batch.stepping:
            self.step_start = self.now
            self.step_number += 1
            self.copies_started = 0
            self.layer = 0
            self.begin_dense()
            if self.case.get("at_start"):
                self.queue(self.scripted(-1))
        elif self.batch.waiting:
            self.stream = "off"
            self.at(self.batch.next_arrival() - self.now, WAKE_UP, 0, self.next_step)

    def on_head_end(self) -> None:
        self.step_ns += self.now - self.step_start
        self.batch.end_step(self.now)
        if not self.batch.active:
            self.prefetches = []
            if self.case["cold"] and self.batch.waiting:
                self.make_cold()
        self.next_step()

    def make_cold(self) -> None:
        for expert in self.gpu.loading | self.gpu.ready:
            self.gpu.leave(expert)
        if self.host_memory is not None:
            for expert in self.host_memory.loading | self.host_memory.ready:
                self.host_memory.leave(expert)
        self.copies = []
        self.moving = self.paused = self.reading = None
        self.heap = [event for event in self.heap if event[1] not in (LINK, DISK)]
        heapq.heapify(self.heap)

    # The compute stream (rule 11)

    def compute(self, what: str, duration: int, handle: Callable[..., None], *arguments: Any) -> None:
        self.stream = what
        if what != "predictor":
            self.busy_ns += duration
        kind = ROUTER if what == "dense" else COMPUTE
        self.at(duration, kind, arguments[0] if what == "expert" else 0, handle, *arguments)

    def begin_dense(self) -> None:
        self.compute("dense", self.case["dense_ns"], self.on_router)

    def use_compute(self) -> None:
        """Let a free stream take the event's next expert, or combine after all of them."""
        if self.stream != "waiting":
            return
        if self.to_compute:
            expert = self.to_compute.pop(0)
            self.compute("expert", self.expert_ns(expert), self.on_expert_end, expert)
        elif not self.awaited and not self.on_host:
            self.compute("combine", self.case["combine_ns"], self.on_combine_end)

    def expert_ns(self, expert: int) -> int:
        return int(self.case["expert_ns"] + self.tokens[expert] * self.case["expert_ns_per_token"])

    def on_expert_end(self, expert: int) -> None:
        if expert in self.bypassed:
            self.bypassed.remove(expert)
            self.gpu.staged.remove(expert)
        else:
            self.gpu.pinned.remove(expert)
        self.stream = "waiting"

    def on_combine_end(self) -> None:
        if self.layer + 1 < self.L:
            self.layer += 1
            self.begin_dense()
        else:
            self.compute("head", self.case["head_ns"], self.on_head_end)

    # The router (rules 1 to 4, 13 and 14)

    def on_router(self) -> None:
        self.tokens = {self.layer * self.E + expert: tokens for expert, tokens in self.event().items()}
        experts = sorted(self.tokens)
        misses = self.look_up(experts)
        self.on_host = self.placed_on_host(misses)
        self.gpu.observe(experts, self.on_host)
        if self.admits:
            self.admit(misses)
        self.demand(misses)
        for expert in experts:
            self.events_used[expert] = self.events_used.get(expert, 0) + 1
        proposal = self.ask_prefetcher()
        if self.case["predictor_ns"] > 0:
            self.compute("predictor", self.case["predictor_ns"], self.on_proposal, proposal)
        else:
            self.on_proposal(proposal)

    def event(self) -> dict[int, int]:
        """The experts of the present step and layer, bent by those that are READY or LOADING (rule 22)."""
        if self.bent is None:
            return self.batch.event(self.layer)
        there, first = self.gpu.ready | self.gpu.loading, self.layer * self.E
        steps = [(request, self.batch.steps_done[request]) for request in self.batch.stepping]
        return self.bent.event(self.layer, steps, {expert - first for expert in there})

    def look_up(self, experts: list[int]) -> list[int]:
        """The misses, in ascending id."""
        misses = []
        self.copies = [copy for copy in self.copies if copy not in experts]
        for expert in experts:
            if expert in self.gpu.ready:
                self.counts["hits"] += 1
                self.gpu.pinned.add(expert)
                self.to_compute.append(expert)
            elif expert in self.gpu.loading:
                self.counts["late"] += 1
                self.awaited.add(expert)
                for transfer in (self.moving, self.paused):
                    if transfer is not None and transfer.expert == expert:
                        transfer.late = True
            else:
                self.counts["misses"] += 1
                misses.append(expert)
            self.gpu.unused_prefetch.discard(expert)
        return misses

    def placed_on_host(self, misses: list[int]) -> set[int]:
        """Those of the misses that are computed on the host (rule 13)."""
        placement = self.case.get("placement") or "fetch"
        if placement == "split":
            return self.split(misses)
        if placement == "host" or (placement == "layers" and self.layer < self.case["host_layers"]):
            return set(misses)
        return set()

    def split(self, misses: list[int]) -> set[int]:
        on_host = set()
        link_ready = self.now
        if self.moving is not None:
            link_ready = self.moving.chunk_end
            if not self.moving.interruptible:
                link_ready += self.link_ns(self.moving.bytes) - self.link_ns(self.moving.moved)
        host_ready = self.now + self.given("hop_ns")
        for expert in misses:
            transfer_ns = self.link_ns(bytes_of(self.case, expert))
            if host_ready + self.host_ns(expert) < link_ready + transfer_ns + self.expert_ns(expert):
                on_host.add(expert)
                host_ready += self.host_ns(expert)
            else:
                link_ready += transfer_ns
        return on_host

    def demand(self, misses: list[int]) -> None:
        """Ask for what the misses need: a transfer or host compute, and a read where they are not in host memory."""
        fetched = [expert for expert in misses if expert not in self.on_host]
        self.awaited.update(fetched)
        self.demands += fetched
        self.prefetches = [queued for queued in self.prefetches if queued[1] not in fetched]
        self.demanded_reads = [expert for expert in misses if not self.is_below(expert)]
        self.counts["on_host"] += len(self.on_host)
        self.to_compute_on_host = [expert for expert in sorted(self.on_host) if self.is_below(expert)]
        if self.on_host and self.given("hop_ns") > 0:
            self.host_stream = "hop"
            self.at(self.given("hop_ns"), HOST, 0, self.on_hop_end)

    def admit(self, misses: list[int]) -> None:
        """Rule 21: what becomes of each miss."""
        for expert in misses:
            admitted = self.is_admitted(expert)
            self.missed_in[expert] = self.step_number
            self.counts["admitted" if admitted else "bypassed"] += 1
            if expert in self.on_host and admitted:
                self.copies.append(expert)
            elif expert not in self.on_host and not admitted:
                (self.on_host if self.case.get("placement") == "admitted" else self.bypassed).add(expert)

    def is_admitted(self, expert: int) -> bool:
        if self.case["admission"] == "second":
            missed = self.missed_in.get(expert)
            return missed is not None and self.step_number - missed <= self.case["window"]
        if self.case["admission"] == "own":
            return expert % 2 == 0
        return self.case["admission"] == "score" and self.gpu.is_worth_its_slot(expert)

    def ask_prefetcher(self) -> list[tuple[int, float]]:
        if self.case["prefetch"] == "scripted":
            return self.scripted(self.layer)
        if self.case["prefetch"] == "none" or self.layer + 1 == self.L:
            return []
        first = (self.layer + 1) * self.E
        if self.case["prefetch"] == "oracle1":
            return [(first + expert, 1.0) for expert in self.batch.event(self.layer + 1)]
        used = [expert for expert in range(first, first + self.E) if self.events_used.get(expert, 0) > 0]
        used.sort(key=lambda expert: (-self.events_used[expert], expert))
        return [(expert, self.events_used[expert]) for expert in used[: self.case["popular_n"]]]

    def scripted(self, layer: int) -> list[tuple[int, float]]:
        highest: dict[int, float] = {}
        for request in self.batch.stepping:
            for expert, priority in self.case["proposals"][request][self.batch.steps_done[request]][layer]:
                highest[expert] = max(priority, highest.get(expert, priority))
        return list(highest.items())

    def on_proposal(self, proposal: list[tuple[int, float]]) -> None:
        """At the router or when the predictor ends; then the experts are computed."""
        self.queue(proposal)
        self.stream = "waiting"

    def queue(self, proposal: list[tuple[int, float]]) -> None:
        """In place of all prefetches that have not started."""
        self.gpu.proposal = {expert for expert, _priority in proposal}
        known = self.gpu.ready | self.gpu.loading | self.gpu.staged | set(self.demands)
        self.prefetches = sorted((-priority, expert) for expert, priority in proposal if expert not in known)

    # The link (rules 5, 12 and 17)

    def is_below(self, expert: int) -> bool:
        """Whether the link can take `expert` and the host compute it: READY in host memory, if that is limited."""
        return self.host_memory is None or expert in self.host_memory.ready

    def use_link(self) -> None:
        """Let a free link take what comes first, if there is room for it."""
        if self.moving is not None:
            return
        late = self.paused is not None and self.paused.late
        demand = min((expert for expert in self.demands if self.is_below(expert)), default=None)
        if demand is not None and not late and self.has_room(demand):
            self.demands.remove(demand)
            self.start_transfer(demand, prefetched=False)
        elif self.paused is not None:
            self.moving, self.paused = self.paused, None
            self.move_chunk(self.moving)
        elif demand is None and not self.start_copy():
            for queued in self.prefetches:  # the best that can have room
                if self.is_below(queued[1]) and self.gpu.take_room(queued[1], -queued[0]):
                    self.prefetches.remove(queued)
                    self.start_transfer(queued[1], prefetched=True)
                    break

    def has_room(self, demand: int) -> bool:
        if demand in self.bypassed:
            return self.gpu.has_staging_room(demand)
        return self.gpu.take_room(demand, None)

    def start_copy(self) -> bool:
        """Start the first background copy that can have room, if the step may start one more."""
        cap = self.case.get("insert_cap")
        if cap is not None and self.copies_started >= cap:
            return False
        for expert in self.copies:
            if self.is_below(expert) and self.gpu.take_room(expert, -float("inf")):
                self.copies_started += 1
                self.prefetches = [queued for queued in self.prefetches if queued[1] != expert]
                self.start_transfer(expert, prefetched=True, copy=True)
                return True
        return False

    def start_transfer(self, expert: int, prefetched: bool, copy: bool = False) -> None:
        self.moving = Transfer(expert, bytes_of(self.case, expert), prefetched, copy)
        self.copies = [queued for queued in self.copies if queued != expert]
        if expert in self.bypassed:
            self.gpu.staged.add(expert)
            self.gpu.staged_loading.add(expert)
        else:
            self.gpu.start_loading(expert, prefetched and not copy)
        if self.host_memory is not None:
            self.host_memory.touch(expert)
        counted = "copied_bytes" if copy else "bytes_prefetch" if prefetched else "bytes_demand"
        self.counts[counted] += self.moving.bytes
        self.move_chunk(self.moving)

    def move_chunk(self, transfer: Transfer) -> None:
        before = self.link_ns(transfer.moved)
        chunk = self.case["chunk_bytes"] or transfer.bytes
        transfer.moved = min(transfer.moved + chunk, transfer.bytes)
        duration = self.link_ns(transfer.moved) - before
        transfer.chunk_end = self.now + duration
        self.at(duration, LINK, transfer.expert, self.on_chunk_end, transfer)

    def link_ns(self, moved: int) -> int:
        if moved == 0:
            return 0
        num, den = self.case["link_ns_per_byte_num"], self.case["link_ns_per_byte_den"]
        return int(self.case["link_latency_ns"] + -(-moved * num // den))

    def on_chunk_end(self, transfer: Transfer) -> None:
        if transfer.moved == transfer.bytes:
            self.moving = None
            self.on_transfer_end(transfer.expert)
        elif transfer.interruptible:
            self.moving, self.paused = None, transfer
        else:
            self.move_chunk(transfer)

    def on_transfer_end(self, expert: int) -> None:
        if expert in self.bypassed:
            self.gpu.staged_loading.remove(expert)
            self.awaited.remove(expert)
            self.to_compute.append(expert)
            return
        self.gpu.loading.remove(expert)
        self.gpu.ready.add(expert)
        if expert in self.awaited:
            self.awaited.remove(expert)
            self.gpu.pinned.add(expert)
            self.to_compute.append(expert)
        elif expert in self.on_host:
            self.gpu.pinned.add(expert)

    # The disk (rule 17)

    def use_disk(self) -> None:
        """Let a free disk take the first demanded read, else the best read for a queued prefetch, if it has room."""
        memory = self.host_memory
        if memory is None or self.reading is not None:
            return
        pinned = set(self.demands) | self.on_host | self.gpu.loading | self.gpu.staged_loading
        if self.demanded_reads:
            if memory.take_room(self.demanded_reads[0], pinned):
                self.start_read(memory, self.demanded_reads[0], "reads_demand")
            return
        queued = [expert for _priority, expert in self.prefetches]
        for expert in queued:
            if expert not in memory.ready and memory.take_room(expert, pinned | set(queued)):
                self.start_read(memory, expert, "reads_prefetch")
                break

    def start_read(self, memory: HostMemory, expert: int, counted: str) -> None:
        self.reading = expert
        self.counts[counted] += 1
        memory.loading.add(expert)
        memory.touch(expert)
        num, den = self.given("disk_ns_per_byte_num"), self.given("disk_ns_per_byte_den") or 1
        read_ns = self.given("disk_latency_ns") + -(-bytes_of(self.case, expert) * num // den)
        self.at(read_ns, DISK, expert, self.on_read_end, memory, expert)

    def on_read_end(self, memory: HostMemory, expert: int) -> None:
        self.reading = None
        memory.loading.remove(expert)
        memory.ready.add(expert)
        if expert in self.demanded_reads:
            self.demanded_reads.remove(expert)
            if expert in self.on_host:
                self.to_compute_on_host.append(expert)

    # The host stream (rule 13)

    def use_host(self) -> None:
        if self.host_stream == "free" and self.to_compute_on_host:
            expert = self.to_compute_on_host.pop(0)
            self.host_stream = "computing"
            if self.host_memory is not None:
                self.host_memory.touch(expert)
            self.at(self.host_ns(expert), HOST, expert, self.on_host_end, expert)

    def host_ns(self, expert: int) -> int:
        return self.given("host_ns") + self.tokens[expert] * self.given("host_ns_per_token")

    def on_hop_end(self) -> None:
        self.host_stream = "free"

    def on_host_end(self, expert: int) -> None:
        self.host_stream = "free"
        self.on_host.remove(expert)
        self.gpu.pinned.discard(expert)
