"""The experts of one layer, computed from slots with the code of the model's own class, and so the same to the bit.

That code ("eager" in transformers) goes through experts one by one. It runs over a module whose parameters are looked
up in slots where all experts of an event are there, else over a module of one expert, whose rows are added up in
ascending ids, as eager does. What it does with one token is computed directly, where that gives the same bits.
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from replay.live.layout import ExpertLayer
from replay.live.sources import Row

TRIALS = 3
"""Of one token through one expert, by the module's code and directly, before the latter alone is trusted."""


class Added(TorchFunctionMode):
    """Keeps what a forward pass adds to its output, instead of adding it."""

    values: Tensor | None = None
    dtype = torch.float32  # of the output

    def __torch_function__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.index_add_:
            self.dtype, self.values = args[0].dtype, args[3]
            return args[0]
        return func(*args, **(kwargs or {}))


class Direct:
    """What an expert adds to one token, by the contract of `use_experts_implementation`, which its classes meet.

    The module's code may still round otherwise: it is trusted as long as TRIALS give the same bits.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        self._trials = 0
        self.dtype = torch.float32  # of what it is added to
        self.fits = True

    @property
    def is_tried(self) -> bool:
        return self._trials == TRIALS

    def __call__(self, hidden: Tensor, weight: Tensor, rows: dict[str, Tensor]) -> Tensor:
        """Return [1, H] for hidden [1, H] and weight [1, 1]; rows: the expert's, [1, ...] by the parameter's name."""
        module = self._module
        if module.has_gate:
            inner = module._apply_gate(self._linear(hidden, rows, "gate_up_proj"))
        else:
            inner = module.act_fn(self._linear(hidden, rows, "up_proj"))
        output = self._linear(inner, rows, "down_proj")
        if module.has_post_expert_norm:
            output = module.post_expert_norm(output)
        values: Tensor = (output * weight).to(self.dtype)
        return values

    def _linear(self, values: Tensor, rows: dict[str, Tensor], name: str) -> Tensor:
        matrix, bias = rows[name][0], rows[f"{name}_bias"][0] if self._module.has_bias else None
        if not self._module.is_transposed:
            return functional.linear(values, matrix, bias)
        return values @ matrix if bias is None else values @ matrix + bias

    def compare(self, added: Added, hidden: Tensor, weight: Tensor, rows: dict[str, Tensor]) -> None:
        assert added.values is not None
        self.dtype = added.dtype
        self._trials += 1
        try:
            self.fits = self.fits and torch.equal(self(hidden, weight, rows), added.values)
        except Exception:  # whatever keeps it from being computed so, the module's code can do without
            self.fits = False


class LayerExperts:
    """Computes one event at a time: `whole`, or `begin`, `expert` for each in any order, and `combined`."""

    def __init__(self, layer: ExpertLayer, views: "SlotViews", places: Sequence[tuple[int, ...]]) -> None:
        """Take views of slots as the rows of this layer, and the places in a slot of the rows of each expert."""
        self._layer, self._views, self._places = layer, views.of, places
        names = {row.name for row in layer.rows}
        rest = {name: value for name, value in layer.module._parameters.items() if name not in names}
        self._eager: Any = type(layer.module).forward.__wrapped__  # type: ignore[attr-defined]
        self._rows = {row.name: Rows(row.name, self._of) for row in layer.rows}
        self._slots: dict[int, int] = {}  # of each expert of an event that is computed as a whole
        self._latest: tuple[int, dict[str, Tensor]] = -1, {}  # of these experts, and its rows
        self._all = _with_parameters(layer.module, {**rest, **self._rows})
        self._one = _with_parameters(layer.module, rest)
        self._one.num_experts = 1
        self._rest = rest
        self._hidden = self._index = self._weights = torch.empty(0)
        self._chosen: list[int] = []  # of a single token, which are distinct
        self._may_try = True  # once an event: all experts of one get the same token
        self._first = torch.zeros(1, dtype=torch.int64)  # that token
        self._added: dict[int, tuple[Tensor, Tensor]] = {}  # of each expert: its tokens, and what it adds to them
        self._dtype = torch.float32
        self._directs: dict[tuple[torch.dtype, torch.dtype], Direct] = {}  # by types of tokens and their weights
        self._direct = Direct(layer.module)  # for the event's types

    def whole(self, hidden: Tensor, index: Tensor, weights: Tensor, slots: dict[int, int]) -> Tensor:
        """Compute an event of which every expert is in a slot; slots: by expert."""
        partly = bool((index < 0).any())  # a token computes less than it chose (rule 22)
        if partly or (self._chosen and self._direct.fits):
            for expert in sorted(slots):
                self.expert(expert, slots[expert])
            return self.combined()
        self._slots, self._latest = slots, (-1, {})
        output: Tensor = self._eager(self._all, hidden, index, weights)
        self._latest = -1, {}
        return output

    def _of(self, expert: int) -> dict[str, Tensor]:
        """Return the rows of an expert of that event; its code goes from one expert to the next."""
        if expert != self._latest[0]:
            self._latest = expert, self._view(expert, self._slots[expert])
        return self._latest[1]

    def begin(self, hidden: Tensor, index: Tensor, weights: Tensor) -> None:
        """Take an event: hidden[T, H], index[T, k], weights[T, k]."""
        self._hidden, self._index, self._weights = hidden, index, weights
        chosen = index[0].tolist() if len(index) == 1 else []
        computed = [expert for expert in chosen if expert >= 0]
        self._chosen = chosen if len(set(computed)) == len(computed) else []
        self._may_try = True
        self._direct = self._directs.setdefault((hidden.dtype, weights.dtype), Direct(self._layer.module))
        if self._first.device != index.device:
            self._first = self._first.to(index.device)
        self._added = {}

    def expert(self, expert: int, slot: int) -> None:
        rows = self._view(expert, slot)
        if self._chosen:
            place, token = self._chosen.index(expert), self._first
            hidden, weights = self._hidden, self._weights[:, place : place + 1]
        else:
            places, token = torch.where((self._index == expert).T)
            hidden, weights = self._hidden[token], self._weights[token, places, None]
        direct = self._direct if len(token) == 1 and self._direct.fits else None
        if direct and direct.is_tried:
            self._added[expert], self._dtype = (token, direct(hidden, weights, rows)), direct.dtype
            return
        self._one._parameters = {**self._rest, **rows}
        with Added() as added:
            self._eager(self._one, hidden, torch.zeros_like(token)[:, None], weights)
        assert added.values is not None  # by the contract of `use_experts_implementation`
        if direct and self._may_try:
            direct.compare(added, hidden, weights, rows)
            self._may_try = False
        self._added[expert], self._dtype = (token, added.values), added.dtype

    def forget(self) -> None:
        """Forget what was tried: what was computed so far were no tokens."""
        self._directs.clear()

    def _view(self, expert: int, slot: int) -> dict[str, Tensor]:
        views, packing = self._views(slot, self._places[expert]), self._layer.packing
        return packing.unpacked(views) if packing else views

    def combined(self) -> Tensor:
        """Add up all experts of the event, in ascending order; return [T, H]."""
        hidden = self._hidden
        output = torch.zeros_like(hidden, dtype=self._dtype if self._added else None)
        for expert in sorted(self._added):
            tokens, values = self._added[expert]
            if self._chosen:  # which is what index_add_ does for one token, in more time
                output.add_(values)
            else:
                output.index_add_(0, tokens, values)
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
    """Stands for a stacked parameter of which some rows are in slots. of: an expert's rows, by names of parameters."""

    def __init__(self, name: str, of: Callable[[int], dict[str, Tensor]]) -> None:
        self._name, self._of = name, of

    def __getitem__(self, expert: Any) -> Tensor:
        """Return the row of an expert, a number or a tensor of one."""
        return self._of(int(expert))[self._name][0]


def _with_parameters(module: nn.Module, parameters: dict[str, Any]) -> Any:
    """Return a copy of a module with other parameters; all else is shared."""
    twin = copy(module)
    twin.__dict__["_parameters"] = parameters
    return twin
