"""How the hot path is compiled: kept on disk, without Python's lock, and without counting references.

What policies know is dozens of arrays, handed from function to function at every event; by default numba counts a
reference to each, atomically, which took most of the compiled engine's time. Their owner is Python, which holds them
throughout a call. So a `compiled` function must not create an array ("NRT required but not enabled"): loops instead of
array expressions, scratch in what it is given. One that has to is `allocating`.

Numba keeps what it compiled under the date of a function's own file, but contains what that function calls. Here it is
kept under the dates of all files of this package with compiled functions, and of the list that numbers the policies, so
that nothing stale is ever played.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from numba import njit, typeof

P = ParamSpec("P")
R = TypeVar("R")


def _stamp() -> tuple[tuple[str, int, int], ...]:
    sources = sorted(Path(__file__).parents[1].rglob("*.py"))
    marks = b"policies.core.compiled import", b"BUILT_IN ="
    dated = [(path, path.stat()) for path in sources if any(mark in path.read_bytes() for mark in marks)]
    return tuple((path.name, found.st_mtime_ns, found.st_size) for path, found in dated)


STAMP = _stamp()
"""Name, date and size of every file of this package with compiled functions, and of the list of policies."""


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function that makes no arrays."""
    return _kept(function, _nrt=False)


def allocating(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function that makes arrays, and that a compiled one calls."""
    return _kept(function, _nrt=True)


def inlined(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function that makes no arrays into its callers.

    For the guard of something rarer on the hot path: a call hands over every array as nine words.
    """
    return _kept(function, _nrt=False, forceinline=True)


def _kept(function: Callable[P, R], **options: Any) -> Callable[P, R]:
    made: Any = njit(cache=True, nogil=True, **options)(function)
    if hasattr(made, "_cache"):  # not under NUMBA_DISABLE_JIT
        file = made._cache._cache_file
        file._source_stamp = file._source_stamp, STAMP
    return made  # type: ignore[no-any-return]


def from_python(function: Callable[P, R]) -> Callable[P, R]:
    """Return the compiled function for callers in Python that always give arguments of the same types.

    From the second call on it skips numba's look at these, which takes microseconds for every NamedTuple of arrays.
    """
    entry: Callable[P, R] | None = None
    overloads = getattr(function, "overloads", {})  # none under NUMBA_DISABLE_JIT

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal entry
        if entry:
            return entry(*args, **kwargs)
        answer = function(*args, **kwargs)
        if made := overloads.get(tuple(map(typeof, args))):
            entry = made.entry_point
        return answer

    return call
