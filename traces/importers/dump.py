"""What the readers of formats hand over: routing by request (Dump), or counts only (Counts); and how sequences
of prompt and generated tokens, the unit of what servers answer, become a Dump.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.errors import InputError
from traces.facts import LARGEST
from traces.files import plain
from traces.importers.source import Request, Source, requests_of, require_modest
from traces.steps import DECODE, PREFILL

UNROUTED = "they are in the trace without experts, so a run computes all else of them"
"""Of tokens whose routing a server did not compute again, as it had them in its cache."""


@dataclass(frozen=True)
class Dump:
    """Routing of R requests, T rows, layers as the dump counts them."""

    experts: NDArray[np.integer]  # [T, layers, k] ids within a layer, -1: not routed
    offsets: NDArray[np.int64]  # [R + 1]
    requests: list[Request]  # [R]
    locate: Callable[[int, int], str]  # (row, request) -> where that is, for messages
    phase: NDArray[np.uint8] | None = None  # [T]; None: all rows have one phase, which the user says
    position: NDArray[np.uint32] | None = None  # [T]; None: consecutive
    step: NDArray[np.uint32] | None = None  # [T]; None: a prefill is one, and each decoded token
    weights: NDArray[np.float16] | None = None  # [T, layers, k]
    token_id: NDArray[np.int32] | None = None  # [T]
    num_experts: int | None = None  # E, where the dump says it


@dataclass(frozen=True)
class Counts:
    """Tokens that chose each expert, of R parts of a dump that kept no sequences."""

    counts: NDArray[np.int64]  # [R, layers, E]
    requests: list[Request]  # [R]
    layers: tuple[int, ...] | None = None  # those that are MoE layers, where the dump says it


@dataclass(frozen=True)
class Sequence:
    """Routing of one request: its prompt and its generated tokens but the last, which is never fed back."""

    place: str  # for messages
    id: str
    experts: NDArray[np.integer]  # [rows, layers, k]
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    token_id: NDArray[np.int32] | None = None  # [rows] -1 where the source tells none


def integers(array: Any, place: str, what: str = "experts", ndim: int = 3) -> NDArray[np.integer]:
    """`array` if it holds integers and has `ndim` axes, in the machine's byte order."""
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu":
        kind = f"the type {array.dtype}" if isinstance(array, np.ndarray) else f"the type {type(array).__name__}"
        raise InputError(f"{place}: {what} has {kind}; integers are needed")
    if array.ndim != ndim:
        axes = {1: "[tokens]", 2: "[layers, experts]", 3: "[tokens, layers, k]"}[ndim]
        raise InputError(f"{place}: {what} has the shape {array.shape}; {axes} is needed")
    native: NDArray[np.integer] = array.astype(array.dtype.newbyteorder("="), copy=False)
    if native.dtype == np.uint64 and native.size and int(native.max()) > LARGEST:
        row = int(np.argwhere(native > LARGEST)[0][0])
        raise InputError(f"{place}: row {row} of {what} holds {int(native.max())}, more than a signed number can be")
    return native


def row_bytes(shape: tuple[int, ...], kind: "np.dtype[Any]") -> int:
    """What a token takes while it is imported: its ids [layers, k], and its position, phase, step and request."""
    return prod(shape) * kind.itemsize + 32


def join(source: Source, sequences: list[Sequence]) -> Dump:
    """Sequences as one dump: lengths held against token counts, prompt and generated tokens told apart."""
    if not sequences:
        raise InputError(f"{source.path} holds no request")
    found = [
        {"id": one.id}
        | {key: value for key in ("prompt_tokens", "output_tokens") if (value := getattr(one, key)) is not None}
        for one in sequences
    ]
    requests = requests_of(source, found)
    _, layers, k = sequences[0].experts.shape
    for one, request in zip(sequences, requests, strict=True):
        if one.experts.shape[1:] != (layers, k):
            shape = one.experts.shape[1:]
            raise InputError(f"{one.place}: [layers, k] is {shape}, but {(layers, k)} at {sequences[0].place}")
        _check_length(one, request)
    known = [request.prompt_tokens is not None for request in requests]
    if not all(known) and (any(known) or (source.options.phase is None and "phase" not in source.facts)):
        place = sequences[known.index(False)].place
        raise InputError(
            f"{place} does not say where the prompt ends: give requests[].prompt_tokens with --meta, "
            "or --phase prefill or decode if all tokens are of one phase"
        )
    offsets = np.zeros(len(sequences) + 1, np.int64)
    starts = np.array([request.start for request in requests], np.int64)
    np.cumsum([len(one.experts) for one in sequences] + starts, out=offsets[1:])
    kind = np.result_type(np.int16, *{one.experts.dtype for one in sequences})
    require_modest(
        int(offsets[-1]) * row_bytes((layers, k), kind),
        sum(one.experts.nbytes for one in sequences),
        f"{source.path}: {starts.sum()} tokens that were left out",
    )
    if starts.any():
        source.notes.append(f"{source.path}: {starts.sum()} tokens were left out of prompts: {UNROUTED}")
    experts = np.full((int(offsets[-1]), layers, k), -1, kind)
    for one, end in zip(sequences, offsets[1:], strict=True):
        experts[end - len(one.experts) : end] = one.experts
    phase = None
    if all(known):
        position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], np.diff(offsets))
        prompts = np.array([request.prompt_tokens for request in requests], np.int64)
        phase = np.where(position < np.repeat(prompts, np.diff(offsets)), PREFILL, DECODE).astype(np.uint8)

    token_id = None
    if any(one.token_id is not None for one in sequences):
        token_id = np.full(int(offsets[-1]), -1, np.int32)
        for one, end in zip(sequences, offsets[1:], strict=True):
            if one.token_id is not None:
                token_id[end - len(one.token_id) : end] = one.token_id

    def locate(row: int, request: int) -> str:
        return f"{sequences[request].place}: row {row - int(offsets[request]) - int(starts[request])}"

    return Dump(experts, offsets, requests, locate, phase, token_id=token_id)


def check_start(place: str, start: int, prompt_tokens: int | None) -> None:
    """Raise InputError unless the `start` tokens that the server left out are of the prompt."""
    if start and prompt_tokens is None:
        raise InputError(f"{place}: {start} tokens were left out of a prompt of unknown length")
    if prompt_tokens is not None and start > prompt_tokens:
        raise InputError(f"{place}: --start {start} leaves out more than the {prompt_tokens} tokens of the prompt")


def _check_length(one: Sequence, request: Request) -> None:
    rows, prompt, output = len(one.experts) + request.start, request.prompt_tokens, request.output_tokens
    if not one.experts.size:
        raise InputError(f"{one.place}: experts is empty {one.experts.shape}: nothing was routed")
    check_start(one.place, request.start, prompt)
    if prompt is None:
        return
    left_out = f" less {request.start} left out" if request.start else ""
    if output is not None and rows != prompt + output - 1:
        raise InputError(
            f"{one.place}: {len(one.experts)} rows, but {prompt} prompt and {output} generated tokens less the last"
            f"{left_out} are {prompt + output - 1 - request.start}; "
            "where the server was told to leave leading tokens out, say how many with --start"
        )
    if rows < prompt:
        raise InputError(
            f"{one.place}: {len(one.experts)} rows{left_out and f' after {request.start} left out'} "
            f"are fewer than the {prompt} tokens of the prompt"
        )


def each_file(path: Path, suffix: str) -> list[Path]:
    """`path`, or the files with `suffix` in the folder `path`, by name. Raises InputError."""
    if not path.is_dir():
        if not plain(path).is_file():
            raise InputError(f"no file {path} to import")
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix == suffix)
    if not files:
        raise InputError(f"{path} holds no {suffix} file")
    return files
