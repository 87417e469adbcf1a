"""The CUDA device: registered host memory, one copy stream, one compute stream, polled by the driver's own thread.

Copy engines know no priorities, so at most two chunks are in flight and nothing else copies host to device. Slots and
slabs are allocated once. A copy waits, on the device, for the last use of its slot; compute waits for the slot's ready
event. Host memory is registered in the slabs that it is, not taken from torch's pinned allocator, which rounds up to
powers of two.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from replay.device import Completion, Device, Kind, nothing_under_way, stuck
from replay.network import Network
from replay.store import HostStore
from sim.quantities import show_bytes
from traces.errors import InputError

Pending = deque[tuple[Completion, torch.cuda.Event]]

# torch annotates none of these.
_new_event: Callable[[], torch.cuda.Event] = torch.cuda.Event
_new_stream: Callable[[], torch.cuda.Stream] = torch.cuda.Stream
_has_ended: Callable[[torch.cuda.Event], bool] = torch.cuda.Event.query
_driver: Callable[[], Any] = torch.cuda.cudart


class CudaDevice(Device):
    """One GPU. With `verify`, each expert's bytes are compared with the store's when it computes (slow)."""

    chunks_in_flight = 2

    def __init__(self, store: HostStore, network: Network, slots: int, verify: bool = False) -> None:
        self.store = store
        self._network = network
        self._verify = verify
        self.pool = torch.ones(slots, store.stride, dtype=torch.uint8, device="cuda")  # fails sooner than pinning
        self._host = [torch.from_numpy(store[expert]) for expert in range(store.distinct)]
        self._registered: list[int] = []
        self._register()
        self._weights = [network.weights(slot) for slot in self.pool]
        self._link, self._compute = _new_stream(), _new_stream()
        self._ready = [_new_event() for _ in range(slots)]
        self._last_use = [_new_event() for _ in range(slots)]
        self._copies: Pending = deque()
        self._computes: Pending = deque()
        self._spare: list[torch.cuda.Event] = []
        self._stuck = False
        torch.cuda.synchronize()

    def now(self) -> int:
        """Wall clock of the host."""
        return time.perf_counter_ns()

    def copy(self, expert: int, slot: int, first: int, last: int) -> None:
        """One asynchronous copy; the slot is ready behind its last chunk."""
        with torch.cuda.stream(self._link):
            if first == 0:
                self._link.wait_event(self._last_use[slot])
            source = self._host[expert % self.store.distinct]
            self.pool[slot, first:last].copy_(source[first:last], non_blocking=True)
            if last == self.store.expert_bytes:
                self._ready[slot].record()
            self._record(self._copies, Completion(Kind.COPY, expert))

    def dense(self, layer: int, tokens: int, context: int) -> None:
        """One matmul of the layer's dense weights; its event is the causality gate."""
        with torch.cuda.stream(self._compute), torch.inference_mode():
            self._network.dense(layer, tokens)
            self._record(self._computes, Completion(Kind.ROUTER))

    def expert(self, expert: int, slot: int, tokens: int) -> None:
        """The expert in its slot."""
        with torch.cuda.stream(self._compute), torch.inference_mode():
            self._compute.wait_event(self._ready[slot])
            if self._verify:
                self._require(expert, slot)
            self._network.expert(self._weights[slot], tokens)
            if self._verify:
                self._require(expert, slot)
            self._last_use[slot].record()
            self._record(self._computes, Completion(Kind.EXPERT, expert))

    def combine(self, tokens: int) -> None:
        """Add up."""
        with torch.cuda.stream(self._compute), torch.inference_mode():
            self._network.combine(tokens)
            self._record(self._computes, Completion(Kind.COMBINE))

    def head(self, tokens: int) -> None:
        """The vocabulary."""
        with torch.cuda.stream(self._compute), torch.inference_mode():
            self._network.head(tokens)
            self._record(self._computes, Completion(Kind.HEAD))

    def next_completion(self) -> Completion:
        """Poll the oldest event of each stream: no thread to wake, no synchronise."""
        if not (self._copies or self._computes):
            raise nothing_under_way()
        began = time.monotonic()
        while time.monotonic() - began < self.watchdog_s:
            for pending in (self._copies, self._computes):
                if pending and _has_ended(pending[0][1]):
                    completion, event = pending.popleft()
                    self._spare.append(event)
                    return completion
        self._stuck = True
        raise stuck(self.watchdog_s, [pending[0][0] for pending in (self._copies, self._computes) if pending])

    def discard_copies(self) -> None:
        """Let the chunks under way end, and forget them."""
        self._link.synchronize()
        self._spare += [event for _, event in self._copies]
        self._copies.clear()

    def close(self) -> None:
        """Let the GPU end, and unregister host memory, also where the GPU has failed.

        Not where it is stuck: waiting for it would be for ever, and it may still read the memory.
        """
        if self._stuck:
            return
        try:
            torch.cuda.synchronize()
        finally:
            while self._registered:
                _driver().cudaHostUnregister(self._registered.pop())

    def _record(self, pending: Pending, completion: Completion) -> None:
        """On the current stream."""
        event = self._spare.pop() if self._spare else _new_event()
        event.record()
        pending.append((completion, event))

    def _register(self) -> None:
        """Pin every slab at its true size; InputError where the driver refuses."""
        for slab in self.store.slabs:
            refused = int(_driver().cudaHostRegister(slab.ctypes.data, slab.nbytes, 0))
            if refused:
                pinned = len(self._registered)
                self.close()
                raise InputError(
                    f"the driver refused to pin host memory (CUDA error {refused}) after {pinned} of "
                    f"{len(self.store.slabs)} slabs, {show_bytes(self.store.nbytes)} in all: raise the limit of "
                    "locked memory, or share buffers with --host-dedup"
                )
            self._registered.append(slab.ctypes.data)

    def _require(self, expert: int, slot: int) -> None:
        content = self.pool[slot, : self.store.expert_bytes].cpu().numpy()
        if not self.store.holds(expert, content):
            raise RuntimeError(f"slot {slot} computes as expert {expert}, but holds other bytes")
