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
            size = min(len(block) - lead, end - begin)
            self.read_pages(block.data, offset + begin - lead, lead + size)
            np.copyto(target[begin : begin + size], block[lead : lead + size])
            begin += size

    def read_to(self, offset: int, size: int, memory: Bytes, place: int) -> None:
        """Read the pages that hold `size` bytes from `offset` on, so that these come to lie at `memory[place]`.

        Nothing is copied: place and offset lie equally far behind the beginning of a page, and so does `memory` at one.
        What else is in the pages is written as well. Raise InputError where the file is cut off.
        """
        begin = place - offset % PAGE
        self.read_pages(memory[begin : page_up(place + size)].data, offset - offset % PAGE, place + size - begin)

    def _block(self, size: int) -> Bytes:
        """Return memory of this thread, uint8[whole pages, enough for `size` or BOUNCE_BYTES]."""
        if not hasattr(self._bounce, "memory"):
            self._bounce.memory = anonymous(BOUNCE_BYTES)
        memory: Bytes = self._bounce.memory
        return memory[: min(page_up(size), BOUNCE_BYTES)]


class Held:
    """A parameter as a file is read, of which offsets are addresses: so rows are aligned in slots as they are here."""

    past_cache = False

    def __init__(self, weight: Tensor) -> None:
        self._content = weight.detach().contiguous().view(-1).view(torch.uint8)
        self.address = self._content.data_ptr()

    def read(self, offset: int, target: Bytes) -> None:
        begin = offset - self.address
        np.copyto(target, self._content[begin : begin + len(target)].cpu().numpy())

    def read_to(self, offset: int, size: int, memory: Bytes, place: int) -> None:
        self.read(offset, memory[place : place + size])

    def require_unchanged(self) -> None:
        """A parameter that is changed is read as it is then."""


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
        return next(str(name) for name, dtype in dtypes.items() if dtype is self.dtype)


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
