"""Plain arrays: a .npz with `experts` and `offsets`, a folder of them, or a .npy with its offsets beside it.

`experts` is an integer array [tokens, layers, k] of ids within a layer, -1 where nothing was routed; `offsets`
[requests + 1] rises from 0 to the number of tokens. Optional in a .npz: `weights` [tokens, layers, k], and, for
requests with both phases, `phase` (0 prefill, 1 decode), `position`, `step` and `token_id`, each [tokens].
`moe-trace export --to npz` writes them. Token ids of any dump may lie apart, in a .npz with `token_ids` or a .npy.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces import arrays
from traces.errors import InputError
from traces.importers.dump import Dump, integers
from traces.importers.source import Request, Source

BESIDE = ".offsets.npy"

_PER_TOKEN = {"phase": np.uint8, "position": np.uint32, "step": np.uint32, "token_id": np.int32}
"""Optional arrays [tokens], and their types in a trace."""


def read_npz(source: Source) -> Dump:
    """Read a .npz, or those of a folder in the order of their names, one behind the other. Raises InputError."""
    files = sorted(source.path.glob("*.npz")) if source.path.is_dir() else [source.path]
    held = [arrays.read_npz(file) for file in files]
    joined = {name: np.concatenate([each[name] for each in held]) for name in held[0] if name != "offsets"}
    lengths = np.concatenate([np.diff(each["offsets"].astype(np.int64)) for each in held])
    begins = [each["offsets"][:1].astype(np.int64) for each in held[:1]]
    return _dump(source, {**joined, "offsets": np.concatenate([*begins, begins[0] + np.cumsum(lengths)])})


def read_npy(source: Source) -> Dump:
    """Read a .npy of the experts; the offsets are X.offsets.npy beside X.npy, or in the JSON. Raises InputError."""
    stated = source.facts.offsets
    offsets = arrays.read_npy(source.path.with_suffix(BESIDE)) if stated is None else np.array(stated)
    return _dump(source, {"experts": arrays.read_npy(source.path), "offsets": offsets})


def fits(source: Source) -> bool:
    return source.path.is_file() and (source.facts.offsets is not None or source.path.with_suffix(BESIDE).is_file())


def token_ids(path: Path, tokens: int) -> NDArray[np.int32]:
    """Return the ids of the tokens of a dump, which lie in a file of their own. Raises InputError."""
    held = arrays.read_npy(path) if path.suffix == ".npy" else arrays.read_npz(path)["token_ids"]
    return _column(path, "token_id", held, tokens)


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
    return Dump(
        experts,
        offsets,
        source.requests([Request()] * (len(offsets) - 1)),
        weights=None if weights is None else weights.astype(np.float16),
        **columns,
    )


def _column(path: Path, name: str, values: NDArray[Any], tokens: int) -> NDArray[Any]:
    column = integers(values, str(path), name, ndim=1).astype(_PER_TOKEN[name])
    if len(values) != tokens or not np.array_equal(column, values):
        raise InputError(f"{path}: {name} must hold a {column.dtype} for each of {tokens} tokens")
    return column
