"""Ctrl-C and the processes that this one starts."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_later() -> Iterator[None]:
    """Put Ctrl-C off to the end of the block; processes started in it leave it to this one for good."""
    main = threading.current_thread() is threading.main_thread()
    if not (main and hasattr(signal, "pthread_sigmask")):  # elsewhere, and on Windows, nothing can be put off
        yield
        return
    missed: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: missed.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if missed:
        raise KeyboardInterrupt
