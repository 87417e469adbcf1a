"""What is run: traces from a cold and from a warm cache, sizes, three machines, each with another wall, and policies.

docs/board.md says what cold and warm are, and which policies are left out. Of traces of one request there is only
cold. Counted are all requests, timed the first TIMED.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from policies.core.catalog import available
from policies.core.policy import Shape
from policies.core.spec import FETCHED, GLOBAL, PolicySpec, parse
from policies.core.systems import System, systems
from sim.experiment import Experiment
from traces.board import Card, board
from traces.errors import InputError, unknown
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


POLICIES = ("lfu", "lrfu", "eamc", "eamc-blend")

FASTEST = "belady+oracle1"
"""Belady that fetches what the next layer will use: the ceiling in time."""


def every() -> list[str]:
    """Return the policies that ship, each once: of those that decide alike, the first."""
    found: dict[PolicySpec, str] = {}
    built_in = [
        f"lru+{each.name}" if each.kind == "prefetch" else each.name
        for each in available()
        if each.kind != "prefetch" or not (each.oracle or each.name == "none")
    ]
    for text in (*built_in, *(policy for _, policy in of_systems()), FASTEST):
        policy = parse(text)
        if _runs(policy):
            found.setdefault(policy, text)
    return list(found.values())


def of_systems() -> Iterator[tuple[System, str]]:
    """Yield systems whose policy is one of a cache, with the policy for traces without lookahead."""
    for system in systems().values():
        for policy in (system.runs, system.without_lookahead):
            of_a_cache = policy and "{" not in policy and not (system.whole_layers or system.preload)
            if of_a_cache and _runs(parse(policy)):
                yield system, policy


def _runs(policy: PolicySpec) -> bool:
    if policy.needs_lookahead or policy.placement != FETCHED or policy.scope != GLOBAL:
        return False
    try:
        policy.require(Shape(1, 1))
    except InputError:
        return False
    return True
