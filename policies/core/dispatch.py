"""The dispatch table of compiled policies: which functions observe and propose for which built-in policy, by number.

Numba cannot keep on disk a kernel that takes functions as arguments, nor need it: a compiled engine takes numbers, and
what the policies of the run know as one `PolicyStates`, of one type whatever they are, so that it is compiled once.
`observe` and `propose` are made here, at import, from what the policies of `policies.core.registry.BUILT_IN` declare as
their `kernel`: a chain of ifs each. They count as lines of this file, under whose name numba keeps what it compiles.

Served is every built-in with a kernel and every built-in score policy whose bookkeeping is a rule of
`policies.core.scores`, which hears of no events. A policy from elsewhere, or one that names its victims itself, is not;
nor are two halves of one family with different options, since `PolicyStates` has one place for each.
"""

from collections import namedtuple
from collections.abc import Callable
from functools import cache
from typing import Any

from policies.core.compiled import apart, inlined
from policies.core.policy import Kernel, Listener, Prefetcher, RetentionPolicy, Shape
from policies.core.registry import NoPrefetch, built_in, is_compiled

NONE = 0  # hears of no events, proposes nothing

KERNELS: dict[type[Listener], Kernel] = {cls: cls.kernel for cls in built_in() if cls.kernel}
NUMBERS = {cls: number for number, cls in enumerate(KERNELS, NONE + 1)}
SERVED: set[type[Listener]] = {NoPrefetch, *filter(is_compiled, built_in())}

FAMILIES = {kernel.start: f"of_{place}" for place, kernel in enumerate(KERNELS.values())}
"""Fields of `PolicyStates`, by what makes the state."""

PolicyStates = namedtuple("PolicyStates", list(FAMILIES.values()))  # type: ignore[misc]
"""What each family of policies knows; of one that is not used, next to nothing."""


def _made(name: str, parameters: str, returns: str = "") -> Any:
    """Compile the function `name` that calls, by number, what each kernel has under that name."""
    space, lines = globals(), [f"def {name}(number, states, {parameters}):", "    n = 0"]
    for cls, kernel in KERNELS.items():
        number, function = NUMBERS[cls], getattr(kernel, name)
        if function is not None:
            space[f"{name}_{number}"] = apart(function)
            given = parameters if issubclass(cls, RetentionPolicy) else parameters.removeprefix("keep, ")
            call = f"{returns}{name}_{number}(states.{FAMILIES[kernel.start]}, {given})"
            lines += [f"    {'if' if len(lines) == 2 else 'elif'} number == {number}:", f"        {call}"]
    lines.append("    return n" if returns else "    return")
    exec(compile("\n".join(lines), __file__, "exec"), space)
    return inlined(space[name])


observe: Callable[..., None] = _made("observe", "keep, event")
"""(number, states, keep, event): rule 3; a retention policy writes its keep scores."""

propose: Callable[..., int] = _made("propose", "event, ids, priorities", returns="n = ")
"""(number, states, event, ids, priorities): rule 4; fill ids and priorities, [L*E] each; how many."""


def refusal(keeper: RetentionPolicy, fetcher: Prefetcher) -> str | None:
    """Return why compiled engines cannot serve this pair; None if they can."""
    for half in (keeper, fetcher):
        if type(half) not in SERVED:
            return f"{half.name} is not one of the built-in score policies and prefetchers"
    if _field(keeper) is not None and _field(keeper) == _field(fetcher) and fetcher.observes:
        return f"its halves are two different {keeper.name}"
    return None


def _field(half: Listener) -> str | None:
    return FAMILIES[half.kernel.start] if half.kernel else None


@cache
def _nothing() -> Any:
    """Return the states of a model of one expert, before anything has happened."""
    options = {kernel.start: cls.Options() for cls, kernel in KERNELS.items()}
    return PolicyStates(**{field: start(Shape(1, 1), options[start]) for start, field in FAMILIES.items()})


def states(*halves: Listener) -> Any:
    """Return what the halves know, in a request that has begun."""
    return _nothing()._replace(**{field: half.state for half in halves if (field := _field(half)) is not None})
