"""How the hot path is compiled, and kept on disk. Nothing else knows how numba does it.

A `compiled` function must not create an array ("NRT required but not enabled"): loops instead of array expressions,
scratch in what it is given. One that has to is `allocating`. What is compiled is kept beside the sources, else in the
user's home or NUMBA_CACHE_DIR, else in a folder that ends with the process. docs/architecture.md (How policies and the
loop are compiled) has the reasons, and what is done that numba does not document.
"""

import atexit
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from llvmlite.binding import Linkage
from numba import config, njit, typeof, types
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler, Flags
from numba.core.registry import CPUDispatcher

P = ParamSpec("P")
R = TypeVar("R")

_IMPORT = re.compile(rb"^from ((?:policies|sim|traces)\.[\w.]+) import", re.M)


@cache
def _digest(*files: Path) -> str:
    """Return a digest of files and of the modules they import from, whose values numba compiles as constants."""
    names = {name.decode().replace(".", "/") for file in files for name in _IMPORT.findall(file.read_bytes())}
    imported = (Path(__file__).parents[2] / f"{name}.py" for name in names)
    read = [file.read_bytes() for file in sorted({*files, *filter(Path.is_file, imported)})]
    return hashlib.sha256(b"".join(read)).hexdigest()[:16]


def _sources() -> list[Path]:
    """Return the files of this package with compiled functions, and with the list of policies."""
    sources = Path(__file__).parents[1].rglob("*.py")
    marks = b"policies.core.compiled import", b"BUILT_IN ="
    return [file for file in sources if any(mark in file.read_bytes() for mark in marks)]


def _kept_where() -> tuple[bool, bool]:
    """Return whether what is compiled is kept, and whether for this process alone."""

    def probe() -> None: ...

    try:
        njit(cache=True)(probe)
    except RuntimeError:  # numba has no folder
        try:
            folder = tempfile.mkdtemp(prefix="moe-expert-cache-")
        except OSError:
            return False, True
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ["NUMBA_CACHE_DIR"] = folder  # for processes that this one starts
        config.reload_config()
        return True, True
    return True, False


KEPT, KEPT_FOR_NOW = _kept_where()

OURS = ("policies.", "sim.", "replay.")
"""How the names of modules begin whose compiled functions are kept."""

SOURCES = _digest(*_sources())


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
    options: dict[str, Any] = {"nogil": True, "_nrt": _nrt, "forceinline": forceinline}
    made: Any = njit(cache=keep_as(function), **WHOLE, **options)(function)
    part = _Part(function, targetoptions={"nopython": True, **options}, **_PART)
    made.get_call_template, made.get_overload, made.part = part.get_call_template, part.get_overload, part
    return made  # type: ignore[no-any-return]


def keep_as(function: Any) -> bool:
    """Return whether a function is kept on disk, once it is compiled, and name it for that."""
    ours = KEPT and function.__module__.startswith(OURS)
    if ours:
        function.__qualname__ += f"_{SOURCES}_{_digest(Path(function.__code__.co_filename))}"
    return ours


def kept_for(function: Any) -> list[Any]:
    """Return the types of arguments that a function is compiled for, in this process or on disk."""
    file = getattr(function._cache, "_cache_file", None)
    return [*function.overloads, *(key[0] for key in (file._load_index() if file else ()))]


def entry_point(function: Callable[..., R], *examples: Any) -> Callable[..., R]:
    """Return the compiled function for a caller in Python that always gives arguments of the types of `examples`.

    It skips numba's look at the types, which takes microseconds for every NamedTuple of arrays.
    """
    made: Any = function
    types_of = tuple(map(typeof, examples))
    made.compile(types_of)
    entry: Callable[..., R] = made.overloads[types_of].entry_point
    return entry


def apart(function: Callable[P, R]) -> Callable[P, R]:
    """Keep a compiled function a call of its own, never a piece of its callers, which so stay small.

    Only the function that Python calls has it, so it is handed no more of its arguments than it reads.
    """
    made: Any = function
    made.part.apart = True
    return function


def from_python(function: Callable[P, R]) -> Callable[P, R]:
    """Return the `entry_point` of a function for arguments of the types of its first call."""
    entry: Callable[P, R] | None = None

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal entry
        entry = entry or entry_point(function, *args)
        return entry(*args, **kwargs)

    return call


class _Part(CPUDispatcher):
    """A function as compiled functions call it: a part of theirs, which Python cannot call."""

    apart = False  # whether LLVM may not inline it

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """As numba's, but literal arguments are values like others: one version serves all."""
        return super().get_call_template([types.unliteral(each) for each in args], kws)

    def add_overload(self, result: Any) -> None:
        """As numba's, but for calls from compiled functions alone: there is nothing for Python to call."""
        key = object()
        if self.apart:
            result.library.get_function(result.fndesc.llvm_func_name).add_function_attribute("noinline")
        self.targetctx.insert_user_function(key, result.fndesc, [result.library])
        self.overloads[tuple(result.signature.args)] = result._replace(entry_point=key)


def _part(typing: Any, target: Any, _: None, args: Any, returns: Any, flags: Any, kinds: Any) -> Compiler:
    """Return what compiles a part."""
    flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    return Compiler(typing, target, _PartLibrary(target.codegen(), "part"), args, returns, _Flags(flags), kinds)


def _whole(typing: Any, target: Any, _: None, args: Any, returns: Any, flags: Any, kinds: Any) -> Compiler:
    """Return what compiles a function that Python calls, with its parts."""
    library = _WholeLibrary(target.codegen(), "whole")
    library.enable_object_caching()
    return Compiler(typing, target, library, args, returns, _Flags(flags), kinds)


WHOLE: dict[str, Any] = {"pipeline_class": _whole}
_PART: dict[str, Any] = {"pipeline_class": _part}


class _Flags(Flags):
    """Numba's, which it hashes and compares at each call that it types: a copy, which nothing changes, does so once."""

    known: dict[str, Any] | None = None
    number = 0

    def copy(self) -> "_Flags":
        made = _Flags(self)
        made.known, made.number = super().values(), super().__hash__()
        return made

    def values(self) -> dict[str, Any]:
        return self.known or dict(super().values())

    def __hash__(self) -> int:
        return self.number or int(super().__hash__())


class _PartLibrary(JITCodeLibrary):
    """Code that is optimized and made executable once, in the function that Python calls."""

    def finalize(self) -> None:
        for library in dict.fromkeys(self._linking_libraries):
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalized = True


class _WholeLibrary(JITCodeLibrary):
    """A function that Python calls, with its parts."""

    def _optimize_final_module(self) -> None:
        """As numba's; LLVM first learns that nothing else calls what is linked in, and leaves out unread arguments."""
        for function in self._final_module.functions:
            if not function.is_declaration and function.linkage == Linkage.linkonce_odr:
                function.linkage = "internal"
        super()._optimize_final_module()
