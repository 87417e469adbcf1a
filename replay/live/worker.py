"""One thread that answers requests from a queue with a live model, one after another."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, Full, Queue

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


@dataclass
class Job:
    """One request. `report` gets each piece of text, and at the end why it ended, or the error."""

    tokens: list[int]  # of the prompt
    limit: int
    report: "Callable[[Piece], None]"
    sampling: Sampling = field(default_factory=Sampling)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    left: threading.Event = field(default_factory=threading.Event)  # the client has gone
    asked: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Piece:
    """A piece of an answer, or its end: `finish` says why, `error` what went wrong."""

    text: str = ""
    tokens: int = 0  # so far, the end of sequence too
    finish: str | None = None
    error: Exception | None = None

    @property
    def ends(self) -> bool:
        """Whether nothing follows."""
        return self.finish is not None or self.error is not None


@dataclass(frozen=True)
class Served:
    """What a request was, for metrics."""

    outcome: str  # stop, length, left or error
    prompt_tokens: int
    tokens: int
    first_s: float | None  # from the request to its first token
    rows: list[StepRow]


class Worker:
    """Answers jobs until it is closed; at most `waiting` wait. `served` hears of each that has ended."""

    def __init__(
        self, live: LiveModel, loaded: LoadedModel, served: Callable[[Served], None], waiting: int = 64
    ) -> None:
        self._live, self._loaded, self._served = live, loaded, served
        self._jobs: Queue[Job | None] = Queue(waiting)
        self._current: Job | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="worker", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Jobs that have not begun."""
        return self._jobs.qsize()

    def put(self, job: Job) -> bool:
        """Let a job wait for its turn; return False where too many wait already."""
        if self._closing:
            job.report(Piece(error=ClosedError()))
            return True
        try:
            self._jobs.put_nowait(job)
        except Full:
            return False
        return True

    def refuse(self) -> None:
        """Refuse all jobs, later ones too, as the worker ends. The one under way ends at its next token."""
        self._closing = True
        with suppress(Empty):
            while job := self._jobs.get_nowait():
                job.report(Piece(error=ClosedError()))
        if current := self._current:
            current.report(Piece(error=ClosedError()))

    def close(self) -> None:
        """Refuse all jobs, and return when the one under way has ended."""
        self.refuse()
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        with self._live.hook:
            while job := self._jobs.get():
                self._current = job
                if self._closing:  # `refuse` came between the two
                    job.report(Piece(error=ClosedError()))
                elif not job.left.is_set():
                    self._answer(job)

    def _answer(self, job: Job) -> None:
        stop_ids = self._loaded.stop_ids  # while it generates, the model's config has none
        shown: list[str] = []
        first: list[float] = []

        def show(text: str) -> None:
            shown.append(text)

        stream = TextStream(self._loaded, show)
        held = max((len(text) for text in job.stop), default=1) - 1  # may be the beginning of a stop string
        sent = taken = 0

        def send(whole: str, upto: int) -> None:
            nonlocal sent
            if upto > sent:
                job.report(Piece(whole[sent:upto], taken))
                sent = upto

        def take(tokens: list[int]) -> None:
            nonlocal taken
            taken += 1
            if not first:
                first.append(time.monotonic() - job.asked)
            if tokens[0] in stop_ids:
                return
            stream.add(tokens[0])
            whole = "".join(shown)
            places = [place for text in job.stop if (place := whole.find(text)) >= 0]
            if places:
                send(whole, min(places))
                raise StoppedError("a stop string")
            send(whole, len(whole) - held)
            if job.left.is_set() or self._closing:
                raise StoppedError("the client has gone")

        began = len(self._live.rows)
        outcome, end = "error", Piece()
        try:
            if job.seed is None:
                torch.seed()  # or answers would depend on the seed that a client before this one has sent
            else:
                torch.manual_seed(job.seed)
            runner = Runner(self._loaded, self._live.hook, lambda rows: None, take)
            (answer,) = runner.generate([job.tokens], job.limit, job.sampling)
            outcome = "stop" if answer.output[-1] in stop_ids else "length"
        except StoppedError:
            outcome = "left" if job.left.is_set() or self._closing else "stop"
        except Exception as error:
            end = Piece(error=error)
        try:
            self._live.end_request()
        except Exception as error:
            outcome, end = "error", Piece(error=error)
        if outcome in ("stop", "length"):
            if not any(text in "".join(shown) for text in job.stop):
                stream.end()
                send("".join(shown), len("".join(shown)))
            end = Piece(tokens=taken, finish=outcome)
        elif outcome == "left":
            end = Piece(error=InputError("the request was given up"))
        rows = self._live.rows[began:]
        self._live.rows.clear()
        first_s = first[0] if first else None
        self._served(Served(outcome, len(job.tokens), taken, first_s, rows))
        job.report(end)
