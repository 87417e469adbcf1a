"""How a command starts: until its modules are imported, an interrupt ends it, and nothing has begun.

A number of threads at which numba cannot be imported is refused before that.
"""

import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

THREADS = "NUMBA_NUM_THREADS"


@contextmanager
def importing(name: str) -> Iterator[None]:
    """Meanwhile Ctrl-C ends the command `name` with one line and status 130: a module cut short raises anything."""
    threads = os.environ.get(THREADS, "1")
    if not re.fullmatch(r"0*[1-9]\d{0,8}", threads):
        reason = f"the environment variable {THREADS} is {threads!r}: unset it, or set it to 1"
        os.write(2, f"{name}: error: {reason}\n".encode())
        sys.exit(2)

    def interrupted(number: int, frame: FrameType | None) -> None:
        os.write(2, f"{name}: error: interrupted\n".encode())
        os._exit(130)

    was = signal.getsignal(signal.SIGINT)
    if was is signal.default_int_handler:  # else the shell has it ignored
        signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, was)
