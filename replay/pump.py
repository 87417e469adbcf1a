"""The copy pump: turns the residency machine's transfers into chunks and keeps the link busy. Rule 5 over completions.

Copy engines know no priorities, so the queue stays on the host (in the machine) and only as many chunks as the
device names, one or two, are in flight. Demand goes as one copy, since nothing interrupts it; prefetches go in chunks.
With two, an interrupted prefetch still receives the chunk that was already submitted, and the next transfer is chosen
when the last chunk of the one before is on its way, so that the link never waits for the host.
"""

from collections import deque
from dataclasses import dataclass

from policies.residency import Residency
from replay.device import Device


@dataclass(slots=True)
class Transfer:
    """An expert on its way into a slot."""

    expert: int
    slot: int
    demand: bool  # started as one
    sent: int = 0  # bytes submitted


class Pump:
    """One transfer at a time, one more that was interrupted, and the chunks of both in flight."""

    def __init__(self, machine: Residency, device: Device, expert_bytes: int, chunk_bytes: int | None) -> None:
        self._machine = machine
        self._device = device
        self._expert_bytes = expert_bytes
        self._chunk_bytes = min(chunk_bytes or expert_bytes, expert_bytes)
        self._in_flight: deque[tuple[Transfer, int]] = deque()  # with the bytes moved once the chunk has ended
        self._paused: Transfer | None = None
        self.active: Transfer | None = None
        self.evictions: list[int] = []

    @property
    def on_link(self) -> Transfer | None:
        """The transfer whose chunk is on the link."""
        return self._in_flight[0][0] if self._in_flight else None

    def act(self) -> None:
        """Submit as many chunks as may be in flight; behind the last one of a transfer goes the next transfer."""
        while len(self._in_flight) < self._device.chunks_in_flight:
            if self.active and self.active.sent == self._expert_bytes:
                self._machine.land()
                self.active = None
            if self.active is None and not self._next():
                return
            transfer = self.active
            assert transfer
            size = self._expert_bytes if transfer.demand else self._chunk_bytes
            upto = min(transfer.sent + size, self._expert_bytes)
            self._in_flight.append((transfer, upto))
            self._device.copy(transfer.expert, transfer.slot, transfer.sent, upto)
            transfer.sent = upto

    def chunk_ended(self) -> int | None:
        """The oldest chunk in flight has ended; the expert that the current event waited for, if it is there now."""
        transfer, upto = self._in_flight.popleft()
        if upto == self._expert_bytes:
            if transfer is self.active:
                self.active = None
            return transfer.expert if self._machine.arrived() else None
        if transfer is self.active and transfer.sent < self._expert_bytes:
            expert, victim = self._machine.interrupt()
            if expert >= 0:
                self._paused = transfer
                self._begin(expert, victim, prefetch=False)
        return None

    def cut(self) -> None:
        """`--cold`: discard what is under way."""
        self._device.discard_copies()
        self._in_flight.clear()
        self.active = self._paused = None

    def _next(self) -> bool:
        """Take the transfer that comes next, if there is one."""
        expert, victim, prefetch = self._machine.next_transfer()
        if expert < 0:
            return False
        if self._paused and self._paused.expert == expert:
            self.active, self._paused = self._paused, None
        else:
            self._begin(expert, victim, prefetch)
        return True

    def _begin(self, expert: int, victim: int, prefetch: bool) -> None:
        if victim >= 0:
            self.evictions.append(victim)
        self.active = Transfer(expert, self._machine.slot(expert), demand=not prefetch)
