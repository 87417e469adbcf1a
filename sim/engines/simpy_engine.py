"""The SimPy engine, the specification of time: one GPU, one host link. Rules 11 to 15 of the contract live here.

Two things happen at once. The compute stream is a SimPy process that reads top to bottom: dense part, router,
predictor, hits, arrivals, combine, head. The link is a few callbacks around one transfer at a time. Every decision
is the residency machine's. Only waits and transfers are SimPy events: hits cost one wait together, and the end of
a single hit becomes an event only while a transfer is stuck for want of a slot.
"""

from collections import deque
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import Any

import numpy as np
import simpy

from policies.core.events import RequestEvents
from policies.core.policy import Shape
from policies.core.residency import Residency
from policies.core.residency_compiled import BLOCKED, NO_EXPERT
from policies.core.runner import PolicyRunner
from sim.engines.hits import HitQueue
from sim.loop.log import STALLS, Ended, Run, RunLog, whole
from sim.profiles.timing import Link
from traces.steps import RequestSteps

PREDICTOR, DEMAND, LATE, BEHIND_PREFETCH = range(4)  # of STALLS; with one link the fifth never occurs, see HostLink
NOT_WAITING = -1

# Rule 15 within one instant: transfers and chunk boundaries, then ends of compute, then routers. One transfer and one
# part of the compute stream run at a time, so ids never decide; the end of an earlier hit precedes that of the last.
# SimPy's own wake-ups have the ranks 0 and 1 and run before all of these.
TRANSFER, HIT, COMPUTE, ROUTER = range(2, 6)

Wait = Generator[simpy.Event, Any, None]


class Nanoseconds(simpy.Environment):
    """An environment whose clock is whole nanoseconds from 0."""

    def __init__(self) -> None:
        super().__init__(initial_time=0)

    @property
    def now(self) -> int:
        """Nanoseconds since the start of the run."""
        return self._now  # type: ignore[return-value]  # whole, since every delay is


class At(simpy.Event):
    """An event `delay` ns from now; among those of its instant the one of the lower `rank` comes first."""

    def __init__(self, env: Nanoseconds, delay: int, rank: int) -> None:
        self.env = env
        self.callbacks = []
        self._ok = True
        self._value = None
        env.schedule(self, rank, delay)  # type: ignore[arg-type]  # priorities above NORMAL, as SimPy's heap allows


def simulate(run: Run) -> RunLog:
    """Play a run and keep its log whole."""
    return whole(play, run)


def play(run: Run, ended: Ended) -> None:
    """Play a run; `ended` is told of each request when it ends."""
    Model(run).play(ended)


class Model:
    """One run: environment, residency machine, compute stream, link, and the log that they fill."""

    def __init__(self, run: Run) -> None:
        self.env = Nanoseconds()
        self.requests = run.requests
        self.shape = Shape(run.layers, run.experts)
        self.timing = run.timing
        self.cold = run.cold
        self.policy = PolicyRunner(run.policy, self.shape, run.requests, experts_per_layer=run.experts_per_layer)
        self.machine = self.policy.residency(run.slots)
        self.hits = HitQueue(self.machine)
        self.link = HostLink(self.env, self.machine, run.link, self.hits)

    def play(self, ended: Ended) -> None:
        """Play everything; the run ends with the last head."""
        self.env.run(until=self.env.process(self._compute_stream(ended)))

    # The compute stream

    def _compute_stream(self, ended: Ended) -> Wait:
        last, played = len(self.requests) - 1, 0
        for ordinal in range(last + 1):
            request, rows = self.requests[ordinal], []
            events = RequestEvents(request, self.shape.layers, played)
            played += events.count
            self.policy.begin_request(ordinal)
            steps = len(request.tokens)
            for step in range(steps):
                before, began = self._snapshot(), self.env.now
                yield from self._step(events, step)
                if step == steps - 1:
                    self._end_request(cold=self.cold and ordinal != last)
                rows.append(self._row(request, step, self.env.now - began, before))
            ended(self._log(rows))

    def _end_request(self, cold: bool) -> None:
        """Rule 10. What `--cold` discards counts for the step that has just ended."""
        self.policy.end_request()
        if cold:
            self.link.cut()
        self.machine.end_request(cold)

    def _step(self, events: RequestEvents, step: int) -> Wait:
        """One forward pass: L layers, then the head."""
        env, link, machine, hits, policy = self.env, self.link, self.machine, self.hits, self.policy
        timing, L, predictor_ns = self.timing, self.shape.layers, self.timing.predictor_ns
        request = events.request
        tokens, context = int(request.tokens[step]), int(request.context[step])
        dense_ns, combine_ns, one_token_ns = timing.dense_ns, timing.combine_ns(tokens), timing.expert_ns(1)
        experts, offsets = request.experts, request.offsets[step * L : step * L + L + 1].tolist()
        for layer in range(L):
            yield At(env, dense_ns(layer, tokens, context), ROUTER)
            first, last = offsets[layer], offsets[layer + 1]
            n_hits = machine.route(experts, first, last)
            n_others = last - first - n_hits
            proposal = None
            if not policy.silent:
                event = events.event(step, layer)
                policy.observe(event)
                proposal = policy.propose(event)
            if predictor_ns:
                link.queued()
                yield At(env, predictor_ns, COMPUTE)
                link.stall_ns[PREDICTOR] += predictor_ns
            if proposal is not None:
                machine.propose(*proposal)
            durations = None if tokens == 1 else self._durations(request, first, last)
            if n_hits:
                hits_ns = hits.begin(n_hits, env.now, durations, one_token_ns)
            if n_others or proposal is not None:
                link.queued()
            if n_hits:
                yield At(env, hits_ns, COMPUTE)
                hits.finish()
                link.act()
            for _ in range(n_others):
                while not link.arrivals:
                    yield link.next_chunk()
                expert = link.arrivals.popleft()
                yield At(env, durations[expert] if durations else one_token_ns, COMPUTE)
                machine.computed(expert)
                link.act()
            if combine_ns:
                yield At(env, combine_ns, COMPUTE)
        yield At(env, timing.head_ns(tokens), COMPUTE)

    def _durations(self, request: RequestSteps, first: int, last: int) -> dict[int, int]:
        """Of each expert of an event, by its tokens."""
        tokens = zip(request.experts[first:last].tolist(), request.counts[first:last].tolist(), strict=True)
        return {expert: self.timing.expert_ns(n) for expert, n in tokens}

    # The log

    def _snapshot(self) -> list[int]:
        return [*self.link.stall_ns, *self.machine.counters(), self.link.busy_until_now()]

    def _row(self, request: RequestSteps, step: int, step_ns: int, before: list[int]) -> list[int]:
        spent = [now - then for now, then in zip(self._snapshot(), before, strict=True)]
        kind = [request.request, int(request.phase[step]), int(request.tokens[step])]
        return [*kind, step_ns, *spent]

    def _log(self, rows: list[list[int]]) -> RunLog:
        table = np.array(rows, np.int64).reshape(-1, 17)
        evictions, self.link.evictions = np.array(self.link.evictions, np.int64), []
        stall = table[:, 4:9]
        return RunLog(
            request=table[:, 0],
            phase=table[:, 1].astype(np.uint8),
            tokens=table[:, 2],
            step_ns=table[:, 3],
            stall_ns=stall,
            hits=table[:, 9],
            late=table[:, 10],
            misses=table[:, 11],
            demand_transfers=table[:, 12],
            prefetch_transfers=table[:, 13],
            prefetch_used=table[:, 14],
            prefetch_wasted=table[:, 15],
            link_busy_ns=table[:, 16],
            compute_busy_ns=table[:, 3] - stall.sum(axis=1),
            expert_bytes=self.link.spec.expert_bytes,
            evictions=evictions,
        )


class HostLink:
    """The serial host link: at most one transfer at a time, chunk by chunk while it may be interrupted (rule 12).

    The compute stream never waits with the link idle: what it waits for is on the link, or is queued and finds a
    slot, since whatever has arrived is computed first and whatever is computed can be evicted.
    """

    def __init__(self, env: Nanoseconds, machine: Residency, spec: Link, hits: HitQueue) -> None:
        self.env = env
        self.machine = machine
        self.spec = spec
        self.arrivals: deque[int] = deque()
        self.stall_ns = [0] * len(STALLS)
        self.evictions: list[int] = []
        self._hits = hits
        self._used_ns = lru_cache(spec.used_ns)
        self._whole_ns = spec.used_ns(spec.expert_bytes)
        self._whole_sent, self._chunk_sent = self._after_transfer, self._after_chunk  # bound once
        self._chunk = min(spec.chunk_bytes or spec.expert_bytes, spec.expert_bytes)
        self._end: At | None = None  # of the chunk on the link
        self._expert = NO_EXPERT
        self._began = 0  # of the chunk
        self._busy_ns = 0
        self._moved = 0  # bytes of the running transfer, its current chunk included
        self._paused = 0  # bytes of the paused transfer
        self._cause = DEMAND
        self._nothing_queued = True
        self._waiting_since = NOT_WAITING  # stall up to here is accounted for

    def act(self) -> None:
        """Rule 5: if the link is free, start what comes next; if all of it is stuck, try at the next hit's end."""
        if self._end is None and not self._nothing_queued:
            self._turn_to(*self.machine.next_transfer())

    def queued(self) -> None:
        """The router or the prefetcher has changed what is queued."""
        self._nothing_queued = False
        self.act()

    def next_chunk(self) -> simpy.Event:
        """The compute stream waits: for the end of the chunk on the link, as long as nothing has arrived."""
        assert self._end is not None, "the compute stream waits for a transfer that nobody makes"
        if self._waiting_since == NOT_WAITING:
            self._waiting_since = self.env.now
        return self._end

    def cut(self) -> None:
        """`--cold`: discard what is under way."""
        self._busy_ns = self.busy_until_now()
        self._end = None
        self._moved = self._paused = 0

    def busy_until_now(self) -> int:
        """Time during which the link moved bytes, latency included."""
        return self._busy_ns + (self.env.now - self._began if self._end else 0)

    def _turn_to(self, expert: int, victim: int, prefetch: bool) -> None:
        """The machine has answered what comes next."""
        if expert >= 0:
            self._start(expert, victim, prefetch)
            return
        self._end = None
        if expert == BLOCKED:
            end = self._hits.next_end()
            if end is not None:
                At(self.env, end - self.env.now, HIT).callbacks.append(self._after_hit)
        else:
            self._nothing_queued = True

    def _start(self, expert: int, victim: int, prefetch: bool) -> None:
        if victim >= 0:
            self.evictions.append(victim)
        self._expert = expert
        if prefetch:
            self._cause = BEHIND_PREFETCH
            self._moved, self._paused = self._paused, 0
            self._send_chunk()
        else:
            self._cause = DEMAND
            self._send(self._whole_ns, self._whole_sent)

    def _send_chunk(self) -> None:
        moved, whole = self._moved, self.spec.expert_bytes
        self._moved = upto = min(moved + self._chunk, whole)
        duration = self._used_ns(upto) - self._used_ns(moved)
        self._send(duration, self._whole_sent if upto == whole else self._chunk_sent)

    def _send(self, duration: int, then: Callable[[simpy.Event], None]) -> None:
        self._began = self.env.now
        self._end = at = At(self.env, duration, TRANSFER)
        at.callbacks.append(then)

    def _after_chunk(self, at: simpy.Event) -> None:
        """A chunk boundary, unless the transfer was cut off: a demand may go first."""
        if at is not self._end:
            return
        self._account()
        expert, victim = self.machine.interrupt()
        if expert >= 0:
            self._paused = self._moved
            self._start(expert, victim, prefetch=False)
        else:
            self._send_chunk()

    def _after_transfer(self, at: simpy.Event) -> None:
        """The end of a transfer, unless it was cut off."""
        if at is not self._end:
            return
        self._account()
        arrival = self._expert
        self._moved = 0
        awaited, expert, victim, prefetch = self.machine.arrived_and_next()
        if awaited:
            self.arrivals.append(arrival)
            self._waiting_since = NOT_WAITING
        self._turn_to(expert, victim, prefetch)

    def _account(self) -> None:
        """A chunk has ended: unpin the hits before now, charge the time to the link and, if it waited, to compute."""
        now = self.env.now
        self._busy_ns += now - self._began
        if self._hits.ends:
            self._hits.settle(now)
        elif self._waiting_since != NOT_WAITING:
            cause = self._cause
            if cause == BEHIND_PREFETCH and self.machine.awaited(self._expert):
                cause = LATE
            self.stall_ns[cause] += now - self._waiting_since
            self._waiting_since = now

    def _after_hit(self, at: simpy.Event) -> None:
        self._hits.unpin_next()
        self.act()
