"""Decisions of one run, written down and executed again: which transfer starts when, into whose slot.

What differs between two runs of one `Script` is time, never a decision. A transfer starts when it is the next of the
script, its moment has come (so many routers and proposals were heard) and its slot is available; a demand may turn out
late, or the other way round. docs/architecture.md (How the residency works) says why it cannot deadlock.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from policies.core import residency_compiled as core
from policies.core.calling import LOOKED_UP, LOOKUP, NEXT, PROPOSED, Asked
from policies.core.policy import NO_FLOATS, NO_INTS, Float, Int, Options, ScorePolicy, Shape
from policies.core.residency import BLOCKED, NO_EXPERT, PolicyResidency, ResidencyObserver


class Act(IntEnum):
    """What the link turned to."""

    DEMAND = 0
    PREFETCH = 1
    RESUME = 2  # the prefetch that was interrupted


class Decision(NamedTuple):
    """One turn of the link."""

    act: Act
    expert: int
    victims: tuple[int, ...]  # whose slot it takes, or whose bytes; none: a free one
    moment: int
    interrupts: bool = False  # a demand, at a chunk boundary of a prefetch


@dataclass
class Script:
    """What a run decided, in the order in which it was decided."""

    decisions: list[Decision] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)  # how many decisions had been taken at each `--cold` cut
    proposes: bool = False  # the run's prefetcher was heard


class Recorder(ResidencyObserver):
    """Writes down what a residency decides."""

    def __init__(self) -> None:
        self.script = Script()
        self._moment = 0
        self._running = self._paused = NO_EXPERT  # prefetches

    def routed(self, experts: Int, hits: list[int]) -> None:
        self._moment += 1

    def proposed(self, experts: Int, priorities: Float) -> None:
        self.script.proposes = True
        self._moment += 1

    def turned_to(self, expert: int, victim: int, prefetch: bool) -> None:
        if expert < 0:
            return
        act = Act.RESUME if expert == self._paused else Act.PREFETCH if prefetch else Act.DEMAND
        if act is Act.RESUME:
            self._paused = NO_EXPERT
        elif prefetch:
            self._running = expert
        self._write(act, expert, victim)

    def interrupted(self, expert: int, victim: int) -> None:
        if expert >= 0:
            self._paused = self._running
            self._write(Act.DEMAND, expert, victim, interrupts=True)

    def left(self, experts: list[int]) -> None:
        self.script.decisions[-1] = self.script.decisions[-1]._replace(victims=tuple(experts))

    def request_ended(self, cold: bool) -> None:
        if cold:
            self._paused = NO_EXPERT
            self.script.cuts.append(len(self.script.decisions))

    def _write(self, act: Act, expert: int, victim: int, interrupts: bool = False) -> None:
        victims = (victim,) if victim >= 0 else ()
        self.script.decisions.append(Decision(act, expert, victims, self._moment, interrupts))


class OrderedResidency(PolicyResidency):
    """A residency for a loop that asks Python, from within compiled code, which transfers it makes in which order."""

    event: Int
    """The experts that are looked up come first: the loop's own array."""

    def __init__(self, shape: Shape, partitions: Sequence[int], sizes: Int | None = None) -> None:
        super().__init__(shape, partitions, ScorePolicy(shape, Options()), sizes=sizes)
        self._orders = Asked(self._ordered, self.failed)
        self.scripted = self._orders.address

    asks = True

    def check(self) -> None:
        """Raise what Python has raised."""
        self._orders.check()

    def look_up(self, experts: Int) -> None:
        """These are about to be looked up."""

    def looked_up(self) -> int:
        """They were; return how many demands are queued."""
        return self._one[core.LAST_DEMAND]

    def route(self, experts: Int) -> tuple[list[int], int]:
        """Look up the experts of an event; the hits, and how many demands are queued."""
        self.look_up(experts)
        return super().route(experts)[0], self.looked_up()

    def _ordered(self, question: int, number: int) -> int:
        if question == LOOKUP:
            self.look_up(self.event[:number])
        elif question == LOOKED_UP:
            return self.looked_up()
        elif question == PROPOSED:
            self.propose(NO_INTS, NO_FLOATS)
        else:
            expert, victim, *prefetch = self.next_transfer() if question == NEXT else self.interrupt()
            return ((expert + 2) * (self._total + 1) + victim + 1) * 2 + any(prefetch)
        return 0


class ScriptedResidency(OrderedResidency):
    """A residency whose transfers are a script's."""

    def __init__(self, shape: Shape, partitions: Sequence[int], script: Script, sizes: Int | None = None) -> None:
        super().__init__(shape, partitions, sizes)
        self._decisions = script.decisions
        self._cuts = iter(script.cuts)
        self._next = 0  # decision
        self._moment = 0
        self._coming: list[deque[Act]] = [deque() for _ in range(shape.total)]
        for decision in script.decisions:
            if decision.act is not Act.RESUME:
                self._coming[decision.expert].append(decision.act)
        self.propose = self._propose
        self.next_transfer = self._next_transfer
        self.interrupt = self._interrupt

    def end_request(self, cold: bool) -> None:
        """Rule 10; skip what a cut leaves undone."""
        super().end_request(cold)
        if cold:
            end = next(self._cuts)
            for decision in self._decisions[self._next : end]:
                if decision.act is not Act.RESUME:
                    self._coming[decision.expert].popleft()
            self._next = end

    def looked_up(self) -> int:
        """Rules 1 and 2; of what is absent, the script says whether it is late or a miss."""
        self._moment += 1
        one = self.m[core.ONE]
        absent = self.m[core.DEMANDS, : one[core.LAST_DEMAND]].tolist()
        late = sum(self._coming[expert][0] is Act.PREFETCH for expert in absent)
        one[core.N_MISSES] -= late
        one[core.N_LATE] += late
        return len(self._decisions) - self._next

    def _propose(self, experts: Int, priorities: Float) -> None:
        self._moment += 1

    def _next_transfer(self) -> tuple[int, int, bool]:
        """Rule 5 by the script, the link being free."""
        paused = self.m[core.ONE, core.PAUSED] != NO_EXPERT
        decision = self._decision()
        if decision and decision.act is Act.RESUME and not paused:  # it was never interrupted here
            self._next += 1
            decision = self._decision()
        if decision is None:
            return NO_EXPERT, NO_EXPERT, False
        if decision.act is Act.RESUME:
            self._next += 1
            return int(core.resume(self.m)), NO_EXPERT, True
        if not self._due(decision):
            return BLOCKED, NO_EXPERT, False
        return self._begin(decision)

    def _interrupt(self) -> tuple[int, int]:
        """Rule 5 at a chunk boundary of a prefetch, by the script; what the event waits for continues."""
        running, decision = int(self.m[core.ONE, core.ACTIVE]), self._decision()
        if self.awaited(running) or decision is None or not decision.interrupts or not self._due(decision):
            return NO_EXPERT, NO_EXPERT
        expert, victim, _ = self._begin(decision)
        self.m[core.ONE, core.PAUSED] = running
        return expert, victim

    def _decision(self) -> Decision | None:
        return self._decisions[self._next] if self._next < len(self._decisions) else None

    def _due(self, decision: Decision) -> bool:
        """Whether its moment has come, and its slot is available."""
        if decision.moment > self._moment:
            return False
        return all(self.m[core.STATE, each] == core.READY and not self.awaited(each) for each in decision.victims)

    def _begin(self, decision: Decision) -> tuple[int, int, bool]:
        """As scripted, also where the event already waits for a prefetch, or found what is now demanded."""
        act, expert, victims, *_ = decision
        prefetch, victim = act is Act.PREFETCH, victims[-1] if victims else NO_EXPERT
        self._next += 1
        self._coming[expert].popleft()
        self.m[core.STATE, expert] = core.ABSENT if prefetch else core.DEMANDED
        if self.m[core.ONE, core.SIZED]:
            for each in victims:
                core.evict(self.m, self.keep, each)
        core.start(self.m, self.keep, expert, victim)
        if prefetch and self.awaited(expert):
            self.m[core.UNUSED, expert] = 0
            self.m[core.ONE, core.N_USED] += 1
        return expert, victim, prefetch
