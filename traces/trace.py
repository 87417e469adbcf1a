"""A trace in memory: which experts each token of each request was routed to, as plain arrays.

Tokens are rows, grouped by request; within a request they are in the order of execution, prefill first.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from traces.check import check_rows, count_eams, first_fault
from traces.drafts import Drafts
from traces.errors import InputError, refuse
from traces.index import Index
from traces.reader import RUN, Folder, by_request, frame, numpy, open_folder, require_known
from traces.schema import AGGREGATE, OPTIONAL, TraceMeta
from traces.steps import DECODE, PREFILL, Int, RequestSteps, steps_of_rows

Phases = Literal["prefill", "decode", "both"]


@dataclass(frozen=True, eq=False, repr=False)
class AnyTrace(ABC):
    """R requests and T tokens of a model with L MoE layers of E experts, top-k, as engines and sweeps run them.

    `requests` has the columns id, dataset, task ("" if unlabelled), prompt_tokens (<NA> if unknown),
    output_tokens (0 if nothing was generated; a request with n output tokens has n - 1 decode rows, since the
    last is never fed back), arrival_ns (<NA> if unknown) and mode.
    """

    name: str  # of the trace's folder
    meta: TraceMeta
    requests: pd.DataFrame  # [R]
    offsets: Int  # [R + 1] request r owns the rows offsets[r] to offsets[r + 1]
    prefill_chunk: int | None = field(default=None, kw_only=True)  # tokens of a prefill that run as one step; None: all
    drafts: Drafts | None = field(default=None, kw_only=True)  # what is drafted for its decode steps (rule 20)

    @property
    @abstractmethod
    def prompts(self) -> Int:
        """Return the tokens of each request that are run as one prefill, [R]."""

    @property
    @abstractmethod
    def columns(self) -> Set[str]:
        """Return what is known of a row, of `traces.reader.RUN` too."""

    @property
    def has_lookahead(self) -> bool:
        """Return whether the requests' steps state what gates pick ahead of time."""
        return "lookahead" in self.columns

    @property
    def has_drafts(self) -> bool:
        """Return whether it states what was drafted and accepted when it was recorded."""
        return "drafted" in self.columns

    @property
    def layers(self) -> int:
        return self.meta.layers

    @property
    def num_experts(self) -> int:
        return self.meta.experts

    @property
    def top_k(self) -> int:
        return self.meta.top_k

    @property
    def sentinel(self) -> int:
        """The id that means: nothing was routed here."""
        return self.meta.sentinel

    @cached_property
    def phases(self) -> Phases:
        prefilled = int(self.prompts.sum())
        return "decode" if not prefilled else "both" if prefilled < self.offsets[-1] else "prefill"

    def require_sequences(self) -> None:
        if self.meta.mode == AGGREGATE:
            raise InputError(f"{self.name} holds EAMs only, no sequences that could be run: its source counted tokens")

    def head(self, n: int) -> Self:
        if not 1 <= n <= len(self.requests):
            raise InputError(f"{self.name} holds {len(self.requests)} requests; it cannot give the first {n}")
        return self.select(np.arange(n))

    def select(self, requests: NDArray[np.integer]) -> Self:
        """Return some of the requests, by number, ascending."""
        return self._part(requests, np.zeros(len(requests), np.int64))

    def as_decode(self) -> Self:
        """Return the tokens with the prefill run token by token, as if decoded: routing is causal. The name says so."""
        if self.phases == "decode":
            raise InputError(f"{self.name} holds no prefill that could run as decode: leave `as_decode` out")
        return self._decoded(f"{self.name} (prefill as decode)")

    def without_prompts(self) -> Self:
        """Return the decoded tokens alone. The name says so."""
        if self.phases == "prefill":
            raise InputError(f"{self.name} decodes no token: leave `decode_only` out")
        return self._part(np.arange(len(self.requests)), self.prompts, name=f"{self.name} (decode only)")

    def in_steps(self, prefill_chunk: int | None = None, drafts: Drafts | None = None) -> Self:
        """Return the same requests in other steps (rule 20): prefills in chunks, decoded tokens behind drafted ones."""
        return replace(self, prefill_chunk=prefill_chunk, drafts=drafts)

    def steps(self, i: int) -> RequestSteps:
        """Return request `i` as an engine runs it: prefill as one step, then token by token, unless `in_steps` says."""
        rows, prompt = self.rows(i), int(self.prompts[i])
        steps = steps_of_rows(i, rows, prompt, self.meta, self.prefill_chunk)
        if not self.drafts:
            return steps
        recorded = rows["drafted"][prompt:].astype(np.int64) if self.has_drafts else None
        return self.drafts.of(steps, self.layers, self.num_experts, recorded)

    def _part(self, requests: NDArray[np.integer], skipped: Int, **changes: Any) -> Self:
        """Return some of the requests; skipped: rows of the prompt of each that are left out."""
        lengths = np.diff(self.offsets)[requests] - skipped
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        kept = self._kept(requests, skipped, offsets)
        return replace(self, requests=self.requests.iloc[requests], offsets=offsets, **kept, **changes)

    @abstractmethod
    def _kept(self, requests: NDArray[np.integer], skipped: Int, offsets: Int) -> dict[str, Any]:
        """Return the other fields of such a part; offsets: of its rows."""

    @abstractmethod
    def _decoded(self, name: str) -> Self: ...

    @abstractmethod
    def rows(self, i: int) -> dict[str, NDArray[Any]]:
        """Return the rows of request `i` by column: experts, position, and what there is of `traces.reader.RUN`."""


@dataclass(frozen=True, eq=False, repr=False)
class Trace(AnyTrace):
    """A trace in memory."""

    experts: NDArray[Any]  # uint8 or uint16 [T, L, k] ids within a layer; `sentinel`: nothing routed here
    phase: NDArray[np.uint8]  # [T] traces.steps.PREFILL or DECODE
    position: NDArray[np.uint32]  # [T] place in the request's sequence of tokens, from 0
    step: NDArray[np.uint32]  # [T] serial number of the forward pass
    weights: NDArray[np.float16] | None = None  # [T, L, k] of the router; None: not recorded, or not read
    token_id: NDArray[np.int32] | None = None  # [T] -1 where withheld; None: not read
    lookahead: NDArray[Any] | None = None  # [T, L, distances, picks] ids as experts: picked for L so many layers before
    lookahead_scores: NDArray[np.float16] | None = None  # [T, L, distances, picks]; `meta.lookahead` says which
    candidates: NDArray[Any] | None = None  # [T, L, C] ids as experts: the choices, then those of the next best scores
    scores: NDArray[np.float32] | None = None  # [T, L, C] log probabilities by the router; `meta.candidates` is C
    drafted: NDArray[np.int16] | None = None  # [T] tokens drafted behind this one; -1: it was drafted, and accepted
    hits: NDArray[np.int8] | None = None  # as experts: 1, the recorded engine had it in its cache; 0, not; -1, not said
    aggregate: NDArray[np.uint32] | None = None  # [2, R, L * E] EAMs of a trace that holds no sequences (T is 0)

    @staticmethod
    def read(path: Path | str, columns: Iterable[str] = ()) -> "Trace":
        """Read and validate a trace folder, a path or a URL. `columns`: what else to read, of traces.reader.EXTRA.

        Routing of requests that are not listed is left out: its writer was killed. Raises InputError.
        """
        wanted = require_known(columns)
        folder = open_folder(path)
        with ThreadPoolExecutor(1) as beside:
            requests = beside.submit(folder.listed.table, folder.listed.schema.names)
            rows = folder.routing.table(folder.row_columns(wanted))
        return Trace.assemble(folder, requests.result(), rows, wanted)

    @staticmethod
    def assemble(folder: Folder, requests: pa.Table, rows: pa.Table, columns: Iterable[str], first: int = 0) -> "Trace":
        """Return requests and all their rows, as tables of `folder`, checked. The first request is number `first`."""
        meta, where = folder.meta, folder.path
        lists = {name: numpy(requests.column(name)) for name in folder.list_columns}
        listing = frame(requests.drop_columns(folder.list_columns))
        eams = np.stack([lists["eam_prefill"], lists["eam_decode"]])
        arrays: dict[str, Any] = {name: numpy(rows.column(name)) for name in folder.row_columns(columns)}
        request, index = arrays["request"].astype(np.int64) - first, Index(len(listing))
        index.add(request, arrays["position"], arrays["phase"])
        index.check(meta, listing, where)
        if not (known := request < len(listing)).all():
            arrays = {name: array[known] for name, array in arrays.items()}
        arrays = {name: array.reshape(-1, *meta.shape(name)) for name, array in by_request(arrays).items()}
        del arrays["request"]
        offsets, aggregate = index.offsets, eams if meta.mode == AGGREGATE else None
        if aggregate is None:
            check_rows(meta, arrays, offsets, eams, where, first)
        return Trace(
            name=folder.location.name,
            meta=meta,
            requests=listing,
            offsets=offsets,
            aggregate=aggregate,
            **arrays,
        )

    @staticmethod
    def from_arrays(
        requests: Sequence[NDArray[np.integer]],
        num_experts: int,
        prompt_tokens: int | Sequence[int] = 0,
        model: str = "unnamed",
        name: str = "in memory",
        token_ids: Sequence[NDArray[np.integer]] | None = None,
    ) -> "Trace":
        """Return a trace of routing that is in memory.

        requests: for each request the ids of its tokens' experts, int[tokens, L, k], ids within a layer, -1 where
        nothing was routed. prompt_tokens: how many tokens of each request are its prompt, which runs as one prefill.
        model: names the model profile that gives the sizes, such as "olmoe-1b-7b". token_ids: for each request the ids
        of its tokens, int[tokens], -1 where it is withheld.

        Raises InputError for arrays that are not the routing of one model.
        """
        shapes = {np.shape(array)[1:] if np.ndim(array) == 3 else None for array in requests}
        if len(shapes) != 1 or None in shapes:
            raise InputError(f"{name}: each request needs an array [tokens, layers, k], with the same layers and k")
        ids = np.concatenate([_integers(f"{name}: expert ids", array) for array in requests])
        _, L, k = ids.shape
        meta = TraceMeta(model, L, num_experts, k, tuple(f"layers.{layer}" for layer in range(L)), mode="import")
        row, layer, reason = first_fault(ids, num_experts) or (0, 0, "")
        refuse((reason, f"{name}: token row {row}, MoE layer {layer}: {reason}"))
        lengths = np.array([len(array) for array in requests], np.int64)
        prompts = np.broadcast_to(_integers(f"{name}: prompt_tokens", prompt_tokens), lengths.shape)
        if (wrong := (prompts < 0) | (prompts > lengths)).any():
            i = int(np.argmax(wrong))
            raise InputError(f"{name}: request {i} has {lengths[i]} tokens, {prompts[i]} of them in its prompt")
        token_id = None
        if token_ids is not None:
            by_request = [_integers(f"{name}: token_ids", each) for each in token_ids]
            if [each.shape for each in by_request] != [(length,) for length in lengths]:
                raise InputError(f"{name}: token_ids needs an id for each token of each request")
            token_id = np.concatenate(by_request).astype(np.int32)
        decoded = lengths - prompts
        return Trace(
            name=name,
            meta=meta,
            requests=listed(
                [str(r) for r in range(len(lengths))], name, "", prompts, np.where(decoded, decoded + 1, 0), meta.mode
            ),
            experts=meta.stored(ids),
            token_id=token_id,
            **in_turn(lengths, prompts),
        )

    def __repr__(self) -> str:
        shape = f"{self.layers} layers x {self.num_experts} experts, top-{self.top_k}"
        held = f"{len(self.requests):,} requests, {int(self.offsets[-1]):,} tokens"
        return f"<Trace {self.name!r} of {self.meta.model}: {shape}; {held}>"

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"{self.name} {self.meta}".encode())
        for array in (
            self.offsets,
            *(getattr(self, column) for column in ("experts", "phase", "position", "step", *RUN)),
        ):
            digest.update(b"" if array is None else np.ascontiguousarray(array).tobytes())
        digest.update(pd.util.hash_pandas_object(self.requests, index=False).to_numpy().tobytes())
        return digest.hexdigest()

    @property
    def columns(self) -> Set[str]:
        return {name for name in PER_ROW if getattr(self, name) is not None}

    @cached_property
    def prompts(self) -> Int:
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.phase == PREFILL)])
        return np.diff(before[self.offsets])

    def eams(self, phase: int) -> Int:
        """Return expert activation matrices, tokens per expert: int64[R, L, E]. `phase`: PREFILL or DECODE."""
        if self.aggregate is not None:
            counted: Int = self.aggregate[phase].astype(np.int64)
            return counted.reshape(-1, self.layers, self.num_experts)
        return count_eams(self.experts, self.offsets, self.phase == phase, self.num_experts)

    def without_last(self, rows: int) -> "Trace":
        """Cut the last request off before its last `rows` decoded tokens, of which it has more."""
        held = int(self.offsets[-1]) - rows
        lengths = self.requests["output_tokens"].to_numpy(np.int64, copy=True)
        lengths[-1] = max(0, lengths[-1] - rows)
        requests = self.requests.assign(output_tokens=lengths)
        arrays = {name: getattr(self, name)[:held] for name in self.columns}
        return replace(self, requests=requests, offsets=np.append(self.offsets[:-1], held), **arrays)

    def _kept(self, requests: NDArray[np.integer], skipped: Int, offsets: Int) -> dict[str, Any]:
        numbers = np.arange(offsets[-1]) + np.repeat(self.offsets[requests] + skipped - offsets[:-1], np.diff(offsets))
        is_range = len(numbers) and numbers[-1] - numbers[0] + 1 == len(numbers)
        rows = slice(numbers[0], numbers[-1] + 1) if is_range else numbers  # views instead of copies
        return {name: getattr(self, name)[rows] for name in self.columns} | {
            "aggregate": None if self.aggregate is None else self.aggregate[:, requests],
        }

    def _decoded(self, name: str) -> "Trace":
        return replace(self, name=name, phase=np.full_like(self.phase, DECODE))

    def of_phase(self, phase: int) -> "Trace":
        """Return the rows of one phase, PREFILL or DECODE."""
        keep = self.phase == phase
        held = {name: getattr(self, name)[keep] for name in self.columns}
        offsets = np.concatenate([[0], np.cumsum(keep)])[self.offsets].astype(np.int64)
        requests = self.requests.assign(output_tokens=0) if phase == PREFILL else self.requests
        return replace(self, requests=requests, offsets=offsets, **held)

    def rows(self, i: int) -> dict[str, NDArray[Any]]:
        rows = slice(int(self.offsets[i]), int(self.offsets[i + 1]))
        return {name: getattr(self, name)[rows] for name in {"experts", "position", *RUN} & self.columns}


def listed(
    ids: list[str],
    dataset: str | list[str],
    task: str | list[str],
    prompt_tokens: Any,
    output_tokens: Any,
    mode: str,
    arrival_ns: Any = None,
) -> pd.DataFrame:
    """Return `AnyTrace.requests`. prompt_tokens, arrival_ns: None where unknown."""
    return pd.DataFrame(
        {
            "id": ids,
            "dataset": dataset,
            "task": task,
            "prompt_tokens": pd.array(prompt_tokens, dtype="Int64"),
            "output_tokens": output_tokens,
            "arrival_ns": pd.array(arrival_ns or [None] * len(ids), dtype="Int64"),
            "mode": mode,
        }
    )


def in_turn(lengths: Int, prompts: Int) -> dict[str, Any]:
    """Return offsets, phase, position and step of requests in turn; lengths, prompts: [R] rows, of them prefill."""
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    phase = np.where(position < np.repeat(prompts, lengths), PREFILL, DECODE).astype(np.uint8)
    step = np.cumsum((phase == DECODE) | (position == 0)) - 1
    return {
        "offsets": offsets,
        "phase": phase,
        "position": position.astype(np.uint32),
        "step": step.astype(np.uint32),
    }


def concatenate(parts: Sequence[Trace]) -> Trace:
    """Return the requests of several traces of one model, with the same columns, in turn; named as the first."""
    first, ends = parts[0], np.cumsum([0, *(part.offsets[-1] for part in parts)])

    def joined(name: str, axis: int = 0) -> NDArray[Any] | None:
        return None if getattr(first, name) is None else np.concatenate([getattr(each, name) for each in parts], axis)

    offsets = [part.offsets[1:] + end for part, end in zip(parts, ends, strict=False)]
    arrays: dict[str, Any] = {name: joined(name) for name in PER_ROW}
    return replace(
        first,
        requests=pd.concat([part.requests for part in parts], ignore_index=True),
        offsets=np.concatenate([np.zeros(1, np.int64), *offsets]),
        aggregate=joined("aggregate", axis=1),
        **arrays,
    )


PER_ROW = ("experts", "phase", "position", "step", "token_id", *OPTIONAL)
"""Fields of a Trace with an entry for each row."""


def _integers(what: str, values: Any) -> Int:
    """Return whole numbers as an array. Raises InputError for others."""
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise InputError(f"{what} are integers, not {array.dtype}")
    return array.astype(np.int64)
