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
from traces.files import plain
from traces.importers.dump import Counts, each_file, integers
from traces.importers.source import Source, requests_of, require_modest

COLUMNS = ("layer", "expert", "count")
CHUNK = 1_000_000
"""Lines of a CSV that are held at once."""


def read_stat(source: Source, files: list[tuple[Path, dict[str, Any]]]) -> Counts:
    """The counts in the loaded files. Raises InputError."""
    held = []
    for path, content in files:
        counts = content["logical_count"]
        if isinstance(counts, np.ndarray) and counts.ndim == 2:
            counts = counts[None]
        counts = integers(counts, str(path), "logical_count")
        if not counts.size:
            raise InputError(f"{path}: logical_count is empty {counts.shape}: nothing was recorded")
        if (counts < 0).any():
            raise InputError(f"{path}: row {np.argwhere(counts < 0)[0].tolist()} of logical_count is negative")
        if int(counts.max()) >= 2**32:
            raise InputError(f"{path}: a count of {int(counts.max())} is more than a trace can hold (2^32 - 1)")
        if not counts.any():
            raise InputError(f"{path}: logical_count is 0 everywhere: nothing was recorded")
        held.append(counts.astype(np.int64).sum(axis=0))
        if held[-1].shape != held[0].shape:
            raise InputError(f"{path} counts {held[-1].shape} [layers, experts], but {files[0][0]} {held[0].shape}")
    return Counts(np.stack(held), requests_of(source, [{"id": path.stem} for path, _ in files]))


def read_csv(source: Source) -> Counts:
    """Read a CSV of layer,expert[,count], or a folder of them. Raises InputError."""
    files = each_file(source.path, ".csv")
    limit = source.agreed("experts", "experts", None)
    tables = [_read(path, limit) for path in files]
    numbers = [table.index.get_level_values(level) for table in tables for level in ("layer", "expert")]
    layers, E = max(int(level.max()) for level in numbers[::2]) + 1, limit
    if E is None:
        E = max(int(level.max()) for level in numbers[1::2]) + 1
        source.notes.append(f"the number of experts is taken from the largest id: {E} (--experts says otherwise)")
    held = sum(path.stat().st_size for path in files)
    require_modest(len(files) * layers * E * 16, held, f"{source.path}: layer {layers - 1} of {E} experts")
    present = sorted({int(layer) for level in numbers[::2] for layer in level})
    counts = np.zeros((len(files), layers, E), np.int64)
    for i, table in enumerate(tables):
        counts[i, numbers[2 * i], numbers[2 * i + 1]] = table.to_numpy()
    return Counts(counts, requests_of(source, [{"id": path.stem} for path in files]), tuple(present))


def _read(path: Path, limit: int | None) -> "pd.Series[int]":
    """Counts by (layer, expert)."""
    parts: list[pd.Series[int]] = []
    columns: list[str] | None = None
    try:
        with pd.read_csv(
            plain(path), header=None, dtype=str, chunksize=CHUNK, keep_default_na=False, skip_blank_lines=False
        ) as chunks:
            for chunk in chunks:
                if columns is None:
                    columns, skip = _header(path, chunk)
                    chunk = chunk.iloc[skip:]
                if len(chunk):
                    parts.append(_counted(path, chunk.set_axis(columns, axis=1), limit))
    except InputError:
        raise
    except (ValueError, pd.errors.ParserError, OSError) as error:
        raise InputError(f"{path} is no CSV of layer,expert: {error}") from error
    if not parts:
        raise InputError(f"{path} holds no line of layer,expert: nothing was recorded")
    return pd.concat(parts).groupby(level=["layer", "expert"]).sum()


def _header(path: Path, chunk: pd.DataFrame) -> tuple[list[str], int]:
    """The columns' names, and how many lines tell them."""
    first = [str(name).strip() for name in chunk.iloc[0]]
    if first[0].lstrip("-").isdigit():
        first, skip = list(COLUMNS[: len(first)]), 0
    else:
        skip = 1
    if sorted(first) not in (sorted(COLUMNS), sorted(COLUMNS[:2])) or chunk.shape[1] != len(first):
        raise InputError(f"{path} line 1: {','.join(map(str, chunk.iloc[0]))!r}; layer,expert or layer,expert,count")
    return first, skip


def _counted(path: Path, lines: pd.DataFrame, limit: int | None) -> "pd.Series[int]":
    whole = lines.apply(lambda column: column.str.fullmatch(r"\s*\d{1,9}\s*")).all(axis=1)
    if not whole.all():
        line = lines[~whole].iloc[0]
        raise InputError(
            f"{path} line {int(str(line.name)) + 1}: {','.join(line)!r} is no layer,expert of whole numbers"
        )
    numbers = lines.astype(np.int64)
    if limit is not None and (numbers["expert"] >= limit).any():
        line = numbers[numbers["expert"] >= limit].iloc[0]
        raise InputError(f"{path} line {int(str(line.name)) + 1}: {line['expert']} is no id of {limit} experts")
    by = numbers.groupby(["layer", "expert"])
    return by["count"].sum() if "count" in numbers else by.size()
