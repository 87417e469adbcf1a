"""A trace folder piece by piece, for traces larger than memory.

A first pass over some columns learns where each request ends (`traces.index`); the second gives whole requests.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from traces.index import Index
from traces.reader import open_folder, require_known
from traces.trace import Trace

ROWS = 65_536  # of a piece, about; a batch of requests that ran together is never cut
REQUESTS = 1_024  # of a piece, at most


def pieces(path: Path | str, columns: Iterable[str] = ()) -> Iterator[Trace]:
    """Yield the requests of a trace in order, some at a time, each piece checked as `Trace.read` would."""
    wanted = require_known(columns)
    folder = open_folder(path)
    ends = Index.of(folder, folder.listing()).last + 1  # rows after which each request is whole
    listed, requests = folder.listed.batches(folder.listed.schema.names, REQUESTS), folder.listed.schema.empty_table()
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
        while len(requests) < whole - first:
            if (batch := next(listed, None)) is None:
                raise folder.listed.changed
            requests = pa.concat_tables([requests, batch]) if len(requests) else batch
        request, taken = held.column("request").to_numpy(), requests.slice(0, whole - first)
        yield Trace.assemble(folder, taken, held.filter(pa.array(request < whole)), wanted, first)
        requests = requests.slice(whole - first)
        held = held.filter(pa.array(request >= whole))
        first = whole
