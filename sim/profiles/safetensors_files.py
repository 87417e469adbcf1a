"""What safetensors files say of themselves (github.com/huggingface/safetensors, "Format"); no weights are read.

Eight bytes hold the length of a JSON header, which says where each tensor lies in the data behind it, without gaps.
"""

import reprlib
import struct
from dataclasses import dataclass
from math import prod
from os.path import isfile  # of any name, however long
from pathlib import Path
from typing import Any

from traces.errors import InputError, located
from traces.facts import parse_json, text, whole
from traces.files import plain

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

LONGEST_HEADER = 100_000_000
"""Bytes of a header, at most, as in the format's own reader."""

BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""Of a value of each type; of types that are not here the bytes are taken as they stand."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file."""

    name: str
    dtype: str  # as the format names it
    shape: tuple[int, ...]  # outermost first
    begin: int  # byte in the file
    size: int  # bytes


def files_of(folder: Path) -> list[Path]:
    """Return the files that the folder's index names, else model.safetensors, else all there are. Raise InputError."""
    index = folder / INDEX
    if not index.exists():
        single = folder / SINGLE
        return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    with located(f"{index} is no index of safetensors files"):
        try:
            held = parse_json(plain(index).read_bytes(), "it")
        except OSError as error:
            raise InputError(f"it cannot be read: {error.strerror}") from error
        weights = held.get("weight_map") if isinstance(held, dict) else None
        if not isinstance(weights, dict) or not weights:
            raise InputError("it has no weight_map")
        names = sorted({text("a file's name", name) for name in weights.values()})
    for name in names:
        if not isfile(folder / name):
            raise InputError(f"{name} is missing beside {index}")
    return [folder / name for name in names]


def header_of(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a file as it stands, and where the data behind it begins. Raise InputError."""
    try:
        with plain(path).open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= LONGEST_HEADER:
                raise InputError("it is no safetensors file, or cut off: it does not begin with its header's length")
            content = file.read(length)
    except OSError as error:
        raise InputError(f"it cannot be read: {error.strerror}") from error
    if len(content) < length:
        raise InputError(f"it is cut off: its header has {length} bytes, {len(content)} are there")
    header = parse_json(content, "its header")
    if not isinstance(header, dict):
        raise InputError("its header is no JSON object")
    return header, 8 + length


def tensors_of(path: Path) -> list[StoredTensor]:
    """Return the tensors of a file, in their order in it. Raise InputError for a header that cannot be true."""
    with located(str(path)):
        header, begin = header_of(path)
        header.pop("__metadata__", None)
        found = [_tensor(name, held, begin) for name, held in header.items()]
        found.sort(key=lambda tensor: (tensor.begin, tensor.size))
        end = begin
        for tensor in found:
            if tensor.begin != end:
                raise InputError(f"{_about(tensor.name)}: it does not begin where the tensor before it ends")
            end += tensor.size
        if (total := path.stat().st_size) < end:
            raise InputError(f"it is cut off: it should have {end} bytes and has {total}")
    return found


def _tensor(name: str, held: Any, begin: int) -> StoredTensor:
    with located(_about(name)):
        if not isinstance(held, dict):
            raise InputError("it is no JSON object")
        dtype, shape, offsets = (held.get(key) for key in ("dtype", "shape", "data_offsets"))
        if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
            raise InputError("it has no shape, or no data_offsets")
        sizes = tuple(whole("shape", size, low=0) for size in shape)
        first, last = (whole("data_offsets", offset, low=0) for offset in offsets)
        bits = BITS.get(text("dtype", dtype))
        if last < first or (bits and (last - first) * 8 != prod(sizes) * bits):
            raise InputError(f"{list(sizes)} of {dtype} do not take {last - first} bytes")
        return StoredTensor(name, str(dtype), sizes, begin + first, last - first)


def _about(name: str) -> str:
    return f"its header is damaged at {reprlib.repr(name)}"
