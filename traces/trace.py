"""A trace in memory: which experts each token of each request was routed to, as plain arrays.

Tokens are rows, grouped by request; within a request they are in the order of execution, prefill first.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from traces.check import check_ids, check_order, check_requests, count_eams
from traces.errors import InputError, unknown
from traces.reader import OPTIONAL, read_folder
from traces.schema import TraceMeta
from traces.steps import DECODE, PREFILL, RequestSteps, decode_steps, join, prefill_step

Phases = Literal["prefill", "decode", "both"]


@dataclass(frozen=True, eq=False)
class Trace:
    """R requests and T tokens of a model with L MoE layers of E experts, top-k.

    `requests` has the columns id, dataset, task ("" if unlabelled), prompt_tokens (<NA> if unknown),
    output_tokens (0 if nothing was generated; a request with n output tokens has n - 1 decode rows, since the
    last is never fed back), arrival_ns (<NA> if unknown) and mode.
    """

    name: str  # of the trace's folder
    meta: TraceMeta
    requests: pd.DataFrame  # [R]
    offsets: NDArray[np.int64]  # [R + 1] request r owns the rows offsets[r] to offsets[r + 1]
    experts: NDArray[Any]  # uint8 or uint16 [T, L, k] ids within a layer; `sentinel`: nothing routed here
    phase: NDArray[np.uint8]  # [T] traces.steps.PREFILL or DECODE
    position: NDArray[np.uint32]  # [T] place in the request's sequence of tokens, from 0
    step: NDArray[np.uint32]  # [T] serial number of the forward pass
    weights: NDArray[np.float16] | None = None  # [T, L, k] of the router; None: not recorded, or not read
    token_id: NDArray[np.int32] | None = None  # [T] -1 where withheld; None: not read

    @staticmethod
    def read(path: Path | str, columns: Iterable[str] = ()) -> "Trace":
        """Read and validate a trace folder. `columns` names what else to read: "weights", "token_id".

        Routing of requests that are not listed is left out: its writer was killed before they were whole.
        Raises InputError with what is wrong, where, and what to do.
        """
        path, wanted = Path(path), tuple(columns)
        for name in wanted:
            if name not in OPTIONAL:
                raise unknown("column", name, OPTIONAL)
        folder = read_folder(path, wanted)
        meta, rows, where = folder.meta, folder.columns, str(path)
        request = rows.pop("request").astype(np.int64)
        held = len(folder.requests)
        if (request[1:] < request[:-1]).any():
            order = np.argsort(request, kind="stable")
            rows = {name: column[order] for name, column in rows.items()}
        offsets = np.zeros(held + 1, np.int64)
        np.cumsum(np.bincount(request, minlength=held), out=offsets[1:])
        shape = (len(request), meta.layers, meta.top_k)
        experts = rows["experts"].reshape(shape)
        check_requests(folder.requests, offsets, rows["phase"], where)
        check_order(offsets, rows["phase"], rows["position"], where)
        check_ids(meta, experts, offsets, rows["phase"], folder.eams, where)
        return Trace(
            name=path.resolve().name,
            meta=meta,
            requests=folder.requests,
            offsets=offsets,
            experts=experts,
            phase=rows["phase"],
            position=rows["position"],
            step=rows["step"],
            weights=rows["weights"].reshape(shape) if "weights" in rows else None,
            token_id=rows.get("token_id"),
        )

    @property
    def layers(self) -> int:
        """L: MoE layers."""
        return self.meta.layers

    @property
    def num_experts(self) -> int:
        """E: routed experts of a layer."""
        return self.meta.experts

    @property
    def top_k(self) -> int:
        """k: experts that a token may choose in a layer."""
        return self.meta.top_k

    @property
    def sentinel(self) -> int:
        """The id that means: nothing was routed here."""
        return self.meta.sentinel

    @cached_property
    def phases(self) -> Phases:
        """Which phases the trace holds."""
        decoded = int(np.count_nonzero(self.phase == DECODE))
        return "decode" if decoded == len(self.phase) else "both" if decoded else "prefill"

    def eams(self, phase: int) -> NDArray[np.int64]:
        """Expert activation matrices, tokens per expert: int64[R, L, E]. `phase`: PREFILL or DECODE."""
        return count_eams(self.experts, self.offsets, self.phase == phase, self.num_experts)

    def head(self, n: int) -> "Trace":
        """The first `n` requests."""
        if not 1 <= n <= len(self.requests):
            raise InputError(f"{self.name} holds {len(self.requests)} requests; it cannot give the first {n}")
        end = int(self.offsets[n])
        return replace(
            self,
            requests=self.requests.iloc[:n],
            offsets=self.offsets[: n + 1],
            experts=self.experts[:end],
            phase=self.phase[:end],
            position=self.position[:end],
            step=self.step[:end],
            weights=None if self.weights is None else self.weights[:end],
            token_id=None if self.token_id is None else self.token_id[:end],
        )

    def as_decode(self) -> "Trace":
        """The same tokens with the prefill played token by token, as if decoded; the name says so.

        Routing is causal, so each token's experts are those that it would have had. It is still no decode:
        the model did not write these tokens.
        """
        if self.phases == "decode":
            raise InputError(f"{self.name} holds no prefill that could be played as decode: leave --as-decode out")
        return replace(self, name=f"{self.name} (prefill as decode)", phase=np.full_like(self.phase, DECODE))

    def steps(self, i: int) -> RequestSteps:
        """Request `i` as an engine plays it: its prefill as one step, then its decoded tokens one by one."""
        rows = slice(int(self.offsets[i]), int(self.offsets[i + 1]))
        experts, context = self.experts[rows], self.position[rows].astype(np.int64) + 1
        prompt = int(np.count_nonzero(self.phase[rows] == PREFILL))
        parts = []
        if prompt:
            parts.append(prefill_step(i, experts[:prompt], self.num_experts, self.sentinel))
        if prompt < len(experts) or not parts:
            parts.append(decode_steps(i, experts[prompt:], self.num_experts, self.sentinel, context[prompt:]))
        return join(parts) if len(parts) > 1 else parts[0]
