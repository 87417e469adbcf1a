"""Table 1 of the MoE-Infinity paper beside what is predicted: rows, deviations, and the headline's ratios.

The paper (arXiv 2401.14361) measured DeepSeek-V2-Lite on an RTX A5000; `table1.toml` holds its figures. Deviations are
predicted / printed - 1. Of other models it prints only its own system's mean.
"""

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sim.loaded import TimedRun
from sim.systems.play import Prediction
from traces.errors import InputError

MODEL, HARDWARE = "deepseek-v2-lite", "a5000"

OURS = "moe-infinity"
"""The system that the headline's ratios are over."""

WITHIN = 0.15
"""Deviation beyond which a row is named with its cause."""

HEADLINE = (3.1, 16.7)
"""Per-token latency of the others over MoE-Infinity's, as the paper's abstract has it."""


OTHER_MODELS = {"mixtral-8x7b": 836.0, "nllb-moe-54b": 531.0, "switch-large-128": 155.0}
"""What MoE-Infinity took a token of other models on the same machine, in ms, as the paper prints it."""


@dataclass(frozen=True)
class Printed:
    """A row of the paper's table, ms a token; 0: not printed."""

    name: str
    mean_ms: float
    cause: str  # of a deviation
    idle_ms: float = 0.0
    tail_ms: float = 0.0


@cache
def printed() -> dict[str, Printed]:
    """Return the rows of the paper by system."""
    table = tomllib.loads((Path(__file__).parent / "table1.toml").read_text("utf-8"))
    return {name: Printed(name, **row) for name, row in table.items()}


@dataclass(frozen=True)
class Row:
    """A system's prediction beside the paper's."""

    prediction: Prediction
    paper: Printed

    @property
    def deviation(self) -> float:
        """Of the mean."""
        assert self.prediction.tpot_mean_ms is not None
        return self.prediction.tpot_mean_ms / self.paper.mean_ms - 1

    @property
    def idle_deviation(self) -> float | None:
        """Of the GPU's idle time, None where the paper prints none."""
        assert self.prediction.idle_ms is not None
        return self.prediction.idle_ms / self.paper.idle_ms - 1 if self.paper.idle_ms else None

    @property
    def tail_deviation(self) -> float | None:
        """Of the tail, None where the paper prints none."""
        assert self.prediction.tpot_p99_ms is not None
        return self.prediction.tpot_p99_ms / self.paper.tail_ms - 1 if self.paper.tail_ms else None

    @property
    def beyond(self) -> bool:
        """Whether the mean deviates by more than 15%."""
        return abs(self.deviation) > WITHIN


def applies(loaded: TimedRun) -> bool:
    """Whether the paper's table is of this model and machine."""
    return (loaded.profile.name, loaded.hardware.name) == (MODEL, HARDWARE)


def of_other_model(loaded: TimedRun, predictions: Iterable[Prediction]) -> tuple[float, float] | None:
    """Return (predicted, printed) ms of MoE-Infinity on a model beside Table 1's; None where the paper has none."""
    printed_ms = OTHER_MODELS.get(loaded.profile.name)
    ours = next((each.tpot_mean_ms for each in predictions if each.system.name == OURS), None)
    return (ours, printed_ms) if ours and printed_ms and loaded.hardware.name == HARDWARE else None


def require(loaded: TimedRun) -> None:
    """Raise InputError where the paper's table is of another model or machine."""
    if loaded.profile.name != MODEL:
        raise InputError(f"--table1 is of {MODEL}, and the trace {loaded.trace.name} is of {loaded.profile.name}")
    if loaded.hardware.name != HARDWARE:
        raise InputError(f"--table1 was measured on {HARDWARE}: leave out --hardware {loaded.hardware.name}")


def rows(predictions: Iterable[Prediction]) -> list[Row]:
    """Return those of the predictions that the paper has a row for."""
    return [Row(each, printed()[each.system.name]) for each in predictions if _comparable(each)]


def _comparable(each: Prediction) -> bool:
    return each.system.name in printed() and each.tpot_mean_ms is not None


def ratios(found: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """Return (predicted, printed) latency of each other system over MoE-Infinity's; empty without that."""
    base = next((row for row in found if row.paper.name == OURS), None)
    if base is None:
        return {}
    ours = base.prediction.tpot_mean_ms
    assert ours
    return {
        row.paper.name: ((row.prediction.tpot_mean_ms or 0.0) / ours, row.paper.mean_ms / base.paper.mean_ms)
        for row in found
        if row is not base
    }
