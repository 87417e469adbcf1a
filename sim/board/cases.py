"""What is fixed: traces from a cold and from a warm cache, sizes, and three machines, each with another wall.

Cold: each request begins with an empty cache. Warm: the first request fills the cache and is not counted, and each
further one finds what the one before has left; of traces of one request there is only cold. Counted are all requests,
timed the first TIMED.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from sim.experiment import Experiment
from traces.board import Card, board
from traces.errors import unknown
from traces.models.profile import known

SIZES = ("5%", "10%", QUARTER := "25%", "50%")


TIMED = 10
"""Requests of a trace."""


@dataclass(frozen=True)
class Machine:
    """A machine with the resource that is busy longest under LRU at 25%, on each trace of a known model."""

    wall: str
    hardware: str
    title: str
    host_memory: str | None = None  # for experts, over the disk


MACHINES = (
    Machine("link", "a5000", "RTX A5000, PCIe 4.0"),
    Machine("compute", "gh200", "GH200, NVLink-C2C"),
    Machine("disk", "rtx4090", "RTX 4090, experts on an NVMe disk", host_memory="2%"),  # a buffer: Belady bounds
)


@dataclass(frozen=True)
class Case:
    """A trace from one start, counted without a clock or on a machine."""

    card: Card
    warm: bool
    machine: Machine | None = None

    @property
    def start(self) -> str:
        return f"{self.card.name} {'warm' if self.warm else 'cold'}"

    @property
    def requests(self) -> int:
        """Return how many are run, those that warm up included."""
        return min(self.card.requests, TIMED) if self.machine else self.card.requests

    @property
    def counted(self) -> int:
        return self.requests - self.warm

    @property
    def measure(self) -> str:
        return self.machine.wall if self.machine else HITS

    @property
    def experiment(self) -> Experiment:
        machine = self.machine
        return Experiment(
            str(self.card.folder),
            **({"hardware": machine.hardware, "host_memory": machine.host_memory} if machine else {"untimed": True}),
            expert_sizes=self.card.expert_sizes or None if machine else None,
            requests=self.requests,
            cold=not self.warm,
            warmup_requests=int(self.warm),
        )


HITS = "hits"
MEASURES = (HITS, *(machine.wall for machine in MACHINES))


def cards_of(names: Collection[str] = ()) -> list[Card]:
    """Return the cards of these traces, or of all that are here. Raise InputError for another name."""
    here = {card.name: card for card in board().cards if card.sha256}
    if missing := [name for name in names if name not in here]:
        raise unknown("trace of the board", missing[0], here)
    return [here[name] for name in names] or list(here.values())


def cases_of(cards: Sequence[Card]) -> Iterator[Case]:
    """Yield the cases of these traces, counted first; timed are those of models whose sizes are known."""
    starts = [(card, warm) for card in cards for warm in (False, True) if card.requests > warm]
    yield from (Case(*start) for start in starts)
    for machine in MACHINES:
        for card, warm in starts:
            if known(card.model):
                yield Case(card, warm, machine)
