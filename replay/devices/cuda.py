"""The CUDA device: registered host memory, one copy stream, one compute stream, polled by the driver's own thread.

Nothing but transfers is copied to the device, and nothing is allocated in a run. Compute waits, on the device, for the
event behind an expert's last piece; a slot is taken again only when its last use was seen to have ended. Dense parts,
combine and head are a CUDA graph each, small experts at hand one fused kernel, others matmuls on views of their slots.
Only dense parts and heads, which the host awaits, have an event at once; other work when somebody asks for its end.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import torch

from replay.devices.gpu import Event, Gpu, Stream, Task
from replay.devices.store import HostStore
from replay.devices.waiting import WATCHDOG_S, stuck, timed
from replay.model.dense import Weights
from replay.model.network import Network, Operands
from sim.loop.device import Completion, Device, Kind, Work, nothing_under_way

TAIL_BYTES = 2 << 20
"""What a PCIe 5.0 x16 link moves in 40 us, in which the host answers; more would be chosen earlier than need be."""

Fused = Callable[[torch.Tensor, Sequence[int]], object]
"""From the pool (uint8[slots, stride]), the experts in these slots on one token, in one go."""


class Launches:
    """Of one network on one GPU. A dense part has a graph for each bucket of context lengths."""

    def __init__(self, gpu: Gpu, network: Network) -> None:
        self._gpu = gpu
        self._network = network
        self._dense: dict[tuple[int, int], Task] = {}  # layer, bucket
        self.combine: Task = partial(network.combine, 1)
        self.head: Task = partial(network.head, 1)
        self.fallbacks: list[str] = []  # why something is launched kernel by kernel that should not be
        try:
            self.experts = fused(network)
        except Exception as error:  # Triton's own are many: its compiler's, its driver's
            self.experts = None
            self.fallbacks.append(f"no fused kernel: {type(error).__name__}: {' '.join(str(error).split())[:300]}")

    def prepare(self, contexts: Iterable[int]) -> None:
        """Capture what one token at each of these contexts runs, unless it was captured before."""
        network = self._network
        buckets = {network.bucket(1, context): context for context in contexts}
        layers = range(network.profile.moe_layers)
        missing = [(layer, at) for at in sorted(buckets) for layer in layers if (layer, at) not in self._dense]
        if missing:
            tasks: list[Task] = [partial(network.dense, layer, 1, buckets[at]) for layer, at in missing]
            ends: list[Task] = [] if self._dense else [self.combine, self.head]
            try:
                graphs = self._gpu.capture([*tasks, *ends])
            except torch.AcceleratorError:
                raise
            except RuntimeError as error:
                self.fallbacks.append(f"no CUDA graphs: {' '.join(str(error).split())[:300]}")
                return
            if ends:
                self.combine, self.head = graphs[-2:]
            self._dense.update(zip(missing, graphs, strict=False))

    def dense(self, layer: int, context: int) -> Task:
        """Return the launch of one token's dense part; what was not prepared is launched kernel by kernel."""
        graph = self._dense.get((layer, self._network.bucket(1, context)))
        return graph or partial(self._network.dense, layer, 1, context)


def fused(network: Network) -> Fused | None:
    """Return the fused kernel; None for large experts, other numbers than the hidden state's, and without Triton."""
    if network.hidden.device.type != "cuda" or find_spec("triton") is None:
        return None
    from replay.model.kernels import FusedExperts, is_small

    profile = network.profile
    shape = profile.routed_size, profile.expert_intermediate_size, profile.expert_matrices, network.expert_dtype
    if network.hidden.dtype != network.expert_dtype or not is_small(*shape):
        return None
    kernel = FusedExperts(*shape, network.hidden.device)
    hidden, out, weight = network.hidden[0], network.experts_out[0], network.router_weight
    return lambda pool, slots: kernel(hidden, pool, slots, weight, out)


class Pending(NamedTuple):
    """Submitted work, and the event behind it; None: it has ended when the event behind later work has."""

    completion: Completion
    event: Event | None = None


class CudaDevice(Device):
    """One GPU. With `verify`, each expert's bytes are compared with the store's when it computes (slow)."""

    watchdog_s = WATCHDOG_S

    tail_bytes = TAIL_BYTES

    def __init__(
        self, store: HostStore, network: Network, slots: int, gpu: Gpu, launches: Launches, verify: bool = False
    ) -> None:
        self.store = store
        self.gpu = gpu
        self._network = network
        self._launches = launches
        self._verify = verify
        self.pool = torch.ones(slots, store.stride, dtype=torch.uint8, device=gpu.device)  # never zeros
        self._host = [torch.from_numpy(store[expert]) for expert in range(len(store))]
        self._rows = list(self.pool)
        self._operands = Operands(network, self.pool)
        self._weights: Operands | list[Weights] = self._operands
        self._compute, self._link = gpu.compute_stream(), gpu.copy_stream()
        self._copies: deque[Pending] = deque()
        self._computes: deque[Pending] = deque()
        self._past = 0  # of these, the first ones, known to have ended
        self._landing: dict[int, Event] = {}  # behind the last piece of an expert
        self._spare: list[Event] = []
        gpu.synchronize()

    def prepare(self, contexts: Iterable[int]) -> None:
        self._launches.prepare(contexts)

    def now(self) -> int:
        return time.perf_counter_ns()

    @timed
    def copy(self, expert: int, slot: int, first: int, last: int) -> None:
        target, source = self._rows[slot][first:last], self._host[expert][first:last]
        if first == 0:
            self._copying(expert, slot)
        self._link.run(partial(target.copy_, source, non_blocking=True))
        event = self._mark(self._link, self._copies, Completion(Kind.COPY, expert))
        self._copied()
        if last == self.store.bytes_of(expert):
            self._landing[expert] = event

    @timed
    def dense(self, layer: int, tokens: int, context: int, requests: int = 1) -> None:
        """Compute the real shapes; the event behind them is the causality gate."""
        one = tokens == 1
        self._compute.run(
            self._launches.dense(layer, context) if one else partial(self._network.dense, layer, tokens, context)
        )
        self._mark(self._compute, self._computes, Completion(Kind.ROUTER))

    @timed
    def experts(self, works: Sequence[Work]) -> None:
        """Compute what is there in as few launches as possible, each expert that is landing behind its own arrival."""
        here = [work for work in works if work[0] not in self._landing]
        for group in self._grouped(here):
            self._launch(group)
        for work in works:
            if (event := self._landing.get(work[0])) is not None:
                self._compute.wait(event)
                self._launch([work])

    @timed
    def combine(self, layer: int, tokens: int, context: int) -> None:
        if self._network.profile.runs(layer, tokens, context):
            self._compute.run(self._launches.combine if tokens == 1 else partial(self._network.combine, tokens))
        self._computes.append(Pending(Completion(Kind.COMBINE)))

    @timed
    def head(self, tokens: int, requests: int = 1) -> None:
        self._compute.run(self._launches.head if tokens == 1 else partial(self._network.head, tokens))
        self._mark(self._compute, self._computes, Completion(Kind.HEAD))

    @timed
    def next_completion(self) -> Completion:
        """Poll until something has ended: no thread to wake, no synchronise."""
        copies, computes = self._copies, self._computes
        if not (copies or computes):
            raise nothing_under_way()
        began = time.monotonic()
        while time.monotonic() - began < self.watchdog_s:
            if (completion := self.poll()) is not None:
                return completion
        self.gpu.is_stuck = True
        raise stuck(self.watchdog_s, [pending[0].completion for pending in (copies, computes) if pending])

    def poll(self) -> Completion | None:
        """Look at the oldest event of each stream; behind compute, which may have awaited a copy, at copies again."""
        if self._copy_ended():
            return self._ended(self._copies)
        if not self._compute_ended():
            return None
        if self._copy_ended():
            return self._ended(self._copies)
        self._past -= 1
        return self._ended(self._computes)

    def _copy_ended(self) -> bool:
        event = self._copies[0].event if self._copies else None
        return event is not None and event.query()

    def _compute_ended(self) -> bool:
        """Return whether the oldest work has ended: an event at it or behind it has."""
        computes = self._computes
        if self._past or not computes:
            return self._past > 0
        for place, (_, event) in enumerate(computes, 1):
            if event:
                self._past = place if event.query() else 0
                return self._past > 0
        computes[-1] = Pending(computes[-1].completion, self._recorded(self._compute))
        return False

    def discard_copies(self) -> None:
        self._link.synchronize()
        while self._copies:
            self._ended(self._copies)

    def close(self) -> None:
        """Let the GPU end; not where it is stuck, for waiting for it would be for ever."""
        if not self.gpu.is_stuck:
            self.gpu.synchronize()

    def _grouped(self, works: list[Work]) -> Iterable[list[Work]]:
        if self._launches.experts and all(tokens == 1 for _, _, tokens in works):
            return [works] if works else []
        return [[work] for work in works]

    def _launch(self, works: list[Work]) -> None:
        slots = [slot for _, slot, _ in works]
        tokens = works[0][2]
        if self._verify:
            self._compute.run(lambda: self._require(works))
        if self._launches.experts and tokens == 1:
            self._compute.run(partial(self._launches.experts, *self._in_memory(slots)))
        else:
            weights = self._weights[slots[0]]
            self._compute.run(lambda: self._network.expert(weights, tokens))
        if self._verify:
            self._compute.run(lambda: self._require(works))
        self._computes.extend(Pending(Completion(Kind.EXPERT, expert)) for expert, _, _ in works)

    def _in_memory(self, slots: list[int]) -> tuple[torch.Tensor, list[int]]:
        """Return what a fused launch reads: uint8[n, stride] and rows of it."""
        return self._operands.pool, self._operands.rows(slots)

    def _copying(self, expert: int, slot: int) -> None:
        """Begin a transfer into a slot: a hook for other paths."""

    def _copied(self) -> None:
        """End the submission of a piece: a hook for other paths."""

    def _mark(self, stream: Stream, pending: deque[Pending], completion: Completion) -> Event:
        event = self._recorded(stream)
        pending.append(Pending(completion, event))
        return event

    def _recorded(self, stream: Stream) -> Event:
        event = self._spare.pop() if self._spare else self.gpu.event()
        stream.record(event)
        return event

    def _ended(self, pending: deque[Pending]) -> Completion:
        completion, event = pending.popleft()
        if event:
            self._spare.append(event)
            if self._landing.get(completion.expert) is event:
                del self._landing[completion.expert]
        return completion

    def _require(self, works: list[Work]) -> None:
        for expert, slot, _ in works:
            content = self.pool[slot, : self.store.bytes_of(expert)].cpu().numpy()
            if not self.store.holds(expert, content):
                raise RuntimeError(f"slot {slot} computes as expert {expert}, but holds other bytes")
