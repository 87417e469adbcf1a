"""Arrays: .npz and .npy of routing, of one layer a file, or of one request of vLLM's.

`experts` is an integer array [tokens, layers, k] of ids within a layer, -1 where nothing was routed; `offsets`
[requests + 1] rises from 0 to the number of tokens. Optional in a .npz: `weights` [tokens, layers, k], and, for
requests with both phases, `phase` (0 prefill, 1 decode), `position`, `step` and `token_id`, each [tokens].
`moe-trace export --to npz` writes them. Token ids of any dump may lie apart, in a .npz with `token_ids` or a .npy.
A .npz with other names is read as nested records are (`traces.importers.tree`).
"""

from dataclasses import replace
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
    offsets = [_offsets(each, len(each["experts"])) for each in held]
    names = ["experts", *(name for name in ("weights", *_PER_TOKEN) if name in held[0])]
    whole = {name: np.concatenate([each[name] for each in held]) for name in names}
    begins = np.cumsum([0, *(each[-1] for each in offsets)])
    joined = [each[i > 0 :] + begin for i, (each, begin) in enumerate(zip(offsets, begins, strict=False))]
    return _dump(source, {**whole, "offsets": np.concatenate(joined)})


def read_npy(source: Source, files: list[Path]) -> Dump | Counts:
    """Read a .npy with offsets beside it or in the JSON, of counts, of a layer each, or of a request each."""
    beside = [file for file in files if file.name.endswith(BESIDE) or file.stem in LENGTHS]
    held = {file: arrays.read_npy(file) for file in files if file not in beside}
    beside += [own for own in [source.path.with_suffix(BESIDE)] if own.is_file()]
    layers = {layer_number(file.stem): array for file, array in held.items()}
    experts = next(iter(held.values()))
    offsets = None if source.facts.offsets is None else np.array(source.facts.offsets)
    if beside:
        offsets = arrays.read_npy(beside[0])
        offsets = offsets if beside[0].name.endswith(BESIDE) else np.concatenate([[0], np.cumsum(offsets)])
    if experts.ndim == 2 and len(held) == len(layers) > 1 and None not in layers:
        source.says(f"a layer a file: {len(layers)} layers, from the files' names")
        numbers = sorted(number for number in layers if number is not None)
        experts = np.stack([layers[number] for number in numbers], axis=1)
        dump = _dump(
            source, {"experts": experts, "offsets": np.array([0, len(experts)]) if offsets is None else offsets}
        )
        return replace(dump, layers=tuple(numbers))
    if experts.ndim == 2 and len(held) == 1:
        layer, expert = (each.ravel() for each in np.indices(experts.shape))
        frame = pd.DataFrame({"layer": layer, "expert": expert, "count": experts.ravel()})
        return routing_of([(source.stem, frame)], source)
    if offsets is None:
        return join(source, [Sequence(str(file), array, Request(file.stem)) for file, array in held.items()])
    return _dump(source, {"experts": experts, "offsets": offsets})


def token_ids(path: Path, tokens: int) -> NDArray[np.int32]:
    """Return the ids of the tokens of a dump, which lie in a file of their own. Raises InputError."""
    held = arrays.read_npy(path) if path.suffix == ".npy" else arrays.read_npz(path)["token_ids"]
    return _column(path, "token_id", held, tokens)


def _offsets(values: dict[str, NDArray[Any]], tokens: int) -> NDArray[np.int64]:
    """Return the offsets as they are, by the lengths of requests, else those of one request."""
    if "offsets" in values:
        return integers(values["offsets"], "offsets", "offsets", ndim=1).astype(np.int64)
    lengths = next((values[name] for name in LENGTHS if name in values), np.array([tokens]))
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _dump(source: Source, values: dict[str, NDArray[Any]]) -> Dump:
    path = source.path
    experts, weights = integers(values["experts"], str(path)), values.get("weights")
    if weights is not None and (weights.shape != experts.shape or weights.dtype.kind != "f"):
        raise InputError(f"{path}: weights is {weights.dtype} {weights.shape}; floats {experts.shape} are needed")
    offsets = integers(values["offsets"], str(path), "offsets", ndim=1).astype(np.int64)
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != len(experts) or (np.diff(offsets) < 0).any():
        raise InputError(f"{path}: offsets must rise from 0 to the {len(experts)} tokens, [requests + 1]")
    columns: dict[str, Any] = {
        name: _column(path, name, values[name], len(experts)) for name in _PER_TOKEN if name in values
    }
    source.says(f"experts [tokens, layers, k] {experts.shape}, {len(offsets) - 1} requests")
    requests = source.requests([Request()] * (len(offsets) - 1))
    if any(one.start for one in requests):
        raise InputError(f"{path} is of no server, and only servers leave leading tokens out: leave `start` out")
    position = columns.get("position")  # that of the file is taken where it ascends
    if position is not None and (again := _restarts(position, offsets)).size:
        columns |= {"position": None, "restarts": again}
    return Dump(
        experts,
        offsets,
        requests,
        weights=None if weights is None else weights.astype(np.float16),
        **columns,
    )


def _restarts(position: NDArray[np.uint32], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rows whose position is not above that of the row before, in the same request."""
    return np.setdiff1d(np.flatnonzero(position[1:] <= position[:-1]) + 1, offsets)


def _column(path: Path, name: str, values: NDArray[Any], tokens: int) -> NDArray[Any]:
    column = integers(values, str(path), name, ndim=1).astype(_PER_TOKEN[name])
    if len(values) != tokens or not np.array_equal(column, values):
        raise InputError(f"{path}: {name} must hold a {column.dtype} for each of {tokens} tokens")
    return column
