"""Experts that a checkpoint has in few bits: they stay so on the disk and in slots, and are unpacked to be computed.

What unpacks them is what transformers runs when it loads such a checkpoint dequantised: the operations of its
converters, here on the tensors of one expert instead of all. So every format works of which it has such operations and
of which each expert has tensors of its own, or rows of stacked ones: MXFP4, fp8 in blocks.
"""

from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from replay.live.layout import ExpertLayer, OfExpert, Row, Source, add_row, of_each
from replay.live.shards import lead_of
from traces.errors import InputError


class Packed(NamedTuple):
    """A tensor of each expert, from which its part of a parameter is unpacked."""

    pattern: str  # of the converter
    name: str  # in the checkpoint, of the first expert's
    row: str
    is_stacked: bool  # one tensor has those of all experts


class Packing:
    """How an expert of one layer lies in a slot: `rows`, where each of them is in the files, and how it is unpacked."""

    def __init__(self, layer: ExpertLayer, sources: Mapping[str, Source], model: nn.Module) -> None:
        """Raise InputError where an expert has no bytes of its own."""
        rows: list[Row] = []
        self.ranges: list[list[OfExpert]] = []  # of each row, by expert
        self._model, self._names = model, [row.name for row in layer.rows]
        self._packed: dict[str, tuple[Source, torch.dtype, list[Packed]]] = {}  # by parameter
        for row in layer.rows:
            source = sources[f"{layer.name}.{row.name}"]
            if ranges := source.rows(row, layer.experts):
                add_row(rows, row.name, row.shape, row.dtype)
                self.ranges.append(ranges)
                continue
            packed = []
            for pattern, tensors in source.tensors.items():
                first, is_stacked = tensors[0], len(tensors) == 1 and layer.experts > 1
                own = of_each(tensors, layer.experts, merges=not is_stacked)
                if len(own) != layer.experts or len({(each.shape, each.dtype) for each in tensors}) > 1:
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
            contents = {
                each.pattern: [(each.name, partial(_content, views[each.row], each.is_stacked))] for each in packed
            }
            (found,) = source.made(source.converter, contents, self._model, self._model.config).values()
            made[name] = found.detach().to(dtype)
        return made


def _content(view: Tensor, is_stacked: bool) -> Tensor:
    return view if is_stacked else view[0]
