"""A trace folder piece by piece, for traces larger than memory.

A first pass over some columns learns where each request ends (`traces.index`); the second gives whole requests.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from traces.index import Index
from traces.reader import Folder, open_folder, require_known
from traces.trace import Trace

ROWS = 65_536  # of a piece, about; a batch of requests that ran together is never cut
REQUESTS = 1_024  # of a piece, at most


def pieces(path: Path | str, columns: Iterable[str] = ()) -> Iterator[Trace]:
    """Yield the requests of a trace in order, some at a time, each piece checked as `Trace.read` would."""
    wanted = require_known(columns)
    folder = open_folder(path)
    ends = Index.of(folder, folder.listing()).last + 1  # rows after which each request is whole
    listed = _Requests(folder)
    names = folder.row_columns(wanted)
    batches = folder.routing.batches(names, ROWS)
    held = next(batches, None) or folder.routing.table(names)
    seen, first, count = len(held), 0, len(ends)
    while first < count:
        # Whole so far are the requests before the first one that has not ended.
        open_ = np.flatnonzero(ends[first : first + REQUESTS] > seen)
        whole = first + (int(open_[0]) if len(open_) else min(REQUESTS, count - first))
        if whole == first:
            if (batch := next(batches, None)) is None:
                raise folder.routing.changed
            held, seen = pa.concat_tables([held, batch]), seen + len(batch)
            continue
        request = held.column("request").to_numpy()
        yield Trace.assemble(folder, listed.take(whole - first), held.filter(pa.array(request < whole)), wanted, first)
        held = held.filter(pa.array(request >= whole))
        first = whole


class _Requests:
    """The requests' table, taken from the front."""

    def __init__(self, folder: Folder):
        self._listed = folder.listed
        self._batches = self._listed.batches(self._listed.schema.names, REQUESTS)
        self._held = self._listed.schema.empty_table()

    def take(self, n: int) -> pa.Table:
        while len(self._held) < n:
            if (batch := next(self._batches, None)) is None:
                raise self._listed.changed
            self._held = pa.concat_tables([self._held, batch]) if len(self._held) else batch
        taken, self._held = self._held.slice(0, n), self._held.slice(n)
        return taken
