"""Arrays: .npz and .npy of routing, of one layer a file, or of one request of vLLM's.

`experts` is an integer array [tokens, layers, k] of ids within a layer, -1 where nothing was routed; `offsets`
[requests + 1] rises from 0 to the number of tokens. Optional in a .npz: `weights` [tokens, layers, k], and, for
requests with both phases, `phase` (0 prefill, 1 decode), `position`, `step` and `token_id`, each [tokens].
`moe-trace export --to npz` writes them. Token ids of any dump may lie apart, in a .npz with `token_ids` or a .npy.
A .npz with other names is read as nested records are (`traces.importers.tree`).
"""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from traces import arrays
from traces.errors import InputError
from traces.importers import tree
from traces.importers.dump import Counts, Dump, Sequence, integers, join
from traces.importers.source import Request, Source
from traces.importers.table import routing_of
from traces.importers.words import layer_number

BESIDE = ".offsets.npy"

LENGTHS = ("seq_lens", "lengths", "lens", "sequence_lengths", "tokens_per_request")

_PER_TOKEN = {"phase": np.uint8, "position": np.uint32, "step": np.uint32, "token_id": np.int32}
"""Optional arrays [tokens], and their types in a trace."""


def read_npz(source: Source, files: list[Path]) -> Dump | Counts:
    """Read .npz files, one behind the other. Raises InputError."""
    held = [arrays.read_npz(file) for file in files]
    if any("experts" not in each for each in held):
        frames = [pd.DataFrame(list(tree.rows([each], source.columns, source.stated))) for each in held]
        return routing_of([(file.stem, frame) for file, frame in zip(files, frames, strict=True)], source)
    names = [name for name in ("experts", "weights", *_PER_TOKEN) if name in held[0]]
    whole = {name: np.concatenate([each[name] for each in held]) for name in names}
    return _dump(source, whole, np.concatenate([_lengths(each) for each in held]))


def read_npy(source: Source, files: list[Path]) -> Dump | Counts:
    """Read a .npy with offsets beside it or in the JSON, of a layer each, or of a request each."""
    beside = [file for file in files if file.name.endswith(BESIDE) or file.stem in LENGTHS]
    held = {file: arrays.read_npy(file) for file in files if file not in beside}
    beside += [own for own in [source.path.with_suffix(BESIDE)] if own.is_file()]
    experts, layers = next(iter(held.values())), None
    if experts.ndim == 2:
        by_layer = {layer_number(file.stem): array for file, array in held.items()}
        layers = tuple(sorted(number for number in by_layer if number is not None))
        if len(layers) < len(held):
            raise InputError(
                f"{source.path}: files of arrays [tokens, k] need the numbers of their layers in their names"
            )
        source.says(f"a layer a file: {len(layers)} layers, from the files' names")
        experts = np.stack([by_layer[layer] for layer in layers], axis=1)
    values: dict[str, Any] = {"experts": experts}
    if beside:
        values["offsets" if beside[0].name.endswith(BESIDE) else LENGTHS[0]] = arrays.read_npy(beside[0])
    elif source.facts.offsets is not None:
        values["offsets"] = np.array(source.facts.offsets)
    elif layers is None:
        return join(source, [Sequence(str(file), array, Request(file.stem)) for file, array in held.items()])
    return _dump(source, values, _lengths(values), layers)


def token_ids(path: Path, tokens: int) -> NDArray[np.int32]:
    """Return the ids of the tokens of a dump, which lie in a file of their own. Raises InputError."""
    held = arrays.read_npy(path) if path.suffix == ".npy" else arrays.read_npz(path)["token_ids"]
    return _column(path, "token_id", held, tokens)


def _lengths(values: dict[str, NDArray[Any]]) -> NDArray[Any]:
    """Return how many tokens each request has: by offsets, as stated, or those of one request."""
    if "offsets" in values:
        return np.diff(values["offsets"])
    return next((values[name] for name in LENGTHS if name in values), np.array([len(values["experts"])]))


def _dump(
    source: Source, values: dict[str, NDArray[Any]], lengths: NDArray[Any], layers: tuple[int, ...] | None = None
) -> Dump:
    path, weights = source.path, values.get("weights")
    experts, lengths = integers(values["experts"], str(path)), integers(lengths, str(path), "offsets", ndim=1)
    if weights is not None and (weights.shape != experts.shape or weights.dtype.kind != "f"):
        raise InputError(f"{path}: weights is {weights.dtype} {weights.shape}; floats {experts.shape} are needed")
    if not len(lengths) or lengths.min() < 0 or lengths.sum() != len(experts):
        raise InputError(f"{path}: offsets must rise from 0 to the {len(experts)} tokens, [requests + 1]")
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]).astype(np.int64)
    columns: dict[str, Any] = {
        name: _column(path, name, values[name], len(experts)) for name in _PER_TOKEN if name in values
    }
    source.says(f"experts [tokens, layers, k] {experts.shape}, {len(lengths)} requests")
    requests = source.requests([Request()] * len(lengths))
    if any(one.start for one in requests):
        raise InputError(f"{path} is of no server, and only servers leave leading tokens out: leave `start` out")
    position = columns.get("position")  # that of the file is taken where it ascends within requests
    if position is not None:
        again = np.setdiff1d(np.flatnonzero(position[1:] <= position[:-1]) + 1, offsets)
        columns |= {"position": None, "restarts": again} if again.size else {}
    weights = None if weights is None else weights.astype(np.float16)
    return Dump(experts, offsets, requests, weights=weights, layers=layers, **columns)


def _column(path: Path, name: str, values: NDArray[Any], tokens: int) -> NDArray[Any]:
    column = integers(values, str(path), name, ndim=1).astype(_PER_TOKEN[name])
    if len(values) != tokens or not np.array_equal(column, values):
        raise InputError(f"{path}: {name} must hold a {column.dtype} for each of {tokens} tokens")
    return column
