"""One thread that answers requests with a live model, several at a time; and what it did, as metrics."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from replay.live.answering import TextStream
from replay.live.batching import ContinuousBatch
from replay.live.model import LiveModel
from sim.loop.log import COLUMNS, STALLS, StepRow
from tracer.answers import LoadedModel, answer_config, without_own_config
from tracer.blaming import blaming
from tracer.lookup import drafting
from tracer.observed import Sampling
from traces.errors import InputError

MOST_WAIT = 64
"""Jobs in the queue."""

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class Pass(NamedTuple):
    """A forward pass of a request."""

    took_s: float  # since the pass before it, or since the request came
    taken: int  # tokens that it took in
    given: int


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
    passes: list[Pass] = field(default_factory=list)
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
    """Answers jobs until it is closed, at most `most` at a time.

    metrics: `stepped` is called with the rows of steps that have ended, `served` with each job that has.
    """

    def __init__(self, live: LiveModel, loaded: LoadedModel, metrics: "Metrics", most: int) -> None:
        self._live, self._loaded, self._metrics, self._most = live, loaded, metrics, most
        self._waiting, self._running = deque[Job](), list[Job]()
        self._ended = list[tuple[Job, Exception | None]]()
        self._changed = threading.Condition()
        self._closing = False
        live.make_room(most)
        self._thread = threading.Thread(target=self._work, name="worker", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def put(self, job: Job) -> bool:
        """Let a job wait for its turn; return False where too many wait already."""
        with self._changed:
            if len(self._waiting) >= MOST_WAIT:
                return False
            if self._closing:
                job.report(ClosedError())
            else:
                self._waiting.append(job)
                self._changed.notify()
        return True

    def refuse(self) -> None:
        """Refuse all jobs, later ones too, as the worker ends. Those that run end at their next token."""
        with self._changed:
            self._closing = True
            for job in (*self._running, *self._waiting):
                job.report(ClosedError())
            self._waiting.clear()
            self._changed.notify()

    def close(self) -> None:
        """Refuse all jobs, and return when those that run have ended."""
        self.refuse()
        self._thread.join()

    def _work(self) -> None:
        while not self._closing:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
            try:
                with torch.inference_mode(), drafting(self._live.model) if self._live.draft else nullcontext():
                    self._run(ContinuousBatch(self._live, self._most))
            except Exception as error:  # of no request: all end, and the next one starts anew
                for job in self._running:
                    job.outcome = "error"
                self._ended = [(job, error) for job in self._running]
                self._report()

    def _run(self, batch: ContinuousBatch) -> None:
        """Run steps as long as anybody waits or runs."""
        while self._waiting or len(batch):
            with self._changed:
                job = self._waiting.popleft() if self._waiting and not batch.is_full else None
            if job and not job.left.is_set():
                self._begin(job, batch)
            if len(batch):
                batch.step()
                self._metrics.stepped(self._live.rows)
                self._live.rows.clear()
            self._report()

    def _begin(self, job: Job, batch: ContinuousBatch) -> None:
        config = answer_config(self._loaded, job.limit, job.sampling, self._live.draft)
        stops = self._loaded.stop_ids
        self._running.append(job)
        with without_own_config(self._live.model):  # which generate() reads before its first pass
            batch.add(lambda: self._answer(job, config, stops, batch))

    def _answer(self, job: Job, config: Any, stops: Sequence[int], batch: ContinuousBatch) -> None:
        """Answer a job, as a request of a batch, which may let others run at each of its passes."""
        error: Exception | None = None
        for part in (partial(self._generate, job, config, stops, batch), self._live.require_unchanged):
            try:
                part()
            except StoppedError:
                pass
            except Exception as raised:
                job.outcome, error = "error", raised
        self._ended.append((job, error))

    def _report(self) -> None:
        """Report the jobs that have ended, once their last step is counted."""
        for job, error in self._ended:
            self._running.remove(job)
            self._metrics.served(job)
            job.report(ClosedError() if job.outcome == "left" else error)
        self._ended.clear()

    def _generate(self, job: Job, config: Any, stops: Sequence[int], batch: ContinuousBatch) -> None:
        name, model, stream = self._loaded.name, self._live.model, TextStream(self._loaded)
        ids = torch.tensor([job.tokens], device=self._loaded.device)
        since, width = job.since, len(job.tokens)

        def take(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            """Take the tokens that a pass gave; as a stopping criterion it stops nothing."""
            nonlocal since, width
            tokens, now = input_ids[0, width:].tolist(), time.monotonic()
            job.passes.append(Pass(now - since, batch.columns, len(tokens)))
            since, width = now, input_ids.shape[1]
            for token in tokens:
                job.answered += 1
                if token in stops:
                    job.outcome = "stop"
                    break
                job.take(stream.add(token))
            else:
                if job.left.is_set() or self._closing:
                    job.outcome = "left"
                    raise StoppedError("the client has gone")
            return torch.zeros(1, dtype=torch.bool, device=input_ids.device)

        if job.seed is None:
            torch.seed()  # or answers would depend on the seed that a client before this one has sent
        else:
            torch.manual_seed(job.seed)
        with blaming(f"{name} cannot be run on a prompt of {width} tokens"):
            model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                stopping_criteria=[take],
            )
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
        self._steps = Counter("moe_steps", "Forward passes, of several requests together.", registry=own)
        self._drafted = Counter("moe_drafted", "Tokens drafted for decode steps.", ["outcome"], registry=own)
        self._lookups = Counter("moe_lookups", "Experts that were looked up.", ["found"], registry=own)
        self._bytes = Counter("moe_read_bytes", "Bytes of experts brought into slots.", ["why"], registry=own)
        self._stalls = Counter("moe_stall_seconds", "Time that compute has waited.", ["cause"], registry=own)
        self._waiting = Gauge("moe_waiting", "Requests that wait for their turn.", registry=own)
        Gauge("moe_slots", "Experts that the cache holds.", registry=own).set(slots)
        Gauge("moe_experts", "Experts of the model.", registry=own).set(experts)

    def served(self, job: Job) -> None:
        """A job has ended."""
        self._requests.labels(job.outcome).inc()
        self._tokens.labels("prompt").inc(len(job.tokens))
        self._tokens.labels("answer").inc(job.answered)
        for took_s, _, _ in job.passes[:1]:
            self._first.observe(took_s)
        for took_s, taken, given in job.passes[1:]:
            self._drafted.labels("accepted").inc(given - 1)
            self._drafted.labels("rejected").inc(taken - given)
            for _ in range(given):  # which come at once, in equal parts
                self._each.observe(took_s / given)

    def stepped(self, rows: Sequence[StepRow]) -> None:
        """Steps have ended, of all requests together."""
        self._steps.inc(len(rows))
        for row in rows:
            step = dict(zip(COLUMNS, row.numbers, strict=True))
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
