"""What passes of a live model have routed, kept as a trace: each row of a batch is a request.

A request has the tokens that its attention mask does not hide, in the order of the sequence. Those that the KV cache
gave up again, as after candidates of an assistant that were rejected, are not in it. What the first pass took in is its
prompt; what later ones took in counts as decoded. A row that has ended has what it is fed while others continue. Beams
that change places change those of their requests.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from traces.errors import InputError
from traces.schema import TraceMeta
from traces.trace import Trace

Array = NDArray[Any]


class Part(NamedTuple):
    """Columns of a batch that one pass took in."""

    experts: Array  # [rows, columns, L, k], -1 where nothing was routed
    ids: Array  # int32[rows, columns], -1 where unknown
    is_own: Array  # bool[rows, columns], False for padding

    def first(self, columns: int) -> "Part":
        return Part(*(each[:, :columns] for each in self))


class Batch:
    """Keeps what passes of one batch route that come to their end; the first that does adds it to `kept`."""

    def __init__(self, layers: int, experts: int, top_k: int, kept: "list[Batch]") -> None:
        self._layers, self._top_k, self._kept = layers, top_k, kept
        self._id_type = np.int16 if experts < 1 << 15 else np.int32
        self._parts: list[Part] = []
        self._first = self._held = 0  # tokens in its KV cache when it began, columns that are kept
        self._layer = 0

    def begin(self, ids: Array | None, is_own: Array, before: int) -> None:
        """A pass begins. ids, is_own: [rows, columns]; before: tokens in the KV cache."""
        experts = np.full((*is_own.shape, self._layers, self._top_k), -1, self._id_type)
        known = np.full(is_own.shape, -1, np.int32) if ids is None else ids.astype(np.int32)
        self._part, self._layer, self._before = Part(experts, known, is_own), 0, before

    def put(self, ids: Array) -> None:
        """The next layer has chosen. ids: [rows * columns, k], -1 where nothing is routed."""
        experts = self._part.experts
        experts[:, :, self._layer, : ids.shape[1]] = ids.reshape(*experts.shape[:2], -1)
        self._layer += 1

    def keep(self) -> None:
        """The pass has come to its end: keep it, without what its KV cache had given up before."""
        if not self._parts:
            self._kept.append(self)
            self._first = self._before
        parts, kept = self._parts, self._before - self._first
        while parts and self._held > kept:
            last = parts.pop()
            columns = last.ids.shape[1]
            left = max(0, columns - (self._held - kept))
            if left:
                parts.append(last.first(left))
            self._held -= columns - left
        parts.append(self._part)
        self._held += self._part.ids.shape[1]

    @property
    def requests(self) -> int:
        return len(self._parts[0].ids)

    @property
    def prompt(self) -> Part:
        """What the first pass took in."""
        return self._parts[0]

    @property
    def whole(self) -> Part:
        """What all passes took in, as one."""
        return Part(*(np.concatenate(each, axis=1) for each in zip(*self._parts, strict=True)))


class Recorder:
    """Keeps the batches of a model, in the order in which their first passes ended."""

    def __init__(self, layers: int, experts: int, top_k: int) -> None:
        self._shape = layers, experts, top_k
        self._batches: list[Batch] = []

    def clear(self) -> None:
        """Forget all; batches that run are kept no more."""
        self._batches = []

    @property
    def requests(self) -> int:
        """Return how many are kept."""
        return sum(batch.requests for batch in self._batches)

    def batch(self, is_kept: bool = True) -> Batch:
        """Return a new one; is_kept: whether it will be in the trace."""
        return Batch(*self._shape, kept=self._batches if is_kept else [])

    def trace(self, meta: TraceMeta) -> Trace:
        """Return all as a trace, with `meta`. Raise InputError where there is nothing."""
        if not self._batches:
            raise InputError("no pass has been run since the model was loaded, or since its cache's last `clear`")
        experts, ids, prompts = [], [], []
        for batch in self._batches:
            every = batch.whole
            for row, own in enumerate(every.is_own):
                experts.append(every.experts[row, own])
                ids.append(every.ids[row, own])
                prompts.append(int(batch.prompt.is_own[row].sum()))
        made = Trace.from_arrays(experts, meta.experts, prompts, name="recorded", token_ids=ids)
        requests = made.requests.assign(dataset="", mode=meta.mode)
        return Trace(**{**vars(made), "meta": meta, "requests": requests})
