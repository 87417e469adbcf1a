"""How a command starts: until its modules are imported, an interrupt ends it, and nothing has begun.

What numba cannot read in the environment is refused before that.
"""

import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

VALUES = {"NUMBA_NUM_THREADS": (r"0*[1-9]\d{0,8}", "1"), "NUMBA_OPT": (r"[0-3]|max", "3")}
"""What numba takes of its variables, and the usual value: others end in a traceback, or a warning that contains one."""


@contextmanager
def importing(name: str) -> Iterator[None]:
    """Meanwhile Ctrl-C ends the command `name` with one line and status 130: a module cut short raises anything."""
    for variable, (values, usual) in VALUES.items():
        if not re.fullmatch(values, value := os.environ.get(variable, usual)):
            reason = f"the environment variable {variable} is {value!r}: unset it, or set it to {usual}"
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
