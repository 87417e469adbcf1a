"""What a policy declares as `compiled`, as functions at addresses that the compiled loop calls.

Of each function that a policy declares a C function is made here that takes what `policies.core.calling` hands over:
what the policy knows, its scores and the event as pointers. It is compiled when a run first needs it, and of this
package's policies kept on disk, under the name of this file. A policy in a user's own file is called in the same way
and as fast.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from policies.core.calling import NO_EXPERTS, CFunction, Held, Proposal, Scores, call, value, with_names
from policies.core.compiled import OURS, compiled, inlined
from policies.core.limits import Bounds, Limiter, Limits, within
from policies.core.policy import CHANGED, DID_NOTHING, NO_INTS, Compiled, Event, Int, Listener, Policy, Shape

HOOKS = ("on_lookup", "on_host_lookup", "on_insert", "on_evict")
"""Bookkeeping in the keep scores (rule 8), by the name that a policy declares."""

IN_PYTHON = ("observe", "propose", "on_hit", "on_insert", "on_evict", "on_need", "admit", "victim")
"""Methods with which a class takes a decision from compiled code."""

EVENT = Event._make((0, 0, 0, *[NO_INTS.copy() for _ in Event._fields[3:-2]], np.zeros(0), np.zeros(0)))

SCORES = Scores(np.zeros((2, 1)))
PROPOSAL = Proposal(NO_INTS.copy(), np.zeros(0))
NO_STATE = (NO_INTS.copy(),)


def is_compiled(cls: type[Listener]) -> bool:
    """Return whether all that a half decides is compiled."""
    methods = (getattr(cls, name) for name in IN_PYTHON if hasattr(cls, name))
    return cls.compiled is not None and all(method.__module__ == Listener.__module__ for method in methods)


def hooks_of(half: Listener) -> list[int]:
    """Return the addresses of an eviction policy's `HOOKS`, 0 for each that it does not have."""
    cls = type(half)
    own = dict(zip(HOOKS, hooks(cls.declared(half.options)), strict=True))
    made = {name: _address(cls, name) if function else 0 for name, function in own.items()}
    made["on_host_lookup"] = made["on_host_lookup"] or made["on_lookup"]
    return list(made.values())


def compile_named(cls: type[Listener], options: Any, names: Iterable[str]) -> None:
    """Compile what a half that is compiled declares under these names, or load it."""
    declared = cls.declared(options) if is_compiled(cls) else None
    for name in names:
        if getattr(declared, name, None):
            _address(cls, name)


def hooks(declared: Compiled | None) -> list[Any]:
    """Return the `HOOKS` that a policy declares, None for each that it does not."""
    return [getattr(declared, name) if declared else None for name in HOOKS]


class Limited(NamedTuple):
    """A prefetcher and its limits."""

    propose: int  # where that of the prefetcher stands,
    state: int  # and what it knows
    bounds: Bounds
    states: Int  # [L*E] of all experts
    experts: int  # of a layer


EXAMPLE = Limited(0, 0, Limiter(Limits(), Shape(1, 1), None).bounds, NO_INTS.copy(), 1)


def _propose_within(limited: Any, event: Any, proposal: Any, _: int) -> int:
    """Propose what a prefetcher proposes, within its limits; how many."""
    own, (ids, priorities), layer = value(limited), value(proposal), value(event).layer
    n = call(own.propose, own.state, event, proposal, 0)
    if n < 0:
        return n
    return within(own.bounds, ids, priorities, n, layer, own.experts, own.states, ids, priorities)


class Native:
    """One half of a policy, as the compiled loop calls it: addresses, 0 for what it does not do, or Python does."""

    def __init__(self, half: Listener, asked: bool = False) -> None:
        """`asked`: Python is asked for all that it decides."""
        cls = type(half)
        declared = cls.compiled if is_compiled(cls) and not asked else None
        self._half = half
        self._held = Held(_state(half)) if declared else None
        self.state = self._held.address if self._held else 0
        self.proposer = self.state
        """What `propose` is called with."""
        self.propose = _address(cls, "propose") if declared and declared.propose else 0

    @property
    def observe(self) -> int:
        return self.declared("observe") if self._half.observes else 0

    def declared(self, name: str) -> int:
        cls = type(self._half)
        return _address(cls, name) if self._held and getattr(cls.compiled, name) else 0

    def within(self, bounds: Bounds, states: Int, shape: Shape) -> None:
        """Propose within limits (`policies.core.limits`) from now on; states: [L*E] of all experts."""
        self._limited = Held(Limited(self.propose, self.state, bounds, states, shape.experts))
        if "within" not in MADE:
            MADE["within"] = CFunction(_propose_within, EXAMPLE, EVENT, PROPOSAL, None)
        self.proposer, self.propose = self._limited.address, MADE["within"].address

    def refresh(self) -> None:
        """Take note of a state that the half has replaced since."""
        if self._held:
            self._held.hold(_state(self._half))


def _state(half: Listener) -> Any:
    """Return what a half knows, of the type of all that it knows."""
    declared = type(half).compiled
    return half.state if declared and declared.start else NO_STATE


MADE: dict[Any, CFunction] = {}
"""By class and name of what it declares."""


def _address(cls: type[Listener], name: str) -> int:
    """Return where the C function stands of what a policy declares under that name."""
    if (cls, name) not in MADE:
        declared = cls.compiled
        assert declared
        state = declared.start(Shape(1, 1), cls.Options()) if declared.start else NO_STATE
        template, *taken = {
            "propose": (_propose, state, EVENT, PROPOSAL, None),
            "learn": (_learn, state, EVENT, None, None),
            "follow": (_follow, state, SCORES, EVENT, None),
            "observe": (_observe if issubclass(cls, Policy) else _observe_without_scores, state, SCORES, EVENT, None),
            "on_insert": (_on_insert, SCORES, None, None, None),
            "on_evict": (_on_evict, SCORES, None, None, None),
        }.get(name, (_on_lookup, SCORES, None, None, None))
        MADE[cls, name] = CFunction(_adapted(template, cls, name), *taken)
    return MADE[cls, name].address


def _adapted(template: Any, cls: type[Listener], name: str) -> Any:
    """Return a template whose `function` is what a class declares under a name."""
    is_ours = f"{cls.__module__}.".startswith(OURS)
    qualname = f"{cls.__module__}_{cls.__qualname__}_{name}".replace(".", "_")
    names = {
        "function": getattr(cls.compiled, name),
        "ours": is_ours,
        "__name__": __name__ if is_ours else cls.__module__,
    }
    return with_names(template, qualname, **names)


@inlined
def changes(answer: int | None) -> int:
    """Return what a function says that it did."""
    if answer is None:
        return CHANGED
    return int(answer)


# Templates: `function` is what a policy declares, `ours` whether the policy is of this package.
function: Any = None
ours = True


def _on_lookup(scores: Any, expert: int, serial: int, start: int) -> int:
    return changes(function(value(scores).keep, expert, serial))


def _on_insert(scores: Any, expert: int, serial: int, start: int) -> int:
    return changes(function(value(scores).keep, expert, serial, start))


def _on_evict(scores: Any, expert: int, serial: int, start: int) -> int:
    return changes(function(value(scores).keep, expert))


def _observe(state: Any, scores: Any, event: Any, _: int) -> int:
    return changes(function(value(state), value(scores).keep, value(event)))


def _learn(state: Any, event: Any, _: int, __: int) -> int:
    return changes(function(value(state), value(event)))


def _follow(state: Any, scores: Any, event: Any, changed: int) -> int:
    return changes(function(value(state), value(scores).keep, value(event), changed))


def _observe_without_scores(state: Any, scores: Any, event: Any, _: int) -> int:
    return changes(function(value(state), value(event))) & DID_NOTHING


def _propose(state: Any, event: Any, proposal: Any, _: int) -> int:
    ids, priorities = value(proposal)
    n = int(function(value(state), value(event), ids, priorities))
    return n if ours or are_experts(ids, n) else NO_EXPERTS


@compiled
def are_experts(ids: Int, n: int) -> bool:
    """Return whether a user's own function proposes experts alone, and no more than there are (rule 4)."""
    if n < 0 or n > len(ids):
        return False
    wrong = 0
    for i in range(n):
        wrong += ids[i] < 0 or ids[i] >= len(ids)
    return wrong == 0
