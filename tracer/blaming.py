"""What a model's own code raises becomes one line: files and code of a model raise any error where they do not fit."""

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb

import torch

from traces.errors import InputError

OURS = ("tracer.", "replay.", "sim.", "policies.")
"""Packages whose errors are defects of this project."""


@contextmanager
def blaming(what: str) -> Iterator[None]:
    """Raise InputError, one line that starts with `what`, for whatever a model's own code raises; our errors stay."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        *_, (innermost, _) = walk_tb(error.__traceback__)
        if innermost.f_globals.get("__name__", "").startswith(OURS):
            raise
        lines = (str(error).strip() or type(error).__name__).splitlines()
        reason = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
        if isinstance(error, torch.OutOfMemoryError):
            reason = "out of memory; a smaller --batch-size or --dtype may fit"
        raise InputError(f"{what}: {reason}") from error
