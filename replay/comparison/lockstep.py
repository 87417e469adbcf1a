"""Lockstep: the simulator's decisions, executed on a device. What then differs between both is time, never a decision.

A `Script` holds what a simulated run decided: which transfers started, in which order, into whose slot, as prefetch or
on demand, and at which moment. Moments are counted, not timed: each router and each proposal that the residency machine
hears of is one. The machine of a script answers the pump from it: the next transfer starts once its moment has come on
the device too and its victim is there, whole and not waiting to be computed; nothing is decided anew, nothing starts
before the event at which the simulator decided it, and nothing overtakes. Everything else, slots, pins, counters, is
the residency machine's own.

An expert that is in its slot when its event looks it up is a hit, whatever the simulator found; one that is on its
way, or is scripted as a prefetch that the link has not come to yet, is late; one that is scripted on demand is a miss.
(Where the link lags so far that an expert waits to be evicted and loaded once more, what is still there is computed,
and the transfers take place all the same.) What the link has not begun when a request ends with `--cold`, or the run,
is skipped: nothing that an event waits for.

A prefetch that a demand interrupted is interrupted on the device at the first chunk boundary at which that demand can
start, unless none is left or the event waits for it by then. On the virtual device with the timing that made the
script, a run in lockstep equals the one scripted in every step and counter, chunks and the predictor's time included.
On other devices the policy is not asked, so that its own work takes no time: make scripts with a timing that charges
nothing for it.

It cannot come to a stand: transfers start in the order of the script, so slots hold at every transfer what they held
in the simulated run; an expert of the current event that is absent is loaded by a transfer of this event or of earlier
ones, and so is whatever stands before that in the script; a victim of those that the event looks up is in its slot, or
landing, and is computed without waiting for any transfer behind it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from policies.core import residency_compiled as core
from policies.core.policy import NOTHING, Event, Float, Int, Options, ScorePolicy, Shape
from policies.core.residency import Residency
from policies.core.residency_compiled import BLOCKED, NO_EXPERT
from replay.devices.virtual import VirtualDevice
from replay.driver import Plan, play
from sim.loop.log import RunLog
from sim.profiles.timing import Link, Timing
from sim.timeline.residency_tracks import after


class Act(IntEnum):
    """What the link turned to."""

    DEMAND = 0
    PREFETCH = 1
    RESUME = 2  # the prefetch that was interrupted


class Decision(NamedTuple):
    """One turn of the link."""

    act: Act
    expert: int
    victim: int  # whose slot it takes, or NO_EXPERT: a free one
    moment: int
    interrupts: bool = False  # a demand, at a chunk boundary of a prefetch


@dataclass
class Script:
    """What a run decided, in the order in which it was decided."""

    decisions: list[Decision] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)  # how many decisions had been taken at each `--cold` cut
    proposes: bool = False  # the run's prefetcher was heard

    @classmethod
    def of(cls, plan: Plan, timing: Timing, link: Link) -> tuple["Script", RunLog]:
        """Of the plan on a machine with this timing and link; and the log of that run, which equals the simulator's."""
        recorder = Recorder()
        log = play(plan, VirtualDevice(timing, link), watch=recorder.watch)
        return recorder.script, log


class Recorder:
    """Writes down what a residency machine decides."""

    def __init__(self) -> None:
        self.script = Script()
        self._moment = 0
        self._running = self._paused = NO_EXPERT  # prefetches

    def watch(self, machine: Residency) -> None:
        """Before anything is played."""
        after(machine, "route", lambda *_: self._heard())
        after(machine, "propose", lambda *_: self._proposed())
        after(machine, "next_transfer", lambda started: self._turned_to(*started))
        after(machine, "interrupt", lambda started: self._interrupted(*started))
        after(machine, "end_request", lambda _, cold: self._ended(cold))

    def _heard(self) -> None:
        self._moment += 1

    def _proposed(self) -> None:
        self.script.proposes = True
        self._heard()

    def _turned_to(self, expert: int, victim: int, prefetch: bool) -> None:
        if expert < 0:
            return
        if expert == self._paused:
            self._paused = NO_EXPERT
            self._write(Act.RESUME, expert, victim)
        elif prefetch:
            self._running = expert
            self._write(Act.PREFETCH, expert, victim)
        else:
            self._write(Act.DEMAND, expert, victim)

    def _interrupted(self, expert: int, victim: int) -> None:
        if expert >= 0:
            self._paused = self._running
            self._write(Act.DEMAND, expert, victim, interrupts=True)

    def _ended(self, cold: bool) -> None:
        if cold:
            self._paused = NO_EXPERT
            self.script.cuts.append(len(self.script.decisions))

    def _write(self, act: Act, expert: int, victim: int, interrupts: bool = False) -> None:
        self.script.decisions.append(Decision(act, expert, victim, self._moment, interrupts))


class Lockstep:
    """Who decides in a run in lockstep: the script, in place of the plan's policy (`replay.driver.Deciding`)."""

    def __init__(self, plan: Plan, script: Script) -> None:
        self._plan = plan
        self._script = script

    def residency(self, slots: int) -> Residency:
        """A machine that follows the script."""
        shape = self._plan.shape
        return LockstepMachine(shape, self._plan.policy.divide(shape, slots), self._script)

    def begin_request(self, ordinal: int) -> None:
        """Of no interest."""

    def observe(self, event: Event) -> None:
        """Of no interest."""

    def propose(self, event: Event) -> tuple[Int, Float] | None:
        """Nothing; but where the script's run heard proposals, their arrival is a moment."""
        return NOTHING if self._script.proposes else None

    def end_request(self) -> None:
        """Of no interest."""


class LockstepMachine(Residency):
    """A residency machine whose transfers are a script's."""

    def __init__(self, shape: Shape, partitions: Sequence[int], script: Script) -> None:
        super().__init__(shape, partitions, ScorePolicy(shape, Options()))
        self._decisions = script.decisions
        self._cuts = iter(script.cuts)
        self._next = 0  # decision
        self._moment = 0
        self._coming: list[deque[Act]] = [deque() for _ in range(shape.total)]
        for decision in script.decisions:
            if decision.act is not Act.RESUME:
                self._coming[decision.expert].append(decision.act)
        self.propose = self._propose
        self.route = self._route
        self.next_transfer = self._next_transfer
        self.interrupt = self._interrupt
        self.arrived_and_next = lambda: (self.arrived(), *self._next_transfer())

    def end_request(self, cold: bool) -> None:
        """Rule 10; what a cut leaves undone is skipped."""
        super().end_request(cold)
        if cold:
            end = next(self._cuts)
            for decision in self._decisions[self._next : end]:
                if decision.act is not Act.RESUME:
                    self._coming[decision.expert].popleft()
            self._next = end

    def _route(self, experts: Int, first: int, last: int) -> int:
        """Rules 1 and 2; of what is absent, the script says whether it is late or a miss."""
        self._moment += 1
        hits: int = core.route(self.m, self.keep, self.rule, experts, first, last)
        one = self.m[core.ONE]
        absent = self.m[core.DEMANDS, : one[core.LAST_DEMAND]].tolist()
        late = sum(self._coming[expert][0] is Act.PREFETCH for expert in absent)
        one[core.N_MISSES] -= late
        one[core.N_LATE] += late
        return hits

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
        """Rule 5 at a chunk boundary of a prefetch, by the script; what the event waits for goes on."""
        running, decision = int(self.m[core.ONE, core.ACTIVE]), self._decision()
        if self.awaited(running) or decision is None or not decision.interrupts or not self._due(decision):
            return NO_EXPERT, NO_EXPERT
        expert, victim, _ = self._begin(decision)
        self.m[core.ONE, core.PAUSED] = running
        return expert, victim

    def _decision(self) -> Decision | None:
        """The next one."""
        return self._decisions[self._next] if self._next < len(self._decisions) else None

    def _due(self, decision: Decision) -> bool:
        """Its moment has come, and its slot can be had."""
        if decision.moment > self._moment:
            return False
        victim = decision.victim
        return victim == NO_EXPERT or (self.m[core.STATE, victim] == core.READY and not self.awaited(victim))

    def _begin(self, decision: Decision) -> tuple[int, int, bool]:
        """As scripted, also where the event already waits for a prefetch, or found what is now demanded."""
        act, expert, victim, *_ = decision
        prefetch = act is Act.PREFETCH
        self._next += 1
        self._coming[expert].popleft()
        self.m[core.STATE, expert] = core.QUEUED if prefetch else core.DEMANDED
        core.start(self.m, self.keep, self.rule, expert, victim)
        if prefetch and self.awaited(expert):
            self.m[core.UNUSED, expert] = 0
            self.m[core.ONE, core.N_USED] += 1
        return expert, victim, prefetch
