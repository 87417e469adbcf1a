"""What safetensors files say of themselves (github.com/huggingface/safetensors, "Format"); no weights are read.

Eight bytes hold the length of a JSON header, which says where each tensor lies in the data behind it, without gaps.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traces.errors import InputError, located
from traces.facts import parse_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


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
    index, single = folder / INDEX, folder / SINGLE
    if not index.exists():
        return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    files = [folder / name for name in sorted(set(parse_json(index.read_bytes(), str(index))["weight_map"].values()))]
    for file in files:
        if not file.is_file():
            raise InputError(f"{file.name} is missing beside {index}")
    return files


def header_of(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a file as it stands, and where the data behind it begins. Raise InputError."""
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= path.stat().st_size - 8:
            raise InputError("it is no safetensors file, or cut off: its header is not there")
        header: dict[str, Any] = parse_json(file.read(length), "its header")
    return header, 8 + length


def tensors_of(path: Path) -> list[StoredTensor]:
    """Return the tensors of a file, in their order in it. Raise InputError where the file is cut off."""
    with located(str(path)):
        header, begin = header_of(path)
        header.pop("__metadata__", None)
        places = {name: (stated, *stated["data_offsets"]) for name, stated in header.items()}
        tensors = [
            StoredTensor(name, stated["dtype"], tuple(stated["shape"]), begin + first, last - first)
            for name, (stated, first, last) in places.items()
        ]
        tensors.sort(key=lambda tensor: (tensor.begin, tensor.size))
        end = max((tensor.begin + tensor.size for tensor in tensors), default=begin)
        if (total := path.stat().st_size) < end:
            raise InputError(f"it is cut off: it should have {end} bytes and has {total}")
    return tensors
