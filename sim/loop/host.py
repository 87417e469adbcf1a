"""What the host does in a run: it computes experts (rule 13), and reads others from a disk (rule 17).

Both are streams of the device that get one piece of work at a time, since what comes next is chosen when one ends. What
host memory holds is decided in `policies.core.host_memory`, where misses are computed in `policies.core.placement`.
"""

from collections import deque
from collections.abc import Iterable
from functools import partial

from policies.core.placement import Costs, Placement
from policies.core.policy import Int
from policies.core.residency import PolicyResidency
from sim.loop.device import Device, Kind
from sim.loop.observer import LoopObserver
from sim.loop.run import Run

NOTHING, HOPPING = -1, -2


def needed(run: Run) -> bool:
    """Return whether anything of it matters to this run."""
    return run.host is not None or run.policy.uses_host or run.policy.admits is not None


class Host:
    """The host of one run: the experts of the current event that it computes, and its memory over a disk."""

    def __init__(
        self, run: Run, residency: PolicyResidency, device: Device, observer: LoopObserver | None = None
    ) -> None:
        self._observer = observer or LoopObserver()
        self._residency, self._device = residency, device
        self._timing, self._link = run.timing, run.gpu.link
        spec = run.policy.placement
        self._placement: Placement = spec.cls(spec.options)
        self.memory = residency.host_memory(run.host.slots) if run.host else None
        self.tokens: dict[int, int] = {}
        """Of each expert of the event that the host computes and has not computed yet."""
        self._queue: deque[int] = deque()  # of these, those in host memory, in the order of their compute
        self._doing, self._began = NOTHING, 0
        self._reading, self._read_began = NOTHING, 0
        self._busy_ns = self._disk_busy_ns = 0
        self.evictions: list[int] = []

    def place(self, layer: int, chosen: Int, tokens: dict[int, int], link_ready: int) -> None:
        """Rule 13: before a lookup, take from `tokens` what the host computes. link_ready: see `Costs`."""
        timing = self._timing
        costs = Costs(
            link_ready,
            timing.hop_ns,
            self._link.used_ns(self._link.bytes_of(layer)),
            partial(timing.expert_ns, layer=layer),
            partial(timing.host_ns, layer=layer),
        )
        placed = self._placement.on_host(layer, self._residency.misses(chosen), tokens, costs)
        self._residency.place_on_host(placed)
        self.tokens = {expert: tokens.pop(expert) for expert in placed}

    def take(self, tokens: dict[int, int]) -> None:
        """Rule 21: after a lookup, take from `tokens` what was not admitted, where the host computes that."""
        placed = [expert for expert in tokens if expert not in self.tokens and self._residency.on_host(expert)]
        self.tokens |= {expert: tokens.pop(expert) for expert in placed}

    def begin_event(self, chosen: Int) -> None:
        """The lookup has been made: misses are demanded of host memory, and the hop begins."""
        if self.memory:
            self.memory.demand(chosen)
        self._queue.extend(expert for expert in self.tokens if self._has(expert))
        if self.tokens and self._device.hop():
            self._doing = HOPPING
            self._observer.host_began(Kind.HOP, NOTHING, 0)

    def act(self) -> None:
        """Let disk and host start what they can; the link has been asked before."""
        if self.memory and self._reading == NOTHING:
            expert = self.memory.next_read()
            self.evictions += self.memory.victims()
            if expert >= 0:
                self._observer.read_began(expert, self.memory.demanded(expert))
                self._reading, self._read_began = expert, self._device.now()
                self._device.read(expert)
        if self._queue and self._doing == NOTHING:
            expert = self._queue.popleft()
            self._observer.host_began(Kind.HOST, expert, self.tokens[expert])
            self._doing, self._began = expert, self._device.now()
            if self.memory:
                self.memory.touch(expert)
            self._device.host(expert, self.tokens[expert])

    def ended(self, kind: Kind, expert: int) -> None:
        """The hop, a compute or a read has ended."""
        if kind is Kind.READ:
            assert self.memory
            self._disk_busy_ns += self._device.now() - self._read_began
            self._reading = NOTHING
            self.memory.read_ended(expert)
            if expert in self.tokens:
                self._queue.append(expert)
            return
        if kind is Kind.HOST:
            self._busy_ns += self._device.now() - self._began
            self._residency.computed(expert)
            if self.memory:
                self.memory.release(expert)
            del self.tokens[expert]
        self._doing = NOTHING

    def started(self, expert: int) -> None:
        if self.memory:
            self.memory.touch(expert)

    def arrived(self, expert: int) -> None:
        if self.memory and expert not in self.tokens:
            self.memory.release(expert)

    def cut(self) -> None:
        """`--cold`: host memory is emptied, what is read is discarded."""
        if self.memory:
            self._disk_busy_ns = self.busy_ns()[1]
            self._reading = NOTHING
            self.memory.empty()
            self._device.discard_reads()

    def awaits_disk(self, experts: Iterable[int]) -> bool:
        """Return whether any of these, or of those that the host computes, is still to come from the disk."""
        return self.memory is not None and not all(map(self._has, (*experts, *self.tokens)))

    def can_send(self) -> bool:
        """Return whether host memory holds any expert whose demand transfer is queued."""
        return self._residency.next_demand() >= 0

    @property
    def busy(self) -> bool:
        """Whether it computes, or the activations are on their way."""
        return self._doing != NOTHING

    def busy_ns(self) -> tuple[int, int]:
        """Return the time in which the host computed experts, and in which the disk read, so far."""
        now = self._device.now()
        computing = now - self._began if self._doing >= 0 else 0
        reading = now - self._read_began if self._reading != NOTHING else 0
        return self._busy_ns + computing, self._disk_busy_ns + reading

    def reads(self) -> list[int]:
        """Return how many reads have begun, demanded ones and prefetches."""
        return self.memory.counters() if self.memory else [0, 0]

    def _has(self, expert: int) -> bool:
        return self.memory is None or self.memory.ready(expert)
