"""The SimPy engine, the specification of time: one GPU, one host link. Rules 11 to 15 of the contract live here.

Two things happen at once. The compute stream is a SimPy process that reads top to bottom: dense part, router,
predictor, hits, arrivals, combine, head. The link is a few callbacks around one transfer at a time. Every decision
is the residency machine's. Only waits and transfers are SimPy events: hits cost one wait together, and the end of
a single hit becomes an event only while a transfer is stuck for want of a slot.
"""

from collections import deque
from collections.abc import Callable, Generator
from itertools import accumulate
from typing import Any

import numpy as np
import simpy

from policies.contract import Event, Requests, Shape
from policies.core import BLOCKED
from policies.registry import PolicySpec
from policies.residency import Residency
from sim.log import STALLS, RunLog
from sim.timing import Link, Timing
from traces.steps import RequestSteps

PREDICTOR, DEMAND, LATE, BEHIND_PREFETCH, SLOT = range(len(STALLS))

Wait = Generator[simpy.Event, Any, None]


class At(simpy.Event):
    """An event `delay` ns from now; among those of its instant the one of the lower `rank` comes first (rule 15).

    SimPy's own wake-ups between processes have ranks 0 and 1, so they run before every timed event.
    """

    def __init__(self, env: simpy.Environment, delay: int, rank: int) -> None:
        self.env = env
        self.callbacks = []
        self._ok = True
        self._value = None
        env.schedule(self, rank, delay)  # type: ignore[arg-type]  # priorities above NORMAL, as SimPy's heap allows


class Ranks:
    """Rule 15: transfers and chunk boundaries, then compute completions, then routers; by expert id within a kind."""

    def __init__(self, total: int) -> None:
        self.transfer = 2
        self.compute = 2 + total
        self.router = 2 + 2 * total


def simulate(
    requests: Requests,
    layers: int,
    experts: int,
    slots: int,
    policy: PolicySpec,
    timing: Timing,
    link: Link,
    cold: bool = False,
    progress: Callable[[int], None] | None = None,
) -> RunLog:
    """Play `requests` one after another through a cache of `slots` experts.

    `requests` is a sequence of `RequestSteps` of a model of `layers` x `experts`; `progress` is called with the
    number of steps of each request that has ended. An oracle policy reads `requests` before the run, no other does.
    """
    model = Model(requests, Shape(layers, experts), slots, policy, timing, link, cold)
    return model.run(progress)


class Model:
    """One run: environment, residency machine, compute stream, link, and the log that they fill."""

    def __init__(
        self,
        requests: Requests,
        shape: Shape,
        slots: int,
        policy: PolicySpec,
        timing: Timing,
        link: Link,
        cold: bool,
    ) -> None:
        self.env = simpy.Environment(initial_time=0)
        self.requests = requests
        self.shape = shape
        self.timing = timing
        self.cold = cold
        self.ranks = Ranks(shape.total)
        self.retention, self.prefetcher = policy.build(shape)
        for listener in (self.retention, self.prefetcher):
            listener.foresee(requests, per_access=False)
        self.machine = Residency(shape, slots, self.retention)
        self.event = Event()
        self.hears = self.retention.observes or self.prefetcher.observes or self.prefetcher.proposes
        self.hits = HitQueue(self.machine)
        self.link = HostLink(self.env, self.machine, link, self.ranks, self.hits)
        self.rows: list[list[int]] = []

    def run(self, progress: Callable[[int], None] | None) -> RunLog:
        """Play everything; the run ends with the last head."""
        self.env.run(until=self.env.process(self._compute_stream(progress)))
        return self._log()

    # The compute stream

    def _compute_stream(self, progress: Callable[[int], None] | None) -> Wait:
        last = len(self.requests) - 1
        for ordinal in range(last + 1):
            request = self.requests[ordinal]
            self.retention.begin_request(ordinal)
            self.prefetcher.begin_request(ordinal)
            steps = len(request.tokens)
            for step in range(steps):
                before, began = self._snapshot(), self.env.now
                yield from self._step(request, ordinal, step)
                if step == steps - 1:
                    self._end_request(cold=self.cold and ordinal != last)
                self._write_row(request, step, self.env.now - began, before)
            if progress:
                progress(steps)

    def _end_request(self, cold: bool) -> None:
        """Rule 10. What `--cold` discards counts for the step that has just ended."""
        self.retention.end_request()
        self.prefetcher.end_request()
        if cold:
            self.link.cut()
        self.machine.end_request(cold)

    def _step(self, request: RequestSteps, ordinal: int, step: int) -> Wait:
        """One forward pass: L layers, then the head."""
        env, link, machine, hits = self.env, self.link, self.machine, self.hits
        compute = self.ranks.compute
        L, predictor_ns = self.shape.layers, self.timing.predictor_ns
        tokens, context = int(request.tokens[step]), int(request.context[step])
        expert_ns, combine_ns = self.timing.expert_ns, self.timing.combine_ns(tokens)
        one_token_ns = expert_ns(1)
        experts, offsets = request.experts, request.offsets[step * L : step * L + L + 1].tolist()
        for layer in range(L):
            yield At(env, self.timing.dense_ns(layer, tokens, context), self.ranks.router)
            first, last = offsets[layer], offsets[layer + 1]
            n_hits = machine.route(experts, first, last)
            proposal = self._consult(request, ordinal, step, layer, first, last) if self.hears else None
            if predictor_ns:
                link.act()
                yield At(env, predictor_ns, compute)
                link.stall_ns[PREDICTOR] += predictor_ns
            if proposal is not None:
                machine.propose(*proposal)
            durations = (
                None
                if tokens == 1
                else {e: expert_ns(n) for e, n in zip(experts[first:last].tolist(), request.counts[first:last].tolist(), strict=True)}
            )
            if n_hits:
                chosen = hits.begin(n_hits, env.now, durations, one_token_ns)
                link.act()
                yield At(env, hits.ends[-1] - env.now, compute + chosen)
                hits.finish()
            link.act()
            for _ in range(last - first - n_hits):
                if not link.arrivals:
                    yield link.wait()
                expert = link.arrivals.popleft()
                yield At(env, durations[expert] if durations else one_token_ns, compute + expert)
                machine.computed(expert)
                link.act()
            if combine_ns:
                yield At(env, combine_ns, compute)
        yield At(env, self.timing.head_ns(tokens), compute)

    def _consult(self, request: RequestSteps, ordinal: int, step: int, layer: int, first: int, last: int) -> Any:
        """Rules 3 and 4: the policies hear of the event; the prefetcher's proposal, None if it never makes one."""
        event = self.event
        event.request, event.step, event.phase, event.layer = ordinal, step, int(request.phase[step]), layer
        event.serial, event.first = self.machine.serial, first
        event.experts, event.counts = request.experts[first:last], request.counts[first:last]
        if self.retention.observes:
            self.retention.observe(event)
        if self.prefetcher.observes:
            self.prefetcher.observe(event)
        return self.prefetcher.propose(event) if self.prefetcher.proposes else None

    # The log

    def _snapshot(self) -> list[int]:
        return [*self.link.stall_ns, *self.machine.counters(), self.link.busy_until_now()]

    def _write_row(self, request: RequestSteps, step: int, step_ns: int, before: list[int]) -> None:
        spent = [now - then for now, then in zip(self._snapshot(), before, strict=True)]
        kind = [request.request, int(request.phase[step]), int(request.tokens[step])]
        self.rows.append([*kind, step_ns, *spent])

    def _log(self) -> RunLog:
        table = np.array(self.rows, np.int64).reshape(-1, 17)
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
            evictions=np.array(self.link.evictions, np.int64),
        )


class HitQueue:
    """The hits of the current event on the compute stream: when each ends, and which have been unpinned.

    Their ends are known from the start, so they need no events; `settle` unpins those that lie in the past.
    """

    def __init__(self, machine: Residency) -> None:
        self._machine = machine
        self.experts: list[int] = []
        self.ends: list[int] = []
        self._unpinned = 0

    def begin(self, n: int, now: int, durations: dict[int, int] | None, each_ns: int) -> int:
        """The `n` hits of the event start, one after another; the last of them."""
        self.experts = self._machine.hits(n)
        if durations is None:
            self.ends = [now + each_ns * i for i in range(1, n + 1)]
        else:
            self.ends = list(accumulate((durations[e] for e in self.experts), initial=now))[1:]
        self._unpinned = 0
        return self.experts[-1]

    def settle(self, now: int) -> None:
        """Unpin the hits that ended before `now`: a transfer's completion precedes compute of the same instant."""
        done = self._unpinned
        while done < len(self.ends) and self.ends[done] < now:
            done += 1
        if done > self._unpinned:
            self._machine.computed_hits(self._unpinned, done)
            self._unpinned = done

    def unpin_next(self) -> None:
        """Unpin the next hit: its end is an event this time."""
        self._machine.computed_hits(self._unpinned, self._unpinned + 1)
        self._unpinned += 1

    def pending(self) -> tuple[int, int] | None:
        """(end, expert) of the next hit to end, the last one excepted: the compute stream waits for that itself."""
        i = self._unpinned
        return (self.ends[i], self.experts[i]) if i < len(self.ends) - 1 else None

    def finish(self) -> None:
        """The last hit has ended."""
        self._machine.computed_hits(self._unpinned, len(self.ends))
        self.experts, self.ends, self._unpinned = [], [], 0


class HostLink:
    """The serial host link: at most one transfer at a time, chunk by chunk while it may be interrupted (rule 12)."""

    def __init__(
        self, env: simpy.Environment, machine: Residency, spec: Link, ranks: Ranks, hits: HitQueue
    ) -> None:
        self.env = env
        self.machine = machine
        self.spec = spec
        self.arrivals: deque[int] = deque()
        self.stall_ns = [0] * len(STALLS)
        self.evictions: list[int] = []
        self._ranks = ranks
        self._hits = hits
        self._whole_ns = spec.used_ns(spec.expert_bytes)
        self._chunk = min(spec.chunk_bytes or spec.expert_bytes, spec.expert_bytes)
        self._end: At | None = None  # of the chunk on the link
        self._expert = -1
        self._began = 0  # of the chunk
        self._busy_ns = 0
        self._moved = 0  # bytes of the running transfer whose chunks have ended
        self._paused = 0  # the same, of the paused one
        self._cause = SLOT
        self._waiter: simpy.Event | None = None
        self._since = 0  # stall up to here is accounted for

    def act(self) -> None:
        """Rule 5: if the link is free, start what comes next; if all of it is stuck, try at the next hit's end."""
        if self._end is not None:
            return
        expert, victim = self.machine.next_transfer()
        if expert >= 0:
            self._start(expert, victim)
        elif expert == BLOCKED:
            pending = self._hits.pending()
            if pending:
                at = At(self.env, pending[0] - self.env.now, self._ranks.compute + pending[1])
                at.callbacks.append(self._after_hit)

    def wait(self) -> simpy.Event:
        """The compute stream has nothing to do until something arrives."""
        self._waiter = self.env.event()
        self._since = self.env.now
        return self._waiter

    def cut(self) -> None:
        """`--cold`: discard what is under way."""
        self._busy_ns = self.busy_until_now()
        self._end = None
        self._moved = self._paused = 0

    def busy_until_now(self) -> int:
        """Time during which the link moved bytes, latency included."""
        return self._busy_ns + (self.env.now - self._began if self._end else 0)

    def _start(self, expert: int, victim: int) -> None:
        if victim >= 0:
            self.evictions.append(victim)
        self._charge()
        self._expert = expert
        if self.machine.is_prefetch(expert):
            self._cause = BEHIND_PREFETCH
            self._moved, self._paused = self._paused, 0
            self._send_chunk()
        else:
            self._cause = DEMAND
            self._send(self.spec.expert_bytes, self._whole_ns)

    def _send_chunk(self) -> None:
        upto = min(self._moved + self._chunk, self.spec.expert_bytes)
        self._send(upto, self.spec.used_ns(upto) - self.spec.used_ns(self._moved))

    def _send(self, upto: int, duration: int) -> None:
        self._moved = upto
        self._began = self.env.now
        self._end = At(self.env, duration, self._ranks.transfer + self._expert)
        self._end.callbacks.append(self._after_chunk)

    def _after_chunk(self, at: simpy.Event) -> None:
        """A chunk boundary or the end of a transfer (of one that was cut off: nothing)."""
        if at is not self._end:
            return
        env, machine = self.env, self.machine
        self._busy_ns += env.now - self._began
        self._hits.settle(env.now)
        if self._moved < self.spec.expert_bytes:
            expert, victim = machine.interrupt()
            if expert >= 0:
                self._paused = self._moved
                self._start(expert, victim)
            else:
                self._send_chunk()
            return
        self._charge()
        self._end = None
        self._cause = SLOT
        self._moved = 0
        if machine.arrived():
            self.arrivals.append(self._expert)
            if self._waiter is not None:
                self._waiter.succeed()
                self._waiter = None
        self.act()

    def _after_hit(self, at: simpy.Event) -> None:
        self._hits.unpin_next()
        self.act()

    def _charge(self) -> None:
        """While the compute stream waits, the time since the last change goes to what held the link."""
        if self._waiter is None:
            return
        cause = self._cause
        if cause == BEHIND_PREFETCH and self.machine.awaited(self._expert):
            cause = LATE
        self.stall_ns[cause] += self.env.now - self._since
        self._since = self.env.now
