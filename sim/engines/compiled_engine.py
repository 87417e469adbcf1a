"""The compiled engine: the same as the SimPy engine (`sim.engines.simpy_engine`), bit for bit, as one loop over arrays.

One call of the compiled loop (`sim.engines.compiled_streams`) runs a request, or the steps of a batch between two
changes of who takes part. What policies do then (`begin_request`, learning in `end_request`) stays Python, and is here.
A policy that is written in Python is asked from within the loop (`policies.core.calling`).
"""

import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import count
from threading import Lock
from typing import Any

import numpy as np

from policies.core import dispatch
from policies.core import host_memory as memory
from policies.core import residency_compiled as core
from policies.core.bent import Bending
from policies.core.calling import Held, Proposal
from policies.core.compiled import KEPT, kept_for
from policies.core.dispatch import EVENT, Native
from policies.core.events import Events, Routing, routing_of, routing_of_batch
from policies.core.limits import limiter
from policies.core.policy import NO_INTS, Float, Int, Policy, Prefetcher, Shape
from policies.core.residency import PolicyResidency
from policies.core.runner import AskedRunner, PolicyRunner
from policies.core.spec import PolicySpec
from sim.engines import compiled_streams as streams
from sim.loop import host
from sim.loop.log import MOST, STALLS, Ended, RequestLog, RunLog, counting, whole
from sim.loop.run import Run, Users, gpu_run
from sim.loop.schedule import Active, Admission
from sim.loop.session import decider_of
from sim.profiles.timing import Durations, DurationTables, FixedTiming, Link
from traces.steps import PREFILL, RequestSteps

IN_PYTHON = -1  # in place of an address

BESIDE: dict[bool, subprocess.Popen[bytes] | None] = {}
"""By version of the engine (`tiered`): the process that compiles it beside this one, or none."""

BESIDE_LOCK = Lock()

NO_STREAMS: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)


def simulate(run: Run) -> RunLog:
    return whole(play, run)


def play(run: Run, ended: Ended) -> None:
    """Run a run; `ended` gets the log of each request.

    InputError where a time is beyond what a clock of 64 bits counts.
    """
    play_cells([run], [ended])


def play_cells(runs: Sequence[Run], ended: Sequence[Ended]) -> None:
    """Run runs that differ in the sizes of their caches alone, together where the policy lets them: it learns once."""
    with counting(runs[0]):
        runner = decider_of(runs[0])
        if len(runs) > 1 and (runs[0].users or runs[0].routing or not runner.shares_cells):
            for run, each in zip(runs, ended, strict=True):
                Engine([run], decider_of(run)).play([each])
            return
        together = Engine(runs, runner)
        together.play(ended)
        for place, logs in together.left.items():
            rest = _after(logs, ended[place])
            Engine([runs[place]], decider_of(runs[place])).play([rest])


def _after(logs: int, ended: Ended) -> Ended:
    """Return what hears of a run's requests but for those whose logs were there before."""
    numbers = count()

    def heard(log: RunLog) -> None:
        if next(numbers) >= logs:
            ended(log)

    return heard


def tiered(run: Run) -> bool:
    """Return whether a run needs the version with a host that computes, a disk, or experts of several sizes."""
    return host.needed(run) or run.gpu.link.layer_bytes is not None


def on_disk(tiered: bool) -> bool:
    """Return whether that version is on disk, compiled from these sources, or in this process."""
    place = streams.Streams._fields.index("tiers")
    return any(bool(len(types[1].types[place])) == tiered for types in kept_for(streams.run_steps))


def prepare(versions: Iterable[bool] = (False,)) -> None:
    """Compile these versions of the engine (see `tiered`), or load them: once for the processes that come after."""
    none, one = np.zeros(0, np.int64), np.ones(1, np.int64)
    request = RequestSteps(0, np.ones(1, np.uint8), one, one, np.zeros(2, np.int64), none, none)
    for version in versions:
        policy = PolicySpec.of("lru", placement="host" if version else "fetch")
        simulate(gpu_run([request], Shape(1, 1), 1, policy, FixedTiming(0, 0, 0, 0, 0), Link(0, 1, 1, 1)))


def compile_policies(policies: Mapping[PolicySpec, bool], versions: Iterable[bool]) -> None:
    """Compile policies, each with whether several runs share it, while another process compiles the engine.

    Where these versions are on disk it does nothing: each policy is compiled, or loaded, when it first runs.
    """
    versions = set(versions)
    for version in versions:
        _compile_beside(version)
    if any(BESIDE[version] for version in versions):
        for policy, several in policies.items():
            keeper, fetcher = policy.evict, policy.prefetch
            hears = ("learn", "follow") if several and policy.learns_apart else ("observe",)
            fetches = ("propose",) if policy.shares else ("propose", "observe")
            dispatch.compile_named(keeper.cls, keeper.options, (*hears, *dispatch.HOOKS))
            dispatch.compile_named(fetcher.cls, fetcher.options, fetches)


def _compile_beside(version: bool) -> None:
    """Compile this version of the engine, unless it is on disk, in a process of its own: numba has one lock in each.

    Meanwhile this process compiles policies. Should the other fail, this one compiles the engine when it needs it.
    """
    with BESIDE_LOCK:
        if version in BESIDE:
            return
        code = (
            f"import sys; sys.path = {sys.path!r}; from sim.engines import compiled_engine as engine; "
            f"engine.BESIDE[{version}] = None; engine.prepare([{version}])"
        )
        starts = KEPT and not on_disk(version)
        BESIDE[version] = subprocess.Popen([sys.executable, "-c", code], **NO_STREAMS) if starts else None


class Cell:
    """One of the runs of an engine: its cache, its streams, and what its requests leave behind."""

    def __init__(
        self, place: int, run: Run, residency: PolicyResidency, proposals: Float, halves: tuple[Native, Native]
    ) -> None:
        """place: among the runs of the engine; halves: what the policy knows of this cache."""
        _check_transfers(run)
        shape, link = run.shape, run.gpu.link
        L, E = shape.layers, shape.experts
        self.place = place
        self.run = run
        self.residency = residency
        self.memory = residency.host_memory(run.host.slots) if run.host else None
        disk = run.host.link if run.host else None
        h = np.zeros((memory.ROWS + 5, max(shape.total, memory.WIDTH)), np.int64)
        if self.memory:
            h[: memory.ROWS] = self.memory.h
            self.memory.h = h
        for layer in range(L):
            size = link.bytes_of(layer)
            read_ns = disk.used_ns(disk.bytes_of(layer)) if disk else 0
            h[[streams.LAYER_BYTES, streams.LAYER_NS, streams.READ_NS], layer] = size, link.used_ns(size), read_ns
        self.slowest_transfer_ns = int(h[[streams.LAYER_NS, streams.READ_NS]].max())
        self.n = _numbers(run)
        self.evictions = np.zeros(max(1 << 16, 4 * (L + 2) * (shape.total + E) + 2 * shape.total), np.int64)
        self.halves = halves
        self.logs = 0  # heard of so far
        self.state = streams.Streams(
            m=residency.m,
            keep=residency.keep,
            proposals=proposals,
            one_scale=residency.one_scale,
            n=self.n,
            ends=np.zeros(E, np.int64),
            arrivals=np.zeros(E, np.int64),
            stall=np.zeros(len(STALLS), np.int64),
            evictions=self.evictions,
            tiers=(1,) if tiered(run) else (),
            h=h,
        )
        self.held = Held(self.state)
        self.totals = np.zeros(streams.COLUMNS, np.int64)  # of the run when the last step ended
        self.step_ended: dict[int, int] = {}  # by batch slot: when the request's latest step ended, or it was admitted
        self.waited: dict[int, int] = {}  # by batch slot, of those whose first step is still to come

    @property
    def now(self) -> int:
        return int(self.n.now)

    def taken_evictions(self) -> Int:
        """Return who left since this was last asked (see `Streams`)."""
        taken = self.evictions[: self.n.evicted].copy()
        self.n.evicted = 0
        return taken

    def end_requests(self, cold: bool) -> None:
        """Rule 10: no request remains active; `cold` discards what is under way."""
        n = self.n
        if cold:
            n.busy, n.disk_busy = streams.busy_until_now(n), streams.disk_busy_until_now(n)
            n.link_end = n.read_end = streams.NEVER
            n.moved = n.paused = 0
            if self.memory:
                self.memory.empty()
        self.residency.end_request(cold)

    def check_range(self, routing: Routing, durations: Durations) -> None:
        """Compiled numbers wrap around: OverflowError before they can, should a run last more than a century."""
        timing, events = self.run.timing, durations.dense.size
        longest = float(durations.dense.sum(dtype=float)) + events * (
            float(durations.combine.max()) + float(durations.head.max()) + timing.predictor_ns
        )
        slowest = float(durations.expert.max()) + float(durations.host.max(initial=0)) + timing.hop_ns
        longest += len(routing.experts) * (slowest + 2.0 * self.slowest_transfer_ns)
        if self.now + longest > MOST:
            raise OverflowError("the run takes more nanoseconds than there are whole numbers of 62 bits")

    def log(self, parts: list[Active], first: list[int], began: int, totals: Int, evictions: Int) -> RunLog:
        """Return the log of steps of these, of which each began with its step `first`; began: the clock then."""
        # What --cold discards is within the step that has ended.
        totals[-1, streams.COUNTERS : streams.READS] = self.residency.counters()
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
        number, request, own, latency, waited, rejected, prefills = by_request
        number[:], latency[:] = np.arange(S)[:, None], step_ns[:, None]
        for r, (each, step) in enumerate(zip(parts, first, strict=True)):
            steps = slice(step, step + S)
            request[:, r], own[:, r] = each.request.request, each.request.tokens[steps]
            rejected[:, r] = 0 if each.request.rejected is None else each.request.rejected[steps]
            prefills[:, r] = each.request.phase[steps] == PREFILL
            latency[0, r] = totals[0, streams.CLOCK] - self.step_ended[each.batch_slot]
            waited[0, r] = self.waited.pop(each.batch_slot, 0)
            self.step_ended[each.batch_slot] = last
        phase = 1 - prefills.min(axis=1)  # a step in which anybody decodes is a decode step
        of_streams = spent[:, streams.LINK_BUSY], busy_ns, spent[:, streams.HOST_BUSY_NS :]
        table = np.column_stack(
            [phase, own.sum(axis=1), step_ns, spent[:, streams.STALL : streams.LINK_BUSY], *of_streams]
        )
        link, gone = self.run.gpu.link, evictions >= 0
        evicted = evictions[gone], ~evictions[~gone]
        return RunLog.of_table(
            table, RequestLog(*by_request.reshape(-1, S * R)), link.expert_bytes, *evicted, bool(link.layer_bytes), last
        )


class Engine:
    """Runs of one policy that differ in the sizes of their caches alone: it learns of each event once.

    It may, unless it names its victims, or keeps scores both by events and by the cache and does not say what of that
    it learns from events (`Compiled.learn`): then it is one run.
    """

    def __init__(self, runs: Sequence[Run], runner: PolicyRunner) -> None:
        run = runs[0]
        _compile_beside(tiered(run))
        assert len(runs) == 1 or (runner.shares_cells and run.users is None)
        self.run = run
        self.runner = runner
        sizes = run.gpu.link.sizes(run.shape.experts)
        caches = [runner.residency(each.gpu.slots, sizes) for each in runs]
        self.asked = None if run.policy.compiled or runner.silent else AskedRunner(runner, caches[0])
        first = _natives(runner.pairs[0], self.asked is not None)
        self.apart = len(runs) > 1 and runner.learns_apart
        self.cells = [Cell(0, run, caches[0], caches[0].proposals, first)]
        for place, (each, cache) in enumerate(zip(runs[1:], caches[1:], strict=True), 1):
            if self.apart:
                cache.policy.charged(each.gpu.transfers_per_event, each.gpu.experts)
                self.cells.append(Cell(place, each, cache, cache.proposals, _natives(runner.pairs[place], False)))
            else:
                self.cells.append(Cell(place, each, cache, caches[0].proposals, first))
        self.left: dict[int, int] = {}  # runs for which the policy would learn otherwise, and how many logs they left
        self.event = Held(EVENT)  # the one at hand
        self.plan = self._plan(run.gpu.experts_per_layer)
        self.events = 0  # so far
        self.bending = Bending(run.routing, run.shape) if run.routing else None
        self.tables = DurationTables(run.timing, run.shape.layers, host=host.needed(run))

    def _plan(self, experts_per_layer: float | None) -> streams.Plan:
        runner, asked, (keeper, fetcher) = self.runner, self.asked, self.cells[0].halves
        shape, prefetcher = runner.shape, runner.prefetcher
        for cell in self.cells[: len(self.cells) if self.apart else 1]:
            if fetcher.propose and (limited := limiter(prefetcher.options, shape, experts_per_layer)):
                cell.halves[1].within(limited.bounds, cell.residency.m[core.STATE], shape)
        proposal = asked.proposal if asked else Proposal(np.empty(shape.total, np.int64), np.empty(shape.total))
        self.proposal = Held(proposal)
        return streams.Plan(
            keeps=0 if self.apart else keeper.observe,
            keepers=NO_INTS,
            listens=fetcher.observe,
            fetches=IN_PYTHON if asked and prefetcher.proposes else fetcher.propose,
            fetcher=fetcher.state,
            proposers=NO_INTS,
            learns=keeper.declared("learn") if self.apart else 0,
            follows=keeper.declared("follow") if self.apart else 0,
            event=self.event.address,
            asks=asked.address if asked else 0,
            hears=not runner.silent,
            may_be_idle=runner.may_be_idle,
            changed=np.zeros(1, np.int64),
            at_start=prefetcher.proposes and prefetcher.at_start,
            proposal=self.proposal.address,
            ids=proposal.ids,
            priorities=proposal.priorities,
        )

    def play(self, ended: Sequence[Ended]) -> None:
        """Run everything, by run; each ends with its last head."""
        run = self.run
        admission = Admission(run.requests, run.users or Users(1))
        while admission.more and self.cells:
            cells, one = self.cells, self.cells[0]
            admitted, waited = admission.admit(one.now)
            if not admission.active:
                arrival = admission.next_arrival
                assert arrival is not None
                streams.wait_until(one.state, arrival)
                continue
            for each, ns in zip(admitted, waited, strict=True):
                self.runner.begin_request(each.ordinal, each.batch_slot)
                for cell in cells:
                    cell.step_ended[each.batch_slot], cell.waited[each.batch_slot] = cell.now, ns
            parts = admission.taking_part(admitted)
            began, first = [cell.now for cell in cells], [each.step for each in parts]
            totals, evictions = self._play(parts, admission)
            left = admission.ended(parts, totals.shape[1])
            for each in left:
                self.runner.end_request(each.batch_slot)
            for cell, now, rows, gone in zip(cells, began, totals, evictions, strict=True):
                if cell.n.leaves:
                    self.left[cell.place] = cell.logs
                    continue
                if left and not admission.active:
                    cell.end_requests(run.cold and admission.more)
                ended[cell.place](cell.log(parts, first, now, rows, gone))
                cell.logs += 1
            self.cells = [cell for cell in cells if not cell.n.leaves]

    def _play(self, parts: list[Active], admission: Admission) -> tuple[Int, list[Int]]:
        """Run steps of a request, or of a batch until a request leaves or is admitted.

        Return by run the totals at the end of each step, [K, S, COLUMNS], and the experts evicted (see `Streams`).
        """
        cells, one = self.cells, self.cells[0]
        alone = self.run.users is None
        left = min(len(each.request.phase) - each.step for each in parts)
        steps = left if alone else 1 if parts[0].prefills else min(left, streams.STRETCH)
        batch = [(each.batch_slot, each.step, each.request) for each in parts]
        bending, shape = self.bending, self.runner.shape
        routing = routing_of(parts[0].request, bending) if alone else routing_of_batch(batch, steps, shape, bending)
        durations = self._durations(parts, steps, routing)
        for cell in cells:
            cell.check_range(routing, durations)
        arrival = None if alone else admission.next_arrival
        admit_at = streams.NEVER if arrival is None or arrival <= one.now else arrival
        halves = [cell.halves for cell in cells]
        for half in {id(each): each for pair in halves for each in pair}.values():
            half.refresh()
        keepers, proposers = np.array([[keeper.state, fetcher.proposer] for keeper, fetcher in halves]).T.copy()
        plan = self.plan._replace(keepers=keepers, proposers=proposers)
        for cell in cells:
            cell.residency.m[core.ONE, core.SCORES_ARE] = core.NEW
        if self.asked:
            self.asked.events = Events(routing, self.runner.shape.layers, self.events)
        rows = np.zeros((len(cells), steps, streams.COLUMNS), np.int64)
        evictions: list[list[Int]] = [[NO_INTS] for _ in cells]
        addresses = np.array([cell.held.address for cell in cells])
        common = addresses, one.state, plan, routing, durations, self.run.timing.predictor_ns
        if beside := BESIDE[tiered(self.run)]:
            beside.wait()
        step = 0
        while step < steps and one.now < admit_at:
            step = streams.run_steps(*common, step, rows, admit_at)
            for cell, gone in zip(cells, evictions, strict=True):
                gone.append(cell.taken_evictions())
            one.residency.check()
            if self.asked:
                self.asked.check()
        self.events += step * self.runner.shape.layers
        return rows[:, :step], [np.concatenate(gone) for gone in evictions]

    def _durations(self, parts: list[Active], steps: int, routing: Routing) -> Durations:
        """Return what the next steps of these take: their tokens and contexts together."""
        tokens, context = (
            sum(getattr(each.request, name)[each.step : each.step + steps] for each in parts)
            for name in ("tokens", "context")
        )
        durations = self.tables.of(tokens, context, int(routing.counts.max(initial=1)), len(parts))
        drafting = [(each.request.draft_ns, slice(each.step, each.step + steps)) for each in parts]
        if drafts := [ns[own] for ns, own in drafting if ns is not None]:
            durations.dense[:, 0] += np.max(drafts, axis=0)
        return durations


def _natives(pair: tuple[Policy, Prefetcher], asked: bool) -> tuple[Native, Native]:
    return Native(pair[0], asked), Native(pair[1], asked)


def _check_transfers(run: Run) -> None:
    """Raise OverflowError where one transfer takes longer than compiled numbers can count."""
    for tier in run.tiers:
        link = tier.link
        if link.expert_bytes * max(link.ns_per_byte_num, 1) + link.latency_ns > MOST:
            raise OverflowError(
                f"a transfer of {link.expert_bytes} bytes takes more nanoseconds than there are numbers of 62 bits"
            )


def _numbers(run: Run) -> streams.Numbers:
    """Return the single numbers of streams at rest."""
    link, placement = run.gpu.link, run.policy.placement
    whole = link.expert_bytes
    n: streams.Numbers = np.zeros(1, streams.NUMBERS)[0]
    n.link_end = n.hit_end = n.read_end = n.host_end = streams.NEVER
    n.waiting_since = streams.NOT_WAITING
    n.nothing_queued = 1
    n.whole_ns = link.used_ns(whole)
    n.expert_bytes = whole
    n.chunk_bytes = link.chunk_bytes or whole
    n.latency_ns = link.latency_ns
    n.per_byte_num, n.per_byte_den = link.ns_per_byte_num, link.ns_per_byte_den
    n.placement, n.host_layers = placement.cls.number, placement.cls(placement.options).layers
    n.hop_ns = run.timing.hop_ns
    n.disk_there, n.all_experts = run.host is not None, run.shape.total
    return n
