"""What a forward pass does with tensors, recorded once and done again without the Python around it.

Python that runs for every expert of every token costs more than some experts do. So the calls that a module's own code
makes for one token are kept, but for those that depend on nothing that changes, and made again with other inputs: the
same functions with the same shapes, and so the same numbers to the bit.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

SHAPE_ONLY = {"__get__", "__len__", "dim", "ndimension", "size", "numel", "nelement", "stride", "element_size"}
SHAPE_ONLY |= {"is_contiguous", "is_floating_point"}
"""Functions of a tensor's shape and type alone. Any other one that returns no tensor may depend on its values."""
DYNAMIC = {"nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "bincount"}
"""What answers tensors whose shapes depend on values."""
WRITES = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"}

Call = tuple[Callable[..., Any], Any, Any, tuple[int, ...]]
"""A function, its arguments with places instead of tensors that change, and the places of its results."""


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
        self._held: list[Any] = list(inputs)  # so that no other tensor gets the id of one
        self._calls: list[Call] = []

    def called(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        arguments, options = self._replaced(args), self._replaced(kwargs)
        if func is Tensor.__getitem__ and _is_number(arguments[1]):
            arguments = arguments[0], int(arguments[1])  # which is what it means, and asks no tensor
        if any(True for _ in _places((arguments, options))):
            name = getattr(func, "__name__", "")
            writes = name in WRITES or "out" in kwargs or (name.endswith("_") and not name.endswith("__"))
            by_values = name in DYNAMIC or (name == "where" and len(args) + len(kwargs) == 1)
            by_values |= func is Tensor.__getitem__ and any(True for _ in _places(arguments[1]))
            results = result if isinstance(result, tuple | list) else [result]
            if results and all(isinstance(each, Tensor) for each in results):
                self._calls.append((func, arguments, options, tuple(self._place(each) for each in results)))
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
            _, arguments, options, made = call
            if needed.intersection(made):
                needed.update(_places((arguments, options)))
                calls.append(call)
        return Program(calls[::-1], len(self._held), result)


class Program:
    """Calls, to be made again."""

    def __init__(self, calls: Sequence[Call], places: int, result: int) -> None:
        self._calls, self._places, self._result = calls, places, result

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return what comes of other inputs of the same shapes."""
        held: list[Any] = [*inputs, *[None] * (self._places - len(inputs))]
        for func, arguments, options, places in self._calls:
            result = func(*_filled(arguments, held), **(_filled(options, held) if options else {}))
            if isinstance(result, tuple | list):
                for place, each in zip(places, result, strict=True):
                    held[place] = each
            else:
                held[places[0]] = result
        made: Tensor = held[self._result]
        return made


def _is_number(thing: Any) -> bool:
    return isinstance(thing, Tensor) and thing.dim() == 0 and thing.dtype == torch.int64


def _places(thing: Any) -> Iterator[int]:
    """Yield all places in nested arguments."""
    if isinstance(thing, Place):
        yield thing
    elif isinstance(thing, tuple | list | dict):
        for each in thing.values() if isinstance(thing, dict) else thing:
            yield from _places(each)


def _filled(thing: Any, held: Sequence[Any]) -> Any:
    if isinstance(thing, Place):
        return held[thing]
    if isinstance(thing, tuple | list):
        each = [_filled(each, held) for each in thing]
        return each if isinstance(thing, list) else tuple(each)
    if isinstance(thing, dict):
        return {name: _filled(each, held) for name, each in thing.items()}
    return thing
