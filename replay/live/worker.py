"""One thread that answers requests from a queue with a live model, one after another; and what it did, as metrics."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from replay.live.answering import TextStream
from replay.live.model import LiveModel
from sim.loop.log import COLUMNS, STALLS, StepRow
from tracer.answers import Runner
from tracer.models import LoadedModel
from tracer.observed import Sampling
from traces.errors import InputError
from traces.steps import DECODE

MOST_WAIT = 64
"""Jobs in the queue."""

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class StoppedError(InputError):
    """A request needs no more tokens."""


class ClosedError(InputError):
    """The worker ends, and with it all requests."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


@dataclass
class Job:
    """One request and its answer. `report` gets each piece of text, at the end None, or the error."""

    tokens: list[int]  # of the prompt
    limit: int
    sampling: Sampling
    seed: int | None
    stop: Sequence[str]  # the text ends before the first of these
    report: Callable[[str | Exception | None], None]
    left: threading.Event = field(default_factory=threading.Event)  # the client has gone
    since: float = field(default_factory=time.monotonic)
    outcome: str = "length"  # or stop, left, error
    answered: int = 0  # tokens so far, the end of sequence too
    first_s: float | None = None  # from the request to its first token
    drafts: Sequence[tuple[int, int]] = ()  # of each pass that decoded: tokens drafted, and of them accepted
    _text: str = ""
    _sent: int = 0  # of the text

    def take(self, text: str) -> None:
        """Send more text, but what may be the beginning of a stop string. Raise StoppedError behind one."""
        self._text += text
        if places := [place for stop in self.stop if (place := self._text.find(stop)) >= 0]:
            self._send(min(places))
            self.outcome = "stop"
            raise StoppedError("a stop string")
        self._send(len(self._text) - max(map(len, self.stop), default=1) + 1)

    def end(self, text: str) -> None:
        """Send the last text, and what was held back."""
        self._text += text
        self._send(len(self._text))

    def _send(self, end: int) -> None:
        if end > self._sent:
            self.report(self._text[self._sent : end])
            self._sent = end


class Worker:
    """Answers jobs until it is closed. `served` is called with each that has ended, and its steps."""

    def __init__(self, live: LiveModel, loaded: LoadedModel, served: Callable[[Job, Sequence[StepRow]], None]) -> None:
        self._live, self._loaded, self._served = live, loaded, served
        self._jobs: list[Job] = []  # the one that runs, and those that wait
        self._closing = False
        self._thread = ThreadPoolExecutor(1, "worker")

    @property
    def waiting(self) -> int:
        return max(0, len(self._jobs) - 1)

    def put(self, job: Job) -> bool:
        """Let a job wait for its turn; return False where too many wait already."""
        if len(self._jobs) > MOST_WAIT:
            return False
        self._jobs.append(job)
        self._thread.submit(self._work, job)
        return True

    def refuse(self) -> None:
        """Refuse all jobs, later ones too, as the worker ends. The one that runs ends at its next token."""
        self._closing = True
        for job in list(self._jobs):
            job.report(ClosedError())

    def close(self) -> None:
        """Refuse all jobs, and return when the one that runs has ended."""
        self.refuse()
        self._thread.shutdown()

    def _work(self, job: Job) -> None:
        if self._closing:
            job.report(ClosedError())
        elif not job.left.is_set():
            with self._live.hook:
                self._answer(job)
        self._jobs.remove(job)

    def _answer(self, job: Job) -> None:
        began, error = len(self._live.rows), None
        for part in (partial(self._generate, job), self._live.end_request):
            try:
                part()
            except StoppedError:
                pass
            except Exception as raised:
                job.outcome, error = "error", raised
        rows = self._live.rows[began:]
        self._live.clear()
        self._served(job, rows)
        job.report(ClosedError() if job.outcome == "left" else error)

    def _generate(self, job: Job) -> None:
        stream = TextStream(self._loaded)
        stops = self._loaded.stop_ids  # while it generates, the model's config has none

        def take(tokens: list[int]) -> None:
            job.answered += 1
            job.first_s = job.first_s or time.monotonic() - job.since
            if tokens[0] in stops:
                job.outcome = "stop"
                return
            job.take(stream.add(tokens[0]))
            if job.left.is_set() or self._closing:
                job.outcome = "left"
                raise StoppedError("the client has gone")

        if job.seed is None:
            torch.seed()  # or answers would depend on the seed that a client before this one has sent
        else:
            torch.manual_seed(job.seed)
        runner = Runner(self._loaded, self._live.hook, lambda rows: None, take, self._live.draft)
        try:
            runner.generate([job.tokens], job.limit, job.sampling)
        finally:
            job.drafts = runner.drafts
        job.end(stream.end())


class Metrics:
    """Of one server; names begin with `moe_`."""

    def __init__(self, slots: int, experts: int, expert_bytes: int) -> None:
        own = self._registry = CollectorRegistry()
        self._expert_bytes = expert_bytes
        self._requests = Counter("moe_requests", "Requests that have ended.", ["outcome"], registry=own)
        self._tokens = Counter("moe_tokens", "Tokens taken in and given out.", ["kind"], registry=own)
        self._first = Histogram("moe_ttft_seconds", "From a request to its first token.", registry=own, buckets=SECONDS)
        self._each = Histogram("moe_tpot_seconds", "Of a decoded token.", registry=own, buckets=SECONDS)
        self._drafted = Counter("moe_drafted", "Tokens drafted for decode steps.", ["outcome"], registry=own)
        self._lookups = Counter("moe_lookups", "Experts that were looked up.", ["found"], registry=own)
        self._bytes = Counter("moe_read_bytes", "Bytes of experts brought into slots.", ["why"], registry=own)
        self._stalls = Counter("moe_stall_seconds", "Time that compute has waited.", ["cause"], registry=own)
        self._waiting = Gauge("moe_waiting", "Requests that wait for their turn.", registry=own)
        Gauge("moe_slots", "Experts that the cache holds.", registry=own).set(slots)
        Gauge("moe_experts", "Experts of the model.", registry=own).set(experts)

    def served(self, job: Job, rows: Sequence[StepRow]) -> None:
        self._requests.labels(job.outcome).inc()
        self._tokens.labels("prompt").inc(len(job.tokens))
        self._tokens.labels("answer").inc(job.answered)
        if job.first_s is not None:
            self._first.observe(job.first_s)
        for drafted, accepted in job.drafts:
            self._drafted.labels("accepted").inc(accepted)
            self._drafted.labels("rejected").inc(drafted - accepted)
        steps = [dict(zip(COLUMNS, row.numbers, strict=True)) for row in rows]
        decoded = [step["step_ns"] for step in steps if step["phase"] == DECODE]
        for step_ns, (_, accepted) in zip(decoded, job.drafts, strict=False):  # which come at once, in equal parts
            for _ in range(1 + accepted):
                self._each.observe(step_ns / (1 + accepted) / 1e9)
        for step in steps:
            for found in ("hits", "late", "misses"):
                self._lookups.labels(found).inc(step[found])
            for why in ("demand", "prefetch"):
                self._bytes.labels(why).inc(step[f"{why}_transfers"] * self._expert_bytes)
            for cause in STALLS:
                self._stalls.labels(cause).inc(step[f"stall_{cause}_ns"] / 1e9)

    def text(self, waiting: int) -> bytes:
        """Return everything; waiting: requests now."""
        self._waiting.set(waiting)
        return generate_latest(self._registry)
