"""Join traces, and take requests out of them, piece by piece: memory does not grow with the traces."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from traces.errors import InputError
from traces.reader import EXTRA, Folder, open_folder
from traces.schema import AGGREGATE, TraceMeta
from traces.stream import pieces
from traces.writer import TraceWriter, check_target

MIXED = "mixed"
"""The mode of a joined trace whose parts were made differently; each request tells its own."""


@dataclass(frozen=True)
class Source:
    """A trace folder and the requests to take from it."""

    folder: Folder
    labels: pd.DataFrame  # the requests, as `Folder.listing` gives them
    keep: NDArray[np.bool_]  # [requests]

    @staticmethod
    def open(path: Path | str) -> "Source":
        folder = open_folder(path)
        labels = folder.listing()
        return Source(folder, labels, np.ones(len(labels), bool))

    def only(self, keep: NDArray[np.bool_]) -> "Source":
        """Return those of its requests where `keep` [requests] holds."""
        return replace(self, keep=self.keep & keep)

    def sampled(self, n: int, seed: int, by: str | None = None) -> "Source":
        """Return `n` of its requests at random, in order; of each value of the label `by`, if given. InputError."""
        rng, keep = np.random.default_rng(seed), np.zeros(len(self.keep), bool)
        labels = self.labels[by] if by else pd.Series("", index=self.labels.index)
        drawn = self.keep & (labels != "").to_numpy() if by else self.keep
        groups = labels[drawn].groupby(labels[drawn], sort=True).indices
        for label, rows in groups.items() or [("any", [])]:
            if len(rows) < n:
                of = f" of {by} {label!r}" if by else ""
                raise InputError(f"{self.folder.path} holds {len(rows)} requests{of}; {n} cannot be drawn from them")
            keep[rng.choice(np.flatnonzero(drawn)[rows], n, replace=False)] = True
        return replace(self, keep=keep)


def join(
    sources: Sequence[Source],
    out: Path,
    overwrite: bool = False,
    prefix: bool = False,
    on_done: Callable[[int], None] = lambda requests: None,
) -> None:
    """Write the kept requests of traces of one model, in turn, as one trace with the columns that all have.

    prefix: puts the name of its trace before each id. Raises InputError where traces do not fit or ids repeat.
    """
    check_target(out, overwrite, read=[source.folder.location for source in sources])
    if not any(source.keep.any() for source in sources):
        paths = ", ".join(str(source.folder.path) for source in sources)
        raise InputError(f"none of the requests of {paths} is chosen: nothing was written")
    folders = [source.folder for source in sources]
    meta = _common(folders)
    names = [source.labels["id"].to_numpy(object) for source in sources]
    if prefix:
        own = zip(folders, names, strict=True)
        names = [np.array([f"{of.location.name}/{one}" for one in ids], object) for of, ids in own]
    kept = pd.Series(np.concatenate([ids[source.keep] for ids, source in zip(names, sources, strict=True)]))
    if (repeated := kept.duplicated()).any():
        advice = "give each trace once, in folders of different names" if prefix else "--prefix-ids tells traces apart"
        raise InputError(f"the request id {kept[repeated].iloc[0]!r} would occur twice; {advice}")
    held = [{"token_id", *of.optional} for of in folders]
    left_out = () if meta.candidates else ("candidates", "scores")
    known = [name for name in EXTRA if meta.lookahead or not name.startswith("lookahead")]
    columns = [name for name in known if name not in left_out and all(name in each for each in held)]
    with TraceWriter(out, meta, overwrite, whole=True) as writer:
        next_step = 0
        for source, ids in zip(sources, names, strict=True):
            first, base = 0, next_step
            for piece in pieces(source.folder.path, columns):
                here = slice(first, first + len(piece.requests))
                piece = replace(piece, requests=piece.requests.assign(id=ids[here]))
                piece = piece.select(np.flatnonzero(source.keep[here]))
                first = here.stop
                if len(piece.requests):
                    last = base + int(piece.step.max(initial=0))
                    if last > np.iinfo(np.uint32).max:
                        raise InputError(f"{source.folder.path}: in {out} a step had the number {last}, above 2^32")
                    writer.add(replace(piece, meta=meta, step=piece.step + np.uint32(base)))
                    next_step = max(next_step, last + 1)
                    on_done(len(piece.requests))


def _common(folders: Sequence[Folder]) -> TraceMeta:
    """Return what holds for all traces. Raises InputError if they are not of one model."""
    first = folders[0]
    common: dict[str, Any] = {fact.name: getattr(first.meta, fact.name) for fact in fields(TraceMeta)}
    for folder in folders[1:]:
        for fact in fields(TraceMeta):
            held, value = common[fact.name], getattr(folder.meta, fact.name)
            if held == value:
                continue
            if isinstance(held, dict):
                common[fact.name] = {key: held[key] for key in held if key in value and held[key] == value[key]}
            elif fact.name == "mode" and AGGREGATE not in (held, value):
                common["mode"] = MIXED
            elif held is None or value is None or fact.name in ("lookahead", "candidates"):
                common[fact.name] = None
            else:
                raise InputError(
                    f"{folder.path} and {first.path} cannot be joined: {fact.name} is {value!r}, there {held!r}"
                )
    common["settings"] = {key: value for key, value in common["settings"].items() if key != "requests"}
    return TraceMeta(**common)
