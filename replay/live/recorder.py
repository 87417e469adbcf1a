"""What passes of a live model have routed, kept as a trace: each row of a batch is a request.

A request has the tokens that its attention mask does not hide, but for those that the KV cache gave up again (rejected
candidates of an assistant). The first pass took in its prompt, later ones what was decoded. A row that has ended has
what it is fed while others continue. Beams that change places change those of their requests.
"""

from collections.abc import Sequence
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
    picks: Array  # [rows, columns, L, distances, k], as `experts`
    scores: Array  # of these

    def first(self, columns: int) -> "Part":
        return Part(*(each[:, :columns] for each in self))


class Recorder:
    """Keeps what passes route that come to their end."""

    def __init__(self, layers: int, experts: int, top_k: int, distances: int = 0) -> None:
        """distances: of the layers whose routers look ahead."""
        self._distances = distances
        self._layers, self._top_k = layers, top_k
        self._id_type = np.int16 if experts < 1 << 15 else np.int32
        self.clear()

    def clear(self) -> None:
        self._batches: list[list[Part]] = []
        self._requests = 0
        self._first = self._held = 0  # of the latest batch: tokens in its KV cache when it began, columns that are kept
        self._layer = 0

    def begin(self, ids: Array | None, is_own: Array, before: int, continues: bool) -> int:
        """A pass begins. Return the number of its first request, which counts once the pass has ended.

        ids, is_own: [rows, columns]; before: tokens in the KV cache; continues: the batch before.
        """
        experts = np.full((*is_own.shape, self._layers, self._top_k), -1, self._id_type)
        known = np.full(is_own.shape, -1, np.int32) if ids is None else ids.astype(np.int32)
        picks = np.full((*is_own.shape, self._layers, self._distances, self._top_k), -1, self._id_type)
        self._part = Part(experts, known, is_own, picks, np.zeros(picks.shape, np.float16))
        self._layer, self._before, self._continues = 0, before, continues
        return self._requests - len(is_own) * continues

    def put(self, ids: Array, ahead: Sequence[tuple[Array, Array]] = ()) -> None:
        """The next layer has chosen. ids: [rows * columns, k], -1 where nothing is routed.

        ahead: what the layers behind it would choose by its input, and scores, alike.
        """
        experts = self._part.experts
        experts[:, :, self._layer, : ids.shape[1]] = ids.reshape(*experts.shape[:2], -1)
        for distance, both in enumerate(ahead):
            for array, values in zip((self._part.picks, self._part.scores), both, strict=True):
                place = slice(None), slice(None), self._layer + 1 + distance, distance, slice(values.shape[1])
                array[place] = values.reshape(*array.shape[:2], -1)
        self._layer += 1

    def keep(self) -> None:
        """The pass has come to its end: keep it, without what its KV cache had given up before."""
        if not self._continues:
            self._batches.append([])
            self._requests += len(self._part.ids)
            self._first, self._held = self._before, 0
        batch, kept = self._batches[-1], self._before - self._first
        while batch and self._held > kept:
            last = batch.pop()
            columns = last.ids.shape[1]
            left = max(0, columns - (self._held - kept))
            if left:
                batch.append(last.first(left))
            self._held -= columns - left
        batch.append(self._part)
        self._held += self._part.ids.shape[1]

    def trace(self, meta: TraceMeta) -> Trace:
        """Return all as a trace, with `meta`. Raise InputError where there is nothing."""
        if not self._batches:
            raise InputError("no pass has been run since the model was loaded, or since its cache's last `clear`")
        found, prompts = list[Part](), list[int]()
        for batch in self._batches:
            every = Part(*(np.concatenate(each, axis=1) for each in zip(*batch, strict=True)))
            found += [Part(*(each[row, own] for each in every)) for row, own in enumerate(every.is_own)]
            prompts += batch[0].is_own.sum(1).tolist()
        experts, ids, _, picks, scores = zip(*found, strict=True)
        made = Trace.from_arrays(experts, meta.experts, prompts, name="recorded", token_ids=ids)
        requests = made.requests.assign(dataset="", mode=meta.mode)
        ahead: dict[str, Any] = {}
        if meta.lookahead:
            ahead = {"lookahead": meta.stored(np.concatenate(picks)), "lookahead_scores": np.concatenate(scores)}
        return Trace(**{**vars(made), "meta": meta, "requests": requests, **ahead})
