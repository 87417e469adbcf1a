"""What a policy declares as `compiled`, as functions at addresses that the compiled loop calls.

Of each function that a policy declares one is made here that takes what `policies.core.calling` hands over: what the
policy knows and the event as addresses. It is compiled when a run first needs it, and of this package's policies kept
on disk, under the name of this file. A policy in a user's own file is called in the same way and as fast.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np

from policies.core.calling import Held, address_of, call_propose, got, put
from policies.core.compiled import OURS, compiled
from policies.core.limits import Bounds, Limiter, Limits, within
from policies.core.policy import NO_INTS, Compiled, Event, Float, Int, Listener, Policy, Shape

HOOKS = ("on_lookup", "on_host_lookup", "on_insert", "on_evict")
"""Bookkeeping in the keep scores (rule 8), by the name that a policy declares."""

IN_PYTHON = ("observe", "propose", "on_hit", "on_insert", "on_evict", "on_need", "victim")
"""Methods with which a class takes a decision from compiled code."""

EVENT = Event(0, 0, 0, *[NO_INTS.copy() for _ in Event._fields[3:]])

event_of = got(EVENT)

put_event: Callable[[Event, int], int] = put
"""(event, address), in compiled code."""


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

limited_of = got(EXAMPLE)


@compiled
def propose_within(state: int, event: int, ids: Int, priorities: Float) -> int:
    """Propose what a prefetcher proposes, within its limits; how many."""
    own, layer = limited_of(state), event_of(event).layer
    n = call_propose(own.propose, own.state, event, ids, priorities)
    return within(own.bounds, ids, priorities, n, layer, own.experts, own.states, ids, priorities)


class Native:
    """One half of a policy, as the compiled loop calls it: addresses, 0 for what it does not do, or Python does."""

    def __init__(self, half: Listener, asked: bool = False) -> None:
        """`asked`: Python is asked for all that it decides."""
        cls = type(half)
        declared = cls.compiled if is_compiled(cls) and not asked else None
        self._half = half
        self._held = Held(half.state) if declared and declared.start else None
        self.state = self._held.address if self._held else 0
        self.proposer = self.state
        """What `propose` is called with."""
        self.observe = _address(cls, "observe") if declared and half.observes else 0
        self.propose = _address(cls, "propose") if declared and declared.propose else 0

    def within(self, bounds: Bounds, states: Int, shape: Shape) -> None:
        """Propose within limits (`policies.core.limits`) from now on; states: [L*E] of all experts."""
        self._limited = Held(Limited(self.propose, self.state, bounds, states, shape.experts))
        self.proposer, self.propose = self._limited.address, address_of(propose_within, "propose")

    def refresh(self) -> None:
        """Take note of a state that the half has replaced since."""
        if self._held:
            self._held.hold(self._half.state)


_ADDRESSES: dict[tuple[type[Listener], str], int] = {}


def _address(cls: type[Listener], name: str) -> int:
    """Return where the function stands that a policy declares under that name."""
    if (cls, name) not in _ADDRESSES:
        declared = cls.compiled
        assert declared
        kind = name if name in ("observe", "propose") else "hook"
        _ADDRESSES[cls, name] = address_of(_function(cls, declared, name, kind), kind)
    return _ADDRESSES[cls, name]


_TAKES = {"hook": "keep, expert, serial, start", "observe": "state, keep, event"}
_TAKES["propose"] = "state, event, ids, priorities"
"""Parameters of a function by its kind."""

_GIVES = {"on_lookup": "keep, expert, serial", "on_host_lookup": "keep, expert, serial", "on_evict": "keep, expert"}
"""What of these a declared function takes, if not all."""


def _function(cls: type[Listener], declared: Compiled, name: str, kind: str) -> Callable[..., int]:
    """Make the compiled function of a class that calls what is declared under a name."""
    ours = f"{cls.__module__}.".startswith(OURS)
    called = f"{cls.__qualname__}_{name}".replace(".", "_") if ours else name
    given = _GIVES.get(name, _TAKES[kind])
    if kind == "observe" and not issubclass(cls, Policy):
        given = "state, event"
    space = {"__name__": __name__ if ours else cls.__module__, "function": getattr(declared, name), "known": known}
    if kind != "hook":
        given = given.replace("state", "state_of(state)").replace("event", "event_of(event)")
        space |= {"state_of": got(_state(declared.start, cls)), "event_of": event_of}
    answer = f"function({given})"
    if kind == "propose":
        body = f"    return {answer if ours else f'known(ids, {answer})'}"
    else:
        body = f"    {answer}\n    return 0"
    exec(compile(f"def {called}({_TAKES[kind]}):\n{body}\n", __file__, "exec"), space)
    made = space[called]
    assert isinstance(made, FunctionType)
    return compiled(made)


@compiled
def known(ids: Int, n: int) -> int:
    """Return `n`, how many experts a user's own function proposes. Raise ValueError for ids of no expert (rule 4)."""
    if n < 0 or n > len(ids):
        raise ValueError("a compiled policy proposes more experts than there are")
    for i in range(n):
        if ids[i] < 0 or ids[i] >= len(ids):
            raise ValueError("a compiled policy proposes ids that no expert has")
    return n


def _state(start: Callable[[Shape, Any], Any] | None, cls: type[Listener]) -> Any:
    """Return what the policy knows of a model of one expert, before anything has happened: of the type of all."""
    return start(Shape(1, 1), cls.Options()) if start else (np.zeros(1, np.int64),)
