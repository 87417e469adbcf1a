"""Let a live model answer prompts: text as it comes, the trace of what it routed, and the steps as they were timed."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from replay.live.model import LiveModel
from sim.loop.log import RunLog
from tracer.models import LoadedModel
from tracer.prompts import Prompt
from tracer.record import Options, Recording
from traces.trace import Trace, concatenate
from traces.writer import TraceWriter

UNFINISHED = "\ufffd"
"""What a tokenizer writes for bytes that are not a whole letter yet."""


class TextStream:
    """Turns tokens into text as they come, in whole letters."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self.tokens: list[int] = []
        self._shown = 0

    def add(self, token: int) -> str:
        """Return the text that is new with this token."""
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
    """Answer all prompts, one request after another. Raise InputError.

    loaded: the live model, with the tokenizer that reads the prompts; on_token: called with each new token;
    on_answer: at the end of each request; record: folder for a trace.
    """
    first, traces = len(live.rows), []

    def ended() -> None:
        live.end_request()
        on_answer()

    with live.hook as hook:
        recording = Recording(
            *(loaded, hook, prompts, options),
            on_note=on_note,
            on_tokens=lambda tokens: on_token(tokens[0]),
            on_turn=ended,
        )
        with TraceWriter(record, recording.meta, overwrite) if record else nullcontext() as writer:
            for _, trace in recording.traces():
                traces.append(trace)
                if writer:
                    writer.add(trace)
    log = RunLog.of_rows(live.rows[first:], live.run.gpu.link.expert_bytes, ())
    return Answered(concatenate(traces), log)
