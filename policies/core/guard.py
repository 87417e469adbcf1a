"""The door for a user's own policy: what it raises is one error with its place, and what it answers is checked.

An instance of a class from outside this project gets the guard where it is made (`built`). Victims, proposals and keep
scores are checked (rules 4 to 6), since a wrong one would be a wrong number, and arrays that it is passed are
read-only. Nothing else is guarded: it is the user's own program. Built-in policies have no guard and pay nothing.
"""

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from traceback import walk_tb
from typing import Any, TypeVar

import numpy as np

from policies.core.compiled import compiled, entry_point
from policies.core.policy import KEEP_ROWS, Event, Float, Int, Listener, Policy, Prefetcher, ScorePolicy, Shape
from traces.errors import InputError
from traces.steps import Lookahead, RequestSteps

OF_VICTIMS = ("on_hit", "on_insert", "on_evict", "on_need", "victim")
METHODS = ("foresee", "begin_request", "observe", "end_request", "save", "window", "propose", "admit", *OF_VICTIMS)
"""All that engines call of policies: of a `ScorePolicy`, which the compiled residency serves, none of OF_VICTIMS."""

FIRST_ARRAY = Event._fields.index("experts")
MOST_VIEWS = 1000

OURS = ("policies", "abc", "builtins")
"""Packages whose classes are no user's."""

T = TypeVar("T")


class PolicyError(InputError):
    """A fault of a user's policy: its text begins with `place`, the file and the line."""

    place = ""


class BrokenRuleError(Exception):
    """A rule that a policy has broken, as the rest of a sentence about it."""


def own_classes(cls: type) -> list[type]:
    """Return `cls` and its bases as far as they are a user's own, in the order of resolution."""
    return [each for each in cls.__mro__ if each.__module__.partition(".")[0] not in OURS]


def guarded(cls: type, name: str, call: Callable[..., T]) -> Callable[..., T]:
    """Return `call` of a user's class so that all that it raises, SystemExit too, is a PolicyError with its place."""
    if not own_classes(cls):
        return call

    def guard(*arguments: Any) -> T:
        try:
            return call(*arguments)
        except PolicyError:
            raise
        except (Exception, SystemExit) as error:
            place = _raised(cls, error)
            if isinstance(error, InputError) and (not place or name == "Options"):  # a check of this project's
                raise
            said = str(error)
            if not isinstance(error, BrokenRuleError | InputError):
                said = f"{type(error).__name__}: {said}" if said else type(error).__name__
            if isinstance(error, ValueError) and "read-only" in said:
                said += " (what a policy is passed is read-only: copy an array before you write into it)"
            fault = PolicyError(f"{place or _defined(cls, name)}: {said}")
            fault.place = place or _defined(cls, name)
            raise fault from error

    return guard


def _raised(cls: type, error: BaseException) -> str:
    """Return the last place in the files of a user's class that had to do with the error, or nothing."""
    own = own_classes(cls)
    codes = (getattr(value, "__code__", None) for each in own for value in vars(each).values())
    files = {getattr(sys.modules.get(each.__module__), "__file__", None) for each in own}
    files |= {code.co_filename for code in codes if code and code.co_filename != "<string>"}
    places = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    return next((f"{file}:{line}" for file, line in reversed(places) if file in files), "")


def _defined(cls: type, name: str) -> str:
    for each in own_classes(cls):
        if code := getattr(vars(each).get(name), "__code__", None):
            return f"{code.co_filename}:{code.co_firstlineno}"
    try:
        return f"{inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]}"
    except (OSError, TypeError):  # typed into a notebook
        return cls.__name__


def built(cls: type[Listener], make: Callable[[], Any], shape: Shape, guard: bool = True) -> Any:
    """Return the half that `make` makes of `cls`, guarded if that is a user's own. Raise PolicyError."""
    half = guarded(cls, "__init__", make)()
    if guard and (own := own_classes(cls)):
        guarded(cls, "__init__", _check)(half, cls, shape)
        _guard(half, cls, shape, own)
    return half


def _check(half: Any, cls: type[Listener], shape: Shape) -> None:
    """Raise BrokenRuleError for an instance that engines cannot use, or of which they would never call a method."""
    if not hasattr(half, "options"):
        raise BrokenRuleError("it has no options: let its __init__ call super().__init__(shape, options)")
    scored, defined = issubclass(cls, ScorePolicy), {name for each in own_classes(cls) for name in vars(each)}
    base = Prefetcher if issubclass(cls, Prefetcher) else Policy
    for name in defined.intersection(METHODS):
        if not hasattr(base, name) or (scored and name in OF_VICTIMS):
            advice = "Policy, or write the scores in `observe`" if scored else "the class that has it"
            raise BrokenRuleError(f"its {name} is never called of a {base.__name__}: derive from {advice}")
    if not cls.oracle and ("foresee" in defined or any(getattr(each, "oracle", False) for each in cls.__mro__)):
        raise BrokenRuleError("its `foresee` sees the whole run ahead: declare `oracle = True` in its class")
    if scored:
        keep: Any = getattr(half, "keep", None)
        rows = KEEP_ROWS + (cls.compiled.more_rows if cls.compiled else 0)
        sound = isinstance(keep, np.ndarray) and keep.dtype == np.float64 and keep.flags.carray and keep.ndim == 2
        if not sound or keep.shape[1] != shape.total or len(keep) < rows:
            raise BrokenRuleError(f"its `keep` is not the writable float64[{rows}, L*E] that its base class makes")


def _guard(half: Any, cls: type[Listener], shape: Shape, own: list[type]) -> None:
    latest: tuple[Event | None, Any] = (None, None)  # as engines make it, and as the policy is passed it
    # By the identity of an array, which is held here: that, and its view, since many recur for a step, or a run.
    views: dict[int, tuple[Int, Int]] = {}
    keep = getattr(half, "keep", None) if isinstance(half, ScorePolicy) else None

    def require_keep() -> None:
        if keep is not None and half.keep is not keep:
            raise BrokenRuleError(
                "it replaces its array `keep`: the residency holds the first one, so write into it, as in "
                "self.keep[0] *= 0.5 or self.keep[0] = ..."
            )

    def passed(event: Event) -> Any:
        nonlocal latest
        if latest[0] is not event:
            if len(views) > MOST_VIEWS:
                views.clear()
            values: list[Any] = list(event)
            for place in range(FIRST_ARRAY, len(values)):
                array = values[place]
                known = views.get(id(array))
                if known is None:
                    known = views[id(array)] = array, read_only(array)
                values[place] = known[1]
            latest = event, Event._make(values)
        return latest[1]

    def original(value: Any) -> Any:
        """Return the event whose arrays compiled functions take as they are; they check nothing."""
        if not isinstance(value, Event):
            return value
        require_keep()
        if value is not latest[1]:
            raise BrokenRuleError("it hands on another event to its base class than the one that it was passed")
        return latest[0]

    def checked(method: str) -> Callable[..., Any]:
        call = getattr(half, method)
        if method == "foresee" and cls.oracle:
            return lambda requests: call([read_only(each) for each in requests])
        if method == "propose":
            return lambda event: _proposal(call(passed(event)), shape.total)
        if method == "victim":
            return lambda evictable: _victim(call(read_only(evictable)), evictable)
        if method in ("observe", "admit"):
            return scored(lambda event: call(passed(event)))
        return scored(call)

    def scored(call: Callable[..., Any]) -> Callable[..., Any]:
        if keep is None:
            return call

        spoiled = entry_point(_spoiled, keep)

        def call_and_check(*arguments: Any) -> Any:
            answer = call(*arguments)
            require_keep()
            if spoiled(keep):
                raise BrokenRuleError("its keep scores are not all numbers: some are NaN")
            return answer

        return call_and_check

    guards = {name: guarded(cls, name, checked(name)) for name in METHODS if hasattr(half, name)}
    if not any("compiled" in vars(each) for each in own):
        for name in ("_observe", "_propose"):
            if function := getattr(half, name):
                vars(half)[name] = lambda *given, function=function: function(*map(original, given))
    vars(half).update(guards)


@compiled
def _spoiled(keep: Float) -> bool:
    """Whether a score is NaN."""
    for row in range(KEEP_ROWS):
        for expert in range(keep.shape[1]):
            if np.isnan(keep[row, expert]):
                return True
    return False


def proposal_fault(proposal: object, total: int) -> str | None:
    """Return what is not as rule 4 asks; None for a proposal that compiled code can take as it is."""
    arrays = proposal if isinstance(proposal, tuple) else ()
    types = [str(getattr(array, "dtype", "no array")) for array in arrays]
    if types != ["int64", "float64"]:
        return f"something else than int64 ids and float64 priorities: {', '.join(types)}"
    ids, priorities = arrays
    if ids.ndim != 1 or ids.shape != priorities.shape:
        return f"ids and priorities of different shapes: {ids.shape}, {priorities.shape}"
    if np.any((ids < 0) | (ids >= total)):
        return f"ids that no expert has: {ids.min()} to {ids.max()}"
    if len(np.unique(ids)) < len(ids):
        return "an expert twice"
    return None if np.isfinite(priorities).all() else "priorities that are not all finite"


def _proposal(answer: Any, total: int) -> tuple[Int, Float]:
    if fault := proposal_fault(answer, total):
        raise BrokenRuleError(f"it proposes {fault}")
    ids, priorities = answer
    return np.array(ids), np.array(priorities)


def _victim(answer: Any, evictable: Int) -> int:
    if isinstance(answer, bool) or not isinstance(answer, int | np.integer) or answer not in evictable:
        raise BrokenRuleError(f"it named victim {answer}, which was not offered: answer one of the ids in `evictable`")
    return int(answer)


def read_only(value: Any) -> Any:
    """Return a view of an array, or of all arrays of a request's steps, that cannot be written into."""
    if isinstance(value, np.ndarray):
        value = value.view()
        value.flags.writeable = False
    elif isinstance(value, RequestSteps | Lookahead):
        value = replace(value, **{name: read_only(held) for name, held in vars(value).items()})
    return value
