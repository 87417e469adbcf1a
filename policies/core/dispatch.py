"""The dispatch table of compiled policies: which functions of which built-in policy are called, by number.

Numba cannot keep on disk a function that takes functions as arguments, nor need it: a compiled engine takes numbers,
and what the policies of the run know as one `PolicyStates`, of one type whatever they are, so that it is compiled once.
The functions here are made at import, from what the policies of `policies.core.registry.BUILT_IN` declare as
`compiled`: a chain of ifs each. They count as lines of this file, under whose name numba keeps what it compiles.

A policy from elsewhere, or one that names its victims itself, has no number; nor do compiled engines run two halves of
one family with different options, since `PolicyStates` has one place for each.
"""

from collections import namedtuple
from collections.abc import Callable
from functools import cache
from typing import Any

from policies.core.compiled import apart, compiled, inlined
from policies.core.policy import Compiled, Listener, RetentionPolicy, Shape
from policies.core.registry import NoPrefetch, built_in

NONE = 0  # observes nothing, proposes nothing, keeps no scores

COMPILED: dict[type[Listener], Compiled] = {cls: cls.compiled for cls in built_in() if cls.compiled}
NUMBERS = {cls: number for number, cls in enumerate(COMPILED, NONE + 1)}
SERVED: set[type[Listener]] = {NoPrefetch, *COMPILED}

FAMILIES = {each.start: f"of_{place}" for place, each in enumerate(COMPILED.values()) if each.start}
"""Fields of `PolicyStates`, by what makes the state."""

PolicyStates = namedtuple("PolicyStates", list(FAMILIES.values()))  # type: ignore[misc]
"""What each family of policies knows; of one that is not used, next to nothing."""


def number_of(cls: type[Listener]) -> int:
    """Return the number of the built-in policy whose functions a class has, which a user's may inherit; or NONE."""
    return next((number for each, number in NUMBERS.items() if each.compiled is cls.compiled), NONE)


def _chain(name: str, parameters: str, compiling: Callable[..., Any], returns: str = "", instead: str = "") -> Any:
    """Compile the function `name` that calls, by number, what each policy declares under that name, or `instead`."""
    space, lines = globals(), [f"def {name}(number, {parameters}):", "    n = 0"]
    for cls, declared in COMPILED.items():
        function = getattr(declared, name) or (getattr(declared, instead) if instead else None)
        if function is not None:
            with_state = parameters.startswith("states, ")
            space[f"{name}_{NUMBERS[cls]}"] = apart(function) if with_state else function
            own = parameters.removeprefix("states, ")
            if with_state:
                own = own if issubclass(cls, RetentionPolicy) else own.removeprefix("keep, ")
                own = f"states.{FAMILIES[declared.start]}, {own}"  # type: ignore[index]
            lines += [f"    {'if' if len(lines) == 2 else 'elif'} number == {NUMBERS[cls]}:"]
            lines += [f"        {returns}{name}_{NUMBERS[cls]}({own})"]
    lines.append("    return n" if returns else "    return")
    exec(compile("\n".join(lines), __file__, "exec"), space)
    return compiling(space[name])


observe: Callable[..., None] = _chain("observe", "states, keep, event", inlined)
"""(number, states, keep, event): rule 3; a retention policy writes its keep scores."""

propose: Callable[..., int] = _chain("propose", "states, event, ids, priorities", inlined, returns="n = ")
"""(number, states, event, ids, priorities): rule 4; fill ids and priorities, [L*E] each; how many."""

on_lookup: Callable[..., None] = _chain("on_lookup", "keep, expert, serial", compiled)
"""(number, keep, expert, serial): rule 8; an event looks `expert` up, whatever its state."""

on_host_lookup: Callable[..., None] = _chain("on_host_lookup", "keep, expert, serial", compiled, instead="on_lookup")
"""(number, keep, expert, serial): the same of a miss that is computed on the host."""

on_insert: Callable[..., None] = _chain("on_insert", "keep, expert, serial, start", compiled)
"""(number, keep, expert, serial, start): the `start`-th transfer of the run begins, after event `serial`."""

on_evict: Callable[..., None] = _chain("on_evict", "keep, expert", compiled)
"""(number, keep, expert): `expert` leaves the cache."""


def _field(half: Listener) -> str | None:
    return FAMILIES[half.compiled.start] if half.compiled and half.compiled.start else None


@cache
def _nothing() -> Any:
    """Return the states of a model of one expert, before anything has happened."""
    options = {declared.start: cls.Options() for cls, declared in COMPILED.items()}
    return PolicyStates(**{field: start(Shape(1, 1), options[start]) for start, field in FAMILIES.items()})


def states(*halves: Listener) -> Any:
    """Return what the halves know, in a request that has begun."""
    return _nothing()._replace(**{field: half.state for half in halves if (field := _field(half)) is not None})
