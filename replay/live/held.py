"""Experts that are in memory already, as a store: rows of a model's own stacked parameters."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from replay.devices.store import Bytes
from replay.live.layout import ExpertLayer, InSlot, ShardStore
from replay.live.shards import ALIGNMENT
from replay.live.sources import OfExpert


class Held:
    """A parameter as a file is read, of which offsets are addresses: so rows are aligned in slots as they are here."""

    past_cache = False

    def __init__(self, weight: Tensor) -> None:
        self._content = weight.detach().contiguous().view(-1).view(torch.uint8)
        self.address = self._content.data_ptr()

    def read(self, offset: int, target: Bytes) -> None:
        begin = offset - self.address
        np.copyto(target, self._content[begin : begin + len(target)].cpu().numpy())

    def read_pages(self, offset: int, size: int, memory: Bytes, place: int) -> None:
        self.read(offset, memory[place : place + size])

    def require_unchanged(self) -> None:
        """A parameter that is changed is read as it is then."""


def held_store(layers: Sequence[ExpertLayer]) -> ShardStore:
    """Return the store of the experts that the modules of these layers hold, in the order of execution."""
    experts = []
    for layer in layers:
        held = [Held(layer.module.get_parameter(row.name)) for row in layer.rows]
        for expert in range(layer.experts):
            begins = [each.address + expert * row.nbytes for each, row in zip(held, layer.rows, strict=True)]
            ranges = zip(held, begins, layer.rows, strict=True)
            own: list[OfExpert] = [([(each, begin, row.nbytes)], begin % ALIGNMENT) for each, begin, row in ranges]
            experts.append(InSlot.of(layer.rows, own))
    return ShardStore(experts, max(layer.expert_bytes for layer in layers))
