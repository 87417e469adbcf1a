"""What a trace is: schema, reading, writing, validating, statistics. No models, no policies, no time."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from traces.errors import InputError
    from traces.trace import Trace

__all__ = ["InputError", "Trace", "demo_trace"]

_HOME = {"InputError": "traces.errors", "Trace": "traces.trace"}
"""Where the public names are defined, which are imported when they are first asked for."""


def demo_trace() -> Path:
    """Return the folder of the trace that ships with the project: the shipped model over the shipped prompts."""
    return Path(__file__).parent / "demo"


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
