"""Where the weights of experts lie in a slot: the rows of an expert one behind another (`replay.live.sources`).

A row lies as far behind the beginning of a page as it does in the file, and is read past the page cache without being
copied. Of numbers of 4 bytes, libraries promise equal results only at equally aligned places: such a row lies as far
behind a multiple of ALIGNMENT as in the model that transformers loads, and is copied where the file differs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from replay.devices.lanes import PAGE, page_up
from replay.devices.store import Bytes, ExpertSource
from replay.live.packing import Packing
from replay.live.shards import ALIGNMENT, Held, Shard
from replay.live.sources import OfExpert, Row, add_row, end_of
from traces.errors import InputError
from traces.models.sites import find_sites

ALIGNED_WIDTH = 4  # bytes of a number from which on the results of libraries depend on alignment


@dataclass(frozen=True)
class ExpertLayer:
    """One module of stacked experts."""

    name: str  # as in `model.named_modules()`
    module: nn.Module
    experts: int
    rows: tuple[Row, ...]
    packing: Packing | None = None  # of experts in few bits

    @property
    def stored(self) -> tuple[Row, ...]:
        """The rows that an expert has in a slot."""
        return self.packing.rows if self.packing else self.rows

    @property
    def width(self) -> int:
        """The numbers of a token that an expert reads; fewer than hidden_size where experts work in a latent space."""
        module: Any = self.module
        return self.rows[0].shape[0 if module.is_transposed else -1]

    @property
    def expert_bytes(self) -> int:
        return end_of(self.stored)


def expert_layers(model: nn.Module) -> list[ExpertLayer]:
    """Return the modules of a model that have the experts interface of transformers. Raise InputError for none."""
    find_sites(model)  # raises for models that are refused by name
    decorated = ("is_transposed", "has_bias", "num_experts")  # of a class, by `use_experts_implementation`
    layers = [
        _layer(name, module)
        for name, module in model.named_modules()
        if all(hasattr(module, attribute) for attribute in decorated)
    ]
    if not layers:
        raise without_interface(type(model).__name__)
    return layers


def without_interface(name: str) -> InputError:
    return InputError(
        f"{name} does not have the experts interface of transformers 5 (stacked experts behind "
        "use_experts_implementation): it cannot generate from a cache of experts"
    )


def _layer(name: str, module: nn.Module) -> ExpertLayer:
    lengths = {len(weight) for weight in module.parameters(recurse=False) if weight.dim() == 3}  # which must agree
    rows: list[Row] = []
    for label, weight in module.named_parameters(recurse=False):
        if weight.dim() > 1 and {len(weight)} == lengths:
            add_row(rows, label, tuple(weight.shape[1:]), weight.dtype)
    return ExpertLayer(name, module, lengths.pop(), tuple(rows))


class Piece(NamedTuple):
    """Bytes of an expert that lie together in a file, and their place in the slot."""

    shard: Shard | Held
    offset: int  # in the file
    begin: int  # byte of the expert
    size: int
    place: int
    in_pages: bool  # whether it is read in whole pages, straight to its place


@dataclass(frozen=True)
class InSlot:
    """How one expert lies in its slot."""

    places: tuple[int, ...]  # of its rows
    pieces: tuple[Piece, ...]
    end: int

    @staticmethod
    def of(rows: Sequence[Row], own: Sequence[OfExpert]) -> "InSlot":
        """Place each row, which lies there, behind the one before."""
        places, pieces, end = [], [], 0
        for row, (ranges, lead) in zip(rows, own, strict=True):
            first, width = ranges[0][1], row.dtype.itemsize
            fits = width < ALIGNED_WIDTH or first % ALIGNMENT == lead
            in_pages = len(ranges) == 1 and fits and first % width == 0
            place = end + (first % PAGE if in_pages else lead)
            places.append(place)
            end = page_up(place + row.nbytes)
            begin = row.begin
            for shard, offset, size in ranges:
                pieces.append(Piece(shard, offset, begin, size, place, in_pages))
                begin, place = begin + size, place + size
        return InSlot(tuple(places), tuple(pieces), end)


class ShardStore(ExpertSource):
    """An `ExpertSource` over ranges of a checkpoint's files: expert e of layer l is l * E + e."""

    def __init__(self, experts: Sequence[InSlot], expert_bytes: int) -> None:
        self._experts = experts
        self.expert_bytes, self.distinct = expert_bytes, len(experts)
        self.stride = max(expert.end for expert in experts)
        self._shards = {piece.shard for expert in experts for piece in expert.pieces}
        self.past_cache = all(shard.past_cache for shard in self._shards)

    def places(self, expert: int) -> tuple[int, ...]:
        return self._experts[expert].places

    def read(self, expert: int, first: int, last: int, slot: Bytes) -> None:
        """Read what of these bytes the expert has. slot: uint8[stride], from the beginning of a page on."""
        for shard, offset, begin, size, place, in_pages in self._experts[expert].pieces:
            low, high = max(first, begin), min(last, begin + size)
            if low >= high:
                continue
            offset, place = offset + low - begin, place + low - begin
            if in_pages:
                shard.read_to(offset, high - low, slot, place)
            else:
                shard.read(offset, slot[place : place + high - low])

    def require_unchanged(self) -> None:
        for shard in self._shards:
            shard.require_unchanged()


def places_of(store: ExpertSource, layers: Sequence[ExpertLayer]) -> Callable[[int], tuple[int, ...]]:
    """Return a function of an expert: the places of its rows in a slot, as this store fills it."""
    if isinstance(store, ShardStore):
        return store.places
    experts, begins = layers[0].experts, [tuple(row.begin for row in layer.stored) for layer in layers]
    return lambda expert: begins[expert // experts]


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
