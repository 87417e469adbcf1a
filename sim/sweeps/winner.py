"""winner.toml: what a sweep recommends, and all that is needed to replay it.

Per cache size the causal policy with the least mean TPOT (TTFT where nothing is decoded, misses where nothing
is timed); of equal ones the first typed. Oracles are drawn, never chosen.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from sim import profiles
from sim.results.files import tables_below
from sim.results.metrics import Row
from sim.sweeps.setup import Setup
from traces.errors import InputError, located
from traces.files import read_toml
from traces.location import absolute
from traces.output import replacing

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

    cache_size: str  # as given
    cache_experts: int
    policy: str  # as given
    predicted: dict[str, float] = field(metadata=profiles.MAY_BE_ZERO)  # columns of results.parquet that are not null


def metric(rows: Iterable[Row]) -> str:
    """The column by which the rows of a sweep are judged: less is better."""
    rows = list(rows)
    timed = ("tpot_mean_ms", "ttft_mean_ms")
    return next((name for name in timed if rows and all(row[name] is not None for row in rows)), "misses")


def choose(rows: Sequence[Row], sizes: dict[str, int]) -> list[Winner]:
    """One winner for each cache size (as given: experts) that a causal policy was tried at."""
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
        "expert_sizes": setup.expert_sizes and absolute(setup.expert_sizes),
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
    if not path.exists():
        raise InputError(f"{folder} holds no {NAME}: {tables_below(folder)}")
    held = read_toml(path)
    with located(f"{path} is not what moe-sim sweep writes"):
        listed = held.get("winner", [])
        if not isinstance(listed, list):
            raise InputError("winner: must be a list of tables, each headed [[winner]]")
        return _made(Setup, "setup", held.get("setup")), [_made(Winner, "winner", each) for each in listed]


def _made(cls: type[T], heading: str, table: object) -> T:
    """An instance of a dataclass, its fields checked as those of options are; InputError with the key."""
    if not isinstance(table, dict):
        raise InputError(f"{heading}: must be a table")
    with located(heading):
        return profiles.make(cls, table, {})
