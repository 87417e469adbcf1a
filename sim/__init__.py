"""Time: the SimPy model of GPU memory, host link and compute, sweeps over it, and their plots. No torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sim.api import Comparison, RunResult, SweepResult, predict_systems, simulate, sweep
    from sim.planner.plan import plan
    from sim.results import plot

__all__ = ["Comparison", "RunResult", "SweepResult", "plan", "plot", "predict_systems", "simulate", "sweep"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "plot":
        return import_module("sim.results.plot")
    return getattr(import_module("sim.planner.plan" if name == "plan" else "sim.api"), name)
