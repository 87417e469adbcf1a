"""Loops over the rows of traces, compiled by numba, and where everything that numba compiles is kept on disk.

That is beside the sources, else in the user's home or NUMBA_CACHE_DIR; where none of these can be written to, in a
folder that ends with the process, and where there is none either, nowhere.

Numba names the functions inside the compiled code by their place in the order of the process that compiled them, and
where two processes gave one name to two functions, a third process that loads both runs one in place of the other: a
sort that does not sort (numba issue 10486). So the names are made of random numbers here. (A counter with a random
start would go the same way in a process and its fork.)

What is kept may name types that are gone from the code, in an index that numba unpickles before it compares dates.
"""

import atexit
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable
from typing import Any, TypeVar

from numba import config, njit
from numba.core.bytecode import FunctionIdentity
from numba.core.caching import IndexDataCacheFile

F = TypeVar("F", bound=Callable[..., Any])

FunctionIdentity._unique_ids = iter(lambda: secrets.randbits(63), 0)  # type: ignore[assignment]


_load_index: Callable[[IndexDataCacheFile], Any] = IndexDataCacheFile._load_index


def _index(file: IndexDataCacheFile) -> Any:
    """Return what is kept of a function: nothing where it is damaged, or names what is gone from the code."""
    try:
        return _load_index(file)
    except Exception:  # whatever a pickle raises
        return {}


IndexDataCacheFile._load_index = _index  # type: ignore[method-assign]


def _kept() -> tuple[bool, bool]:
    """Whether what is compiled is kept, and whether for this process alone."""

    def probe() -> None: ...

    try:
        njit(cache=True)(probe)
    except RuntimeError:  # numba finds no folder
        try:
            folder = tempfile.mkdtemp(prefix="moe-expert-cache-")
        except OSError:
            return False, True
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ["NUMBA_CACHE_DIR"] = folder  # for processes that this one starts
        config.reload_config()  # type: ignore[no-untyped-call]
        return True, True
    return True, False


KEPT, KEPT_FOR_NOW = _kept()


def loop(function: F) -> F:
    """Compile a loop over arrays, which leaves Python's lock alone."""
    made: Any = njit(cache=KEPT, nogil=True)(function)
    return made  # type: ignore[no-any-return]
