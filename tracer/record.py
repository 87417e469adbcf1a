"""Record what a model routes while it answers prompts, in batches that are written whole or not at all.

So a recording that was interrupted, or killed, continues at a batch's beginning, with the same random numbers, and
ends with the trace that it would have been. A prompt of several turns is several requests: each turn is asked with
all that was said before.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray

from tracer.loading import PANEL as RUN
from tracer.observed import NEW_TOKENS, Answer, Answers, Tokens, Wanted
from tracer.prompts import PANEL as PROMPTS
from tracer.prompts import Prompt
from traces.check import first_fault
from traces.errors import InputError, refuse, unknown
from traces.schema import OPTIONAL
from traces.trace import Trace, concatenate, in_turn, listed
from traces.typed import Option, Positive
from traces.writer import TraceWriter

if TYPE_CHECKING:  # each engine needs an extra of its own
    from tracer.answers import LoadedModel, Runner
    from tracer.llama import GgufModel, GgufRunner

    Loaded = LoadedModel | GgufModel
    Observed = Runner | GgufRunner

GENERATE, FORCED = "generate", "teacher-forced"
MODES = (GENERATE, FORCED)

KEEP = "What to record"

IDS = {"lookahead", "candidates"}
"""Of the columns that may be recorded those that hold ids of experts."""


@dataclass(frozen=True)
class Options(Answers):
    """How to record. Raise InputError for options that contradict each other."""

    shard: Annotated[str | None, Option("I/N: only the I-th of N parts; join them with `cat`.", PROMPTS)] = None
    mode: Annotated[
        str, Option("generate, or teacher-forced: one forward pass over prompt and given response.", RUN)
    ] = GENERATE
    batch_size: Annotated[Positive, Option("Prompts that run together.", RUN)] = 1
    weights: Annotated[bool, Option("Record the router's weights.", KEEP)] = False
    lookahead: Annotated[
        str | None, Option("1,2,3: what routers so many layers ahead pick for a layer's input.", KEEP)
    ] = None
    picks: Annotated[Positive | None, Option("Experts that each picks, with scores.", KEEP, "twice the chosen")] = None
    scores: Annotated[
        Positive | None, Option("Candidates of a token in a layer whose scores are recorded, its choices first.", KEEP)
    ] = None
    no_tokens: Annotated[bool, Option("Leave token ids out: prompts may be private.", KEEP)] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode not in MODES:
            raise unknown("mode", self.mode, MODES)
        forced, greedy = self.temperature and self.mode == FORCED, self.top_p != 1 and not self.temperature
        whole = 1 <= self.part[0] <= self.part[1]
        refuse(
            (forced, "`temperature` is for `mode` generate: a response that is forced is not sampled"),
            (greedy, f"`top_p` {self.top_p} is for sampling: give a `temperature` above 0, or leave it out"),
            (
                0 in self.wanted.lookahead,
                f"`lookahead` {self.lookahead!r}: give distances, such as 1,2,3",
            ),
            (self.picks and not self.lookahead, "`picks` is for `lookahead`: give that, or leave it out"),
            (not whole, f"`shard` {self.shard!r}: give I/N, such as 2/8 for the second of eight parts"),
        )

    @property
    def wanted(self) -> Wanted:
        """What is recorded besides ids; distances of 0 for what is no list of them."""
        far = re.fullmatch(r"\d{1,9}(,\d{1,9})*", self.lookahead or "0", re.ASCII)
        distances = sorted({int(each) for each in far[0].split(",")}) if far else [0]
        ahead = tuple(distances) if self.lookahead else ()
        return Wanted(self.weights, ahead, self.picks, self.scores)

    @property
    def part(self) -> tuple[int, int]:
        """I and N of the shard; 1 and 1 for all; 0 and 0 for what is no shard."""
        match = re.fullmatch(r"(\d{1,18})/(\d{1,18})", self.shard or "1/1", re.ASCII)
        return (int(match[1]), int(match[2])) if match else (0, 0)


def record(
    loaded: "Loaded",
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

    `on_step` gets how many tokens each forward pass gave, `on_done` how many requests have finished, `on_note` what
    the user should know. Whole batches stay readable in `out` when it ends early, and `resume` continues after
    them. Raise InputError.
    """
    with loaded.observed(options.wanted, on_step) as model:
        recording = Recording(model, prompts, options, on_note)
        with TraceWriter(out, recording.meta, overwrite, resume) as writer:
            on_done(writer.written)
            for requests, trace in recording.traces(writer.written, writer.next_step):
                writer.add(trace)
                on_done(requests)


class Recording:
    """What a model answers to prompts, as traces. Raise InputError."""

    def __init__(
        self,
        model: "Observed",
        prompts: Sequence[Prompt],
        options: Options,
        on_note: Callable[[str], None] = lambda text: None,
        on_turn: Callable[[], None] = lambda: None,
    ):
        """`on_turn` is called as a turn is answered."""
        _require_turns(prompts, options)
        loaded = model.loaded
        if model.alone and options.batch_size > 1:
            on_note(f"{loaded.name} routes a prompt otherwise beside others: prompts run one at a time")
            options = replace(options, batch_size=1)
        if model.alone and options.mode == FORCED:
            on_note(f"{loaded.name} routes a token by others of its pass too: forced, it may differ from decoding")
        size, (number, of) = options.batch_size, options.part
        batches = list(enumerate(prompts[first : first + size] for first in range(0, len(prompts), size)))
        self._batches = batches[len(batches) * (number - 1) // of : len(batches) * number // of]
        if not self._batches:
            raise InputError(f"--shard {options.shard} is empty: there are fewer batches of prompts")
        settings = _settings(model, prompts, options)
        settings["requests"] = sum(len(prompt.turns) for _, batch in self._batches for prompt in batch)
        self.meta = replace(model.meta(), mode=options.mode, settings=settings)
        for note in model.notes:
            on_note(note)
        self._model = model
        self._loaded, self._options, self._on_note, self._on_turn = loaded, options, on_note, on_turn
        self._has_warned = False

    def traces(self, done: int = 0, step: int = 0) -> Iterator[tuple[int, Trace]]:
        """Yield, by batch, how many requests were answered and their trace, behind the first `done`, from `step` on."""
        for number, batch in self._batches:
            requests = sum(len(prompt.turns) for prompt in batch)
            if done:
                done -= requests
                continue
            self._model.seed(int(np.random.SeedSequence([self._options.seed, number]).generate_state(1)[0]))
            trace = self._run(batch, step)
            yield requests, trace
            step = int(trace.step.max()) + 1

    def _run(self, batch: Sequence[Prompt], step: int) -> Trace:
        """Return the requests of a batch: the first turns of its prompts, then the second ones, ..."""
        texts: dict[str, list[str]] = {prompt.id: [] for prompt in batch}
        parts = []
        for turn in range(max(len(prompt.turns) for prompt in batch)):
            prompts = [prompt for prompt in batch if turn < len(prompt.turns)]
            for prompt in prompts:
                texts[prompt.id].append(prompt.turns[turn])
            answers = self._answer(prompts, [texts[prompt.id] for prompt in prompts], turn)
            self._on_turn()
            self._warn_of_length(max(len(each.prompt) + len(each.output) for each in answers))
            for prompt, answer in zip(prompts, answers, strict=True):
                texts[prompt.id].append(self._loaded.text(answer.output))
            parts.append(self._trace(prompts, turn, answers, step))
            step = int(parts[-1].step.max()) + 1
        return concatenate(parts)

    def _answer(self, prompts: Sequence[Prompt], texts: Sequence[list[str]], turn: int) -> list[Answer]:
        loaded, options = self._loaded, self._options
        tokens = [loaded.prompt_tokens(each, not options.no_chat_template) for each in texts]
        _require_tokens("prompt", prompts, tokens, loaded)
        self._warn_of_length(max(map(len, tokens)))
        if options.mode == GENERATE:
            return self._model.generate(tokens, options.max_new_tokens or NEW_TOKENS, options)
        forced = [loaded.response_tokens(prompt.responses[turn])[: options.max_new_tokens] for prompt in prompts]
        _require_tokens("response of", prompts, forced, loaded)
        return self._model.force(tokens, forced)

    def _warn_of_length(self, longest: int) -> None:
        """Say once that a request is longer than the model's context, of a prompt before it takes its time."""
        context = self._loaded.context
        if context and longest > context and not self._has_warned:
            self._has_warned = True
            self._on_note(
                f"a request has {longest} tokens, and {self._loaded.name} is made for {context}:"
                " what it answers and routes beyond them means little"
            )

    def _trace(self, prompts: Sequence[Prompt], turn: int, answers: Sequence[Answer], first_step: int) -> Trace:
        """Return the answers of one turn. Raise InputError if a token was routed as no model routes."""
        meta, options = self.meta, self._options
        experts = _rows(answers, "ids")
        fault = first_fault(experts, meta.experts)
        if fault:
            _, layer, reason = fault
            raise InputError(f"{meta.model} cannot be recorded: {meta.layer_names[layer]} routed a token to {reason}")
        prompt = np.array([len(answer.prompt) for answer in answers])
        decoded = np.array([len(answer.output) - 1 for answer in answers])
        columns = in_turn(prompt + decoded, prompt)  # but that answers of a batch run at once
        after = columns["position"].astype(np.int64) - np.repeat(prompt, prompt + decoded) + 1
        columns["step"] = (first_step + np.maximum(after, 0)).astype(np.uint32)
        tokens = [token for answer in answers for token in (*answer.prompt, *answer.output[:-1])]
        optional: dict[str, Any] = {}
        for name in OPTIONAL:
            if getattr(answers[0].routed[0][0], name, None) is not None:
                rows = _rows(answers, name)
                optional[name] = meta.stored(rows) if name in IDS else rows
        drafted = [[*[0] * len(answer.prompt), *answer.drafted] for answer in answers if answer.drafted is not None]
        return Trace(
            name="recorded",
            meta=meta,
            requests=listed(
                [_request_id(one, turn) for one in prompts],
                [one.dataset for one in prompts],
                [one.task for one in prompts],
                prompt.tolist(),
                decoded + 1,
                options.mode,
            ),
            experts=meta.stored(experts),
            token_id=np.array(tokens, np.int32) if not options.no_tokens else None,
            drafted=np.concatenate(drafted).astype(np.int16) if drafted else None,
            **columns,
            **optional,
        )


def _rows(answers: Iterable[Answer], what: str) -> NDArray[Any]:
    """One column of the passes, over all tokens of all answers."""
    return np.concatenate([getattr(part, what)[rows] for answer in answers for part, rows in answer.routed])


def _request_id(prompt: Prompt, turn: int) -> str:
    return prompt.id if len(prompt.turns) == 1 else f"{prompt.id}-turn-{turn + 1}"


def _require_turns(prompts: Sequence[Prompt], options: Options) -> None:
    """Raise InputError if a response that is to be forced is missing, or requests share an id."""
    for prompt in prompts:
        if options.mode == FORCED and not prompt.responses:
            raise InputError(f"the prompt {prompt.id!r} has no response to force; name a --response-column")
    ids = Counter(_request_id(prompt, turn) for prompt in prompts for turn in range(len(prompt.turns)))
    for name in (name for name, times in ids.items() if times > 1):
        raise InputError(f"two requests would have the id {name!r}; name another --id-column")


def _require_tokens(what: str, prompts: Sequence[Prompt], tokens: Sequence[Tokens], loaded: "Loaded") -> None:
    for prompt, each in zip(prompts, tokens, strict=True):
        if not each:
            raise InputError(f"the {what} {prompt.id!r} has no tokens in the vocabulary of {loaded.name}")


def _settings(model: "Observed", prompts: Sequence[Prompt], options: Options) -> dict[str, Any]:
    """What decides over a recording besides its model, as plain values; of prompts and routers, fingerprints."""
    negated = {"token_ids": not options.no_tokens, "chat_template": not options.no_chat_template}
    elsewhere = {"mode", "no_tokens", "no_chat_template"}
    stated = {name: value for name, value in asdict(options).items() if name not in elsewhere}
    stated |= {**negated, "shard": "{}/{}".format(*options.part)}
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(repr((prompt.id, prompt.dataset, prompt.task, prompt.turns, prompt.responses)).encode())
    return {**stated, **model.compute(), "prompts": len(prompts), "prompts_sha256": digest.hexdigest()[:16]}
