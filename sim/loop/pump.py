"""The copy pump: turns the residency's transfers into pieces and keeps a link busy. Rules 5 and 12 over completions.

Copy engines know no priorities, so what comes next is chosen late: a chunk is a body and a tail that flies no longer
than the host takes to answer, and the choice is made when the body has ended. Behind a demand it may be made as soon as
all arrived experts are computed: no router can end before. At most two transfers are in flight.
"""

from collections import deque
from collections.abc import Container, Iterator
from typing import Protocol

from policies.core.residency import BLOCKED
from sim.loop.device import Device, Transfer
from sim.loop.host import Host
from sim.loop.observer import LoopObserver
from sim.profiles.timing import Link

PIECES_IN_FLIGHT = 2
"""Of a prefetch, at most."""


class Transfers(Protocol):
    """What the pump asks: a part of `policies.core.residency.Residency`, which documents it."""

    def next_transfer(self) -> tuple[int, int, bool]:
        """Choose what the free link takes."""

    def interrupt(self) -> tuple[int, int]:
        """Choose what interrupts a prefetch at a chunk boundary."""

    def land(self) -> None:
        """The rest of a transfer is sent."""

    def arrived(self) -> bool:
        """A transfer has ended."""

    def slot(self, expert: int) -> int:
        """Return the slot of an expert."""

    def victims(self) -> list[int]:
        """Return who left for the transfer that has just begun, where experts differ in size."""
        return []


class Pump:
    """One transfer that sends, one more that was interrupted, and the pieces in flight."""

    def __init__(
        self,
        residency: Transfers,
        device: Device,
        link: Link,
        experts: int,
        observer: LoopObserver | None = None,
        host: Host | None = None,
    ) -> None:
        """experts: of a layer; host: what it has to hear of transfers, if it does anything in this run."""
        self._observer = observer
        self._residency = residency
        self._device = device
        self._host = host
        self._link = link
        self._experts = experts
        self._tail_bytes = device.tail_bytes
        self.in_flight: deque[tuple[Transfer, int, int]] = deque()  # with the first byte and the one behind the last
        self._flying_bytes = 0
        self._busy_ns = self._busy_since = 0
        self._owes_tail = False  # the piece submitted last was a body
        self._paused: Transfer | None = None
        self._active: Transfer | None = None
        self.demands = 0
        """Demands that are queued and not started: the router sets it."""
        self.computing = 0
        """Experts of the event that have arrived and are not computed yet: the session counts them."""
        self.proposed = False
        """Whether prefetches may be queued, or paused: the prefetcher's answer sets it."""
        self.blocked = False
        """Whether something is queued that found no slot: it is tried again when an expert has been computed."""
        self.evictions: list[int] = []

    @property
    def on_link(self) -> Transfer | None:
        return self.in_flight[0][0] if self.in_flight else None

    def landing(self) -> Iterator[int]:
        """Experts whose last piece is flying, in the order of their arrival."""
        return (transfer.expert for transfer, _, upto in self.in_flight if upto == transfer.size)

    def link_ready(self, awaited: Container[int]) -> int:
        """Return in how many ns the link is free of what nothing interrupts (rule 13).

        That is the transfer on it, if it is a demand or of the experts that are `awaited`, else its chunk.
        """
        if not self.in_flight:
            return 0
        transfer, first, upto = self.in_flight[0]
        until = transfer.size if transfer.demand or transfer.expert in awaited else upto
        return self._busy_since + self._link.used_ns(until) - self._link.used_ns(first) - self._device.now()

    def demand_waits(self) -> bool:
        """Return whether a demand is queued that the link could take."""
        return self.demands > 0 and (self._host is None or self._host.can_send())

    def busy_with_more(self) -> bool:
        """Return whether there may be anything to submit."""
        return self.demands > 0 or self.proposed or self._active is not None

    def act(self) -> list[int]:
        """Submit pieces until the link has enough; behind the last one of a transfer goes the next transfer.

        Return the experts whose last piece has been submitted.
        """
        in_flight, landing = self.in_flight, []
        while (not in_flight or (self._tail_bytes and self._has_room())) and (transfer := self._sending()) is not None:
            first = transfer.sent
            upto, self._owes_tail = self._piece_end(transfer)
            transfer.sent = upto
            if self._observer:
                self._observer.copying(transfer, first, upto)
            self._device.copy(transfer.expert, transfer.slot, first, upto)
            if not in_flight:
                self._busy_since = self._device.now()
            in_flight.append((transfer, first, upto))
            self._flying_bytes += upto - first
            if upto == transfer.size:
                landing.append(transfer.expert)
        return landing

    def piece_ended(self) -> int | None:
        """The oldest piece in flight has ended; return the expert that has arrived with it, or None."""
        if self._observer:
            self._observer.copied()
        transfer, first, upto = self.in_flight.popleft()
        self._flying_bytes -= upto - first
        if not self.in_flight:
            self._busy_ns += self._device.now() - self._busy_since
        if upto < transfer.size:
            return None
        if transfer is self._active:
            self._active = None
        self._residency.arrived()
        if self._host:
            self._host.arrived(transfer.expert)
        return transfer.expert

    def busy_ns(self) -> int:
        """Return the time in which the link moved bytes, latency included, so far."""
        return self._busy_ns + (self._device.now() - self._busy_since if self.in_flight else 0)

    def move_to(self, device: Device) -> None:
        """Continue on another device, while nothing is on the link; forget what was evicted so far."""
        self._device, self._tail_bytes = device, device.tail_bytes
        self.evictions = []

    def cut(self) -> None:
        """`--cold`: discard what is under way."""
        self._device.discard_copies()
        self._busy_ns = self.busy_ns()  # where copies cannot be stopped, the link was busy until they had ended
        self.in_flight.clear()
        self._flying_bytes = 0
        self._owes_tail, self.computing = False, 0
        self._active = self._paused = None

    def _has_room(self) -> bool:
        """For a tail behind its own body; for what is chosen behind a demand, or as a tail flies."""
        if self._owes_tail:
            return True
        first, last = self.in_flight[0][0], self.in_flight[-1][0]
        if last.demand and not self.computing:
            return first is last
        return len(self.in_flight) < PIECES_IN_FLIGHT and self._flying_bytes <= self._tail_bytes

    def _piece_end(self, transfer: Transfer) -> tuple[int, bool]:
        """Of the piece that comes next, and whether it is the chunk's body, with its tail to follow."""
        chunk, size = self._link.chunk_bytes, transfer.size
        if transfer.demand and not self.computing:
            return size, False
        chunk_end = size
        if chunk is not None and not transfer.demand:
            chunk_end = min((transfer.sent // chunk + 1) * chunk, size)
        has_tail = chunk_end - transfer.sent > self._tail_bytes > 0
        return (chunk_end - self._tail_bytes, True) if has_tail else (chunk_end, False)

    def _sending(self) -> Transfer | None:
        """The transfer that the next piece is of."""
        transfer = self._active
        if transfer and transfer.sent == transfer.size:
            self._residency.land()
            self._active = transfer = None
        if transfer is None:
            return self._next()
        chunk = self._link.chunk_bytes
        if chunk is not None and not transfer.demand and transfer.sent % chunk == 0:
            expert, victim = self._residency.interrupt()
            if expert >= 0:
                self._paused = transfer
                return self._begin(expert, victim, prefetch=False)
        return transfer

    def _next(self) -> Transfer | None:
        """Take the transfer that comes next, if there is one."""
        if not (self.demands or self.proposed):
            return None
        expert, victim, prefetch = self._residency.next_transfer()
        self.blocked = expert == BLOCKED
        if expert < 0:
            if not self.blocked and self._host is None:  # else what is queued may wait for the disk
                self.demands, self.proposed = 0, False
            return None
        if self._paused and self._paused.expert == expert:
            self._active, self._paused = self._paused, None
            return self._active
        return self._begin(expert, victim, prefetch)

    def _begin(self, expert: int, victim: int, prefetch: bool) -> Transfer:
        link, size = self._link, self._link.expert_bytes
        if link.layer_bytes:
            size = link.layer_bytes[expert // self._experts]
            self.evictions += self._residency.victims()
        elif victim >= 0:
            self.evictions.append(victim)
        if self._host:
            self._host.started(expert)
        self.demands -= not prefetch
        self._active = Transfer(expert, self._residency.slot(expert), not prefetch, size)
        return self._active
