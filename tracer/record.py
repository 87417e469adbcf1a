"""Record what a model routes while it answers prompts, with every token attributed to its request and phase.

The first forward pass of a batch is its prefill; pass f after it feeds each row the f-th token that it
generated. A request with n new tokens therefore has prompt + n - 1 routed tokens: the last one is never fed
back, and what a finished row is fed while others go on is not its own. Padding is on the left and dropped.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig

from tracer.hook import ExpertsHook
from tracer.models import LoadedModel, blaming, describe
from tracer.prompts import Prompt
from traces.check import first_fault
from traces.errors import InputError
from traces.schema import TraceMeta
from traces.steps import DECODE, PREFILL
from traces.trace import Trace
from traces.writer import TraceWriter

Pass = tuple[NDArray[np.int32], NDArray[np.float16] | None]
"""The routing of one forward pass: ids [rows * columns, L, k], -1 where no expert was routed, and weights."""


@dataclass(frozen=True)
class Options:
    """How to record."""

    max_new_tokens: int = 32
    batch_size: int = 1
    weights: bool = False
    token_ids: bool = True


@dataclass(frozen=True)
class Batch:
    """Requests that run together, and what was seen of them."""

    prompts: Sequence[Prompt]
    prompt_ids: list[list[int]]
    first_step: int
    passes: list[Pass]
    new_ids: list[list[int]]  # what each row was given so far, beyond its end where it finished early


class _Tokens:
    """A stopping criterion that stops nothing: it keeps the tokens so far, in case we are interrupted."""

    def __init__(self, on_step: Callable[[int], None]):
        self.ids: torch.Tensor | None = None
        self._on_step = on_step

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.ids = input_ids
        self._on_step(len(input_ids))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def record(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    out: Path,
    options: Options,
    overwrite: bool = False,
    on_step: Callable[[int], None] = lambda rows: None,
    on_done: Callable[[int], None] = lambda requests: None,
) -> None:
    """Let the model answer each prompt greedily and write the routing as a trace to `out`.

    `on_step` hears how many rows each forward pass had, `on_done` how many requests have finished. When
    interrupted (KeyboardInterrupt), the requests that finished stay readable in `out`. Raises InputError.
    """
    prompt_ids = _tokenize(loaded, prompts)
    with ExpertsHook(loaded.model) as hook:
        with blaming(f"{loaded.name} cannot be run"):
            hook.probe()
        meta = describe(loaded, hook)
        with TraceWriter(out, meta, overwrite) as writer:
            step = 0
            for first in range(0, len(prompts), options.batch_size):
                chosen = slice(first, first + options.batch_size)
                batch = Batch(prompts[chosen], prompt_ids[chosen], step, [], [])
                interrupt = None
                try:
                    _generate(loaded, hook, batch, options, on_step)
                except KeyboardInterrupt as error:
                    interrupt = error
                finished = _to_trace(batch, meta, options, loaded.stop_ids)
                if interrupt is None and (finished is None or len(finished.requests) < len(batch.prompts)):
                    raise InputError(
                        f"{loaded.name} stopped early in the prompts from {batch.prompts[0].id!r} on: neither at an "
                        f"end of sequence nor after {options.max_new_tokens} tokens, so they cannot be recorded"
                    )
                if finished is not None:
                    writer.add(finished)
                    on_done(len(finished.requests))
                if interrupt is not None:
                    raise interrupt
                step += len(batch.passes)


def _tokenize(loaded: LoadedModel, prompts: Sequence[Prompt]) -> list[list[int]]:
    with blaming(f"the tokenizer of {loaded.name} fails"):
        ids = [loaded.tokenizer(prompt.turns[0])["input_ids"] for prompt in prompts]
    for prompt, tokens in zip(prompts, ids, strict=True):
        if not tokens:
            raise InputError(f"the prompt {prompt.id!r} has no tokens in the vocabulary of {loaded.name}")
    return ids


def _generate(
    loaded: LoadedModel, hook: ExpertsHook, batch: Batch, options: Options, on_step: Callable[[int], None]
) -> None:
    """Run a batch to its end, filling `batch.passes` and `batch.new_ids` also if interrupted on the way."""
    model, rows = loaded.model, len(batch.prompt_ids)
    width = max(map(len, batch.prompt_ids))
    ids = torch.full((rows, width), loaded.pad_id)
    mask = torch.zeros((rows, width), dtype=torch.long)
    for row, tokens in enumerate(batch.prompt_ids):
        ids[row, width - len(tokens) :] = torch.tensor(tokens)
        mask[row, width - len(tokens) :] = 1
    tokens_so_far = _Tokens(on_step)
    greedy = _config(
        max_new_tokens=options.max_new_tokens,
        do_sample=False,
        num_beams=1,
        use_cache=True,
        disable_compile=True,
        eos_token_id=loaded.stop_ids or None,
        pad_token_id=loaded.pad_id,
    )
    take = model.register_forward_hook(lambda *_: batch.passes.append(hook.take(options.weights)))
    hook.discard()
    try:
        what = f"{loaded.name} cannot be run on {rows} prompts of {width} tokens"
        with torch.inference_mode(), blaming(what), _without_own_config(model):
            model.generate(
                input_ids=ids.to(model.device),
                attention_mask=mask.to(model.device),
                generation_config=greedy,
                stopping_criteria=[tokens_so_far],
            )
    finally:
        take.remove()
        if tokens_so_far.ids is not None:
            batch.new_ids.extend(tokens_so_far.ids[:, width:].tolist())


def _config(**settings: Any) -> Any:
    untyped: Any = GenerationConfig
    return untyped(**settings)


@contextmanager
def _without_own_config(model: Any) -> Iterator[None]:
    """Hide the checkpoint's generation config: generate() would mix its limits, penalties and stop strings in."""
    own, model.generation_config = model.generation_config, _config()
    try:
        yield
    finally:
        model.generation_config = own


def _to_trace(batch: Batch, meta: TraceMeta, options: Options, stop_ids: list[int]) -> Trace | None:
    """The finished requests of a batch as a trace; None if there are none.

    Raises InputError if the passes are not one prefill and then one token for each row.
    """
    rows, width = len(batch.prompt_ids), max(map(len, batch.prompt_ids))
    if [len(seen) for seen, _ in batch.passes] != [rows * width, *[rows] * (len(batch.passes) - 1)][
        : len(batch.passes)
    ]:
        raise InputError(
            f"{meta.model} does not run a prefill and then one token at a time, so its tokens cannot be attributed"
        )
    ends = [_new_tokens(new, stop_ids, options.max_new_tokens) for new in batch.new_ids]
    finished = [(row, n) for row, n in enumerate(ends) if n is not None]
    if not finished:
        return None
    ids: list[NDArray[np.int32]] = []
    weights: list[NDArray[np.float16]] = []
    tokens, phase, position, step, lengths = [], [], [], [], []
    for row, n in finished:
        prompt = len(batch.prompt_ids[row])
        seen = list(_passes_of(batch, row, n))
        ids.extend(part for part, _ in seen)
        weights.extend(part for _, part in seen if part is not None)
        tokens.append(batch.prompt_ids[row] + batch.new_ids[row][: n - 1])
        phase.append(np.repeat([PREFILL, DECODE], [prompt, n - 1]))
        position.append(np.arange(prompt + n - 1))
        step.append(batch.first_step + np.repeat(np.arange(n), [prompt] + [1] * (n - 1)))
        lengths.append(prompt + n - 1)
    experts = np.concatenate(ids)
    fault = first_fault(experts, meta.experts)
    if fault:
        _, layer, reason = fault
        raise InputError(f"{meta.model} cannot be recorded: {meta.layer_names[layer]} routed a token to {reason}")
    return Trace(
        name="recorded",
        meta=meta,
        requests=_requests(batch, finished),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        experts=np.where(experts < 0, meta.sentinel, experts).astype(meta.id_type),
        phase=np.concatenate(phase).astype(np.uint8),
        position=np.concatenate(position).astype(np.uint32),
        step=np.concatenate(step).astype(np.uint32),
        weights=np.concatenate(weights) if options.weights else None,
        token_id=np.concatenate(tokens).astype(np.int32) if options.token_ids else None,
    )


def _new_tokens(new: list[int], stop_ids: list[int], limit: int) -> int | None:
    """How many tokens a row generated, its end included; None if it has not finished."""
    for n, token in enumerate(new, start=1):
        if token in stop_ids:
            return n
    return limit if len(new) >= limit else None


def _passes_of(batch: Batch, row: int, n: int) -> Iterator[Pass]:
    """The routing of one request's own tokens: its prompt, without padding, then n - 1 new tokens."""
    width = max(map(len, batch.prompt_ids))
    end = (row + 1) * width
    own = slice(end - len(batch.prompt_ids[row]), end)
    for number, (ids, weights) in enumerate(batch.passes[:n]):
        rows = own if number == 0 else slice(row, row + 1)
        yield ids[rows], None if weights is None else weights[rows]


def _requests(batch: Batch, finished: list[tuple[int, int]]) -> pd.DataFrame:
    prompts = [batch.prompts[row] for row, _ in finished]
    return pd.DataFrame(
        {
            "id": [prompt.id for prompt in prompts],
            "dataset": [prompt.dataset for prompt in prompts],
            "task": [prompt.task for prompt in prompts],
            "prompt_tokens": pd.array([len(batch.prompt_ids[row]) for row, _ in finished], dtype="Int64"),
            "output_tokens": np.array([n for _, n in finished], np.int64),
            "arrival_ns": pd.array([pd.NA] * len(prompts), dtype="Int64"),
            "mode": "generate",
        }
    )
