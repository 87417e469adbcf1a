"""How the hot path is compiled: kept on disk, without Python's lock, and without counting references.

What policies know is dozens of arrays, handed from function to function at every event; by default numba counts a
reference to each, atomically, which took most of the compiled engine's time. Their owner is Python, which holds them
throughout a call. So a `compiled` function must not create an array ("NRT required but not enabled"): loops instead of
array expressions, scratch in what it is given. One that has to is `allocating`.

Numba keeps what it compiled under the date of a function's own file, but contains what that function calls. Here it is
kept under the dates of all files of this package with compiled functions, of the list that numbers the policies, and of
what these files import names from, so that nothing stale is ever run. Of a user's functions, which may call or name
anything, nothing is kept. (What the names inside of it are made of, see `traces.compiled`.)

Numba optimizes every function together with all that it calls, and makes it executable, at each level of calls again.
Here that is done once, in the function that Python calls: what compiled functions call is a part of them.

Arrays are handed over by value, in seven words each. So the functions that choose among policies are `inlined`, and
what they choose is `apart`: it gets its own family's state, and of that and the event only the words it reads.
"""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from numba import njit, typeof, types
from numba.core.codegen import CPUCodeLibrary, JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.registry import CPUDispatcher

from traces.compiled import KEPT

P = ParamSpec("P")
R = TypeVar("R")

Stamp = tuple[tuple[str, int, int], ...]
"""Name, date and size of files."""

_IMPORT = re.compile(rb"^from ((?:policies|sim|traces)\.[\w.]+) import", re.M)


@cache
def _stamp(*files: Path) -> Stamp:
    """Return the stamp of files and of the modules they import from, whose values numba compiles as constants."""
    names = {name.decode().replace(".", "/") for file in files for name in _IMPORT.findall(file.read_bytes())}
    imported = (Path(__file__).parents[2] / f"{name}.py" for name in names)
    dated = [(file, file.stat()) for file in sorted({*files, *filter(Path.is_file, imported)})]
    return tuple((file.name, found.st_mtime_ns, found.st_size) for file, found in dated)


def _sources() -> list[Path]:
    """The files of this package with compiled functions, and with the list of policies."""
    sources = Path(__file__).parents[1].rglob("*.py")
    marks = b"policies.core.compiled import", b"BUILT_IN ="
    return [file for file in sources if any(mark in file.read_bytes() for mark in marks)]


STAMP = _stamp(*_sources())

OURS = ("policies.", "sim.")
"""How the names of modules begin whose compiled functions are kept."""


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function that makes no arrays."""
    return _kept(function, _nrt=False)


def allocating(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function that makes arrays, and that a compiled one calls."""
    return _kept(function, _nrt=True)


def inlined(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function that makes no arrays into its callers.

    For what is on the hot path and has few callers, and for the guard of something rarer there.
    """
    return _kept(function, _nrt=False, forceinline=True)


def _kept(function: Callable[P, R], _nrt: bool, forceinline: bool = False) -> Callable[P, R]:
    # Numba takes an option that is not given from the function by whose call this one is first compiled: given are all.
    options: dict[str, Any] = {"_nrt": _nrt, "forceinline": forceinline}
    ours = function.__module__.startswith(OURS)
    made: Any = njit(cache=KEPT and ours, nogil=True, pipeline_class=_WholeCompiler, **options)(function)
    if KEPT and hasattr(made, "_cache"):  # not under NUMBA_DISABLE_JIT
        if ours:
            file = made._cache._cache_file
            file._source_stamp = file._source_stamp, STAMP, _stamp(Path(function.__code__.co_filename))
        part = _Part(function, targetoptions={"nopython": True, "nogil": True, **options}, pipeline_class=_PartCompiler)
        made.get_call_template, made.get_overload, made.part = part.get_call_template, part.get_overload, part
    return made  # type: ignore[no-any-return]


def entry_point(function: Callable[..., R], *examples: Any) -> Callable[..., R]:
    """Return the compiled function for a caller in Python that always gives arguments of the types of `examples`.

    It skips numba's look at the types, which takes longer than a short function.
    """
    made: Any = function
    if not hasattr(made, "overloads"):  # under NUMBA_DISABLE_JIT
        return function
    types_of = tuple(map(typeof, examples))
    made.compile(types_of)
    entry: Callable[..., R] = made.overloads[types_of].entry_point
    return entry


def apart(function: Callable[P, R]) -> Callable[P, R]:
    """Keep a compiled function a call of its own, never a piece of its callers, which so stay small.

    Only the function that Python calls has it, so it is handed no more of its arguments than it reads.
    """
    if part := getattr(function, "part", None):  # none under NUMBA_DISABLE_JIT
        part.apart = True
    return function


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


_PARTS: set[str] = set()
"""Names, to LLVM, of the functions that compiled functions call."""


class _Part(CPUDispatcher):
    """A function as compiled functions call it: a part of theirs, which Python cannot call."""

    apart = False  # whether LLVM may not inline it

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """As numba's, but literal arguments are values like others: one version serves all."""
        return super().get_call_template([types.unliteral(each) for each in args], kws)

    def add_overload(self, result: Any) -> None:
        """As numba's, but for calls from compiled functions alone: there is nothing for Python to call."""
        key = object()
        _PARTS.add(result.fndesc.llvm_func_name)
        if self.apart:
            result.library.get_function(result.fndesc.llvm_func_name).add_function_attribute("noinline")
        self.targetctx.insert_user_function(key, result.fndesc, [result.library])
        self.overloads[tuple(result.signature.args)] = result._replace(entry_point=key)


class _PartCompiler(Compiler):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        flags = self.state.flags
        flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
        self.state.library = _PartLibrary(self.state.targetctx.codegen(), "part")


class _PartLibrary(CPUCodeLibrary):
    """Code that is optimized and made executable once, in the function that Python calls."""

    def finalize(self) -> None:
        for library in dict.fromkeys(self._linking_libraries):
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalized = True


class _WholeCompiler(Compiler):
    """Compiles what Python calls."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.state.library = _WholeLibrary(self.state.targetctx.codegen(), "whole")
        self.state.library.enable_object_caching()


class _WholeLibrary(JITCodeLibrary):
    """A function that Python calls, with its parts."""

    def _optimize_final_module(self) -> None:
        """As numba's; LLVM first learns that nothing else calls the parts, and so leaves out unread arguments."""
        for function in self._final_module.functions:
            if not function.is_declaration and function.name in _PARTS:
                function.linkage = "internal"
        super()._optimize_final_module()
