"""winner.toml: what a sweep recommends, and all that is needed to replay it.

Per cache size the policy that `metric` judges best, of equal ones the first typed. Oracles are drawn, never chosen, nor
is a cache that does not fit into GPU memory.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sim.experiment import Experiment, from_file
from sim.results.files import A_SWEEP, write_toml
from sim.results.metrics import Row
from traces.errors import InputError
from traces.files import read_toml
from traces.typed import typed

NAME = "winner.toml"

PREDICTED = ("misses", "hit_rate", "ttft_mean_ms", "tpot_mean_ms", "tpot_p50_ms", "tpot_p95_ms", "tpot_p99_ms")


@dataclass(frozen=True)
class Winner:
    """The best causal policy at one cache size."""

    cache_size: str  # as given
    cache_experts: int
    policy: str  # as given
    predicted: dict[str, float]  # columns of results.parquet that are not null


def metric(rows: Iterable[Row]) -> str:
    """The column by which the rows of a sweep are judged: less is better."""
    rows = list(rows)
    timed = ("tpot_mean_ms", "ttft_mean_ms")
    return next((name for name in timed if rows and all(row[name] is not None for row in rows)), "misses")


def choose(rows: Sequence[Row], sizes: dict[str, int]) -> list[Winner]:
    """One winner for each cache size (as given: experts) that a causal policy was tried at."""
    best = {row["cache_experts"]: row for row in best_of_sizes(rows, metric(rows))}
    return [
        Winner(text, slots, row["policy"], {name: row[name] for name in PREDICTED if row[name] is not None})
        for text, slots in sizes.items()
        if (row := best.get(slots))
    ]


def best_of_sizes(rows: Iterable[Row], judged_by: str) -> list[Row]:
    """Return the best row of each cache size that may be chosen, the smallest first."""
    best: dict[int, Row] = {}
    for row in rows:
        if not row["oracle"] and row["fits"] is not False:
            best.setdefault(row["cache_experts"], row)
            if row[judged_by] < best[row["cache_experts"]][judged_by]:
                best[row["cache_experts"]] = row
    return [best[slots] for slots in sorted(best)]


def write(path: Path, experiment: Experiment, judged_by: str, winners: Iterable[Winner]) -> None:
    held: dict[str, Any] = {"judged_by": judged_by, "setup": experiment.resolved()}
    if found := [dataclasses.asdict(winner) for winner in winners]:
        held["winner"] = found
    text = (
        "# Written by moe-sim sweep: per cache size the causal policy with the least\n"
        f"# {judged_by}, and what was predicted of it. moe-replay --from FOLDER replays it.\n"
    )
    write_toml(text, held, path)


def read(
    folder: Path, stated: Mapping[str, Any] = MappingProxyType({}), trust: bool = False
) -> tuple[Experiment, list[Winner]]:
    """Return what the sweep in `folder` ran, and its winners. Raise InputError where there is no such sweep.

    stated: options that take the place of the sweep's. trust: open also what `from_file` refuses.
    """
    path = folder / NAME
    if not path.exists():
        raise InputError(f"{folder} holds no {NAME}: {A_SWEEP}")
    held = read_toml(path)
    where = f"{path} is not what moe-sim sweep writes"
    found = typed(_File, held, where)
    setup = {name: from_file(path, name, value, trust) for name, value in found.setup.items() if name not in stated}
    return Experiment.of({**setup, **stated}, where), list(found.winner)


@dataclass(frozen=True)
class _File:
    judged_by: str
    setup: dict[str, Any]
    winner: tuple[Winner, ...] = ()
