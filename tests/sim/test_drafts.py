"""Drafted tokens and prompts in chunks (rule 20): both engines against the oracle and each other, and closed forms."""

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from policies.core.policy import Int, Shape
from policies.core.spec import parse
from replay import replay
from sim import simulate as simulate_trace
from sim.engines import cases, compiled_engine, simpy_engine
from sim.experiment import Experiment
from sim.keywords import RunKeywords
from sim.loaded import TimedRun
from sim.loop.log import RunLog
from sim.loop.requests import Requests
from sim.loop.run import Users, gpu_run
from sim.profiles.hardware_profile import hardware
from sim.profiles.roofline import Roofline
from sim.profiles.timing import FixedTiming, Link
from tests.support.ahead import with_lookahead
from tests.support.logs import assert_logs_equal
from tests.support.reference_cases import play
from tests.support.reference_drafts import draw_drafts_case, run_case
from tests.support.runs import FETCHERS, KEEPERS, recorded_with
from traces import InputError, Trace, demo_trace
from traces.drafts import Drafts
from traces.models.profile import model
from traces.shards import Shards
from traces.steps import RequestSteps
from traces.writer import write_trace

CASES = int(os.environ.get("MOE_FUZZ_CASES", "400"))
BATCHES = 8

TIMING = FixedTiming(dense=1_000, expert=300, expert_per_token=20, combine=50, head=700)
LINK = Link(latency_ns=100, ns_per_byte_num=1, ns_per_byte_den=4, expert_bytes=40_000)
L, E, K = 3, 8, 2


@pytest.mark.parametrize("batch", range(BATCHES))
def test_both_engines_equal_the_oracle_on_seeded_random_cases(batch: int) -> None:
    for seed in range(batch, CASES, BATCHES):
        case = draw_drafts_case(random.Random(seed).randint)
        expected = run_case(case)
        for engine in cases.ENGINES:
            assert play(case, engine) == expected, f"{engine}: draw_drafts_case(random.Random({seed}).randint)"


@pytest.mark.parametrize("batch", range(BATCHES))
def test_the_engines_are_equal_in_every_column_under_every_policy(batch: int) -> None:
    """With ids of tokens, likely acceptance, chunks, times that differ by step, and batches."""
    for seed in range(batch, CASES // 4, BATCHES):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(1, 9, rng.integers(1, 5))
        chosen = [rng.random((n, L, E)).argsort(axis=-1)[:, :, :K] for n in lengths]
        ids = [rng.integers(-1, 5, n) for n in lengths]
        trace = Trace.from_arrays(chosen, E, rng.integers(0, lengths + 1).tolist(), token_ids=ids)
        trace = with_lookahead(trace, rng.permutation(trace.experts, axis=0))
        drafts = Drafts(int(rng.integers(1, 5)), float(rng.random()), seed)
        requests = Requests(trace.in_steps(int(rng.integers(1, 5)), drafts), lambda context: 7 * context)
        policy = f"{rng.choice(KEEPERS)}+{rng.choice(FETCHERS)}"
        batches = Users(int(rng.integers(1, 4))) if rng.integers(2) else None
        slots = int(rng.integers(1, L * E + 1))
        run = gpu_run(requests, Shape(L, E), slots, parse(policy), TIMING, LINK, experts_per_layer=1.0, users=batches)
        assert_logs_equal(compiled_engine.simulate(run), simpy_engine.simulate(run), f"seed {seed}: {policy}")


def rejected(steps: RequestSteps) -> Int:
    """Return the rejected tokens of each step, and require that something was drafted."""
    assert steps.rejected is not None
    return steps.rejected


def random_trace(tokens: int = 60, prompt: int = 0, seed: int = 0) -> Trace:
    rng = np.random.default_rng(seed)
    return Trace.from_arrays([rng.random((tokens, L, E)).argsort(axis=-1)[:, :, :K] for _ in range(2)], E, prompt)


def simulated(trace: Trace, slots: int = L * E, policy: str = "lru", draft_ns: int = 0) -> RunLog:
    requests = Requests(trace, lambda context: draft_ns)
    return compiled_engine.simulate(gpu_run(requests, Shape(L, E), slots, parse(policy), TIMING, LINK))


@pytest.mark.parametrize("slots", [2, 9, L * E])
def test_drafts_of_no_length_are_todays_run_in_every_column(slots: int) -> None:
    trace = random_trace(prompt=9)
    assert_logs_equal(simulated(trace.in_steps(drafts=Drafts(0, 0.5)), slots), simulated(trace, slots))


def test_a_chunk_of_the_whole_prompt_is_todays_run_in_every_column() -> None:
    trace = random_trace(prompt=9)
    assert_logs_equal(simulated(trace.in_steps(prefill_chunk=9), 9), simulated(trace, 9))


def test_a_cache_of_all_experts_reduces_a_step_to_its_compute() -> None:
    """Rule 11 for the union of 1 + 4 tokens, behind four drafts; each expert by its tokens."""
    trace = random_trace(400).in_steps(drafts=Drafts(4, (2, 0, 4)))
    log, steps = simulated(trace, draft_ns=11), [trace.steps(0), trace.steps(1)]
    experts = np.concatenate([np.diff(each.offsets).reshape(-1, L).sum(axis=1) for each in steps])
    tokens, drafted = (np.concatenate([getattr(each, name) for each in steps]) for name in ("tokens", "drafted"))
    computing = L * (1_000 + 50) + 700 + 300 * experts + 20 * tokens * L * K + 11 * drafted
    ready = log.misses == 0
    assert ready[20:].all()
    assert (log.step_ns == computing)[ready].all()
    assert (log.compute_busy_ns == computing).all()


@pytest.mark.parametrize("length", [1, 3, 8])
def test_all_ready_an_acceptance_of_none_is_never_faster_than_no_draft(length: int) -> None:
    """Steps are as many, and each computes what it did and more."""
    trace = random_trace()
    plain, drafted = simulated(trace), simulated(trace.in_steps(drafts=Drafts(length, 0.0)))
    ready = (plain.misses == 0) & (drafted.misses == 0)
    assert ready.sum() > 100
    assert (drafted.step_ns >= plain.step_ns)[ready].all()
    assert len(drafted.step_ns) == len(plain.step_ns)


def test_an_acceptance_of_none_is_not_faster_on_the_shipped_trace() -> None:
    """No theorem where experts move: what rejected tokens bring is no prefetch of what is needed next."""
    for policy in ("lru", "lfu", "belady", "eamc-blend+none"):
        for size in ("10%", "25%", "50%", "90%"):
            runs = [simulate_trace(demo_trace(), policy, size, requests=6, draft=n, acceptance=0) for n in (0, 1, 4)]
            speeds = [run.row["tokens_per_s"] for run in runs]
            assert speeds[0] >= max(speeds[1:]), (policy, size, speeds)


def test_when_all_is_accepted_steps_are_the_tokens_of_the_trace_in_turn() -> None:
    steps = random_trace(10).in_steps(drafts=Drafts(3, 1.0)).steps(0)
    assert steps.tokens.tolist() == [4, 4, 2]
    assert steps.context.tolist() == [4, 8, 10]
    assert not rejected(steps).any()
    assert steps.counts.sum() == 10 * L * K


def test_a_rejected_token_is_routed_as_the_one_half_a_request_away() -> None:
    alone = random_trace(10)
    single, steps = alone.steps(0), alone.in_steps(drafts=Drafts(2, (1, 0))).steps(0)
    assert (steps.tokens - rejected(steps)).tolist() == [2, 1, 2, 1, 2, 1, 1]
    taken = [[0, 1, 2 + 5], [2, 3 + 5, 4 + 5], [3, 4, 5 + 5 - 10]]
    for step, tokens in enumerate(taken):
        expected = np.unique(np.concatenate([single.experts[t * L * K : (t + 1) * L * K] for t in tokens]))
        assert steps.experts[steps.offsets[step * L] : steps.offsets[(step + 1) * L]].tolist() == expected.tolist()


RECORDED = [*[0] * 3, 3, -1, -1, 2, 0, 4, -1, -1, -1]
"""Of 3 tokens of a prompt and 9 decoded ones: passes of 1 + 3, 1 + 2, 1 and, at the end, 1 + 4."""


def recorded_trace() -> Trace:
    return replace(random_trace(12, prompt=3), drafted=np.array(2 * RECORDED, np.int16))


@pytest.mark.parametrize(
    ("length", "tokens", "kept"),
    [(9, [4, 3, 1, 4], [3, 1, 1, 4]), (4, [4, 3, 1, 4], [3, 1, 1, 4]), (2, [3, 3, 1, 3, 1], [3, 1, 1, 3, 1])],
)
def test_a_trace_states_its_own_drafts_in_memory_and_on_disk(
    length: int, tokens: list[int], kept: list[int], tmp_path: Path
) -> None:
    """The last pass drafted more than the request has tokens; of steps that are shorter, a pass is several."""
    write_trace(recorded_trace(), tmp_path / "t")
    own = Drafts(length, None)
    for trace in (recorded_trace(), Shards.open(tmp_path / "t"), Trace.read(tmp_path / "t", ["drafted"])):
        steps = trace.in_steps(drafts=own).steps(1)
        assert steps.tokens[1:].tolist() == tokens
        assert (steps.tokens - rejected(steps))[1:].tolist() == kept


def test_a_trace_recorded_with_drafts_runs_as_with_the_lengths_that_it_states(tmp_path: Path) -> None:
    write_trace(recorded_with(Drafts(2, (1, 0, 2)), Trace.read(demo_trace(), ["token_id"]).head(3)), tmp_path / "t")
    stated = simulate_trace(demo_trace(), "lru", "25%", requests=3, draft=2, acceptance=[1, 0, 2])
    run = simulate_trace(tmp_path / "t", "lru", "25%", draft=2)
    assert run.row["acceptance"] == "recorded"
    pd.testing.assert_frame_equal(run.steps, stated.steps)
    assert run.row["tpot_mean_ms"] == stated.row["tpot_mean_ms"]


def test_a_likely_acceptance_is_met_and_grows_step_by_step_with_it() -> None:
    trace, before = random_trace(4_000), 10**9
    for likely in (0.0, 0.3, 0.7, 1.0):
        steps = trace.in_steps(drafts=Drafts(1, likely, seed=3)).steps(0)
        assert 1 - rejected(steps).sum() / (steps.tokens - 1).sum() == pytest.approx(likely, abs=0.03)
        assert len(steps.phase) < before
        before = len(steps.phase)
    again = trace.in_steps(drafts=Drafts(1, 0.3, seed=3)).steps(0)
    other = trace.in_steps(drafts=Drafts(1, 0.3, seed=4)).steps(0)
    assert not np.array_equal(rejected(again), rejected(other))


def test_rejected_tokens_count_neither_as_tokens_nor_as_their_time() -> None:
    """A step's time belongs in equal parts to what it decodes."""
    plain = simulate_trace(demo_trace(), "lru", "25%", requests=3)
    run = simulate_trace(demo_trace(), "lru", "25%", requests=3, draft=2, acceptance=[1, 0, 2])
    assert run.row["tokens"] == plain.row["tokens"]
    assert run.row["acceptance"] == "1,0,2"
    decoded = run.steps[run.steps["phase"] == "decode"]
    answers = run.row["tokens"] - run.steps[run.steps["phase"] == "prefill"]["tokens"].sum()
    assert run.row["tpot_mean_ms"] == pytest.approx(decoded["step_ms"].sum() / answers)
    assert run.row["tokens_per_s"] == pytest.approx(1e3 * answers / run.steps["step_ms"].sum())


@pytest.mark.parametrize("users", [None, 1, 2])
def test_a_prompt_in_chunks_has_its_first_token_after_the_last(users: int | None) -> None:
    whole = simulate_trace(demo_trace(), "lru", "50%", requests=3)
    run = simulate_trace(demo_trace(), "lru", "50%", requests=3, prefill_chunk=16, max_batch=users)
    prefills = run.steps[run.steps["phase"] == "prefill"]
    assert run.row["tokens"] == whole.row["tokens"]
    assert prefills["tokens"].max() == 16
    if users == 2:  # the chunks behind the first one run beside what others decode
        assert (run.steps["requests"] == 2).any()
        assert run.requests["ttft_ms"].gt(prefills["step_ms"].min()).all()
    else:
        assert run.requests["ttft_ms"].sum() == pytest.approx(prefills["step_ms"].sum())
        assert run.row["ttft_mean_ms"] == pytest.approx(prefills["step_ms"].sum() / 3)


def test_a_draft_takes_its_time_for_each_of_its_tokens() -> None:
    """As stated, or as the model that drafts takes for a token at that context."""
    options: dict[str, Any] = {"requests": 2, "draft": 2, "acceptance": [1]}
    free = simulate_trace(demo_trace(), "lru", "100%", **options)
    stated = simulate_trace(demo_trace(), "lru", "100%", **options, draft_us=500)
    of_model = simulate_trace(demo_trace(), "lru", "100%", **options, draft_model="olmoe-1b-7b")
    steps = [TimedRun.of(Experiment.of({"trace": str(demo_trace()), **options})).requests[i] for i in (0, 1)]
    drafted = np.concatenate([each.drafted for each in steps])
    context = np.concatenate([each.context for each in steps])
    compute = [run.steps["compute_busy_ms"].to_numpy() for run in (free, stated, of_model)]
    assert compute[1] - compute[0] == pytest.approx(0.5 * drafted)
    roofline = Roofline(hardware("a5000"), model("olmoe-1b-7b"))
    token_ms = np.array([roofline.token_ns(int(each)) for each in context]) / 1e6
    assert compute[2] - compute[0] == pytest.approx(token_ms * drafted)


def test_the_virtual_device_replays_drafts_and_others_refuse_them() -> None:
    options: RunKeywords = {"requests": 1, "draft": 2, "acceptance": 0.5}
    run = replay(demo_trace(), "lru", "25%", device="virtual", **options)
    assert run.row["tokens_per_s"] == simulate_trace(demo_trace(), "lru", "25%", **options).row["tokens_per_s"]
    with pytest.raises(InputError, match="`draft` runs on the virtual device alone"):
        replay(demo_trace(), "lru", "25%", device="cpu", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft": 2}, "`draft` needs `acceptance`, as in 0.7: .* was recorded without drafts"),
        ({"draft": 2, "acceptance": "1,x"}, "invalid `acceptance` '1,x': use 0.7, or 2,0,1"),
        ({"draft": 2, "acceptance": 1.5}, "acceptance"),
        ({"draft": 2, "acceptance": 1, "draft_us": 1, "draft_model": "olmoe"}, "leave one out"),
        ({"draft": 2, "acceptance": 1, "draft_us": 1, "untimed": True}, "`untimed` counts without a clock"),
    ],
)
def test_options_that_contradict_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        simulate_trace(demo_trace(), "lru", "25%", requests=1, **options)
