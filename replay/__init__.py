"""A device: slots, copies, kernels and measured time, driven by the same policies as the simulator."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replay.api import ReplayResult, replay

__all__ = ["ReplayResult", "replay"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("replay.api"), name)
