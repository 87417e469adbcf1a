"""The experts of one layer, computed from slots with the code of the model's own class.

Every class of experts in transformers has a forward pass that goes through its experts one by one ("eager"), each from
a row of the stacked parameters. That same code runs here, so that nothing is repeated and the numbers are the model's
to the bit: over a module whose parameters are looked up in slots where all experts of an event are there, else over a
module of one expert, whose rows are added up at the end in the order in which eager adds them, ascending ids.
"""

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from replay.live.layout import ExpertLayer, Row
from traces.errors import InputError


class LayerExperts:
    """Computes one event at a time: `whole`, or `begin`, `expert` for each in any order, and `combined`."""

    def __init__(self, layer: ExpertLayer, views: "SlotViews", places: Sequence[tuple[int, ...]]) -> None:
        """views: of slots, as the rows of this layer; places: in a slot, of the rows of each expert."""
        self._layer, self._views, self._places = layer, views.of, places
        names = {row.name for row in layer.rows}
        rest = {name: value for name, value in layer.module._parameters.items() if name not in names}
        self._eager: Any = type(layer.module).forward.__wrapped__  # type: ignore[attr-defined]
        self._rows = {row.name: Rows() for row in layer.rows}
        self._all = _with_parameters(layer.module, {**rest, **self._rows})
        self._one = _with_parameters(layer.module, rest)
        self._one.num_experts = 1
        self._rest = rest
        self._hidden = self._index = self._weights = torch.empty(0)
        self._added: dict[int, tuple[Tensor, Tensor]] = {}  # of each expert: its tokens, and what it adds to them
        self._dtype = torch.float32

    def whole(self, hidden: Tensor, index: Tensor, weights: Tensor, slots: dict[int, int]) -> Tensor:
        """Compute an event of which every expert is in a slot, given by expert."""
        for name, rows in self._rows.items():
            rows.of = {expert: self._view(expert, slot)[name][0] for expert, slot in slots.items()}
        output: Tensor = self._eager(self._all, hidden, index, weights)
        return output

    def begin(self, hidden: Tensor, index: Tensor, weights: Tensor) -> None:
        """Take an event: hidden[T, H], index[T, k], weights[T, k]."""
        self._hidden, self._index, self._weights = hidden, index, weights
        self._added = {}

    def expert(self, expert: int, slot: int) -> None:
        """Compute one of its experts."""
        place, token = torch.where((self._index == expert).T)
        self._one._parameters = {**self._rest, **self._view(expert, slot)}
        mine = self._hidden[token]
        with Added() as added:
            self._eager(self._one, mine, torch.zeros_like(token)[:, None], self._weights[token, place, None])
        if added.values is None:
            raise InputError(f"{self._layer.name}: {type(self._layer.module).__name__} adds up in a way of its own")
        self._added[expert] = token, added.values
        self._dtype = added.dtype

    def _view(self, expert: int, slot: int) -> dict[str, Tensor]:
        return self._views(slot, self._places[expert])

    def combined(self) -> Tensor:
        """Add up all experts of the event, in ascending order; return [T, H]."""
        hidden = self._hidden
        output = torch.zeros_like(hidden, dtype=self._dtype if self._added else None)
        for expert in sorted(self._added):
            output.index_add_(0, *self._added[expert])
        self._added = {}
        return output.to(hidden.dtype)


class SlotViews:
    """Slots as the rows of stacked parameters, for all layers whose rows are alike. slots: uint8[slots, stride]."""

    def __init__(self, rows: Sequence[Row], slots: Tensor) -> None:
        self._rows, self._slots = rows, slots
        self._made: dict[int, tuple[tuple[int, ...], dict[str, Tensor]]] = {}  # of each slot, and for which places

    def of(self, slot: int, places: tuple[int, ...]) -> dict[str, Tensor]:
        """Return [1, ...] of each row, by the parameter's name; places: in the slot, of each row."""
        made, views = self._made.get(slot, ((), {}))
        if made != places:
            rows = zip(self._rows, places, strict=True)
            views = {row.name: row.view(self._slots[slot], place) for row, place in rows}
            self._made[slot] = places, views
        return views


class Rows:
    """Stands for a stacked parameter of which some rows are in slots."""

    def __init__(self) -> None:
        self.of: dict[int, Tensor] = {}

    def __getitem__(self, expert: Any) -> Tensor:
        """Return the row of an expert, a number or a tensor of one."""
        return self.of[int(expert)]


class Added(TorchFunctionMode):
    """Keeps what a forward pass adds to its output, instead of adding it."""

    values: Tensor | None = None
    dtype = torch.float32

    def __torch_function__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        """Take note of `output.index_add_(0, tokens, values)`."""
        if func is torch.Tensor.index_add_:
            self.dtype, self.values = args[0].dtype, args[3]
            return args[0]
        return func(*args, **(kwargs or {}))


def _with_parameters(module: nn.Module, parameters: dict[str, Any]) -> Any:
    """Return a copy of a module with other parameters; all else is shared."""
    twin = copy(module)
    twin.__dict__["_parameters"] = parameters
    return twin
