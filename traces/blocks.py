"""Parquet files as numbered blocks of rows, decoded when they are asked for: memory is that of a few blocks.

A block is a row group or, of a large one, a part. Reading forward decodes each block once; going back within a large
row group decodes its beginning again. Threads share the blocks: each keeps those that it used last, and together they
keep some more, so that a small trace is decoded once. What two threads ask for at once is decoded by the first.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from threading import Lock, local
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from traces.reader import Files, numpy
from traces.schema import row_bytes

BLOCK_BYTES = 2**22  # of a block, at most (but it has at least one row): no less than a row group of `traces.parquet`
SHARED_BYTES = 2**25  # of the blocks that the threads keep together, at most; a single one may be larger
OWN_BYTES = 2 * BLOCK_BYTES  # of those that a thread keeps, at most: a batch's requests seldom lie in more than two

Arrays = dict[str, NDArray[Any]]


class Blocks:
    """The columns of a table as blocks; block n has the rows `starts[n]` to `starts[n + 1]` of the table.

    Each is a dict of arrays [rows] or [rows, width], passed through `prepare`. What is `passing` is kept only while it
    is looked at. Pickled, it opens its files again.
    """

    def __init__(
        self, files: Files, columns: Sequence[str], prepare: Callable[[Arrays], Arrays] = dict, passing: bool = False
    ):
        self._made_of = files, columns, prepare, passing
        self._files, self._columns, self._prepare = files, columns, prepare
        schema = pa.schema([files.schema.field(name) for name in columns])
        self._rows = max(1, BLOCK_BYTES // row_bytes(schema))
        cuts = [
            (file, group, block, min(self._rows, rows - first))
            for file, groups in enumerate(files.row_groups)
            for group, rows in enumerate(groups)
            for block, first in enumerate(range(0, rows, self._rows))
        ]
        self._places = np.array(cuts, np.int64).reshape(-1, 4)  # file, row group, block of it, rows
        self.starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(self._places[:, 3])])
        self.empty = self._arrays(schema.empty_table())  # a block without rows
        self._slots: WeakValueDictionary[int, _Slot] = WeakValueDictionary()
        self._shared = _Recent(0 if passing else SHARED_BYTES)
        self._lock = Lock()  # of the two above
        self._own = _Own(0 if passing else OWN_BYTES)

    def __reduce__(self) -> tuple[Any, ...]:
        return Blocks, self._made_of

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, n: int) -> Arrays:
        """Block `n`, to be read only. Raises InputError."""
        own = self._own
        if slot := own.recent.get(n):
            return slot.arrays
        with self._lock:
            slot = self._slots.setdefault(n, _Slot())
        with slot.lock:
            if not slot.arrays:
                slot.arrays = self._decode(n)
        own.recent.keep(n, slot)
        with self._lock:
            self._shared.keep(n, slot)
        return slot.arrays

    def _decode(self, n: int) -> Arrays:
        file, group, block, rows = self._places[n].tolist()
        own = self._own
        if own.at != n:
            own.batches = islice(self._files.batches(self._columns, self._rows, file, group), block, None)
        own.at = NOWHERE
        table = next(own.batches, None)
        if table is None or len(table) != rows:
            raise self._files.changed
        own.at = n + 1
        return self._arrays(table)

    def _arrays(self, table: pa.Table) -> Arrays:
        return self._prepare({name: numpy(table.column(name)) for name in self._columns})


NOWHERE = -1


class _Slot:
    """A block, or the place for it while the thread that holds the lock decodes it."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.arrays: Arrays = {}

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


class _Recent:
    """The blocks that were used last: of `limit` bytes at most, but always one."""

    def __init__(self, limit: int):
        self._limit = limit
        self._bytes = 0
        self._slots: OrderedDict[int, _Slot] = OrderedDict()

    def get(self, n: int) -> _Slot | None:
        if n in self._slots:
            self._slots.move_to_end(n)
        return self._slots.get(n)

    def keep(self, n: int, slot: _Slot) -> None:
        if self.get(n) is None:
            self._slots[n] = slot
            self._bytes += slot.nbytes
        while self._bytes > self._limit and len(self._slots) > 1:
            self._bytes -= self._slots.popitem(last=False)[1].nbytes


class _Own(local):
    """What a thread has for itself: the blocks it used last, and where it reads."""

    def __init__(self, limit: int) -> None:
        self.recent = _Recent(limit)
        self.batches: Iterator[pa.Table] = iter(())
        self.at = NOWHERE  # the block that `batches` gives next
