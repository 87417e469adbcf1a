"""The copy pump: turns the residency machine's transfers into chunks and keeps the link busy. Rule 5 over completions.

Copy engines know no priorities, so the queue stays on the host (in the machine) and only as many chunks as the
device names are in flight. Demand goes as one copy, since nothing interrupts it; prefetches go in chunks. With more
than one chunk in flight, an interrupted prefetch still receives those that were already submitted.
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
    def busy(self) -> bool:
        """Whether anything is on the link."""
        return bool(self._in_flight)

    def act(self) -> None:
        """Take the next transfer if there is none, then submit as many chunks as may be in flight."""
        if self.active is None:
            expert, victim, prefetch = self._machine.next_transfer()
            if expert < 0:
                return
            if self._paused and self._paused.expert == expert:
                self.active, self._paused = self._paused, None
            else:
                self._begin(expert, victim, prefetch)
        transfer = self.active
        assert transfer
        while transfer.sent < self._expert_bytes and len(self._in_flight) < self._device.chunks_in_flight:
            size = self._expert_bytes if transfer.demand else self._chunk_bytes
            upto = min(transfer.sent + size, self._expert_bytes)
            self._in_flight.append((transfer, upto))
            self._device.copy(transfer.expert, transfer.slot, transfer.sent, upto)
            transfer.sent = upto

    def chunk_ended(self) -> int | None:
        """The oldest chunk in flight has ended; the expert that the current event waited for, if it is there now."""
        transfer, upto = self._in_flight.popleft()
        if transfer is not self.active:
            return None
        if upto == self._expert_bytes:
            self.active = None
            return transfer.expert if self._machine.arrived() else None
        if transfer.sent < self._expert_bytes:
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

    def _begin(self, expert: int, victim: int, prefetch: bool) -> None:
        if victim >= 0:
            self.evictions.append(victim)
        self.active = Transfer(expert, self._machine.slot(expert), demand=not prefetch)
