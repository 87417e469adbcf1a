"""The experts of one layer, computed from slots with the code of the model's own class, and so the same to the bit.

That code ("eager" in transformers) goes through experts one by one. It runs over a module whose parameters are looked
up in slots where all experts of an event are there, else over a module of one expert, whose rows are added up in
ascending ids, as eager does. The calls that it makes for one token are recorded and made again: Python costs more.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from replay.live.layout import ExpertLayer
from replay.live.sources import Row
from traces.errors import InputError

TRIALS = 3
"""Of one token through one expert, by the module's code and as recorded, before the record alone is trusted."""

SHAPE_ONLY = {"__get__", "__len__", "dim", "ndimension", "size", "numel", "nelement", "stride", "element_size"}
SHAPE_ONLY |= {"is_contiguous", "is_floating_point"}
"""Functions of a tensor's shape and type alone. Any other one that returns no tensor may depend on its values."""
DYNAMIC = {"nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "bincount"}
"""What answers tensors whose shapes depend on values."""
WRITES = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"}

Call = tuple[Callable[..., Any], Any, Any, tuple[int, ...], bool]
"""A function, its arguments with places instead of tensors that change, the places of its results, and whether it
returns them as a sequence."""


class Place(int):
    """Stands for a tensor that changes."""


class Added(TorchFunctionMode):
    """Keeps what a forward pass adds to its output, instead of adding it."""

    values: Tensor | None = None
    dtype = torch.float32  # of the output

    def __torch_function__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        """Take note of `output.index_add_(0, tokens, values)`."""
        if func is torch.Tensor.index_add_:
            self.dtype, self.values = args[0].dtype, args[3]
            return args[0]
        return self.called(func, args, kwargs or {})

    def called(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)


class Recording(Added):
    """Keeps also what is called on tensors that come from `inputs`."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._is_fixed = True  # whether what is called depends on no value of the inputs, and changes nothing
        self._places = {id(tensor): Place(place) for place, tensor in enumerate(inputs)}
        self._inputs = len(inputs)
        self._held: list[Any] = list(inputs)  # so that no other tensor gets the id of one
        self._calls: list[Call] = []

    def called(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        arguments, options = self._replaced(args), self._replaced(kwargs)
        place = arguments[1] if func is Tensor.__getitem__ else None
        if isinstance(place, Tensor) and place.dim() == 0 and place.dtype == torch.int64:
            arguments = arguments[0], int(place)  # which is what it means, and asks no tensor
        if any(True for _ in _places((arguments, options))):
            name = getattr(func, "__name__", "")
            writes = name in WRITES or "out" in kwargs or (name.endswith("_") and not name.endswith("__"))
            by_values = name in DYNAMIC or (name == "where" and len(args) + len(kwargs) == 1)
            by_values |= func is Tensor.__getitem__ and any(True for _ in _places(arguments[1]))
            several = isinstance(result, tuple | list)
            results = result if several else [result]
            if results and all(isinstance(each, Tensor) for each in results):
                self._calls.append((func, arguments, options, tuple(self._place(each) for each in results), several))
                self._is_fixed &= not (writes or by_values)
            else:
                self._is_fixed &= name in SHAPE_ONLY
        return result

    def _place(self, tensor: Tensor) -> int:
        if id(tensor) not in self._places:
            self._places[id(tensor)] = Place(len(self._held))
            self._held.append(tensor)
        return self._places[id(tensor)]

    def _replaced(self, thing: Any) -> Any:
        if isinstance(thing, Tensor):
            return self._places.get(id(thing), thing)
        if isinstance(thing, tuple | list):
            each = [self._replaced(each) for each in thing]
            return each if isinstance(thing, list) else tuple(each)
        if isinstance(thing, Mapping):
            return {name: self._replaced(each) for name, each in thing.items()}
        return thing

    def program(self) -> "Program | None":
        """Return what makes `values` of other inputs; None where it depends on more than their shapes."""
        result = self._places.get(id(self.values))
        if not self._is_fixed or result is None:
            return None
        needed, calls = {int(result)}, list[Call]()
        for call in reversed(self._calls):
            _, arguments, options, made, _ = call
            if needed.intersection(made):
                needed.update(_places((arguments, options)))
                calls.append(call)
        return Program(calls[::-1], self._inputs, int(result))


class Program:
    """Calls, to be made again: as a function, since a loop over calls takes longer than some of them."""

    def __init__(self, calls: Sequence[Call], inputs: int, result: int) -> None:
        self._constants: dict[str, Any] = {}
        lines = [f"def run({', '.join(f't{place}' for place in range(inputs))}):"]
        for func, arguments, options, places, several in calls:
            made = ", ".join(f"t{place}" for place in places) + "," * several
            lines.append(f"    {made} = {self._named(func)}(*{self._text(arguments)}, **{self._text(options)})")
        exec("\n".join([*lines, f"    return t{result}"]), self._constants)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return what comes of other inputs of the same shapes."""
        made: Tensor = self._constants["run"](*inputs)
        return made

    def _text(self, thing: Any) -> str:
        if isinstance(thing, Place):
            return f"t{int(thing)}"
        if isinstance(thing, tuple):
            return f"({''.join(f'{self._text(each)}, ' for each in thing)})"
        if isinstance(thing, list):
            return f"[{', '.join(map(self._text, thing))}]"
        if isinstance(thing, dict):
            return f"{{{', '.join(f'{name!r}: {self._text(each)}' for name, each in thing.items())}}}"
        return self._named(thing)

    def _named(self, thing: Any) -> str:
        name = f"c{len(self._constants)}"
        self._constants[name] = thing
        return name


def _places(thing: Any) -> Iterator[int]:
    """Yield all places in nested arguments."""
    if isinstance(thing, Place):
        yield thing
    elif isinstance(thing, tuple | list | dict):
        for each in thing.values() if isinstance(thing, dict) else thing:
            yield from _places(each)


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
        self._records: dict[tuple[torch.dtype, torch.dtype], Record] = {}  # by types of tokens and their weights
        self._record = Record()  # for the event's types

    def whole(self, hidden: Tensor, index: Tensor, weights: Tensor, slots: dict[int, int]) -> Tensor:
        """Compute an event of which every expert is in a slot; slots: by expert."""
        partly = bool((index < 0).any())  # a token computes less than it chose (rule 22)
        if partly or (self._chosen and (not self._record.is_trusted or self._record.program)):
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
        self._record = self._records.setdefault((hidden.dtype, weights.dtype), Record())
        if self._first.device != index.device:
            self._first = self._first.to(index.device)
        self._added = {}

    def expert(self, expert: int, slot: int) -> None:
        rows = self._view(expert, slot)
        if self._chosen:
            place, token = self._chosen.index(expert), self._first
            inputs = self._hidden, self._weights[:, place : place + 1], *rows.values()
        else:
            places, token = torch.where((self._index == expert).T)
            inputs = self._hidden[token], self._weights[token, places, None], *rows.values()
        record = self._record if len(token) == 1 else None
        if record and record.is_trusted and record.program:
            self._added[expert], self._dtype = (token, record.program(*inputs)), record.dtype
            return
        self._one._parameters = {**self._rest, **rows}
        is_trial = record is not None and not record.is_trusted and self._may_try
        with Recording(inputs) if is_trial else Added() as added:
            self._eager(self._one, inputs[0], torch.zeros_like(token)[:, None], inputs[1])
        if added.values is None:
            raise InputError(
                f"{self._layer.name}: {type(self._layer.module).__name__} does not add up what its experts give "
                "as transformers' experts interface does: it cannot generate from a cache of experts"
            )
        if record and isinstance(added, Recording):
            record.add(added, inputs)
            self._may_try = False
        self._added[expert], self._dtype = (token, added.values), added.dtype

    def forget(self) -> None:
        """Forget what was recorded: what was computed so far were no tokens."""
        self._records.clear()

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


class Record:
    """What a module's code does with one token, as long as that gives what the code gives."""

    def __init__(self) -> None:
        self.program: Program | None = None
        self.dtype = torch.float32  # of what its values are added to
        self._trials = 0

    @property
    def is_trusted(self) -> bool:
        """Return whether the program, if there is one, needs no comparison any more."""
        return self._trials == TRIALS

    def add(self, recording: Recording, inputs: tuple[Tensor, ...]) -> None:
        """Take note of one more run of the module's code."""
        if not self._trials:
            self.program, self.dtype = recording.program(), recording.dtype
        if self.program and not self._is_same(recording, inputs):
            self.program = None
        self._trials += 1

    def _is_same(self, recording: Recording, inputs: tuple[Tensor, ...]) -> bool:
        assert self.program
        assert recording.values is not None
        try:
            return torch.equal(self.program(*inputs), recording.values)
        except Exception:  # whatever keeps it from being done again, the module's code can do without
            return False


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
