"""Plain arrays: a .npz with `experts` and `offsets`, or a .npy of the experts with its offsets beside it.

`experts` is an integer array [tokens, layers, k] of ids within a layer, -1 where nothing was routed; `offsets`
[requests + 1] rises from 0 to the number of tokens. Optional in a .npz: `weights` [tokens, layers, k], and, for
requests with both phases, `phase` (0 prefill, 1 decode), `position`, `step` and `token_id`, each [tokens].
`moe-trace export --to npz` writes them. Token ids of any dump may lie apart, in a .npz with `token_ids` or a .npy.
"""

import reprlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces import arrays
from traces.errors import InputError
from traces.importers.dump import Dump, integers
from traces.importers.source import Request, Source, count, requests_of
from traces.steps import DECODE

_PER_TOKEN = {
    "phase": (np.uint8, 0, DECODE),
    "position": (np.uint32, 0, 2**32 - 1),
    "step": (np.uint32, 0, 2**32 - 1),
    "token_id": (np.int32, -1, 2**31 - 1),
}
"""Optional arrays [tokens]: their types in a trace and their limits."""


def read_npz(source: Source) -> Dump:
    """Read a .npz. Raises InputError."""
    path = source.path
    values = _arrays(path, {"experts", "offsets", "weights", *_PER_TOKEN})
    for name in ("experts", "offsets"):
        if name not in values:
            raise InputError(f"{path} has no array {name!r}; it must hold experts[tokens, layers, k] and offsets")
    return _dump(source, **values)


def _arrays(path: Path, names: set[str]) -> dict[str, NDArray[Any]]:
    """Those of a .npz with these names. Raises InputError."""
    try:
        held = arrays.read_npz(path)
    except FileNotFoundError:
        raise InputError(f"no file {path} to import") from None
    except InputError as error:
        raise InputError(f"{path} {error}") from error
    return {name: array for name, array in held.items() if name in names}


def token_ids(path: Path, tokens: int) -> NDArray[np.int32]:
    """The ids of the tokens of a dump, which lie in a file of their own. Raises InputError."""
    held = {"token_ids": load_npy(path)} if path.suffix == ".npy" else _arrays(path, {"token_ids"})
    if "token_ids" not in held:
        raise InputError(f"{path} has no array 'token_ids'")
    return _column(path, "token_id", held["token_ids"], tokens)


def read_npy(source: Source) -> Dump:
    """Read a .npy of the experts; the offsets are X.offsets.npy beside X.npy, or in the JSON. Raises InputError."""
    beside, stated = offsets_beside(source.path), source.fact("offsets", _numbers, None)
    if stated is None and not beside.is_file():
        raise InputError(f"no offsets for {source.path}: there is no {beside}, and no `offsets` in the JSON")
    offsets = load_npy(beside) if stated is None else np.array(stated)
    return _dump(source, load_npy(source.path), offsets)


def _numbers(what: str, value: Any) -> list[int]:
    if not isinstance(value, list):
        raise InputError(f"{what} is {reprlib.repr(value)}; a list of whole numbers is needed")
    return [count(what, number) for number in value]


def offsets_beside(path: Path) -> Path:
    """Where the offsets of a .npy lie."""
    return path.with_suffix(".offsets.npy")


def load_npy(path: Path) -> NDArray[Any]:
    """The array of a .npy. Raises InputError."""
    try:
        return arrays.read_npy(path)
    except FileNotFoundError:
        raise InputError(f"no file {path} to import") from None
    except InputError as error:
        raise InputError(f"{path} {error}") from error


def _dump(
    source: Source,
    experts: NDArray[Any],
    offsets: NDArray[Any],
    weights: NDArray[Any] | None = None,
    **per_token: Any,
) -> Dump:
    path = source.path
    experts = integers(experts, str(path))
    if not experts.size:
        raise InputError(f"{path}: experts is empty {experts.shape}")
    if weights is not None and (weights.shape != experts.shape or weights.dtype.kind != "f"):
        raise InputError(
            f"{path}: weights is {weights.dtype} {weights.shape}; floats of the shape {experts.shape} are needed"
        )
    offsets = integers(offsets, str(path), "offsets", ndim=1).astype(np.int64)
    requests = _check_offsets(source, offsets, len(experts))
    columns: dict[str, Any] = {name: _column(path, name, values, len(experts)) for name, values in per_token.items()}
    return Dump(
        experts,
        offsets,
        requests,
        locate=lambda row, request: f"{path}: row {row} (request {request})",
        weights=None if weights is None else _half(path, weights),
        **columns,
    )


def _check_offsets(source: Source, offsets: NDArray[np.int64], tokens: int) -> list[Request]:
    """The requests, if the offsets are what they should be: none is empty unless it says 0 `routed_tokens`."""
    path = source.path
    if len(offsets) < 2:
        raise InputError(f"{path}: offsets has the shape {offsets.shape}; [requests + 1] is needed")
    if offsets[0] != 0 or offsets[-1] != tokens:
        raise InputError(
            f"{path}: offsets run from {offsets[0]} to {offsets[-1]}; they must run from 0 to the {tokens} tokens"
        )
    if offsets.min() < 0 or offsets.max() > tokens:  # a difference of such numbers may leave the range of 64 bits
        i = int(np.argmax((offsets < 0) | (offsets > tokens)))
        raise InputError(f"{path}: offsets must rise from 0 to the {tokens} tokens, but number {i} is {offsets[i]}")
    requests = requests_of(source, [{}] * (len(offsets) - 1))
    for i, length in enumerate(np.diff(offsets).tolist()):
        if length < 0 or (length == 0 and requests[i].routed_tokens != 0):
            raise InputError(
                f"{path}: offsets must rise, but go from {offsets[i]} to {offsets[i + 1]} at request {i}: "
                "no request may be empty"
            )
    return requests


def _column(path: Path, name: str, values: NDArray[Any], tokens: int) -> NDArray[Any]:
    kind, low, high = _PER_TOKEN[name]
    values = integers(values, str(path), name, ndim=1)
    if len(values) != tokens:
        raise InputError(f"{path}: {name} has {len(values)} values for {tokens} tokens")
    if ((values < low) | (values > high)).any():
        row = int(np.argmax((values < low) | (values > high)))
        raise InputError(f"{path}: row {row}: {name} is {values[row]}, outside of {low} to {high}")
    return values.astype(kind)


def _half(path: Path, weights: NDArray[Any]) -> NDArray[np.float16]:
    """Weights as a trace holds them. Raises InputError for what it cannot."""
    with np.errstate(over="ignore"):
        half: NDArray[np.float16] = weights.astype(np.float16)
    if not (finite := np.isfinite(half)).all():
        row = int(np.argwhere(~finite)[0][0])
        raise InputError(f"{path}: row {row} of weights holds no number, or one that float16 cannot hold")
    return half
