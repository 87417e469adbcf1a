"""Tensors of safetensors files, read piece by piece and past the page cache; nothing is mapped into memory.

A header says where each tensor lies (github.com/huggingface/safetensors, "Format"). A file that is cut off, or says
what cannot be, is refused here, before anything is read of it.
"""

import json
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from threading import local
from typing import Any

import numpy as np
import torch
from torch import Tensor

from replay.devices.expert_file import LONGEST_HEADER, open_past_cache
from replay.devices.lanes import PAGE, page_up
from replay.devices.store import Bytes, anonymous
from traces.errors import InputError, located
from traces.files import plain

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}

ALIGNMENT = 64
"""Of what torch allocates, in bytes."""
BOUNCE_BYTES = 1 << 20
"""Read at once where a place in a file and the place in memory are not equally far behind a page's beginning."""


class Shard:
    """An open file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with located(str(path)):
            try:
                self._file, self.past_cache = open_past_cache(plain(path))
                self._size = path.stat().st_size
            except OSError as error:
                raise InputError(f"cannot be read: {error.strerror}") from error
        self._bounce = local()

    def read(self, offset: int, target: Bytes) -> None:
        """Read len(target) bytes from `offset` on. Raise InputError if they cannot be read."""
        begin, end = 0, len(target)
        while begin < end:
            lead = (offset + begin) % PAGE
            block = self._block(lead + end - begin)
            got = min(self._read(block, offset + begin - lead) - lead, end - begin)
            if got <= 0:
                raise self._cut_off(offset + begin)
            np.copyto(target[begin : begin + got], block[lead : lead + got])
            begin += got

    def read_pages(self, offset: int, size: int, memory: Bytes, place: int) -> None:
        """Read the pages that hold `size` bytes from `offset` on, so that these come to lie at `memory[place]`.

        Nothing is copied: place and offset lie equally far behind the beginning of a page, and so does `memory` at one.
        What else is in the pages is written as well. Raise InputError if they cannot be read.
        """
        lead = offset % PAGE
        begin, end, at = place - lead, page_up(place + size), offset - lead
        while begin < place + size:
            got = self._read(memory[begin:end], at)
            whole = got if begin + got >= place + size else got // PAGE * PAGE  # else at the file's end
            if not whole:
                raise self._cut_off(at + got)
            begin, at = begin + whole, at + whole

    def _read(self, block: Bytes, offset: int) -> int:
        try:
            return os.preadv(self._file, [block.data], offset)
        except OSError as error:
            raise InputError(f"{self.path} cannot be read: {error.strerror}") from error

    def _cut_off(self, offset: int) -> InputError:
        return InputError(f"{self.path} is cut off at byte {offset}")

    def header(self) -> dict[str, Any]:
        """Return what the file says of each tensor. Raise InputError where it cannot be true."""
        with located(str(self.path)):
            if self._size < 8:
                raise InputError("is no safetensors file, or is cut off")
            length = struct.unpack("<Q", self._bytes(0, 8))[0]
            if not 2 <= length <= min(LONGEST_HEADER, self._size - 8):
                raise InputError("is no safetensors file, or is cut off")
            try:
                entries = json.loads(self._bytes(8, length))
                entries.pop("__metadata__", None)
                end = begin = 8 + length
                for entry in sorted(entries.values(), key=lambda entry: entry["data_offsets"]):
                    first, last = (begin + at for at in entry["data_offsets"])
                    if not (type(first) is type(last) is int and end == first <= last):
                        raise ValueError("tensors must lie one behind another")
                    entry["data_offsets"], end = (first, last), last
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise InputError("its header is damaged") from error
            if end > self._size:
                raise InputError(f"is cut off: it has {self._size} bytes of {end}")
            return dict(entries)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _bytes(self, offset: int, size: int) -> bytes:
        target = np.empty(size, np.uint8)
        self.read(offset, target)
        return target.tobytes()

    def _block(self, size: int) -> Bytes:
        """Return memory of this thread, uint8[whole pages, enough for `size` or BOUNCE_BYTES]."""
        if not hasattr(self._bounce, "memory"):
            self._bounce.memory = anonymous(BOUNCE_BYTES)
        memory: Bytes = self._bounce.memory
        return memory[: min(page_up(size), BOUNCE_BYTES)]


def lead_of(offset: int, width: int) -> int:
    """Return how far behind a multiple of ALIGNMENT numbers lie that are mapped; 0 where they cannot be used so."""
    return 0 if offset % width else offset % ALIGNMENT


@dataclass(frozen=True)
class ShardTensor:
    """A tensor at rest. `tensor[...]` reads it: what transformers asks of a slice of a checkpoint."""

    name: str
    shard: Shard
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Of its content."""
        return prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, _: object) -> Tensor:
        """Return the whole tensor, in memory of its own, as far behind a multiple of ALIGNMENT as if it were mapped.

        So the model that transformers loads has it, and what libraries compute may depend on that.
        """
        lead = lead_of(self.offset, self.dtype.itemsize)
        content = torch.empty(lead + self.nbytes, dtype=torch.uint8)[lead:]
        if self.nbytes:
            self.shard.read(self.offset, content.numpy())
        return content.view(self.dtype).view(self.shape)

    def get_shape(self) -> list[int]:
        """Return its shape."""
        return list(self.shape)


def open_shards(files: Iterable[Path]) -> tuple[list[Shard], dict[str, ShardTensor]]:
    """Open all files of a checkpoint; return them and what they hold. Raise InputError for one that cannot be used."""
    shards: list[Shard] = []
    found: dict[str, ShardTensor] = {}
    try:
        for path in files:
            shards.append(Shard(path))
            for name, entry in shards[-1].header().items():
                found[name] = _tensor(name, shards[-1], entry)
    except BaseException:
        for shard in shards:
            shard.close()
        raise
    return shards, found


def _tensor(name: str, shard: Shard, entry: dict[str, Any]) -> ShardTensor:
    with located(str(shard.path)):
        if entry.get("dtype") not in DTYPES:
            raise InputError(f"{name} is of type {entry.get('dtype')}, which is not read")
        first, last = entry["data_offsets"]
        shape = entry.get("shape")
        if not isinstance(shape, list) or not all(isinstance(each, int) and each >= 0 for each in shape):
            raise InputError(f"{name} has the shape {shape}: its header is damaged")
        tensor = ShardTensor(name, shard, first, tuple(shape), DTYPES[entry["dtype"]])
        if tensor.nbytes != last - first:
            raise InputError(f"{name} has {last - first} bytes instead of {tensor.nbytes}: its header is damaged")
        return tensor
