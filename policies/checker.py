"""The conformance kit: what every policy must hold to, checked in one call, without a clock.

    from policies import check_policy
    print(check_policy("my_file.py:MyPolicy"))        # or: python -m policies.checker my_file.py:MyPolicy

A prefetcher is checked beside what it is paired with: `check_policy("lru+my_file.py:MyPrefetch")`. The kit drives the
residency with scripted random routing on caches of all sizes (one slot, events without experts, prefills,
requests without decode or without any step, cold ends, the untimed mode), and with a link and a compute stream whose
order of events is random but seeded. Checked: two runs decide alike; other routing after an event changes nothing
before it (oracles excepted); nothing writes into the arrays of an event; victims are among those offered;
keep scores and proposals are finite and in range; a user's policy ends each event in time. The cost of an event is
measured and never judged.
"""

import random
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter_ns
from typing import Annotated, Any

import numpy as np
import typer

from policies.core.events import RequestEvents
from policies.core.guard import THIRD_ROW, BrokenRuleError, PolicyError, own_classes, proposal_fault
from policies.core.policy import Event, ScorePolicy, Shape
from policies.core.residency_compiled import BLOCKED, NO_EXPERT, PRIORITY
from policies.core.runner import PolicyRunner
from policies.core.spec import Policy, PolicySpec, parse
from policies.random_routing import Script, scripts
from traces.commands import console, program
from traces.steps import Lookahead, decode_steps

LIMIT_S = 60.0
"""Seconds for an event: for more than the first one of a policy that compiles itself needs."""


@dataclass(frozen=True, repr=False)
class Report:
    """What the kit found. us_per_event: mean time in `observe` and `propose` on a model of 26 x 64 experts, top-6."""

    policy: str
    failures: tuple[str, ...]  # a plain sentence each
    events: int  # run for the checks
    us_per_event: float

    @property
    def passed(self) -> bool:
        """Whether there are no failures."""
        return not self.failures

    def require(self) -> None:
        """AssertionError with all failures, if there are any."""
        if self.failures:
            raise AssertionError(str(self))

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        found = "".join(f"\n  - {failure}" for failure in self.failures)
        verdict = "does not conform:" + found if found else "conforms"
        return f"{self.policy} {verdict}\n  ({self.events:,} events run, {self.us_per_event:.1f} us an event)"


def check_policy(policy: Policy, seed: int = 0) -> Report:
    """Return a report on whether a policy, given by name or as a class, keeps the contract.

    seed: draws other routing. Whatever the policy raises is a failure in the report.

    Raises InputError if the name or an option is wrong.
    """
    spec = parse(policy)
    failures: dict[str, str] = {}  # by rule, the first of each
    events = 0
    for played in _CHECKS:
        for number, script in enumerate(scripts(seed)):
            try:
                events += played(spec, script, random.Random(f"{seed} {number}"))
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


# Driving a policy through a script


class Drive:
    """One run of a policy over a script; `log` holds its decisions, `marks` where each event begins in it."""

    def __init__(self, spec: PolicySpec, script: Script) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.marks: list[int] = []
        self._script = script
        self._turns = random.Random(script.seed)
        self._active = NO_EXPERT
        with _time_limit(spec) as self._event_begins:
            self._runner, self._residency = _told(lambda: self._begin(spec))
            _told(self._play)

    def _begin(self, spec: PolicySpec) -> tuple[PolicyRunner, Any]:
        self._requests = self._script.requests()
        shape = self._script.shape
        runner = PolicyRunner(spec, shape, self._requests, self._script.untimed, experts_per_layer=1.0)
        partitions = len(spec.divide(shape, shape.total))
        return runner, runner.residency(max(self._script.slots, partitions))

    def _play(self) -> None:
        script, runner, residency = self._script, self._runner, self._residency
        L, played = script.shape.layers, 0
        for ordinal, request in enumerate(self._requests):
            events = RequestEvents(request, L, played, script.untimed)
            played += events.count
            runner.begin_request(ordinal)
            for step in range(len(request.phase)):
                for layer in range(L):
                    self._event_begins()
                    self.marks.append(len(self.log))
                    if script.untimed:
                        for event in events.accesses(step, layer):
                            self._access(event)
                    else:
                        self._event(events.event(step, layer))
            runner.end_request()
            cold = script.cold and ordinal < len(self._requests) - 1
            if cold:
                self._active = NO_EXPERT
            residency.end_request(cold)

    def _access(self, event: Event) -> None:
        """The untimed mode: an access is an event of its own, loaded and released at once."""
        hit, _ = self._residency.route(event.experts)
        self._observe(event)
        if not hit:
            self._note(*self._residency.next_transfer())
            self._residency.arrived()
        self._residency.computed(int(event.experts[0]))

    def _event(self, event: Event) -> None:
        residency, turns = self._residency, self._turns
        ready, _ = residency.route(event.experts)
        waiting = set(event.experts.tolist()) - set(ready)
        self._observe(event)
        proposal = self._runner.propose(event)
        if proposal is not None:
            if fault := proposal_fault(proposal, self._script.shape.total):
                raise RuleError(f"it proposes {fault[0]}", fault[1])
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
        queued, heard = self._residency.keep[PRIORITY].copy(), [array.tobytes() for array in event[3:]]
        self._runner.observe(event)
        if heard != [array.tobytes() for array in event[3:]]:
            raise RuleError("it writes into the arrays of an event, which its other half reads too")
        keeper = self._runner.retention
        if not isinstance(keeper, ScorePolicy):
            return
        if not np.shares_memory(keeper.keep, self._residency.keep):
            raise RuleError("it replaces its array `keep`: the residency holds the first one, so write into it")
        if not np.array_equal(keeper.keep[PRIORITY], queued):
            raise RuleError(THIRD_ROW)
        if not np.isfinite(keeper.keep[:2]).all():
            raise RuleError("its keep scores are not all finite")


@contextmanager
def _time_limit(spec: PolicySpec) -> Iterator[Callable[[], Any]]:
    """Yield what says that an event begins: a user's policy has LIMIT_S seconds from there to the next.

    Only the main thread of a POSIX system can be interrupted: elsewhere there is no limit. The signal comes again, for
    a policy that catches it and for a first one that met a destructor, where Python drops what is raised.
    """
    own = any(own_classes(half.cls) for half in (spec.evict, spec.prefetch))
    if not (own and hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()):
        yield lambda: None
        return

    def late(*_: Any) -> None:
        raise BrokenRuleError(f"it takes more than {LIMIT_S:g} s for an event")

    before = signal.signal(signal.SIGALRM, late)
    try:
        signal.setitimer(signal.ITIMER_REAL, LIMIT_S, LIMIT_S)
        yield lambda: signal.setitimer(signal.ITIMER_REAL, LIMIT_S, LIMIT_S)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before or signal.SIG_DFL)


def _told(act: Callable[[], Any]) -> Any:
    """Whatever the policy raises, as a sentence."""
    try:
        return act()
    except RuleError:
        raise
    except (PolicyError, BrokenRuleError) as error:
        raise RuleError(error.broken, error.details) from error
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        raise RuleError(f"it raises {type(error).__name__}", f": {error}, at {where}") from error


# The checks: each runs a script some times and returns the number of events


def _determinism(spec: PolicySpec, script: Script, rng: random.Random) -> int:
    first, second = Drive(spec, script), Drive(spec, script)
    _alike(first, second, None, "two runs over the same events do not decide alike")
    return 2 * script.events


def _causality(spec: PolicySpec, script: Script, rng: random.Random) -> int:
    if spec.oracle or not script.events:
        return 0
    as_it_was = Drive(spec, script)
    events = script.events
    for _ in range(4):
        cut = rng.randrange(script.events)
        other = script.with_another_future(cut, rng)
        upto = as_it_was.marks[cut]
        _alike(as_it_was, Drive(spec, other), upto, "other routing later on changes a decision before it")
        events += other.events
    return events


def _alike(one: Drive, other: Drive, upto: int | None, complaint: str) -> None:
    """The same first `upto` decisions, or the same decisions."""
    ours, theirs = one.log[:upto], other.log[:upto]
    for i, (this, that) in enumerate(zip(ours, theirs, strict=False)):
        if this != that:
            event = sum(mark <= i for mark in one.marks) - 1
            raise RuleError(complaint, f": at event {event} {_shown(this)} or {_shown(that)}")
    if len(ours) != len(theirs):
        raise RuleError(complaint, f": {len(ours)} decisions or {len(theirs)}")


def _shown(decision: tuple[Any, ...]) -> str:
    if decision[0] == "start":
        return f"expert {decision[1]} replaces {decision[2]}" if decision[2] >= 0 else f"expert {decision[1]} is loaded"
    return f"{decision[1]} proposed at {decision[2]}"


_CHECKS = (_determinism, _causality)


# The cost of an event


def _us_per_event(spec: PolicySpec, seed: int) -> float:
    """Mean microseconds in `observe` and `propose`, on decoded tokens of a model of 26 x 64 experts, top-6."""
    rng = np.random.default_rng(seed)
    L, E, k, tokens = 26, 64, 6, 40
    chosen = np.argsort(rng.random((tokens, L, E)) * (1 + np.arange(E)), axis=-1)[..., :k]
    request = decode_steps(0, chosen, E, sentinel=E, context=np.arange(1, tokens + 1))
    request = replace(request, lookahead=Lookahead(L, request.offsets, request.experts, request.counts))
    runner = PolicyRunner(spec, Shape(L, E), [request, request], experts_per_layer=1.0)
    for ordinal in range(2):  # the first warms up
        events = RequestEvents(request, L)
        heard = [events.event(step, layer) for step in range(tokens) for layer in range(L)]
        began = perf_counter_ns()
        runner.begin_request(ordinal)
        for event in heard:
            runner.observe(event)
            runner.propose(event)
        runner.end_request()
    return (perf_counter_ns() - began) / 1000 / (tokens * L)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def _check(
    policies: Annotated[list[str], typer.Argument(metavar="POLICY...", help="lru+markov, my_file.py:Mine")],
) -> None:
    """Check that policies keep the contract. The status is 1 where one does not."""
    reports = [check_policy(name) for name in policies]
    for report in reports:
        console.say(str(report))
    raise typer.Exit(not all(report.passed for report in reports))


if __name__ == "__main__":
    program.main(app, "python -m policies.checker")
