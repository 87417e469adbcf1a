"""What GGUF files say of themselves (github.com/ggml-org/ggml, docs/gguf.md): keys and tensors; no weights are read.

A type of tensors that the package `gguf` does not know, such as those of other engines, has the bytes up to the next
tensor. Files may lie at a URL, of which only the beginning is read.
"""

import re
import struct
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, BinaryIO

from traces.errors import InputError
from traces.location import Location
from traces.models.safetensors_files import StoredTensor

SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
"""Names of the files of a split model."""

SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
STRING, ARRAY = 8, 9


@dataclass(frozen=True)
class GgufFile:
    """Keys and tensors of a model; of arrays only those of at most 4,096 numbers are kept, so no vocabularies."""

    keys: dict[str, Any]
    tensors: list[StoredTensor]

    def key(self, name: str, otherwise: Any = None) -> Any:
        """Return what the file says under a key of its architecture."""
        return self.keys.get(f"{self.keys.get('general.architecture')}.{name}", otherwise)


def read(path: str) -> GgufFile:
    """Return what a model's file says, and all of its files if it is split. Raise InputError for what is damaged."""
    keys: dict[str, Any] = {}
    tensors: dict[str, StoredTensor] = {}
    for each in parts(path):
        place = Location.of(each)
        try:
            with place.filesystem.open(place.root, "rb") as file:
                own, found = _header(file, place.filesystem.size(place.root))
        except FileNotFoundError as error:
            raise InputError(f"no file at {each}") from error
        except (OSError, ValueError, LookupError, OverflowError, MemoryError, struct.error) as error:
            raise InputError(f"{each} cannot be read as GGUF, it is damaged or cut off: {error}") from error
        keys = {**own, **keys}
        if twice := next((one.name for one in found if one.name in tensors), None):
            raise InputError(f"{twice} is in two files of {path}")
        tensors |= {one.name: one for one in found}
    return GgufFile(keys, list(tensors.values()))


def parts(path: str) -> list[str]:
    """Return all files of a model: of a split one, those that stand beside `path`."""
    split = SPLIT.fullmatch(path)
    return [path] if split is None else [f"{split[1]}-{i:05d}-of-{split[3]}.gguf" for i in range(1, int(split[3]) + 1)]


def _header(file: BinaryIO, size: int) -> tuple[dict[str, Any], list[StoredTensor]]:
    from gguf import GGML_QUANT_SIZES  # an extra

    sizes = {int(kind): (kind.name, *of) for kind, of in GGML_QUANT_SIZES.items()}  # weights, and their bytes
    magic, version, count, pairs = struct.unpack("<4sIQQ", file.read(24))
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError(f"it begins with {magic!r}, version {version}")
    keys = {}
    for _ in range(pairs):
        name = _string(file)
        keys[name] = _value(file, _number(file, "I"))
    raw = []
    for _ in range(count):
        name, axes = _string(file), _number(file, "I")
        shape = struct.unpack(f"<{axes}Q", file.read(8 * axes))[::-1]
        raw.append((name, shape, _number(file, "I"), _number(file, "Q")))
    alignment = keys.get("general.alignment", 32)
    data_start = -(-file.tell() // alignment) * alignment
    places = sorted(offset for *_, offset in raw)
    after = dict(pairwise([*places, size - data_start]))
    tensors = []
    for name, shape, kind, offset in raw:
        stored = after[offset] - offset
        if kind in sizes:
            label, weights, block = sizes[kind]
            exact = prod(shape) // weights * block
            if exact > stored:
                raise ValueError(f"{name} should have {exact} bytes, and {stored} are there")
            stored = exact
        else:
            label = f"type {kind}"
        tensors.append(StoredTensor(name, label, tuple(shape), data_start + offset, stored))
    return keys, tensors


def _number(file: BinaryIO, kind: str) -> Any:
    return struct.unpack(f"<{kind}", file.read(struct.calcsize(f"<{kind}")))[0]


def _string(file: BinaryIO) -> str:
    length: int = _number(file, "Q")
    text = file.read(length)
    if len(text) < length:
        raise ValueError("it ends within a text")
    return text.decode("utf-8", "replace")


def _value(file: BinaryIO, kind: int) -> Any:
    """Return a value; of a list of texts or of many numbers None, as it is passed over."""
    if kind == STRING:
        return _string(file)
    if kind != ARRAY:
        return _number(file, SCALARS[kind])
    inner, count = _number(file, "I"), _number(file, "Q")
    if inner == STRING:
        for _ in range(count):
            file.seek(_number(file, "Q"), 1)
        return None
    if inner == ARRAY:
        return [_value(file, inner) for _ in range(count)]
    each = struct.Struct(f"<{SCALARS[inner]}")
    if count > 4096:
        file.seek(count * each.size, 1)
        return None
    return [value for (value,) in each.iter_unpack(file.read(count * each.size))]
