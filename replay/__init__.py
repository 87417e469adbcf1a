"""A device: slots, copies, kernels and measured time, driven by the same policies as the simulator."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replay.api import ReplayResult, replay
    from replay.live import attach, load_model

_MODULES = {"ReplayResult": "replay.api", "attach": "replay.live", "load_model": "replay.live", "replay": "replay.api"}
__all__ = ["ReplayResult", "attach", "load_model", "replay"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
