"""A trace folder piece by piece, for traces larger than memory.

Rows lie in the order of execution, in which requests of a batch alternate. A first pass over one column learns
where each request ends (eight bytes a request are held); the second gives whole requests.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from traces.check import check_unique
from traces.errors import located
from traces.reader import Folder, open_folder, require_known
from traces.trace import Trace

ROWS = 65_536
"""Rows of a piece, about; a batch of requests that ran together is never cut."""

REQUESTS = 1_024
"""Requests of a piece, at most."""


def pieces(path: Path | str, columns: Iterable[str] = ()) -> Iterator[Trace]:
    """The requests of a trace in order, some at a time, each piece checked as `Trace.read` would.

    `columns` as there; memory is that of a piece. Raises InputError.
    """
    wanted = require_known(columns)
    folder = open_folder(Path(path))
    with located(str(path)):
        check_unique(folder.labels()["id"])
    ends = _ends(folder)
    listed = _Requests(folder)
    batches = folder.row_batches(folder.row_columns(wanted), ROWS)
    held = next(batches, None) or folder.rows(wanted)
    seen, first, count = len(held), 0, len(ends)
    while first < count:
        # Whole so far are the requests before the first one that has not ended.
        open_ = np.flatnonzero(ends[first : first + REQUESTS] > seen)
        whole = first + (int(open_[0]) if len(open_) else min(REQUESTS, count - first))
        if whole == first:
            batch = next(batches)
            held, seen = pa.concat_tables([held, batch]), seen + len(batch)
            continue
        request = held.column("request").to_numpy()
        yield Trace.assemble(folder, listed.take(whole - first), held.filter(pa.array(request < whole)), wanted, first)
        held = held.filter(pa.array(request >= whole))
        first = whole


def _ends(folder: Folder) -> NDArray[np.int64]:
    """[requests] the number of rows after which a request is whole."""
    count = sum(len(batch) for batch in folder.request_batches(REQUESTS))
    ends, base = np.zeros(count, np.int64), 0
    for batch in folder.row_batches(["request"], ROWS):
        request = batch.column("request").to_numpy()
        row = np.arange(base, base + len(request)) + 1
        known = request < count
        ends[request[known]] = row[known]  # rows ascend, and the last assignment stays
        base += len(request)
    return ends


class _Requests:
    """The requests' table, taken from the front."""

    def __init__(self, folder: Folder):
        self._batches = folder.request_batches(REQUESTS)
        self._held = next(self._batches)

    def take(self, n: int) -> pa.Table:
        while len(self._held) < n:
            self._held = pa.concat_tables([self._held, next(self._batches)])
        taken, self._held = self._held.slice(0, n), self._held.slice(n)
        return taken
