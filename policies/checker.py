"""The conformance kit: what every policy must hold to, checked in one call, without a clock.

`check_policy("my_file.py:MyPolicy")`, or `python -m policies.checker lru+my_file.py:MyPrefetch`. Checked, on scripted
random routing and caches of all sizes, under a random but seeded order of events: two runs decide alike; other routing
after an event changes nothing before it (oracles excepted); nothing writes into the arrays of an event; victims are
among those offered; keep scores and proposals are finite and in range.
"""

import argparse
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from policies.core.events import Events
from policies.core.guard import PolicyError, proposal_fault
from policies.core.policy import Event, ScorePolicy, Shape
from policies.core.residency_compiled import BLOCKED, NO_EXPERT
from policies.core.runner import PolicyRunner
from policies.core.spec import PolicyLike, PolicySpec, parse
from policies.overhead import measured_us
from policies.random_routing import Routed, Script, drawn, scripts
from traces.errors import InputError


@dataclass(frozen=True, repr=False)
class Report:
    """What the kit measured. us_per_event: what `policies.overhead` measures on 26 x 64 experts, top-6."""

    policy: str
    failures: tuple[str, ...]  # a plain sentence each
    events: int  # run for the checks
    us_per_event: float

    @property
    def passed(self) -> bool:
        return not self.failures

    def require(self) -> None:
        """Raise AssertionError with all failures, if there are any."""
        if self.failures:
            raise AssertionError(str(self))

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        failures = "".join(f"\n  - {failure}" for failure in self.failures)
        verdict = "does not conform:" + failures if failures else "conforms"
        return f"{self.policy} {verdict}\n  ({self.events:,} events run, {self.us_per_event:g} us an event)"


def check_policy(policy: PolicyLike, seed: int = 0) -> Report:
    """Return a report on whether a policy keeps the contract; seed: draws other routing. InputError for its name."""
    spec = parse(policy)
    failures: dict[str, str] = {}  # by rule, the first of each
    events = 0
    for check in (_determinism, _causality):
        for number, script in enumerate(scripts(seed)):
            try:
                events += check(spec, script, np.random.default_rng([seed, number]))
            except RuleError as broken:
                failures.setdefault(broken.rule, f"{broken} ({script})")
        if failures:  # the next check takes for granted what this one is about
            return Report(spec.text, tuple(failures.values()), events, 0.0)
    return Report(spec.text, (), events, _us_per_event(spec, seed))


class RuleError(Exception):
    """A rule that the policy has broken, and the details of this case; a sentence together."""

    def __init__(self, rule: str, details: str = "") -> None:
        super().__init__(rule + details)
        self.rule = rule


class Drive:
    """One run of a policy over a script; `log` holds its decisions, `marks` where each event begins in it."""

    def __init__(self, spec: PolicySpec, script: Script) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.marks: list[int] = []
        self._script = script
        self._turns = Random(script.seed)
        self._active = NO_EXPERT
        try:
            self._run(spec)
        except RuleError:
            raise
        except PolicyError as error:
            raise RuleError(error.place, str(error).removeprefix(error.place)) from error
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(frame.filename).name}:{frame.lineno}"
            raise RuleError(f"it raises {type(error).__name__}", f": {error}, at {where}") from error

    def _run(self, spec: PolicySpec) -> None:
        script, requests, shape = self._script, self._script.requests(), self._script.shape
        self._runner = runner = PolicyRunner(spec, shape, requests, experts_per_layer=1.0)
        partitions = len(spec.divide(shape, shape.total))
        self._residency: Any = runner.residency(max(script.slots, partitions))
        before = 0
        for ordinal, request in enumerate(requests):
            events = Events.of(request, shape.layers, before)
            before += events.count
            runner.begin_request(ordinal)
            for step in range(len(request.phase)):
                for layer in range(shape.layers):
                    self.marks.append(len(self.log))
                    self._event(events.event(step, layer))
            runner.end_request()
            cold = script.cold and ordinal < len(requests) - 1
            if cold:
                self._active = NO_EXPERT
            self._residency.end_request(cold)

    def _event(self, event: Event) -> None:
        residency, turns = self._residency, self._turns
        ready, _ = residency.route(event.experts)
        waiting = set(event.experts.tolist()) - set(ready)
        self._observe(event)
        proposal = self._runner.propose(event)
        if proposal is not None:
            if fault := proposal_fault(proposal, self._script.shape.total):
                raise RuleError(f"it proposes {fault}")
            self.log.append(("propose", proposal[0].tolist(), proposal[1].tolist()))
            residency.propose(*proposal)
        idle = turns.randrange(4)
        while ready or waiting or idle:
            if self._active == NO_EXPERT:
                self._note(*residency.next_transfer())
            if ready and (self._active == NO_EXPERT or turns.random() < 0.5):
                residency.computed(ready.pop(0))
            elif self._active != NO_EXPERT and residency.is_prefetch(self._active) and turns.random() < 0.3:
                self._note(*residency.interrupt())
            elif self._active != NO_EXPERT:
                arrived, self._active = self._active, NO_EXPERT
                if residency.arrived():
                    waiting.remove(arrived)
                    ready.append(arrived)
            if not ready and not waiting:
                idle = max(0, idle - 1)

    def _note(self, expert: int, victim: int, prefetch: bool = False) -> None:
        if expert not in (NO_EXPERT, BLOCKED):
            self._active = expert
            self.log.append(("start", expert, victim))

    def _observe(self, event: Event) -> None:
        """Rule 3, and a look at the scores."""
        before = [array.tobytes() for array in event[3:]]
        self._runner.observe(event)
        if before != [array.tobytes() for array in event[3:]]:
            raise RuleError("it writes into the arrays of an event, which its other half reads too")
        keeper = self._runner.retention
        if not isinstance(keeper, ScorePolicy):
            return
        if not np.isfinite(keeper.keep[:2]).all():
            raise RuleError("its keep scores are not all finite")


# The checks: each runs a script some times and returns the number of events


def _determinism(spec: PolicySpec, script: Script, rng: np.random.Generator) -> int:
    _alike(Drive(spec, script), Drive(spec, script), None, "two runs over the same events do not decide alike")
    return 2 * script.events


def _causality(spec: PolicySpec, script: Script, rng: np.random.Generator) -> int:
    if spec.oracle or not script.events:
        return 0
    as_it_was, events = Drive(spec, script), script.events
    for _ in range(4):
        cut = int(rng.integers(script.events))
        other = script.with_another_future(cut, rng)
        _alike(
            as_it_was, Drive(spec, other), as_it_was.marks[cut], "other routing later on changes a decision before it"
        )
        events += other.events
    return events


def _alike(one: Drive, other: Drive, upto: int | None, complaint: str) -> None:
    """Raise RuleError unless the first `upto` decisions are the same, or all."""
    ours, theirs = one.log[:upto], other.log[:upto]
    for i, (this, that) in enumerate(zip(ours, theirs, strict=False)):
        if this != that:
            event = sum(mark <= i for mark in one.marks) - 1
            raise RuleError(complaint, f": at event {event} {_shown(this)} or {_shown(that)}")
    if len(ours) != len(theirs):
        raise RuleError(complaint, f": {len(ours)} decisions or {len(theirs)}")


def _shown(decision: tuple[Any, ...]) -> str:
    what, expert, other = decision
    if what == "propose":
        return f"{expert} proposed at {other}"
    return f"expert {expert} replaces {other}" if other >= 0 else f"expert {expert} is loaded"


def _us_per_event(spec: PolicySpec, seed: int) -> float:
    """Return what an event takes of decoded tokens of 26 x 64 experts, top-6."""
    shape = Shape(26, 64)
    routed = Routed(0, drawn(np.random.default_rng(seed), shape, tokens=40, k=6, none=0))
    return measured_us(spec, shape, [routed.of(0, shape.experts)])


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m policies.checker",
        description="Check that policies keep the contract. The status is 1 where one does not.",
    )
    parser.add_argument("policies", metavar="POLICY", nargs="+", help="lru+markov, my_file.py:Mine")
    try:
        reports = [check_policy(name) for name in parser.parse_args().policies]
    except InputError as error:
        parser.error(str(error))
    print(*reports, sep="\n")
    return int(not all(report.passed for report in reports))


if __name__ == "__main__":
    sys.exit(main())
