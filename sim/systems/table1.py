"""Table 1 of the MoE-Infinity paper beside what is predicted: rows, deviations, and the headline's ratios.

The paper (arXiv 2401.14361) measured DeepSeek-V2-Lite on an RTX A5000; `table1.toml` holds its figures. Deviations are
predicted / printed - 1. Of other models it prints only its own system's mean.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from sim.loaded import TimedRun
from sim.systems.predict import Prediction
from traces.errors import InputError
from traces.files import read_toml

MODEL, HARDWARE = "deepseek-v2-lite", "a5000"

OURS = "moe-infinity"
"""The system that the headline's ratios are over."""

WITHIN = 0.15
"""Deviation beyond which a row is named with its cause."""

HEADLINE = (3.1, 16.7)
"""Per-token latency of the others over MoE-Infinity's, as the paper's abstract has it."""

OTHER_MODELS = {"mixtral-8x7b": 836.0, "nllb-moe-54b": 531.0, "switch-large-128": 155.0}
"""What MoE-Infinity took a token of other models on the same machine, in ms, as the paper prints it."""


@cache
def printed() -> dict[str, dict[str, Any]]:
    """Return the rows of the paper by system: mean_ms, idle_ms and tail_ms a token, and the cause of a deviation."""
    return read_toml(Path(__file__).parent / "table1.toml")


class Figure(NamedTuple):
    """A predicted figure beside the paper's; theirs: 0 where it prints none."""

    ours: float
    theirs: float

    @property
    def deviation(self) -> float | None:
        return self.ours / self.theirs - 1 if self.theirs else None


class Row(NamedTuple):
    """A system's prediction beside the paper's, ms a token. cause: of a mean that deviates by more than 15%."""

    name: str
    mean: Figure
    idle: Figure  # of the GPU
    tail: Figure
    cause: str | None


def applies(loaded: TimedRun) -> bool:
    return (loaded.profile.name, loaded.hardware.name) == (MODEL, HARDWARE)


def of_other_model(loaded: TimedRun, predictions: Iterable[Prediction]) -> Figure | None:
    """Return the ms of MoE-Infinity on a model beside Table 1's; None where the paper has none."""
    printed_ms = OTHER_MODELS.get(loaded.profile.name)
    ours = next((each.tpot_mean_ms for each in predictions if each.system.name == OURS), None)
    return Figure(ours, printed_ms) if ours and printed_ms and loaded.hardware.name == HARDWARE else None


def require(loaded: TimedRun) -> None:
    """Raise InputError where the paper's table is of another model or machine."""
    if not applies(loaded):
        raise InputError(
            f"--table1 is of {MODEL} on {HARDWARE}, not of {loaded.profile.name} on {loaded.hardware.name}"
        )


def rows(predictions: Iterable[Prediction]) -> list[Row]:
    table = []
    for each in predictions:
        paper = printed().get(each.system.name)
        if paper and each.tpot_mean_ms is not None:
            predicted = each.tpot_mean_ms, each.idle_ms or 0.0, each.tpot_p99_ms or 0.0
            stated = (paper.get(name, 0.0) for name in ("mean_ms", "idle_ms", "tail_ms"))
            mean, idle, tail = map(Figure, predicted, stated)
            cause = paper["cause"] if abs(mean.deviation or 0.0) > WITHIN else None
            table.append(Row(each.system.name, mean, idle, tail, cause))
    return table


def ratios(table: Sequence[Row]) -> dict[str, Figure]:
    """Return the latency of each other system over MoE-Infinity's; empty without that."""
    base = next((row.mean for row in table if row.name == OURS), None)
    others = [row for row in table if base and row.name != OURS]
    return {row.name: Figure(row.mean.ours / base.ours, row.mean.theirs / base.theirs) for row in others if base}
