"""A trace of any size, local or at a URL, run request by request without being held (`traces.trace.AnyTrace`).

Opening passes once over the columns that number and order the rows (`traces.index`). A request is put together from the
blocks that it overlaps (`traces.blocks`), and its routing is checked when it is first requested, as `Trace.read` would.
Memory: some blocks, and a few hundred bytes a request, whatever the number of tokens.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from traces.blocks import Arrays, Blocks
from traces.check import check_ids, check_lookahead
from traces.drafts import Drafts
from traces.index import Index
from traces.reader import RUN, changed, open_folder
from traces.schema import AGGREGATE, TraceMeta
from traces.steps import PREFILL, Int
from traces.trace import AnyTrace


@dataclass(frozen=True, eq=False)
class Shards(AnyTrace):
    """A trace whose tokens stay on disk.

    Several threads may run it at once, each going through the requests as it likes; going forward is quickest. Where
    rows of a request are far apart, all between them is decoded for it. Pickled, it is opened again at the same place.
    """

    name: str
    path: str  # as it was typed
    meta: TraceMeta
    fingerprint: str  # differs where the trace was replaced by another (`traces.reader`)
    requests: pd.DataFrame
    offsets: Int  # counted by request
    prompts: Int
    has_lookahead: bool  # whether the requests' steps hold what gates pick ahead of time
    has_drafts: bool
    _span: Int  # [2, R] first and last row in the files
    _skipped: Int  # [R] first rows that are left out
    _checked: NDArray[np.bool_]  # [R] whether the request's routing was checked
    _rows: Blocks
    _eams: Blocks  # by request
    prefill_chunk: int | None = None
    drafts: Drafts | None = None

    @staticmethod
    def open(path: Path | str, lookahead: bool = True) -> "Shards":
        """Open a trace folder, a path or a URL; lookahead: read that column too. Raise InputError."""
        folder = open_folder(path)
        requests = folder.listing()
        index = Index.of(folder, requests)
        eams = Blocks(folder.listed, folder.list_columns, passing=True)
        if folder.meta.mode == AGGREGATE:
            for n in range(len(eams)):
                eams[n]
        run = [name for name in RUN if name != "lookahead" or lookahead]
        columns = [name for name in folder.row_columns(run) if name != "step"]
        return Shards(
            name=folder.location.name,
            path=folder.path,
            meta=folder.meta,
            fingerprint=folder.fingerprint,
            requests=requests,
            offsets=index.offsets,
            prompts=index.counts[PREFILL],
            has_lookahead="lookahead" in columns,
            has_drafts="drafted" in columns,
            _span=np.stack([index.first, index.last]),
            _skipped=np.zeros(len(requests), np.int64),
            _checked=np.zeros(len(requests), bool),
            _rows=Blocks(folder.routing, columns, by_request),
            _eams=eams,
        )

    def in_steps(self, prefill_chunk: int | None = None, drafts: Drafts | None = None) -> "Shards":
        return replace(self, prefill_chunk=prefill_chunk, drafts=drafts)

    def _first(self, n: int) -> "Shards":
        return replace(
            self,
            requests=self.requests.iloc[:n],
            offsets=self.offsets[: n + 1],
            prompts=self.prompts[:n],
            _span=self._span[:, :n],
            _skipped=self._skipped[:n],
            _checked=self._checked[:n],
        )

    def _decoded(self, name: str) -> "Shards":
        return replace(self, name=name, prompts=np.zeros_like(self.prompts))

    def _without_prompts(self, name: str) -> "Shards":
        offsets = self.offsets - np.concatenate([[0], np.cumsum(self.prompts)])
        none = np.zeros_like(self.prompts)
        return replace(self, name=name, offsets=offsets, prompts=none, _skipped=self._skipped + self.prompts)

    def _rows_of(self, i: int) -> Arrays:
        """Return the rows of request `i`, by column; copies if it spans several blocks, which then need not stay."""
        first, last = np.searchsorted(self._rows.starts, self._span[:, i], "right") - 1
        parts = []
        for n in range(first, last + 1):
            block = self._rows[n] if n >= 0 else self._rows.empty
            own = slice(*(int(np.searchsorted(block["request"], np.uint32(i), side)) for side in ("left", "right")))
            parts.append({name: array[own] if first == last else array[own].copy() for name, array in block.items()})
        rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts[1:] else parts[0]
        skipped = int(self._skipped[i])
        if len(rows["request"]) - skipped != self.offsets[i + 1] - self.offsets[i]:
            raise changed(self.path)
        for name in {"experts", "lookahead"} & rows.keys():
            rows[name] = rows[name].reshape(-1, self.layers, self.top_k)
        if not self._checked[i]:
            self._check(i, rows)
            self._checked[i] = True
        return {name: array[skipped:] for name, array in rows.items()} if skipped else rows

    def _check(self, i: int, rows: Arrays) -> None:
        n = int(np.searchsorted(self._eams.starts, i, "right")) - 1
        block, row = self._eams[n], i - self._eams.starts[n]
        eams = np.stack([block["eam_prefill"][row], block["eam_decode"][row]])[:, None]
        ends = np.array([0, len(rows["experts"])])
        check_ids(self.meta, rows["experts"], ends, rows["phase"], eams, self.path, first=i)
        if "lookahead" in rows:
            check_lookahead(self.meta, rows["lookahead"], self.path, first=int(self.offsets[i]))


def by_request(rows: Arrays) -> Arrays:
    """Return the rows of a block, those of each request together and in their order."""
    request = rows["request"]
    if (request[1:] >= request[:-1]).all():
        return rows
    order = np.argsort(request, kind="stable")
    return {name: array[order] for name, array in rows.items()}
