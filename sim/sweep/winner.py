"""winner.toml: what a sweep recommends, and all that is needed to replay it.

Per cache size the causal policy with the least mean TPOT (TTFT where nothing is decoded, misses where nothing
is timed); of equal ones the first typed. Oracles are drawn, never chosen.
"""

import dataclasses
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from sim import profiles
from sim.results.files import replacing
from sim.results.metrics import Row, tables_below
from sim.sweep.config import fits
from sim.sweep.setup import Setup
from traces.errors import InputError
from traces.location import absolute

NAME = "winner.toml"

T = TypeVar("T")

PREDICTED = (
    "misses",
    "hit_rate",
    "ttft_mean_ms",
    "tpot_mean_ms",
    "tpot_p50_ms",
    "tpot_p95_ms",
    "tpot_p99_ms",
)


@dataclass(frozen=True)
class Winner:
    """The best causal policy at one cache size."""

    cache_size: str  # as typed
    cache_experts: int
    policy: str  # as typed
    predicted: dict[str, float]  # columns of results.parquet; those that are null are absent


def metric(rows: Iterable[Row]) -> str:
    """The column by which the rows of a sweep are judged: less is better."""
    rows = list(rows)
    timed = ("tpot_mean_ms", "ttft_mean_ms")
    return next((name for name in timed if rows and all(row[name] is not None for row in rows)), "misses")


def choose(rows: Sequence[Row], sizes: dict[str, int]) -> list[Winner]:
    """One winner for each cache size (as typed: experts) that a causal policy was tried at."""
    judged_by = metric(rows)
    winners = []
    for text, slots in sizes.items():
        causal = [row for row in rows if row["cache_experts"] == slots and not row["oracle"]]
        if causal:
            best = min(causal, key=lambda row: row[judged_by])
            predicted = {name: best[name] for name in PREDICTED if best[name] is not None}
            winners.append(Winner(text, slots, best["policy"], predicted))
    return winners


def write(path: Path, setup: Setup, judged_by: str, winners: Iterable[Winner]) -> None:
    """Write winner.toml, whole or not at all."""
    import tomli_w  # not at the top: a GPU machine, which writes none, may lack it

    asked = {
        **dataclasses.asdict(setup),
        "trace": absolute(setup.trace),
        "hardware": profiles.absolute("hardware", setup.hardware),
        "model_profile": setup.model_profile and profiles.absolute("models", setup.model_profile),
    }
    held: dict[str, Any] = {
        "judged_by": judged_by,
        "setup": {name: value for name, value in asked.items() if value is not None},
    }
    if found := [dataclasses.asdict(winner) for winner in winners]:
        held["winner"] = found
    text = (
        "# Written by moe-sim sweep: per cache size the causal policy with the least\n"
        f"# {judged_by}, and what was predicted of it. moe-replay --from FOLDER replays it.\n"
    )
    with replacing(path) as file:
        file.write_text(text + tomli_w.dumps(held), encoding="utf-8")


def read(folder: Path) -> tuple[Setup, list[Winner]]:
    """The setup of the sweep in `folder`, and its winners; InputError where there is no such sweep."""
    path = folder / NAME
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        setup = _checked(Setup, table["setup"])
        return setup, [_checked(Winner, winner) for winner in table.get("winner", [])]
    except FileNotFoundError:
        raise InputError(f"{folder} holds no {NAME}: {tables_below(folder)}") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{path} is not what moe-sim sweep writes: {error}") from error


def _checked(cls: Callable[..., T], values: dict[str, Any]) -> T:
    """An instance of a dataclass; TypeError for a value of another type than its field's."""
    hints = get_type_hints(cls)
    for key, value in values.items():
        if not fits(value, hints[key]):
            raise TypeError(f"{key} cannot be {value!r}")
    return cls(**values)
