"""Limits of time and memory for code that comes with a model, such as its chat template."""

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import Any

from traces.errors import InputError

MOST_BYTES = 2 << 30
"""That may be taken beside what the process holds."""

_ONE = Lock()
"""The limit of memory is the process's."""


@contextmanager
def limited(seconds: float, what: str) -> Iterator[None]:
    """Raise InputError, starting with `what`, in code inside that takes longer, or more memory; one thread at a time.

    The time is looked at between lines of Python. Memory is limited where the operating system says what is held
    (Linux).
    """
    with _ONE:
        end = monotonic() + seconds

        def check(*_: Any) -> Any:
            if monotonic() > end:
                raise InputError(f"{what} takes more than {seconds:g} s: correct it, or leave it out")
            return check

        before, limits = sys.gettrace(), resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (_most_data(*limits), limits[1]))
        sys.settrace(check)
        try:
            yield
        except MemoryError as error:
            raise InputError(f"{what} takes more than {MOST_BYTES >> 30} GiB: correct it, or leave it out") from error
        finally:
            sys.settrace(before)
            resource.setrlimit(resource.RLIMIT_DATA, limits)


def _most_data(soft: int, hard: int) -> int:
    """What the process holds and MOST_BYTES, unless it may hold less already, or does not know."""
    try:
        held = int(Path("/proc/self/status").read_text("utf-8").split("VmData:")[1].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        return soft
    return min([held + MOST_BYTES, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)])
