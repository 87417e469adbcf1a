"""Experts that a checkpoint has in few bits: they stay so on the disk and in slots, and are unpacked to be computed.

What unpacks them are the operations of transformers' converters, on the tensors of one expert instead of all: MXFP4,
fp8 in blocks, integers of compressed-tensors. On a CPU a loop looks the numbers of MXFP4 up in a table that they made:
they take several times as long as computing the expert.
"""

from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from policies.core.compiled import compiled
from replay.live.shards import lead_of
from replay.live.sources import OfExpert, Row, Source, add_row, of_each
from traces.errors import InputError


class Packed(NamedTuple):
    """A tensor of each expert, from which its part of a parameter is unpacked."""

    pattern: str  # of the converter
    name: str  # in the checkpoint, of the first expert's
    row: str
    is_stacked: bool  # one tensor has those of all experts


class Packing:
    """How an expert of one layer lies in a slot: `rows`, where each of them is in the files, and how it is unpacked."""

    def __init__(self, sources: Mapping[Row, Source], experts: int, model: nn.Module) -> None:
        """Raise InputError where an expert has no bytes of its own. sources: of each row of a loaded expert."""
        rows: list[Row] = []
        self.ranges: list[list[OfExpert]] = []  # of each row, by expert
        self._model, self._names = model, [row.name for row in sources]
        self._tables: dict[str, tuple[Any, torch.dtype]] = {}  # by parameter of MXFP4, int16[256, 16] of all numbers
        self._packed: dict[str, tuple[Source, torch.dtype, list[Packed]]] = {}  # by parameter
        for row, source in sources.items():
            if ranges := source.rows(row, experts):
                add_row(rows, row.name, row.shape, row.dtype)
                self.ranges.append(ranges)
                continue
            packed = []
            for pattern, tensors in source.tensors.items():
                first, is_stacked = tensors[0], len(tensors) == 1 and experts > 1
                own = of_each(tensors, experts, merges=not is_stacked)
                if len(own) != experts or len({(each.shape, each.dtype) for each in tensors}) > 1:
                    raise InputError(f"{first.name} has no bytes of each expert of its own: it cannot be read so")
                name = f"{row.name} {pattern}"
                add_row(rows, name, first.shape[1:] if is_stacked else first.shape, first.dtype)
                width = first.dtype.itemsize
                self.ranges.append([([each], lead_of(each[1], width)) for each in own])
                packed.append(Packed(pattern, first.name, name, is_stacked))
            copied = Source(source.parameter, deepcopy(source.converter))
            self._packed[row.name] = copied, row.dtype, packed
        self.rows = tuple(rows)

    def unpacked(self, views: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return [1, ...] of each parameter. views: [1, ...] of each of `rows`, by name."""
        made = {}
        for name in self._names:
            if name in views:
                made[name] = views[name]
                continue
            source, dtype, packed = self._packed[name]
            content = {each.pattern: views[each.row] if each.is_stacked else views[each.row][0] for each in packed}
            kinds = [type(kind).__name__ for kind in getattr(source.converter, "operations", [])]
            is_short = dtype.itemsize == 2 and not any(each.is_cuda for each in content.values())
            made[name] = (self._from_table if kinds == ["Mxfp4Dequantize"] and is_short else self._made)(name, content)
        return made

    def _made(self, name: str, content: dict[str, Tensor]) -> Tensor:
        """Return the parameter that transformers makes of tensors, by its patterns."""
        source, dtype, packed = self._packed[name]
        named = {each.pattern: [(each.name, partial(content.__getitem__, each.pattern))] for each in packed}
        (found,) = source.made(source.converter, named, self._model, self._model.config).values()
        unpacked: Tensor = found.detach().to(dtype)
        return unpacked

    def _from_table(self, name: str, content: dict[str, Tensor]) -> Tensor:
        blocks, scales = content[f"{name}_blocks"][0], content[f"{name}_scales"][0]
        if name not in self._tables:
            every = torch.arange(256, dtype=torch.uint8)
            pairs = (2 * every[:16] % 16) | ((2 * every[:16] + 1) % 16 << 4)  # twice all 16 numbers of 4 bits
            parts = {f"{name}_blocks": pairs.expand(1, 256, 1, 16), f"{name}_scales": every.view(1, 256, 1)}
            table = self._made(name, parts)
            self._tables[name] = table[0, :16].T.contiguous().view(torch.int16).numpy(), table.dtype
        values, dtype = self._tables[name]
        unpacked = torch.empty(1, 32 * scales.shape[1], scales.shape[0], dtype=dtype)
        look_up(blocks.numpy(), scales.numpy(), values, unpacked[0].view(torch.int16).numpy())
        return unpacked


TILE = 64  # outputs of which numbers are looked up together: they lie together in what is made


@compiled
def look_up(blocks: Any, scales: Any, values: Any, made: Any) -> None:
    """Unpack a matrix. blocks: uint8[out, G, 16]; scales: uint8[out, G]; values: [256, 16]; made: [G * 32, out]."""
    outputs, groups = scales.shape
    for first in range(0, outputs, TILE):
        for group in range(groups):
            for output in range(first, min(first + TILE, outputs)):
                scaled = values[scales[output, group]]
                for place in range(16):
                    pair = blocks[output, group, place]
                    made[group * 32 + 2 * place, output] = scaled[pair & 15]
                    made[group * 32 + 2 * place + 1, output] = scaled[pair >> 4]
