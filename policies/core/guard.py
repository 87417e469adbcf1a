"""The guard around a user's own policy: whatever goes wrong in it ends in one line, with the file and the line.

An instance of a class from outside this package gets the guard where it is made (`built`): each method that an engine
calls turns what it raises, `SystemExit` included, into a `PolicyError`; what it answers is checked (rules 4 and 5), and
arrays that it is given are read-only. Built-in policies have no guard and pay nothing.
"""

import inspect
import os
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from operator import attrgetter
from threading import current_thread, main_thread
from traceback import walk_tb
from typing import Any, TypeVar

import numpy as np

from policies.core import scores
from policies.core.given import ReadOnly, event_fault, read_only, read_only_array
from policies.core.policy import Event, Float, Int, Listener, Prefetcher, RetentionPolicy, ScorePolicy, Shape
from traces.errors import InputError

OF_BOTH = ("foresee", "begin_request", "observe", "end_request")
OF_PREFETCHERS = ("window", "propose")
OF_KEEPERS = ("on_hit", "on_insert", "on_evict", "on_need", "victim")
METHODS = (*OF_BOTH, *OF_PREFETCHERS, *OF_KEEPERS)
"""All that engines call of policies: of a `ScorePolicy`, which the compiled residency serves, none of the last five."""

NO_SCORES = np.empty(0)

THIRD_ROW = "it writes into the third row of `keep`, or behind it, which are not its own: scores are the first two"

BASES = (Listener, RetentionPolicy, Prefetcher, ScorePolicy)
KNOWN = ("policies", "abc", "builtins")
"""Packages whose classes are no user's."""

T = TypeVar("T")


class PolicyError(InputError):
    """A fault of a user's policy: its text begins with file and line.

    broken: the rule, as the rest of a sentence about the policy, and details of this case.
    """

    def __init__(self, text: str, broken: str = "", details: str = "") -> None:
        super().__init__(text)
        self.broken, self.details = broken, details


class BrokenRuleError(BaseException):
    """A rule that a policy has broken, as the rest of a sentence about it, and details of this case.

    It is no Exception: a policy that catches all of those does not hear of it.
    """

    def __init__(self, broken: str, details: str = "") -> None:
        super().__init__(broken + details)
        self.broken, self.details = broken, details


def own_classes(cls: type) -> list[type]:
    """Return `cls` and its bases as far as they are a user's own, in the order of resolution."""
    return [each for each in cls.__mro__ if each.__module__.partition(".")[0] not in KNOWN]


def called(cls: type, name: str, call: Callable[[], T]) -> T:
    """Return what `call` answers, which runs code of `cls`, its `name`. Raise PolicyError for a fault of a user's."""
    return _guarded(cls, name, call)() if own_classes(cls) else call()


def built(cls: type[Listener], make: Callable[[], Any], shape: Shape) -> Any:
    """Return the half that `make` makes of `cls`, guarded if that is a user's own. Raise PolicyError."""
    if not own_classes(cls):
        return make()
    if issubclass(cls, ScorePolicy) and not isinstance(getattr(cls, "keep", None), property):
        cls.keep = _KEEP  # type: ignore[assignment]
    half = called(cls, "__init__", make)
    called(cls, "__init__", lambda: _check(half, cls, shape))
    called(cls, "__init__", lambda: _guard(half, cls, shape))
    return half


def proposal_fault(proposal: object, total: int) -> tuple[str, str] | None:
    """Return what is not as rule 4 asks, and details; None for a proposal that compiled code can take as it is."""
    arrays = proposal if isinstance(proposal, tuple) else ()
    types = [str(getattr(array, "dtype", "no array")) for array in arrays]
    if types != ["int64", "float64"]:
        return "something else than int64 ids and float64 priorities", f": {', '.join(types)}"
    ids, priorities = arrays
    if ids.ndim != 1 or ids.shape != priorities.shape:
        return "ids and priorities of different shapes", f": {ids.shape}, {priorities.shape}"
    if np.any((ids < 0) | (ids >= total)):
        return "ids that no expert has", f": {ids.min()} to {ids.max()}"
    if len(np.unique(ids)) < len(ids):
        return "an expert twice", ""
    return None if np.isfinite(priorities).all() else ("priorities that are not all finite", "")


# What is wrong, and where


def _guarded(cls: type, name: str, call: Callable[..., T]) -> Callable[..., T]:
    def guarded(*given: Any) -> T:
        try:
            with ProcessKept():
                answer = call(*given)
                if isinstance(answer, NOT_RUN):
                    raise BrokenRuleError(f"its `{name}` is a generator or a coroutine: what it holds never runs")
                return answer
        except PolicyError:
            raise
        except InputError as error:
            place = _raised(cls, error)
            if not place or name == "Options":  # a check of this project's, or of what was asked for
                raise
            raise PolicyError(f"{place[0]}:{place[1]}: {text_of(error)}") from error
        except BaseException as error:  # a policy that exits would end a sweep without a word
            if isinstance(error, KeyboardInterrupt) and current_thread() is main_thread():  # Ctrl-C reaches no other
                raise
            raise _fault(cls, name, error) from error

    return guarded


NOT_RUN = Generator, AsyncGenerator, Coroutine
"""What a function with a `yield` or an `async def` answers instead of running."""


class ProcessKept:
    """Around a user's code: what the rest of the process relies on is as it was. Raise BrokenRuleError."""

    def __enter__(self) -> None:
        self._folder, self._streams, self._outputs = _working_folder(), (sys.stdout, sys.stderr), _outputs()
        self._numpy = np.geterr()

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if np.geterr() != self._numpy:
            np.seterr(**self._numpy)
        if self._folder is not None and _working_folder() != self._folder:
            os.chdir(self._folder)
            raise BrokenRuleError("it changes the working directory: results would be written elsewhere") from error
        kept = (sys.stdout, sys.stderr) == self._streams and _outputs() == self._outputs
        if kept and not any(map(_closed, self._streams)):
            return
        sys.stdout, sys.stderr = (
            open(os.devnull, "w", encoding="utf-8") if _closed(stream) else stream  # noqa: SIM115  so that the rest can write
            for stream in self._streams
        )
        raise BrokenRuleError(
            "it closes or replaces standard output or standard error, which others write to"
        ) from error


def _closed(stream: object) -> bool:
    return bool(getattr(stream, "closed", False))


def _outputs() -> list[tuple[int, int] | None]:
    """The files that are the process's standard output and standard error; None for one that is closed."""
    return [_file(descriptor) for descriptor in (1, 2)]


def _file(descriptor: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _working_folder() -> str | None:
    """None where there is none, as it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return None


def _fault(cls: type, name: str, error: BaseException) -> PolicyError:
    """Return what a user's code has raised, with the place in it."""
    file, line = _raised(cls, error) or _defined(cls, name)
    if isinstance(error, BrokenRuleError):
        return PolicyError(f"{file}:{line}: {error}", error.broken, error.details)
    kind = type.__dict__["__name__"].__get__(type(error))  # whatever a metaclass says
    said = text_of(error)
    if isinstance(error, ValueError) and "read-only" in said:
        said += " (what a policy is given is read-only: copy an array before you write into it)"
    details = f": {said}" if said else ""
    at = f", at {file.replace(chr(92), '/').rpartition('/')[2]}:{line}"
    return PolicyError(f"{file}:{line}: {kind}{details}", f"it raises {kind}", details + at)


def text_of(error: BaseException) -> str:
    """Return the message of any exception, of one that cannot say it too."""
    try:
        return str.__str__(str(error))  # plain, where it is an instance of a subclass of str
    except BaseException:
        return "(its message cannot be read)"


def _raised(cls: type, error: BaseException) -> tuple[str, int] | None:
    """Return the last place in the files of a user's class that had to do with the error."""
    files = {getattr(sys.modules.get(each.__module__), "__file__", None) for each in own_classes(cls)}
    for each in own_classes(cls):
        codes = (getattr(value, "__code__", None) for value in vars(each).values())
        files |= {code.co_filename for code in codes if code and not code.co_filename.startswith("<string>")}
    trace = BaseException.__dict__["__traceback__"].__get__(error)  # whatever its class says
    places = [(frame.f_code.co_filename, line) for frame, line in walk_tb(trace)]
    return next((place for place in reversed(places) if place[0] in files), None)


def _defined(cls: type, name: str) -> tuple[str, int]:
    """Return the place of a method, else of the class."""
    for each in own_classes(cls):
        if code := getattr(inspect.unwrap(vars(each).get(name, each)), "__code__", None):
            return code.co_filename, code.co_firstlineno
    try:
        return inspect.getsourcefile(cls) or cls.__name__, inspect.getsourcelines(cls)[1]
    except (OSError, TypeError):
        return cls.__name__, 1


# What a policy must have when it is built


def _replace(half: Any, keep: object) -> None:
    if vars(half).get("_built") and keep is not half._keep:
        raise BrokenRuleError(
            "it replaces its array `keep`: the residency holds the first one, so write into it, as in "
            "self.keep[0] *= 0.5 or self.keep[0] = ..."
        )
    half._keep = keep.view() if isinstance(keep, np.ndarray) else keep  # a view cannot be resized


_KEEP = property(attrgetter("_keep"), _replace, doc="Keep scores: an array that stays the same once the run begins.")


DECLARED: dict[str, type] = {
    "name": str,
    **dict.fromkeys(("oracle", "observes", "proposes", "at_start", "needs_lookahead"), bool),
    **dict.fromkeys(("starts_from", "one_scale_with"), str),
}
"""Attributes in which a policy describes itself, and their types."""

OF_THE_CLASS = ("name", "oracle", "needs_lookahead", "starts_from")
"""Those of them that are read before there is an instance."""


def _check(half: Any, cls: type[Listener], shape: Shape) -> None:
    """Raise BrokenRuleError for an instance that engines cannot use."""
    if not isinstance(half, cls):
        raise BrokenRuleError(f"it makes {type(half).__name__} instead of {cls.__name__}")
    lacks = [name for name in ("shape", "options") if name not in vars(half)]
    lacks += ["keep"] if isinstance(half, ScorePolicy) and "_keep" not in vars(half) else []
    if lacks:
        raise BrokenRuleError(
            f"it has no {' and no '.join(lacks)}: let its __init__ call super().__init__(shape, options)"
        )
    _check_heard(cls)
    for method in _heard(cls):
        definer = next((each for each in cls.__mro__ if method in vars(each)), None)
        if method in vars(half) or (definer and inspect.isdatadescriptor(vars(definer)[method])):
            raise BrokenRuleError(f"its `{method}` is not a method of its class: define it there, with `def`")
    if any("__getattribute__" in vars(each) for each in own_classes(cls)):
        raise BrokenRuleError("it defines `__getattribute__`: engines could not rely on what they read")
    for name, kind in DECLARED.items():
        if not isinstance(declared := getattr(half, name, kind()), kind):
            raise BrokenRuleError(f"its `{name}` is of type {type(declared).__name__}, not {kind.__name__}")
        if name in OF_THE_CLASS and declared != getattr(cls, name, kind()):
            raise BrokenRuleError(f"its `{name}` differs from its class's: declare it there")
    if cls.starts_from and cls.save is Listener.save:
        raise BrokenRuleError(f"it starts from a file, by `starts_from = {cls.starts_from!r}`, and has no `save`")
    if cls.starts_from and not isinstance(getattr(half.options, cls.starts_from, None), str):
        raise BrokenRuleError(f"its `starts_from` is {cls.starts_from!r}, which is no option that holds a text")
    if not isinstance(half, ScorePolicy):
        return
    keep: Any = half.keep
    if not isinstance(keep, np.ndarray) or keep.dtype != np.float64 or not keep.flags.carray or keep.ndim != 2:
        raise BrokenRuleError("its `keep` is not the writable float64[3, L*E] that ScorePolicy makes: write into that")
    if type(half.rule) is not int or not 0 <= half.rule < scores.NAMES_VICTIMS:
        raise BrokenRuleError(f"its `rule` is {half.rule!r}, none of policies.core.scores")
    rows, maker = (scores.ROWS, "its `rule` needs") if half.rule in scores.WITH_OPTION else (3, "ScorePolicy makes")
    if len(keep) < rows or keep.shape[1] != shape.total:
        raise BrokenRuleError(f"its `keep` has the shape {keep.shape}, not ({rows}, {shape.total}) as {maker} it")
    if half.rule == scores.LFU_AGED and not keep[scores.OPTION, 0] >= 1:
        raise BrokenRuleError(f"its counts halve every {keep[scores.OPTION, 0]} events (`keep[OPTION]`): 1 or more")
    if any("listed" in vars(each) for each in own_classes(cls)):
        raise BrokenRuleError("it declares `listed`, which is for policies of this project: leave it out")
    vars(half)["_built"] = True


def _heard(cls: type[Listener]) -> tuple[str, ...]:
    """Return the methods that are called of instances of `cls`."""
    both = (*OF_BOTH, "save") if cls.starts_from else OF_BOTH
    if issubclass(cls, Prefetcher):
        return (*both, *OF_PREFETCHERS)
    return both if issubclass(cls, ScorePolicy) else (*both, *OF_KEEPERS)


def _check_heard(cls: type[Listener]) -> None:
    """Raise BrokenRuleError where a user's class defines a method that is called of others alone."""
    own = own_classes(cls)
    for method in METHODS:
        if method in _heard(cls) or not any(callable(vars(each).get(method)) for each in own):
            continue
        if issubclass(cls, ScorePolicy) and method in OF_KEEPERS:
            raise BrokenRuleError(
                f"a ScorePolicy is served compiled and its {method} is never called: write the scores in `observe`, "
                "or derive from RetentionPolicy"
            )
        kind = "Prefetcher" if method in OF_PREFETCHERS else "RetentionPolicy"
        raise BrokenRuleError(
            f"its {method} is never called, only that of a {kind}: write a class for that, or rename it"
        )
    foresees = any("foresee" in vars(each) for each in own) or any(getattr(base, "oracle", 0) for base in cls.__mro__)
    if foresees and not cls.oracle:
        raise BrokenRuleError("its `foresee` sees the whole run ahead: declare `oracle = True` in its class")


# The guard


def _said(half: Any) -> dict[str, Any]:
    """Return what engines have read of a policy when a run begins."""
    names = [*DECLARED, "rule"] if isinstance(half, ScorePolicy) else DECLARED
    return {name: getattr(half, name, None) for name in names}


def _guard(half: Any, cls: type[Listener], shape: Shape) -> None:
    """Put a guard around each method of an instance that does anything."""
    own = own_classes(cls)
    own_kernel = any("kernel" in vars(each) for each in own)
    latest: list[Event] = []
    said = _said(half)
    guards: dict[str, Callable[..., Any]] = {}

    def heard(event: Event) -> Event:
        """The event, which compiled functions take as it is."""
        if not latest or latest[0] is not event:
            latest[:] = [event]
        return event

    def protect(event: Event) -> Event:
        """The same event for both calls, as an event that cannot be written into."""
        heard(event)
        if len(latest) < 2:
            latest.append(read_only(event))
        return latest[1]

    def handed(function: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled function for a class of a user's, which may hand on another event than it heard."""

        def call(*given: Any) -> Any:
            made = (each for each in given if isinstance(each, Event) and not any(each is event for event in latest))
            if fault := next(filter(None, (event_fault(each, shape) for each in made)), None):
                raise BrokenRuleError(f"it hands on {fault}")
            return function(*given)

        return call

    def checked(call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, after which the methods must be those of before and the scores numbers."""

        def call_and_check(*given: Any) -> Any:
            others = half.keep[2:].copy() if isinstance(half, ScorePolicy) else NO_SCORES
            answer = call(*given)
            for method, guarded in guards.items():
                if vars(half).get(method) is not guarded:
                    raise BrokenRuleError(f"it replaces its method `{method}`: choose what to do inside of it")
            if changed := [name for name, value in _said(half).items() if value != said[name]]:
                raise BrokenRuleError(f"it changes its `{changed[0]}` during the run: set it in __init__")
            if isinstance(half, ScorePolicy) and not np.array_equal(half.keep[2:], others):
                raise BrokenRuleError(THIRD_ROW)
            if isinstance(half, ScorePolicy) and np.isnan(half.keep[:2].min()):
                raise BrokenRuleError("its keep scores are not all numbers: some are NaN")
            return answer

        return call_and_check

    def guard(method: str, owned: bool) -> Callable[..., Any]:
        call = checked(getattr(half, method))
        if method == "foresee":
            return lambda requests, per_access: call(ReadOnly(requests), per_access)
        if method == "observe":
            return lambda event: call((protect if owned else heard)(event))
        if method == "propose":
            return lambda event: _proposal(call((protect if owned else heard)(event)), shape.total)
        return (lambda evictable: _victim(call, evictable)) if method == "victim" else call

    for method in _heard(cls):
        definer = next((each for each in cls.__mro__ if method in vars(each)), None)
        always = method in ("propose", "victim") or (method == "end_request" and isinstance(half, ScorePolicy))
        if definer and (always or type(half).kernel or definer not in BASES):
            guards[method] = _guarded(cls, method, guard(method, definer in own or own_kernel))
    vars(half).update(guards)
    for name in ("_observe", "_propose"):
        if name in vars(half):
            vars(half)[name] = handed(getattr(type(half).kernel, name[1:]))


def _proposal(answer: Any, total: int) -> tuple[Int, Float]:
    """Return a checked proposal as arrays of its own."""
    if fault := proposal_fault(answer, total):
        raise BrokenRuleError(f"it proposes {fault[0]}", fault[1])
    ids, priorities = answer
    return np.array(ids), np.array(priorities)


def _victim(call: Callable[[Int], Any], evictable: Int) -> int:
    """Return the checked victim."""
    answer = call(read_only_array(evictable))
    if isinstance(answer, bool) or not isinstance(answer, int | np.integer) or answer not in evictable:
        shown = int(answer) if isinstance(answer, np.integer) else repr(answer)
        raise BrokenRuleError(f"it named victim {shown}, which was not offered: answer one of the ids in `evictable`")
    return int(answer)
