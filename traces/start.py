"""How a command starts: until its modules are imported, an interrupt ends it, and nothing has begun."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def importing(name: str) -> Iterator[None]:
    """Meanwhile Ctrl-C ends the command `name` with one line and status 130: a module cut short raises anything."""

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
