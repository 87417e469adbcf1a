"""The compiled engine: the same as the SimPy engine (`sim.engines.simpy_engine`), bit for bit, as one loop over arrays.

One call of the compiled loop (`sim.engines.compiled_streams`) runs a request, or the steps of a batch between two
changes of who takes part. What policies do then (`begin_request`, learning in `end_request`) stays Python, and is here.
"""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import numpy as np

from policies.core import dispatch, limits
from policies.core import host_memory as memory
from policies.core.dispatch import NONE
from policies.core.events import Routing, routing_of, routing_of_batch
from policies.core.limits import limiter
from policies.core.policy import NO_INTS, Int, Shape
from policies.core.runner import PolicyRunner
from policies.core.spec import PolicySpec
from sim.engines import compiled_streams as streams
from sim.loop import host
from sim.loop.log import MOST, STALLS, Ended, RequestLog, RunLog, whole
from sim.loop.run import Run, Users, gpu_run
from sim.loop.schedule import Active, Admission
from sim.loop.session import decider_of
from sim.profiles.timing import Durations, DurationTables, FixedTiming, Link
from traces.errors import InputError
from traces.steps import RequestSteps


def simulate(run: Run) -> RunLog:
    """Return the whole log of a run. Raise NotServedError for a policy that this engine cannot run."""
    return whole(play, run)


def play(run: Run, ended: Ended) -> None:
    """As `simpy_engine.play`, whose logs these are. Raise NotServedError for a policy that this engine cannot run."""
    if reason := run.policy.not_compiled:
        raise NotServedError(f"the compiled engine does not run {run.policy.text}: {reason} (--engine simpy does)")
    Engine(run, decider_of(run)).play(ended)


def tiered(run: Run) -> bool:
    """Return whether a run needs the version with a host that computes, a disk, or experts of several sizes."""
    return host.needed(run) or run.gpu.link.layer_bytes is not None


def on_disk(tiered: bool) -> bool:
    """Return whether that version is on disk, compiled from these sources, or in this process."""
    dispatcher: Any = streams.run_steps
    cache = getattr(dispatcher, "_cache", None)  # None under NUMBA_DISABLE_JIT
    if cache is None:
        return True
    signatures = [*dispatcher.overloads, *(key[0] for key in cache._cache_file._load_index())]
    place = streams.Streams._fields.index("tiers")
    return any(bool(len(signature[0].types[place])) == tiered for signature in signatures)


def prepare(versions: Iterable[bool] = (False,)) -> None:
    """Compile these versions of the engine (see `tiered`), or load them: once for the processes that come after."""
    none, one = np.zeros(0, np.int64), np.ones(1, np.int64)
    request = RequestSteps(0, np.ones(1, np.uint8), one, one, np.zeros(2, np.int64), none, none)
    for version in versions:
        policy = PolicySpec.of("lru", placement="host" if version else "fetch")
        simulate(gpu_run([request], Shape(1, 1), 1, policy, FixedTiming(0, 0, 0, 0, 0), Link(0, 1, 1, 1)))


class NotServedError(InputError):
    """The compiled engine does not run this policy."""


class Engine:
    """One run: the residency, the policies' states, and the rows that requests leave behind."""

    def __init__(self, run: Run, runner: PolicyRunner) -> None:
        _check_transfers(run)
        shape, timing, link = runner.shape, run.timing, run.gpu.link
        L, E = shape.layers, shape.experts
        self.run = run
        self.runner = runner
        self.residency = runner.residency(run.gpu.slots, link.sizes(E))
        self.memory = self.residency.host_memory(run.host.slots) if run.host else None
        self.plan = _plan(runner, run.gpu.experts_per_layer)
        self.tables = DurationTables(timing, L, host=host.needed(run))
        disk = run.host.link if run.host else None
        h = np.zeros((memory.ROWS + 5, max(shape.total, memory.WIDTH)), np.int64)
        if self.memory:
            h[: memory.ROWS] = self.memory.h
            self.memory.h = h
        for layer in range(L):
            size = link.bytes_of(layer)
            read_ns = disk.used_ns(disk.bytes_of(layer)) if disk else 0
            h[[streams.LAYER_BYTES, streams.LAYER_NS, streams.READ_NS], layer] = size, link.used_ns(size), read_ns
        self.state = streams.Streams(
            m=self.residency.m,
            keep=self.residency.keep,
            rule=self.residency.rule,
            one_scale=self.residency.one_scale,
            n=_numbers(run),
            ends=np.zeros(E, np.int64),
            arrivals=np.zeros(E, np.int64),
            stall=np.zeros(len(STALLS), np.int64),
            evictions=np.zeros(max(1 << 16, 4 * (L + 2) * (shape.total + E) + 2 * shape.total), np.int64),
            tiers=(1,) if tiered(run) else (),
            h=h,
        )
        self.slowest_transfer_ns = int(h[[streams.LAYER_NS, streams.READ_NS]].max())
        self.totals = np.zeros(streams.COLUMNS, np.int64)  # of the run when the last step ended
        self.step_ended: dict[int, int] = {}  # by batch slot: when the request's latest step ended, or it was admitted
        self.waited: dict[int, int] = {}  # by batch slot, of those whose first step is still to come

    def play(self, ended: Ended) -> None:
        """Run everything; the run ends with the last head."""
        run, n = self.run, self.state.n
        admission = Admission(run.requests, run.users or Users(1))
        while admission.more:
            admitted, waited = admission.admit(int(n[streams.NOW]))
            if not admission.active:
                arrival = admission.next_arrival
                assert arrival is not None
                streams.wait_until(self.state, arrival)
                continue
            for each, ns in zip(admitted, waited, strict=True):
                self.runner.begin_request(each.ordinal, each.batch_slot)
                self.step_ended[each.batch_slot], self.waited[each.batch_slot] = int(n[streams.NOW]), ns
            parts = admission.taking_part(admitted)
            began, steps = int(n[streams.NOW]), [each.step for each in parts]
            totals, evictions = self._play(parts, admission)
            self._end_requests(admission.ended(parts, len(totals)), admission)
            # What --cold discards is within the step that has ended.
            totals[-1, streams.COUNTERS : streams.READS] = self.residency.counters()
            ended(self._log(parts, steps, began, totals, evictions))

    def _play(self, parts: list[Active], admission: Admission) -> tuple[Int, Int]:
        """Run steps of a request, or of a batch until a request leaves or is admitted.

        Return totals [S, COLUMNS] of the run at the end of each, and the experts evicted (see `Streams`).
        """
        state, n = self.state, self.state.n
        alone = self.run.users is None
        left = min(len(each.request.phase) - each.step for each in parts)
        steps = left if alone else 1 if parts[0].prefills else min(left, streams.STRETCH)
        batch = [(each.batch_slot, each.step, each.request) for each in parts]
        routing = routing_of(parts[0].request) if alone else routing_of_batch(batch, steps, self.runner.shape)
        durations = self._durations(parts, steps, routing)
        self._check_range(routing, durations)
        arrival = None if alone else admission.next_arrival
        admit_at = streams.NEVER if arrival is None or arrival <= n[streams.NOW] else arrival
        rows, evictions = np.zeros((steps, streams.COLUMNS), np.int64), [NO_INTS]
        states = dispatch.states(self.runner.retention, self.runner.prefetcher)
        step, predictor_ns = 0, self.run.timing.predictor_ns
        while step < steps and n[streams.NOW] < admit_at:
            step = streams.run_steps(state, self.plan, states, routing, durations, predictor_ns, step, rows, admit_at)
            evictions.append(state.evictions[: n[streams.EVICTED]].copy())
            n[streams.EVICTED] = 0
        return rows[:step], np.concatenate(evictions)

    def _durations(self, parts: list[Active], steps: int, routing: Routing) -> Durations:
        """Return what the next steps of these take: their tokens and contexts together."""
        tokens, context = (
            sum(getattr(each.request, name)[each.step : each.step + steps] for each in parts)
            for name in ("tokens", "context")
        )
        return self.tables.of(tokens, context, int(routing.counts.max(initial=1)), len(parts))

    def _end_requests(self, left: list[Active], admission: Admission) -> None:
        """Requests have ended; rule 10 where none remains active: `--cold` discards what is under way."""
        for each in left:
            self.runner.end_request(each.batch_slot)
        if admission.active or not left:
            return
        n, cold = self.state.n, self.run.cold and admission.more
        if cold:
            n[streams.BUSY], n[streams.DISK_BUSY] = streams.busy_until_now(n), streams.disk_busy_until_now(n)
            n[streams.LINK_END] = n[streams.READ_END] = streams.NEVER
            n[streams.MOVED] = n[streams.PAUSED] = 0
            if self.memory:
                self.memory.empty()
        self.residency.end_request(cold)

    def _check_range(self, routing: Routing, durations: Durations) -> None:
        """Compiled numbers wrap around: OverflowError before they can, should a run last more than a century."""
        events = durations.dense.size
        longest = float(durations.dense.sum(dtype=float)) + events * (
            float(durations.combine.max()) + float(durations.head.max()) + self.run.timing.predictor_ns
        )
        slowest = float(durations.expert.max()) + float(durations.host.max(initial=0)) + self.run.timing.hop_ns
        longest += len(routing.experts) * (slowest + 2.0 * self.slowest_transfer_ns)
        if self.state.n[streams.NOW] + longest > MOST:
            raise OverflowError("the run takes more nanoseconds than there are whole numbers of 62 bits")

    def _log(self, parts: list[Active], first: list[int], began: int, totals: Int, evictions: Int) -> RunLog:
        """Return the log of steps of these, of which each began with its step `first`; began: the clock then."""
        spent = totals.copy()
        spent[0] -= self.totals
        spent[1:] -= totals[:-1]
        self.totals = totals[-1]
        S, R, last = len(spent), len(parts), int(totals[-1, streams.CLOCK])
        step_ns = spent[:, streams.CLOCK]
        step_ns[0] = totals[0, streams.CLOCK] - began
        stall = spent[:, streams.STALL : streams.COUNTERS]
        busy_ns = step_ns - stall.sum(axis=1)
        by_request = np.zeros((len(fields(RequestLog)), S, R), np.int64)
        number, request, own, latency, waited = by_request
        number[:], latency[:] = np.arange(S)[:, None], step_ns[:, None]
        for r, (each, step) in enumerate(zip(parts, first, strict=True)):
            request[:, r], own[:, r] = each.request.request, each.request.tokens[step : step + S]
            latency[0, r] = totals[0, streams.CLOCK] - self.step_ended[each.batch_slot]
            waited[0, r] = self.waited.pop(each.batch_slot, 0)
            self.step_ended[each.batch_slot] = last
        phase = parts[0].request.phase[first[0] : first[0] + S]
        of_streams = spent[:, streams.LINK_BUSY], busy_ns, spent[:, streams.HOST_BUSY_NS :]
        table = np.column_stack(
            [phase, own.sum(axis=1), step_ns, spent[:, streams.STALL : streams.LINK_BUSY], *of_streams]
        )
        link, gone = self.run.gpu.link, evictions >= 0
        evicted = evictions[gone], ~evictions[~gone]
        return RunLog.of_table(
            table, RequestLog(*by_request.reshape(-1, S * R)), link.expert_bytes, *evicted, bool(link.layer_bytes), last
        )


def _plan(runner: PolicyRunner, experts_per_layer: float | None) -> streams.Plan:
    keeper, fetcher, total = runner.retention, runner.prefetcher, runner.shape.total
    limited = limiter(fetcher.options, runner.shape, experts_per_layer)
    number = dispatch.number_of(type(fetcher))
    return streams.Plan(
        keeps=dispatch.number_of(type(keeper)) if keeper.observes else NONE,
        listens=number if fetcher.observes else NONE,
        fetches=number if fetcher.proposes else NONE,
        hears=keeper.observes or fetcher.observes or fetcher.proposes,
        at_start=fetcher.proposes and fetcher.at_start,
        limited=limited is not None,
        bounds=(limited or limits.Limiter(limits.Limits(), runner.shape, None)).bounds,
        ids=np.empty(total, np.int64),
        priorities=np.empty(total),
    )


def _check_transfers(run: Run) -> None:
    """Raise OverflowError where one transfer takes longer than compiled numbers can count."""
    for tier in run.tiers:
        link = tier.link
        if link.expert_bytes * max(link.ns_per_byte_num, 1) + link.latency_ns > MOST:
            raise OverflowError(
                f"a transfer of {link.expert_bytes} bytes takes more nanoseconds than there are numbers of 62 bits"
            )


def _numbers(run: Run) -> Int:
    """Return the single numbers of streams at rest."""
    link, placement = run.gpu.link, run.policy.placement
    whole = link.expert_bytes
    n = np.zeros(streams.NUMBERS, np.int64)
    n[streams.LINK_END] = n[streams.HIT_END] = n[streams.READ_END] = n[streams.HOST_END] = streams.NEVER
    n[streams.WAITING_SINCE] = streams.NOT_WAITING
    n[streams.NOTHING_QUEUED] = 1
    n[streams.WHOLE_NS] = link.used_ns(whole)
    n[streams.EXPERT_BYTES] = whole
    n[streams.CHUNK_BYTES] = link.chunk_bytes or whole
    n[streams.LATENCY_NS] = link.latency_ns
    n[streams.PER_BYTE_NUM], n[streams.PER_BYTE_DEN] = link.ns_per_byte_num, link.ns_per_byte_den
    n[streams.PLACEMENT], n[streams.HOST_LAYERS] = placement.cls.number, placement.cls(placement.options).layers
    n[streams.HOP_NS] = run.timing.hop_ns
    n[streams.DISK_THERE], n[streams.ALL_EXPERTS] = run.host is not None, run.shape.total
    return n
