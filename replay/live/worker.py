"""One thread that answers requests from a queue with a live model, one after another."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from replay.live.answering import TextStream
from replay.live.model import LiveModel
from sim.loop.log import StepRow
from tracer.answers import Runner, Sampling
from tracer.models import LoadedModel
from traces.errors import InputError


class StoppedError(InputError):
    """A request needs no more tokens."""


class ClosedError(InputError):
    """The worker ends, and with it all requests."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


class Piece(NamedTuple):
    """A piece of an answer, or its end: `finish` is why, `error` what went wrong."""

    text: str = ""
    tokens: int = 0  # so far, the end of sequence too
    finish: str | None = None
    error: Exception | None = None

    @property
    def ends(self) -> bool:
        """Return whether nothing follows."""
        return self.finish is not None or self.error is not None


@dataclass
class Job:
    """One request. `report` gets each piece of text, and at the end why it ended, or the error."""

    tokens: list[int]  # of the prompt
    limit: int
    report: Callable[[Piece], None]
    sampling: Sampling = field(default_factory=Sampling)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    left: threading.Event = field(default_factory=threading.Event)  # the client has gone
    since: float = field(default_factory=time.monotonic)


class Served(NamedTuple):
    """What a request was, for metrics."""

    outcome: str  # stop, length, left or error
    prompt_tokens: int
    tokens: int
    first_s: float | None  # from the request to its first token
    rows: list[StepRow]


class Worker:
    """Answers jobs until it is closed; at most `most` wait. `served` is called with each that has ended."""

    def __init__(self, live: LiveModel, loaded: LoadedModel, served: Callable[[Served], None], most: int = 64) -> None:
        self._live, self._loaded, self._served, self._most = live, loaded, served, most
        self._jobs: list[Job] = []  # the one that runs, and those that wait
        self._closing = False
        self._thread = ThreadPoolExecutor(1, "worker")

    @property
    def waiting(self) -> int:
        """Return how many jobs have not begun."""
        return max(0, len(self._jobs) - 1)

    def put(self, job: Job) -> bool:
        """Let a job wait for its turn; return False where too many wait already."""
        if len(self._jobs) > self._most:
            return False
        self._jobs.append(job)
        self._thread.submit(self._work, job)
        return True

    def refuse(self) -> None:
        """Refuse all jobs, later ones too, as the worker ends. The one that runs ends at its next token."""
        self._closing = True
        for job in list(self._jobs):
            job.report(Piece(error=ClosedError()))

    def close(self) -> None:
        """Refuse all jobs, and return when the one that runs has ended."""
        self.refuse()
        self._thread.shutdown()

    def _work(self, job: Job) -> None:
        if self._closing:
            job.report(Piece(error=ClosedError()))
        elif not job.left.is_set():
            with self._live.hook:
                self._answer(job)
        self._jobs.remove(job)

    def _answer(self, job: Job) -> None:
        began, answer = len(self._live.rows), _Answer(job, self._loaded, lambda: self._closing)
        error: Exception | None = None
        parts: tuple[Callable[[], None], ...] = (partial(self._generate, job, answer), self._live.end_request)
        for part in parts:
            try:
                part()
            except StoppedError:
                pass
            except Exception as raised:
                error = raised
        end = Piece(error=error) if error else answer.end()
        rows = self._live.rows[began:]
        self._live.rows.clear()
        outcome = "error" if error else answer.outcome
        self._served(Served(outcome, len(job.tokens), answer.tokens, answer.first_s, rows))
        job.report(end)

    def _generate(self, job: Job, answer: "_Answer") -> None:
        if job.seed is None:
            torch.seed()  # or answers would depend on the seed that a client before this one has sent
        else:
            torch.manual_seed(job.seed)
        runner = Runner(self._loaded, self._live.hook, lambda rows: None, answer.take)
        runner.generate([job.tokens], job.limit, job.sampling)


class _Answer:
    """The text of a job as its tokens come, sent up to the first stop string."""

    def __init__(self, job: Job, loaded: LoadedModel, is_closing: Callable[[], bool]) -> None:
        self._job, self._is_closing = job, is_closing
        self._stop_ids = loaded.stop_ids  # while it generates, the model's config has none
        self._text = ""
        self._stream = TextStream(loaded, self._add)
        self._held = max((len(text) for text in job.stop), default=1) - 1  # may be the beginning of a stop string
        self._sent = self.tokens = 0
        self._is_cut = False  # before a stop string
        self.outcome = "length"
        self.first_s: float | None = None

    def take(self, tokens: list[int]) -> None:
        """Take the next token. Raise StoppedError where no more are needed."""
        self.tokens += 1
        if self.first_s is None:
            self.first_s = time.monotonic() - self._job.since
        if tokens[0] in self._stop_ids:
            self.outcome = "stop"
            return
        self._stream.add(tokens[0])
        if places := [place for text in self._job.stop if (place := self._text.find(text)) >= 0]:
            self._send(min(places))
            self.outcome, self._is_cut = "stop", True
            raise StoppedError("a stop string")
        self._send(len(self._text) - self._held)
        if self._job.left.is_set() or self._is_closing():
            self.outcome = "left"
            raise StoppedError("the client has gone")

    def end(self) -> Piece:
        """Send what was held back; return the last piece."""
        if self.outcome == "left":
            return Piece(error=InputError("the request was given up"))
        if not self._is_cut:
            self._stream.end()
            self._send(len(self._text))
        return Piece(tokens=self.tokens, finish=self.outcome)

    def _add(self, text: str) -> None:
        self._text += text

    def _send(self, end: int) -> None:
        if end > self._sent:
            self._job.report(Piece(self._text[self._sent : end], self.tokens))
            self._sent = end
