"""Tensors of safetensors files, read piece by piece and past the page cache; nothing is mapped into memory.

A file that is cut off, or says what cannot be (`traces.models.safetensors_files`), is refused before anything is read.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from threading import local

import numpy as np
import torch
import transformers
from torch import Tensor

from replay.devices.expert_file import DirectFile
from replay.devices.lanes import PAGE, page_up
from replay.devices.store import Bytes, anonymous
from traces.errors import InputError
from traces.models.safetensors_files import tensors_of

ALIGNMENT = 64  # of what torch allocates, in bytes
BOUNCE_BYTES = 1 << 20
"""Read at once where a place in a file and the place in memory are not equally far behind a page's beginning."""


class Shard(DirectFile):
    """An open file of a checkpoint."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._bounce = local()

    def read(self, offset: int, target: Bytes) -> None:
        """Read len(target) bytes from `offset` on. Raise InputError where the file is cut off."""
        begin, end = 0, len(target)
        while begin < end:
            lead = (offset + begin) % PAGE
            block = self._block(lead + end - begin)
            got = min(self.read_at(block.data, offset + begin - lead) - lead, end - begin)
            if got <= 0:
                raise self._cut_off(offset + begin)
            np.copyto(target[begin : begin + got], block[lead : lead + got])
            begin += got

    def read_pages(self, offset: int, size: int, memory: Bytes, place: int) -> None:
        """Read the pages that hold `size` bytes from `offset` on, so that these come to lie at `memory[place]`.

        Nothing is copied: place and offset lie equally far behind the beginning of a page, and so does `memory` at one.
        What else is in the pages is written as well. Raise InputError where the file is cut off.
        """
        lead = offset % PAGE
        begin, end, at = place - lead, page_up(place + size), offset - lead
        while begin < place + size:
            got = self.read_at(memory[begin:end].data, at)
            whole = got if begin + got >= place + size else got // PAGE * PAGE  # else at the file's end
            if not whole:
                raise self._cut_off(at + got)
            begin, at = begin + whole, at + whole

    def _cut_off(self, offset: int) -> InputError:
        return InputError(f"{self.path} is cut off at byte {offset}")

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
        return list(self.shape)

    def get_dtype(self) -> str:
        dtypes = transformers.modeling_utils.str_to_torch_dtype
        names: dict[torch.dtype, str] = {dtype: name for name, dtype in dtypes.items()}
        return names[self.dtype]


def open_shards(files: Iterable[Path]) -> tuple[list[Shard], dict[str, ShardTensor]]:
    """Open all files of a checkpoint; return them and what they hold. Raise InputError for one that cannot be used."""
    shards: list[Shard] = []
    tensors: dict[str, ShardTensor] = {}
    dtypes = transformers.modeling_utils.str_to_torch_dtype  # imported here, since that takes seconds
    try:
        for path in files:
            shards.append(Shard(path))
            for stored in tensors_of(path):
                if stored.dtype not in dtypes:
                    raise InputError(f"{path}: {stored.name} is of type {stored.dtype}, which is not read")
                place = shards[-1], stored.begin, stored.shape, dtypes[stored.dtype]
                tensors[stored.name] = ShardTensor(stored.name, *place)
    except BaseException:
        for shard in shards:
            shard.close()
        raise
    return shards, tensors
