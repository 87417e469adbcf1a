"""Calls of a live model: what a forward pass brings, and where several are one step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, Self
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from replay.live.loop import Part
from replay.live.memory import KV_NAMES
from replay.live.recorder import Batch

Routed = tuple[Tensor, Tensor, Tensor]
"""What a call brings to a layer of experts: hidden[T, H], index[T, k], weights[T, k]."""


def nothing() -> None:
    """Stand for a weak reference to nothing."""


@dataclass
class Call:
    """A call of the model: rows of one KV cache, each of them a request, in batch slots from `slot` on."""

    ids: NDArray[Any] | None  # int64[rows, columns] of its tokens, where they are known
    before: int  # tokens in its KV cache
    is_own: NDArray[np.bool_]  # [rows, columns], False for padding
    kv: Callable[[], object] = nothing  # the KV cache that it continues
    slot: int = 0
    request: int = 0  # number of the first row's
    is_new: bool = True
    recorded: Batch | None = None

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Self:
        """Return the call with these arguments of forward()."""
        names = ("input_ids", "inputs_embeds")
        inputs: Tensor = args[0] if args else next(kwargs[name] for name in names if kwargs.get(name) is not None)
        rows, columns = inputs.shape[:2]
        kv = next((kwargs[name] for name in KV_NAMES if kwargs.get(name) is not None), None)
        before = int(kv.get_seq_length()) if kv is not None else 0
        own = np.broadcast_to(own_tokens(kwargs.get("attention_mask"), before, columns), (rows, columns))
        ids = None if inputs.is_floating_point() else inputs.cpu().numpy()
        return cls(ids, before, own, nothing if kv is None else ref(kv))

    @property
    def rows(self) -> int:
        return len(self.is_own)

    @property
    def columns(self) -> int:
        return int(self.is_own.shape[1])

    @property
    def parts(self) -> list[Part]:
        """Return what its requests bring to a step."""
        own = self.columns, self.before + self.columns, self.is_new
        return [Part(self.slot + row, self.request + row, *own) for row in range(self.rows)]


class Meeting(Protocol):
    """Where calls meet that are one step. It calls `LiveModel.begin_step`, `compute` for each layer, and `end_step`."""

    def begin(self, call: Call) -> None:
        """Return when the step begins in which this call takes part."""
        ...

    def event(self, layer: int, routed: Routed) -> Tensor:
        """Return what the experts of a layer make of a call, once all of its step are there."""
        ...


def own_tokens(mask: Any, before: int, columns: int) -> NDArray[np.bool_]:
    """Return which tokens of a pass are no padding, bool[rows or 1, columns], by any mask that a model takes.

    before: tokens in the KV cache. In a mask [rows, 1, queries, keys], made for static caches, all that see themselves.
    With a sliding window the keys are the latest ones alone.
    """
    if isinstance(mask, dict):
        mask = mask.get("full_attention")
    if isinstance(mask, Tensor) and mask.dim() == 4:
        seen = mask[:, 0].diagonal(min(before, mask.shape[3] - columns), 1, 2)
        mask = seen if seen.dtype == torch.bool else seen == 0
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return np.ones((1, columns), np.bool_)
    own: NDArray[np.bool_] = (mask[:, -columns:] != 0).cpu().numpy()
    return own
