"""The loop: what ends first within a nanosecond, against the compiled engine, and driven by a model that runs now."""

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from policies.core.policy import NO_INTS, Shape
from policies.core.spec import parse
from sim.engines import compiled_engine
from sim.engines.cases import case_request
from sim.engines.simpy_engine import SimpyDevice, simulate
from sim.loop.device import ALL, COPIES, ROUTERS, Device, Kind
from sim.loop.log import RunLog, Share, StepRow, whole
from sim.loop.requests import Requests
from sim.loop.run import Run, gpu_run
from sim.loop.schedule import LiveStep
from sim.loop.session import Session
from sim.profiles.hardware_profile import hardware
from sim.profiles.roofline import Roofline, host_link
from sim.profiles.timing import FixedTiming, Link, experts_per_layer
from tests.support.ahead import with_lookahead
from tests.support.devices import AnyOrder, Watch
from tests.support.driven import play
from tests.support.logs import assert_logs_equal
from tests.support.replay_runs import draw
from traces.models.profile import model
from traces.synthetic import synthetic


def test_a_chunk_precedes_a_compute_of_the_same_instant() -> None:
    device = SimpyDevice(FixedTiming(5, 0, 0, 0, 0), Link(0, 1, 1, expert_bytes=5))
    device.dense(0, 1, 1)
    device.copy(3, 0, 0, 5)
    assert [device.next_completion().kind for _ in range(2)] == [Kind.COPY, Kind.ROUTER]
    assert device.now() == 5
    with pytest.raises(RuntimeError, match="nothing is under way"):
        device.next_completion()


def test_a_poll_reports_what_ends_at_this_instant_and_lets_no_time_pass() -> None:
    device = SimpyDevice(FixedTiming(5, 0, 0, 0, 0), Link(0, 1, 1, expert_bytes=5))
    device.dense(0, 1, 1)
    device.copy(3, 0, 0, 5)
    assert device.poll() is None
    assert device.now() == 0
    device.next_completion()
    ended = device.poll()
    assert ended is not None
    assert ended.kind is Kind.ROUTER
    assert (device.poll(), device.now()) == (None, 5)


@pytest.mark.parametrize(
    ("answers", "reported"),
    [
        (ROUTERS, [[(3, 2), (4, 4), (Kind.COPY, 5), (Kind.ROUTER, 9)]]),
        (COPIES, [[(3, 2), (4, 4), (Kind.COPY, 5)], [(Kind.ROUTER, 9)]]),
        (ALL, [[(3, 2)], [(4, 4)], [(Kind.COPY, 5)], [(Kind.ROUTER, 9)]]),
    ],
)
def test_what_nobody_answers_is_reported_with_what_is_answered_and_at_its_time(
    answers: int, reported: list[list[tuple[int, int]]]
) -> None:
    device = SimpyDevice(FixedTiming(5, 2, 0, 0, 0), Link(0, 1, 1, expert_bytes=5))
    device.experts([(3, 0, 1), (4, 1, 1)])
    device.dense(0, 1, 1)
    device.copy(7, 2, 0, 5)
    for ended in reported:
        numbers = iter(device.completions(answers))
        shown = [
            (code >> 4 if code & 15 == Kind.EXPERT else code & 15, at)
            for code, at in zip(numbers, numbers, strict=True)
        ]
        assert shown == ended
        assert device.now() == ended[-1][1]


@pytest.mark.parametrize(
    "policy",
    [
        *("eamc", "lru+eamc", "lfu", "fifo", "belady+oracle1", "lru+popular:n=8"),
        *("lru+popular:n=8@layer", "eamc@layer", "multi-criteria+oracle1@layer"),
        *("lru+gate", "lru+markov:n=8:threshold=0.1:budget=2"),
    ],
)
@pytest.mark.parametrize(("chunks", "cold", "predictor_ns"), [(1, False, 0), (3, True, 0), (3, False, 30_000)])
def test_the_engines_are_equal_on_profiles_prefills_and_real_policies(
    policy: str, chunks: int, cold: bool, predictor_ns: int
) -> None:
    profile = replace(model("olmoe-1b-7b").cut(6), experts=16, top_k=4)
    machine = hardware("rtx4090")
    trace = synthetic(requests=6, tokens=12, layers=6, experts=16, top_k=4, seed=7, prompt_tokens=9)
    trace = with_lookahead(trace, np.roll(trace.experts, 1, axis=0))
    timing = Roofline(machine, profile, predictor_ns)
    link = host_link(machine, profile, -(-profile.expert_bytes // chunks))
    window = experts_per_layer(timing, link, layers=6, top_k=4)
    run = gpu_run(Requests(trace), Shape(6, 16), 30, parse(policy), timing, link, cold, window)
    ours = simulate(run)
    assert_logs_equal(whole(compiled_engine.play, run), ours)
    assert ours.misses.sum() > 0
    assert (ours.step_ns == ours.compute_busy_ns + ours.stall_ns.sum(axis=1)).all()


@pytest.mark.parametrize("steps", [(), (0,), (0, 0, 2, 0)])
def test_requests_without_steps_leave_nothing_behind(steps: tuple[int, ...]) -> None:
    requests = [case_request(ordinal, [[[[0, 1]]]] * length, 4) for ordinal, length in enumerate(steps)]
    timing, link = FixedTiming(5, 1, 0, 0, 0), Link(0, 1, 1, expert_bytes=5)
    run = gpu_run(requests, Shape(1, 4), 2, parse("lru"), timing, link, cold=True)
    log = simulate(run)
    assert_logs_equal(whole(compiled_engine.play, run), log)
    assert log.request.tolist() == [2] * sum(steps)
    assert log.step_ns.tolist() == [11, 6][: sum(steps)]


def live(run: Run, device: Device, between: Callable[[Session], None] = lambda session: None) -> RunLog:
    """Run a run as a model that runs now: it has the routing of a layer once that layer's router has ended.

    between: what it does before each submission.
    """
    session, layers = Session(run, device), run.shape.layers
    rows: list[StepRow] = []
    latest = max(ordinal for ordinal, request in enumerate(run.requests) if len(request.phase))
    for ordinal, request in enumerate(run.requests):
        session.decider.begin_request(ordinal)
        for number, (phase, tokens) in enumerate(zip(request.phase.tolist(), request.tokens.tolist(), strict=True)):
            before, began = session.totals(), session.begin_step()
            known, first = request.token_ids, int(request.tokens[:number].sum())
            ids = NO_INTS if known is None else known[first : first + tokens]
            step = LiveStep(phase, number, len(rows) * layers, ids)
            for layer in range(layers):
                session.submitting(Kind.ROUTER)
                device.dense(layer, tokens, int(request.context[number]))
                if layer == 0:
                    session.start(step)
                session.until(Kind.ROUTER)
                chosen = slice(*request.offsets[number * layers + layer :][:2])
                tokens_of = np.zeros((1, run.shape.experts), np.int64)
                tokens_of[0, request.experts[chosen] - layer * run.shape.experts] = request.counts[chosen]
                step.put(layer, tokens_of)
                session.route(step, layer)
                between(session)
                session.finish_event()
                between(session)
                session.submitting(Kind.COMBINE)
                device.combine(layer, tokens, int(request.context[number]))
            session.submitting(Kind.HEAD)
            device.head(tokens)
            session.until(Kind.HEAD)
            ended = session.clock
            if number == len(request.phase) - 1:
                session.decider.end_request()
                session.end_request(run.cold and ordinal < latest)
            spent = [now - then for now, then in zip(session.totals(), before, strict=True)]
            share = Share(request.request, tokens, ended - began)
            rows.append(StepRow([phase, tokens, ended - began, *spent], [share], ended))
    link = run.gpu.link
    return RunLog.of_rows(rows, link.expert_bytes, session.evicted()[0], sized=bool(link.layer_bytes))


def test_a_model_that_runs_now_gets_what_the_driver_gets_from_its_trace() -> None:
    for seed in range(200):
        run = draw(random.Random(seed).randint)
        pulled = play(run, SimpyDevice.of(run))
        assert_logs_equal(live(run, SimpyDevice.of(run)), pulled, seed)


def test_looking_at_what_has_ended_takes_no_time_and_loses_nothing() -> None:
    for seed in range(100):
        run = draw(random.Random(seed).randint)
        watch = Watch.of(run, tail_bytes=seed % 2 * (1 + seed % 5))
        log = live(run, AnyOrder(watch, seed), between=Session.poll)
        lookups = sum(len(request.experts) for request in run.requests)
        assert watch.computed == lookups == (log.hits + log.late + log.misses).sum(), f"seed {seed}"
        assert log.demand_transfers.sum() == log.misses.sum()


def test_what_was_not_put_is_not_routed() -> None:
    step = LiveStep(phase=1, number=0, events=0)
    step.put(0, np.array([[0, 0, 1]]))
    with pytest.raises(AssertionError, match="before it is routed"):
        step.chosen(1)
