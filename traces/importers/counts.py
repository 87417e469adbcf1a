"""Dumps that counted and kept no sequences: they become EAMs, one for each file.

SGLang's recorder in mode stat dumps `logical_count` [passes, layers, experts], dense layers too
(python/sglang/srt/eplb/expert_distribution.py, _StatAccumulator; its buffer is a ring: older passes are gone).
llama.cpp's examples/moe-trace (pull request 28544) writes a CSV without header, a line `layer,expert` for each
choice of an expert; a third column `count`, and a header that names the columns, are understood too.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from traces.errors import InputError
from traces.importers.dump import Counts, each_file, integers
from traces.importers.source import Request, Source

COLUMNS = ("layer", "expert", "count")
CHUNK = 1_000_000
"""Lines of a CSV that are held at once."""


def read_stat(source: Source, files: list[tuple[Path, dict[str, Any]]]) -> Counts:
    counted = []
    for path, content in files:
        counts = content["logical_count"]
        counts = integers(counts[None] if np.ndim(counts) == 2 else counts, str(path), "logical_count")
        if (counts < 0).any():
            raise InputError(f"{path}: logical_count has negative numbers")
        counted.append(counts.astype(np.int64).sum(axis=0))
    return Counts(np.stack(counted), source.requests([Request(id=path.stem) for path, _ in files]))


def read_csv(source: Source) -> Counts:
    """Read a CSV of layer,expert[,count], or a folder of them. Raises InputError."""
    files = each_file(source.path, ".csv")
    tables = [_read(path) for path in files]
    layers, experts = (np.concatenate([table.index.get_level_values(n) for table in tables]) for n in range(2))
    E = source.agreed("experts")
    if E is None:
        E = int(experts.max()) + 1
        source.notes.append(f"the number of experts is taken from the largest id: {E} (--experts says otherwise)")
    counts = np.zeros((len(files), int(layers.max()) + 1, E), np.int64)
    for i, table in enumerate(tables):
        counts[i, table.index.get_level_values(0), table.index.get_level_values(1)] = table.to_numpy()
    requests = source.requests([Request(id=path.stem) for path in files])
    return Counts(counts, requests, tuple(np.unique(layers).tolist()))


def _read(path: Path) -> "pd.Series[int]":
    with path.open(encoding="utf-8") as file:
        first = [name.strip() for name in file.readline().split(",")]
    header = not first[0].isdigit()
    names = first if header else list(COLUMNS[: len(first)])
    if len(names) != len(first) or not set(COLUMNS[:2]) <= set(names) <= set(COLUMNS):
        raise InputError(f"{path} line 1: {','.join(first)!r}; layer,expert or layer,expert,count")
    parts = []
    with pd.read_csv(path, header=None, names=names, skiprows=int(header), dtype=np.uint32, chunksize=CHUNK) as read:
        for lines in read:
            by = lines.astype(np.int64).groupby(["layer", "expert"])
            parts.append(by["count"].sum() if "count" in lines else by.size())
    counts: pd.Series[int] = pd.concat(parts).groupby(level=["layer", "expert"]).sum()
    return counts
