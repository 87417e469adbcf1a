"""Record what a model routes while it answers prompts, in batches that are written whole or not at all.

So a recording that was interrupted, or killed, continues at a batch's beginning, with the same random numbers, and
ends with the trace that it would have been. A prompt of several turns is several requests: each turn is asked with
all that was said before.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from tracer.answers import Answer, Runner, Sampling, Tokens
from tracer.checkpoints import blaming
from tracer.description import describe
from tracer.hook import ExpertsHook
from tracer.models import LoadedModel
from tracer.prompts import Prompt
from traces.check import first_fault
from traces.errors import InputError
from traces.schema import TraceMeta
from traces.steps import DECODE, PREFILL
from traces.trace import Trace, concatenate
from traces.writer import TraceWriter

GENERATE, FORCED = "generate", "teacher-forced"
MODES = (GENERATE, FORCED)

NEW_TOKENS = 32
"""Tokens that are generated for a request if no limit is given."""

SAMPLE = 256
"""Numbers of each weight by which a resumed recording knows its model again, beside the whole routers."""


@dataclass(frozen=True)
class Options:
    """How to record."""

    max_new_tokens: int | None = None  # None: NEW_TOKENS, or the whole response where it is forced
    batch_size: int = 1
    mode: str = GENERATE
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    weights: bool = False
    gate_probs: bool = False
    lookahead: bool = False
    embedding: bool = False
    token_ids: bool = True
    chat_template: bool = True  # applied where the tokenizer has one
    shard: tuple[int, int] = (1, 1)  # record the first of one shards, that is all


def record(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    out: Path,
    options: Options,
    overwrite: bool = False,
    resume: bool = False,
    on_step: Callable[[int], None] = lambda rows: None,
    on_done: Callable[[int], None] = lambda requests: None,
    on_note: Callable[[str], None] = lambda text: None,
) -> None:
    """Let the model answer each prompt, or take its responses, and write the routing as a trace to `out`.

    `on_step` hears how many tokens each forward pass gave, `on_done` how many requests have finished, `on_note`
    what the user should know. Whole batches stay readable in `out` when it ends early, and `resume` continues after
    them. Raises InputError.
    """
    with ExpertsHook(loaded.model, options.weights, options.gate_probs, options.lookahead) as hook:
        with blaming(f"{loaded.name} cannot be run"):
            hook.probe()
        recording = Recording(loaded, hook, prompts, options, on_step, on_note)
        with TraceWriter(out, recording.meta, overwrite, resume) as writer:
            on_done(writer.written)
            for requests, trace in recording.traces(writer.written, writer.next_step):
                writer.add(trace)
                on_done(requests)


class Recording:
    """What a model answers to prompts, as traces; `hook` has probed it and is entered. Raise InputError."""

    def __init__(
        self,
        loaded: LoadedModel,
        hook: ExpertsHook,
        prompts: Sequence[Prompt],
        options: Options,
        on_step: Callable[[int], None] = lambda rows: None,
        on_note: Callable[[str], None] = lambda text: None,
        on_tokens: Callable[[Tokens], None] = lambda tokens: None,
        on_turn: Callable[[], None] = lambda: None,
    ):
        """`on_tokens` hears the newest token of each row, as it comes; `on_turn` when a turn of a batch is answered.

        See `record` for the others.
        """
        _require_turns(prompts, options)
        if hook.alone and options.batch_size > 1:
            on_note(f"{loaded.name} routes a prompt otherwise beside others: prompts run one at a time")
            options = replace(options, batch_size=1)
        if hook.alone and options.mode == FORCED:
            on_note(f"{loaded.name} routes a token by others of its pass too: forced, it may differ from decoding")
        self._batches = _shard([*_batches(prompts, options.batch_size)], options.shard)
        if not self._batches:
            raise InputError("--shard {}/{} is empty: there are fewer batches of prompts".format(*options.shard))
        settings = _settings(loaded, hook, prompts, options)
        settings["requests"] = sum(len(prompt.turns) for _, batch in self._batches for prompt in batch)
        self.meta = replace(describe(loaded, hook), mode=options.mode, settings=settings)
        for note in (*loaded.notes, *hook.notes):
            on_note(note)
        runner = Runner(loaded, hook, on_step, on_tokens)
        self._recorder = _Recorder(loaded, runner, self.meta, options, on_note, on_turn)

    def traces(self, done: int = 0, step: int = 0) -> Iterator[tuple[int, Trace]]:
        """Yield, batch by batch, how many requests were answered, and their trace; the first `done` are passed over.

        step: number of the next step.
        """
        for number, batch in self._batches:
            requests = sum(len(prompt.turns) for prompt in batch)
            if done:
                done -= requests
                continue
            trace = self._recorder.record(batch, number, step)
            yield requests, trace
            step = int(trace.step.max()) + 1


class _Recorder:
    """Records batches of prompts with one model."""

    def __init__(
        self,
        loaded: LoadedModel,
        runner: Runner,
        meta: TraceMeta,
        options: Options,
        on_note: Callable[[str], None],
        on_turn: Callable[[], None],
    ):
        self._on_note = on_note
        self._on_turn = on_turn
        self._has_warned = False
        self._loaded = loaded
        self._meta = meta
        self._options = options
        self._runner = runner

    def record(self, batch: Sequence[Prompt], number: int, step: int) -> Trace:
        """The requests of a batch: the first turns of its prompts, then the second ones, ..."""
        torch.manual_seed(int(np.random.SeedSequence([self._options.seed, number]).generate_state(1)[0]))
        said: dict[str, list[str]] = {prompt.id: [] for prompt in batch}
        parts = []
        for turn in range(max(len(prompt.turns) for prompt in batch)):
            speaking = [prompt for prompt in batch if turn < len(prompt.turns)]
            for prompt in speaking:
                said[prompt.id].append(prompt.turns[turn])
            try:
                answers = self._answer(speaking, [said[prompt.id] for prompt in speaking], turn)
            except InputError as error:
                raise InputError(f"{error} (at the prompts from {batch[0].id!r} on)") from error
            self._on_turn()
            self._warn_of_length(max(len(each.prompt) + len(each.output) for each in answers))
            for prompt, answer in zip(speaking, answers, strict=True):
                said[prompt.id].append(self._loaded.text(answer.output))
            parts.append(self._trace(speaking, turn, answers, step))
            step = int(parts[-1].step.max()) + 1
        return concatenate(parts)

    def _answer(self, prompts: Sequence[Prompt], said: Sequence[list[str]], turn: int) -> list[Answer]:
        loaded, limit = self._loaded, self._options.max_new_tokens
        asked = [self._tokens(prompt, texts) for prompt, texts in zip(prompts, said, strict=True)]
        self._warn_of_length(max(map(len, asked)))
        if self._options.mode == FORCED:
            given = [loaded.response_tokens(prompt.responses[turn])[:limit] for prompt in prompts]
            for prompt, tokens in zip(prompts, given, strict=True):
                if not tokens:
                    raise InputError(f"the response of {prompt.id!r} has no tokens in the vocabulary of {loaded.name}")
            return self._runner.force(asked, given)
        return self._runner.generate(asked, limit or NEW_TOKENS, self._options.sampling)

    def _warn_of_length(self, longest: int) -> None:
        """Say once that a request is longer than the model's context, of a prompt before it takes its time."""
        context = self._loaded.context
        if context and longest > context and not self._has_warned:
            self._has_warned = True
            self._on_note(
                f"a request has {longest} tokens, and {self._loaded.name} is made for {context}:"
                " what it answers and routes beyond them means little"
            )

    def _tokens(self, prompt: Prompt, said: list[str]) -> Tokens:
        tokens = self._loaded.prompt_tokens(said, self._options.chat_template)
        if not tokens:
            raise InputError(f"the prompt {prompt.id!r} has no tokens in the vocabulary of {self._loaded.name}")
        return tokens

    def _trace(self, prompts: Sequence[Prompt], turn: int, answers: Sequence[Answer], first_step: int) -> Trace:
        """The answers of one turn. Raises InputError if a token was routed as no model routes."""
        meta, options = self._meta, self._options
        experts = _rows(answers, "ids")
        fault = first_fault(experts, meta.experts)
        if fault:
            _, layer, reason = fault
            raise InputError(f"{meta.model} cannot be recorded: {meta.layer_names[layer]} routed a token to {reason}")
        prompt = np.array([len(answer.prompt) for answer in answers])
        decoded = np.array([len(answer.output) - 1 for answer in answers])
        position = _counted(prompt + decoded)
        embedding = [self._loaded.embed(answer.prompt) for answer in answers] if options.embedding else None
        tokens = [token for answer in answers for token in (*answer.prompt, *answer.output[:-1])]
        return Trace(
            name="recorded",
            meta=meta,
            requests=_requests(prompts, turn, prompt, decoded + 1, options.mode),
            offsets=np.concatenate([[0], np.cumsum(prompt + decoded)]).astype(np.int64),
            experts=_encoded(experts, meta),
            phase=np.repeat(np.tile([PREFILL, DECODE], len(answers)), np.c_[prompt, decoded].ravel()).astype(np.uint8),
            position=position.astype(np.uint32),
            step=(first_step + np.maximum(position - np.repeat(prompt, prompt + decoded) + 1, 0)).astype(np.uint32),
            weights=_rows(answers, "weights") if options.weights else None,
            token_id=np.array(tokens, np.int32) if options.token_ids else None,
            lookahead=_encoded(_rows(answers, "lookahead"), meta) if options.lookahead else None,
            gate_probs=_rows(answers, "gate_probs") if options.gate_probs else None,
            embedding=np.stack(embedding) if embedding else None,
        )


def _rows(answers: Iterable[Answer], what: str) -> NDArray[Any]:
    """One column of the passes, over all tokens of all answers."""
    return np.concatenate([getattr(part, what)[rows] for answer in answers for part, rows in answer.routed])


def _encoded(ids: NDArray[np.int32], meta: TraceMeta) -> NDArray[Any]:
    return np.where(ids < 0, meta.sentinel, ids).astype(meta.id_type)


def _counted(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, ... for each of several lengths, one after the other."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def _requests(
    prompts: Sequence[Prompt], turn: int, prompt_tokens: NDArray[np.int64], output: NDArray[np.int64], mode: str
) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "id": [_request_id(prompt, turn) for prompt in prompts],
            "dataset": [prompt.dataset for prompt in prompts],
            "task": [prompt.task for prompt in prompts],
            "prompt_tokens": pd.array(prompt_tokens.tolist(), dtype="Int64"),
            "output_tokens": output.astype(np.int64),
            "arrival_ns": pd.array([pd.NA] * len(prompts), dtype="Int64"),
            "mode": mode,
        }
    )


def _request_id(prompt: Prompt, turn: int) -> str:
    return prompt.id if len(prompt.turns) == 1 else f"{prompt.id}-turn-{turn + 1}"


def _require_turns(prompts: Sequence[Prompt], options: Options) -> None:
    """InputError if requests share an id, or a response that is to be forced is missing."""
    seen: set[str] = set()
    for prompt in prompts:
        if options.mode == FORCED and not prompt.responses:
            raise InputError(f"the prompt {prompt.id!r} has no response to force; name a --response-column")
        for turn in range(len(prompt.turns)):
            name = _request_id(prompt, turn)
            if name in seen:
                raise InputError(f"two requests would have the id {name!r}; name another --id-column")
            seen.add(name)


def _batches(prompts: Sequence[Prompt], size: int) -> Iterable[tuple[int, Sequence[Prompt]]]:
    """Numbered batches of so many prompts."""
    return enumerate(prompts[first : first + size] for first in range(0, len(prompts), size))


def _shard(batches: list[tuple[int, Sequence[Prompt]]], shard: tuple[int, int]) -> list[tuple[int, Sequence[Prompt]]]:
    """The batches of one shard of several: consecutive ones, so that the shards one after the other are all."""
    number, of = shard
    return batches[len(batches) * (number - 1) // of : len(batches) * number // of]


def _settings(loaded: LoadedModel, hook: ExpertsHook, prompts: Sequence[Prompt], options: Options) -> dict[str, Any]:
    """What decides over a recording besides its model, as plain values; of prompts and routers, fingerprints."""
    plain = {**asdict(options), **asdict(options.sampling), "shard": "{}/{}".format(*options.shard)}
    told = {name: value for name, value in plain.items() if name not in ("sampling", "mode")}
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(repr((prompt.id, prompt.dataset, prompt.task, prompt.turns, prompt.responses)).encode())
    # which weights are offloaded may differ from run to run, so a sample of the others would, too
    here = all(weight.device.type != "meta" for weight in loaded.model.parameters())
    compute = {
        "routers_sha256": loaded.fingerprint(site.router for site in hook.sites),
        "weights_sha256": loaded.fingerprint([loaded.model], sample=SAMPLE) if here else None,
        "compute_dtype": str(loaded.model.dtype).removeprefix("torch."),
        "device": loaded.device.type,
    }
    return {**told, **compute, "prompts": len(prompts), "prompts_sha256": digest.hexdigest()[:16]}
