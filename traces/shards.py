"""A trace of any size, local or at a URL, run request by request without being held (`traces.trace.AnyTrace`).

Opening passes once over the columns that number and order the rows (`traces.index`). A request is put together from the
blocks that it overlaps (`traces.blocks`), and its routing is checked when it is first requested, as `Trace.read` would.
Memory: some blocks, and a few hundred bytes a request, whatever the number of tokens.
"""

from collections.abc import Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.blocks import Arrays, Blocks
from traces.check import check_rows
from traces.index import Index
from traces.reader import RUN, by_request, changed, open_folder
from traces.schema import AGGREGATE
from traces.steps import PREFILL, Int
from traces.trace import AnyTrace


@dataclass(frozen=True, eq=False)
class Shards(AnyTrace):
    """A trace whose tokens stay on disk. Several threads may run it at once; going forward is quickest.

    All between distant rows of a request is decoded for it. Pickled, it is opened again at the same place.
    """

    path: str  # as it was typed
    fingerprint: str  # differs where the trace was replaced by another (`traces.reader`)
    _prompts: Int  # [R]
    _skipped: Int  # [R] first rows that are left out
    _numbers: Int  # [R] of the requests in the files, of which there are F
    _span: Int  # [2, F] first and last row
    _checked: NDArray[np.bool_]  # [F] whether the request's routing was checked
    _rows: Blocks
    _eams: Blocks  # by request

    @staticmethod
    def open(path: Path | str, lookahead: bool = True, scores: bool = False) -> "Shards":
        """Open a trace folder, a path or a URL; lookahead, scores: read those columns too. Raise InputError."""
        folder = open_folder(path)
        requests = folder.listing()
        index = Index.of(folder, requests)
        eams = Blocks(folder.listed, folder.list_columns, passing=True)
        if folder.meta.mode == AGGREGATE:
            for n in range(len(eams)):
                eams[n]
        run = [name for name in RUN if lookahead or not name.startswith("lookahead")]
        run = run if scores else [name for name in run if name not in ("candidates", "scores")]
        columns = [name for name in folder.row_columns(run) if name != "step"]
        return Shards(
            name=folder.location.name,
            path=folder.path,
            meta=folder.meta,
            fingerprint=folder.fingerprint,
            requests=requests,
            offsets=index.offsets,
            _prompts=index.counts[PREFILL],
            _skipped=np.zeros(len(requests), np.int64),
            _numbers=np.arange(len(requests)),
            _span=np.stack([index.first, index.last]),
            _checked=np.zeros(len(requests), bool),
            _rows=Blocks(folder.routing, columns, by_request),
            _eams=eams,
        )

    @property
    def prompts(self) -> Int:
        return self._prompts

    @property
    def columns(self) -> Set[str]:
        return self._rows.empty.keys()

    def _kept(self, requests: NDArray[np.integer], skipped: Int, offsets: Int) -> dict[str, Any]:
        return {
            "_prompts": self._prompts[requests] - skipped,
            "_skipped": self._skipped[requests] + skipped,
            "_numbers": self._numbers[requests],
        }

    def _decoded(self, name: str) -> "Shards":
        return replace(self, name=name, _prompts=np.zeros_like(self._prompts))

    def rows(self, i: int) -> Arrays:
        """Return the rows of request `i`, by column; copies if it spans several blocks, which then need not stay."""
        number = int(self._numbers[i])
        first, last = np.searchsorted(self._rows.starts, self._span[:, number], "right") - 1
        parts = []
        for n in range(first, last + 1):
            block = self._rows[n] if n >= 0 else self._rows.empty
            begin = np.searchsorted(block["request"], np.uint32(number))
            end = np.searchsorted(block["request"], np.uint32(number), "right")
            part = {name: array[begin:end] for name, array in block.items()}
            parts.append(part if first == last else {name: array.copy() for name, array in part.items()})
        rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts[1:] else parts[0]
        skipped = int(self._skipped[i])
        if len(rows["request"]) - skipped != self.offsets[i + 1] - self.offsets[i]:
            raise changed(self.path)
        rows = {name: array.reshape(-1, *self.meta.shape(name)) for name, array in rows.items()}
        if not self._checked[number]:
            self._check(i, rows)
            self._checked[number] = True
        return {name: array[skipped:] for name, array in rows.items()} if skipped else rows

    def _check(self, i: int, rows: Arrays) -> None:
        number = int(self._numbers[i])
        n = int(np.searchsorted(self._eams.starts, number, "right")) - 1
        block, row = self._eams[n], number - self._eams.starts[n]
        eams = np.stack([block["eam_prefill"][row], block["eam_decode"][row]])[:, None]
        ends = np.array([0, len(rows["experts"])])
        check_rows(self.meta, rows, ends, eams, self.path, number, int(self.offsets[i]))
