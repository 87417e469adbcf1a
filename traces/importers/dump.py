"""What the readers of formats return beside `traces.defects.Routing`: counts only (Counts); and how sequences of prompt
and generated tokens, the unit of what servers answer, become a Routing.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.defects import Routing
from traces.errors import InputError
from traces.importers.cells import UINT32, whole
from traces.importers.source import Request, Source
from traces.trace import in_turn

UNROUTED = "they are in the trace without experts, so a run computes all else of them"
"""Of tokens whose routing a server did not compute again, as it had them in its cache."""


@dataclass(frozen=True)
class Counts:
    """Tokens that chose each expert, of R parts of a dump that kept no sequences."""

    counts: NDArray[np.int64]  # [R, layers, E]
    requests: list[Request]  # [R]
    layers: tuple[int, ...] | None = None  # those that are MoE layers, where the dump states it
    by_phase: NDArray[np.int64] | None = None  # [2, R, layers, E]; None: all of one phase, which is not stated


@dataclass(frozen=True)
class Again:
    """A dump that is read again each time, in parts of whole requests."""

    parts: Callable[[], Iterator[Routing]]

    def __iter__(self) -> Iterator[Routing]:
        return self.parts()


@dataclass(frozen=True)
class Sequence:
    """Routing of one request: its prompt and its generated tokens but the last, which is never fed back."""

    place: str  # for messages
    experts: NDArray[np.integer]  # [rows, layers, k]
    request: Request
    prompt_ids: list[int] | None = None
    output_ids: list[int] | None = None


def integers(
    array: NDArray[Any],
    place: str,
    what: str = "experts",
    ndim: int = 3,
    least: int = -(2**31),
    most: int = UINT32,
    first: int = 0,
) -> NDArray[np.integer]:
    """Return an array as signed integers in the machine's byte order. Raises InputError for other types and axes, and
    for the first number outside the range. first: number of its first row.
    """
    if array.dtype.kind not in "iu" or array.ndim != ndim:
        raise InputError(f"{place}: {what} is {array.dtype} {array.shape}; integers with {ndim} axes are needed")
    if (beyond := np.argwhere((array < least) | (array > most))).size:
        at = beyond[0].tolist()
        value, at[0] = array[tuple(at)], at[0] + first
        raise InputError(f"{place}: {what}{at} is {value}, not from {least} to {most}")
    size = array.dtype.itemsize * (2 if array.dtype.kind == "u" else 1)
    return array.astype(f"i{min(8, size)}", copy=False)


def join(source: Source, sequences: list[Sequence]) -> Routing:
    """Return sequences as one routing, with the phase of each token. Raises InputError for wrong lengths."""
    requests = source.requests([one.request for one in sequences])
    starts = np.array([request.start for request in requests], np.int64)
    known = [request.prompt_tokens is not None for request in requests]
    if not all(known) and (any(known) or starts.any() or not (source.options.phase or source.facts.phase)):
        raise InputError(
            f"{sequences[known.index(False)].place} does not say where the prompt ends: give requests[].prompt_tokens "
            "with --meta, or --phase prefill or decode if all tokens are of one phase"
        )
    arrays = [integers(one.experts, one.place) for one in sequences]
    lengths = starts + np.array([len(array) for array in arrays])
    for one, request, rows, start in zip(sequences, requests, lengths.tolist(), starts.tolist(), strict=True):
        if one.experts.shape[1:] != (shape := arrays[0].shape[1:]):
            raise InputError(f"{one.place}: [layers, k] is {one.experts.shape[1:]}, but {shape} before")
        prompt, output = request.prompt_tokens or 0, request.output_tokens
        if rows < prompt or start > prompt or (known[0] and output is not None and rows != prompt + output - 1):
            generated = "" if output is None else f" and {output} generated tokens less the last"
            raise InputError(
                f"{one.place}: {rows - start} rows after {start} left out, but {prompt} prompt{generated}; "
                "where the server left leading tokens out, say how many with --start"
            )
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    if starts.any():
        source.notes.append(f"{source.path}: {starts.sum()} tokens were left out of prompts: {UNROUTED}")
    experts = np.full((offsets[-1], *arrays[0].shape[1:]), -1, np.result_type(np.int16, *arrays))
    token_id = np.full(offsets[-1], -1, np.int32)
    for one, array, begin, end, request in zip(sequences, arrays, offsets, offsets[1:], requests, strict=False):
        experts[end - len(array) : end] = array
        counted = request.prompt_tokens
        for first, ids, count in ((0, one.prompt_ids, counted), (counted, one.output_ids, request.output_tokens)):
            held = whole([] if ids is None else ids, f"{one.place}: token ids", 1)
            if len(held) and len(held) != count:
                source.notes.append(f"{one.place}: {len(held)} token ids of {count} tokens: they are left out")
            elif first is not None:
                token_id[begin + first : end][: len(held)] = held[: end - begin - first]
    prompts = [request.prompt_tokens or 0 for request in requests]
    phase = in_turn(lengths, np.array(prompts))["phase"] if all(known) else None
    return Routing(experts, offsets, requests, phase, token_id=token_id if (token_id >= 0).any() else None)
