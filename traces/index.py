"""Where the rows of each request lie: one pass over the columns that number and order them.

Rows lie in the order of execution, in which requests that ran together in a batch alternate, and requests come in any
order. Held is a little for each request, nothing for a row.
"""

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from traces.check import check_requests
from traces.errors import InputError
from traces.reader import CORE, Folder
from traces.schema import AGGREGATE, TraceMeta
from traces.steps import DECODE, PREFILL

ROWS = 65_536
"""Rows of the files that are looked at together."""

NONE = -1


class Index:
    """The rows of each of R requests; rows of others are passed over. Phases but 0 count as decode until `check`."""

    def __init__(self, requests: int):
        self.counts = np.zeros((2, requests), np.int64)  # rows of each phase
        self.first = np.full(requests, NONE, np.int64)  # number of the first row; NONE: it has no rows
        self.last = np.full(requests, NONE, np.int64)  # number of the last row
        self._seen = 0  # rows
        self._latest = np.zeros((2, requests), np.int64)  # position and phase of the last row
        self._faults = np.array([0, NONE, 0], np.int64)  # the greatest phase; a request out of order, and its position

    @staticmethod
    def of(folder: Folder, requests: pd.DataFrame) -> "Index":
        """Return that of the rows of a folder, which lists `requests`; checked. Raises InputError."""
        index = Index(len(requests))
        for table in folder.routing.batches([name for name in CORE if name != "experts"], ROWS):
            index.add(*(table.column(name).to_numpy() for name in ("request", "position", "phase")))
        index.check(folder.meta, requests, folder.path)
        return index

    @property
    def offsets(self) -> NDArray[np.int64]:
        """[R + 1] of the rows, were they grouped by request."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.counts.sum(axis=0))])

    def add(self, request: NDArray[Any], position: NDArray[np.uint32], phase: NDArray[np.uint8]) -> None:
        own = np.flatnonzero(request < len(self.first))
        rows = own[np.argsort(request[own], kind="stable")]
        r, place, p = (column[rows].astype(np.int64) for column in (request, position, phase))
        begins = np.diff(r, prepend=NONE) > 0
        latest = np.where(begins, self._latest[:, r], np.roll([place, p], 1, axis=1))
        wrong = (place <= latest[0]) | (p < latest[1])
        wrong &= ~begins | (self.first[r] != NONE)
        if wrong.any():
            i = int(wrong.argmax())
            if self._faults[1] == NONE or r[i] < self._faults[1]:
                self._faults[1:] = r[i], place[i]
        self._faults[0] = p.max(initial=self._faults[0])
        new = begins & (self.first[r] == NONE)
        self.first[r[new]] = self._seen + rows[new]
        np.add.at(self.counts, (np.minimum(p, DECODE), r), 1)
        ends = np.roll(begins, -1)
        self.last[r[ends]], self._latest[:, r[ends]] = self._seen + rows[ends], (place[ends], p[ends])
        self._seen += len(request)

    def check(self, meta: TraceMeta, requests: pd.DataFrame, where: str) -> None:
        """Raise InputError unless rows are as many as listed, positions ascend, and no prefill follows a decode."""
        if (repeated := requests["id"][requests["id"].duplicated()]).size:
            raise InputError(f"{where}: the request id {repeated.iloc[0]!r} occurs twice")
        rows = int(self.counts.sum())
        if meta.mode == AGGREGATE:
            if rows:
                raise InputError(f"{where} says that it holds EAMs only, but has {rows} rows of routing")
            return
        phase, request, position = self._faults.tolist()
        if phase > DECODE:
            raise InputError(f"{where}: phase {phase} is neither prefill (0) nor decode (1)")
        check_requests(requests, self.counts[PREFILL], self.counts[DECODE], where)
        if request != NONE:
            raise InputError(f"{where}: the tokens of request {request} are out of order at position {position}")
