"""Let a live model answer prompts: text as it comes, the trace of what it routed, and the steps as they were timed.

Prompts are texts, files of them, or token ids for models that have no tokenizer. `outcome` sets beside what was
measured what the simulator says of that trace on this machine: rows as of a replay.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from replay.calibration.in_loop import effective
from replay.calibration.measure import middle
from replay.comparison.cell import host_ms
from replay.live.model import LiveModel
from replay.run import Outcome
from sim.engines.simpy_engine import simulate
from sim.loop.log import RunLog
from sim.loop.requests import Requests
from sim.loop.run import Run
from sim.profiles.measured import MeasuredModel
from sim.profiles.timing import experts_per_layer
from sim.results.metrics import summarise
from tracer.answers import LoadedModel, Runner
from tracer.prompts import Columns, Prompt, read_prompts
from tracer.record import Options, Recording
from traces.drafts import Drafts
from traces.errors import InputError, refuse
from traces.trace import Trace, concatenate
from traces.writer import TraceWriter

UNFINISHED = "\ufffd"  # what a tokenizer writes for bytes that are not a whole letter yet


class TextStream:
    """Turns tokens into text as they come, in whole letters."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self.tokens: list[int] = []
        self._shown = 0

    def add(self, token: int) -> str:
        self.tokens.append(token)
        return self._new(self._loaded.text(self.tokens).rstrip(UNFINISHED))

    def end(self) -> str:
        return self._new(self._loaded.text(self.tokens))

    def _new(self, text: str) -> str:
        new = text[self._shown :]
        self._shown += len(new)
        return new


@dataclass(frozen=True)
class Answered:
    """What came of some prompts."""

    trace: Trace
    log: RunLog


def answer(
    live: LiveModel,
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    options: Options,
    on_token: Callable[[int], None],
    on_answer: Callable[[], None],
    record: Path | None = None,
    overwrite: bool = False,
    on_note: Callable[[str], None] = lambda text: None,
) -> Answered:
    """Answer all prompts, one request after another. Raise InputError. record: folder for a trace.

    loaded: with the tokenizer that reads the prompts; on_token: gets each new token; on_answer: ends each request.
    """
    first, traces = len(live.rows), []

    def ended() -> None:
        live.end_request()
        on_answer()

    with live.hook as hook:
        recording = Recording(
            Runner(loaded, hook, lambda rows: None, lambda tokens: on_token(tokens[0]), live.draft),
            *(prompts, options),
            on_note=on_note,
            on_turn=ended,
        )
        recording.meta = live.as_stored(recording.meta)
        if live.draft:
            recording.meta = replace(recording.meta, settings={**recording.meta.settings, "draft": live.draft})
        with TraceWriter(record, recording.meta, overwrite) if record else nullcontext() as writer:
            for _, trace in recording.traces():
                traces.append(trace)
                if writer:
                    writer.add(trace)
    trace = live.with_picks(concatenate(traces))
    log = RunLog.of_rows(live.rows[first:], live.run.gpu.link.expert_bytes, ())
    if live.draft:
        trace = trace.in_steps(drafts=Drafts(live.draft, None))
        rejected = np.concatenate([steps.rejected for steps in Requests(trace)])  # known only behind each step
        log = replace(log, by_request=replace(log.by_request, rejected=rejected))
    return Answered(trace, log)


def outcome(live: LiveModel, answered: Answered) -> Outcome:
    """Return the rows of a run that has just ended, measured and predicted. Times transfers again: slots are lost.

    Compute was timed in the run, beside transfers where there were any; these were timed alone, and feel contention.
    """
    run, trace, log = replace(live.run, routing=None), answered.trace, answered.log  # what was computed
    row, by_request, cell = live.measured(trace, log)
    predictor_ns = round(1_000 * (cell.predictor_us or 0.0))
    behind, slowed = live.time_transfers()
    each = (live.transfers, behind)
    machines = [live.parts.machine(run.gpu.link.expert_bytes, *transfer, predictor_ns) for transfer in each]

    def on(machine: MeasuredModel) -> Run:
        timing, link = machine.timing(predictor_ns), machine.link()
        window = experts_per_layer(timing, link, run.shape.layers, live.hook.top_k)
        return replace(run.on(timing, link, window), requests=Requests(trace))

    machine = effective(replace(middle(machines), transfer_slowed=slowed), lambda model: simulate(on(model)))
    row["host_ms"] = host_ms(log, np.ones(len(log.step_ns), np.bool_))
    predicted = summarise(simulate(on(machine)), cell, trace.requests)[0]
    return Outcome(row, log, by_request, {"this machine as timed": predicted})


class OfTokenIds(LoadedModel):
    """A model that is asked with token ids, `5,6,7`, and answers with them where it has no tokenizer."""

    def prompt_tokens(self, said: Sequence[str], template: bool) -> list[int]:
        vocabulary, ids = self.model.config.get_text_config().vocab_size, said[0].split(",")
        for token in ids:
            if not (re.fullmatch(r"\s*\d{1,18}\s*", token) and int(token) < vocabulary):
                raise InputError(
                    f"token ids: the model has no token {token[:40]}, its vocabulary has {vocabulary}; "
                    "write numbers with commas between them, as in 5,6,7"
                )
        return list(map(int, ids))

    def text(self, tokens: Sequence[int]) -> str:
        return super().text(tokens) if self.tokenizer is not None else ",".join(map(str, tokens))


def prompts_of(texts: Sequence[str], file: Path | None, token_ids: str | None) -> list[Prompt]:
    """Return what was asked for; InputError unless it was asked for in one way."""
    sources = [bool(texts), file is not None, token_ids is not None]
    what = "say what the model is to continue with: --prompt TEXT, --prompts FILE or --token-ids 5,6,7"
    blank = not all(text.strip() for text in texts)
    refuse((sum(sources) != 1, what), (blank, "--prompt: a blank text is no prompt"))
    if file is not None:
        return read_prompts(file, Columns())
    if token_ids is not None:
        return [Prompt("0", "", "", (token_ids,))]
    return [Prompt(str(number), "", "", (text,)) for number, text in enumerate(texts)]
