"""Compile the engine in another process, once, while this one runs on SimPy (`sim.sweeps.workers`) or waits.

The process keeps what it compiled on disk, where every process after it finds it. It ends with the one that started it.
"""

import multiprocessing
import time
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from multiprocessing.process import BaseProcess

from sim.engines import compiled_engine
from sim.interrupts import interrupts_later
from traces.commands import console
from traces.compiled import KEPT_FOR_NOW

EXPECTED = "half a minute to a minute"

_process: BaseProcess | None = None
_began = 0.0


def start_if_needed(versions: Iterable[bool], quiet: bool) -> None:
    """Begin to compile what of these versions of the compiled engine no process of before has left on disk.

    versions: of each cell that it is to run, whether it is the one with tiers (`compiled_engine.tiered`).
    """
    global _process, _began
    missing = [version for version in dict.fromkeys(versions) if not compiled_engine.on_disk(version)]
    if not missing or going():
        return
    if KEPT_FOR_NOW:
        console.warn("no folder can keep the compiled engine, which is compiled each time: name one in NUMBA_CACHE_DIR")
    if not quiet:
        console.note(f"compiling the engine, once: {EXPECTED} of one core; meanwhile SimPy runs, with the same results")
    _began = time.monotonic()
    _process = multiprocessing.get_context("spawn").Process(
        target=compiled_engine.prepare, args=(missing,), daemon=True
    )
    with interrupts_later():
        _process.start()


def announce(versions: Iterable[bool]) -> None:
    """Print a note if one of these versions of the compiled engine will be compiled where it is first called."""
    if not all(map(compiled_engine.on_disk, dict.fromkeys(versions))):
        console.note(f"compiling the engine, once: {EXPECTED}")


def going() -> bool:
    """Whether the process is at work. Warns when it has failed, and the engine is compiled where it is called."""
    global _process
    if _process is None or _process.is_alive():
        return _process is not None
    if _process.exitcode:
        console.warn("the process that compiled the engine has failed: this one compiles it now, which takes as long")
    _process = None
    return False


def finish(quiet: bool) -> None:
    """Wait until it is compiled, as the results are there, so that what comes next need not; Ctrl-C does without."""
    if KEPT_FOR_NOW or not going():
        return
    shown = nullcontext() if quiet else console.err.status("the engine compiles for the next time (Ctrl-C stops it)")
    with suppress(KeyboardInterrupt), shown:
        while going():
            time.sleep(0.1)


def words() -> str:
    """What the bar shows of it, or nothing."""
    return f"compiling: {time.monotonic() - _began:.0f} s of {EXPECTED}" if _process else ""
