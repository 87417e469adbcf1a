"""Lookahead in a trace reaches a prefetcher when it is known and no earlier: in recordings, and in arrays by hand."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from policies.core.policy import Shape
from policies.core.spec import parse
from sim.engines.simpy_engine import simulate
from sim.loop.run import gpu_run
from sim.profiles.timing import FixedTiming, Link
from tests.support.ahead import with_lookahead
from tests.support.command import moe_sim
from tests.support.logs import assert_logs_equal
from tests.support.routings import proposals
from tests.support.strategies import traces
from tests.support.tiny import SIZES
from traces import DECODE, PREFILL, Trace
from traces.reader import RUN
from traces.synthetic import synthetic
from traces.writer import write_trace


def slowly(trace, distance):
    """What rows would choose in the next layers: scores by distance, from the columns of the trace."""
    L, E = trace.layers, trace.num_experts
    found = {}
    for r in range(len(trace.requests)):
        rows = range(int(trace.offsets[r]), int(trace.offsets[r + 1]))
        prompt = [row for row in rows if trace.phase[row] == PREFILL]
        steps = ([prompt] if prompt else []) + [[row] for row in rows if trace.phase[row] == DECODE]
        for step, tokens in enumerate(steps):
            for layer in range(L):
                picks = Counter[int]()
                for place, far in enumerate(trace.meta.lookahead.distances):
                    for row in tokens if layer + far < L and far <= distance else ():
                        at = row, layer + far, place
                        picked = zip(trace.lookahead[at], trace.lookahead_scores[at], strict=True)
                        for e, score in list(picked)[: trace.top_k]:
                            if e != trace.sentinel:
                                picks[(layer + far) * E + int(e)] += float(score) / far
                found[r, step, layer] = pytest.approx(dict(picks))
    return found


@settings(max_examples=60, deadline=None)
@given(traces().filter(lambda trace: trace.lookahead is not None))
def test_the_gate_proposes_the_picks_for_the_next_layers_by_their_scores(trace):
    requests = [trace.steps(i) for i in range(len(trace.requests))]
    for request in requests:
        offsets = request.lookahead.offsets
        for first, last in pairwise(offsets):
            assert (np.diff(request.lookahead.experts[first:last]) > 0).all(), "distinct ids, ascending"
    for distance in (1, 2):
        found = proposals(requests, Shape(trace.layers, trace.num_experts), f"lru+gate:distance={distance}")
        assert found == slowly(trace, distance)


def by_hand():
    """One request, 3 layers of 4 experts: two prompt tokens, then two decoded ones."""
    made = synthetic(requests=1, tokens=2, layers=3, experts=4, top_k=2, seed=0, prompt_tokens=2)
    nothing = [made.sentinel] * 2
    picks = [
        [nothing, [0, 1], [2, 3]],
        [nothing, [1, 2], [3, 2]],
        [nothing, [3, 0], [1, 0]],
        [nothing, [2, 0], nothing],
    ]
    return with_lookahead(made, np.array(picks, made.experts.dtype))  # the scores of two picks: 1/2 and 1/4


def test_picks_made_by_hand():
    trace = by_hand()
    found = proposals([trace.steps(0)], Shape(3, 4), "lru+gate")
    assert found[0, 0, 0] == {4: 0.5, 5: 0.75, 6: 0.25}, "two tokens of the prompt pick expert 1"
    assert found[0, 0, 1] == {10: 0.75, 11: 0.75}
    assert found[0, 1, 0] == {4: 0.25, 7: 0.5}
    assert found[0, 1, 1] == {8: 0.25, 9: 0.5}
    assert found[0, 2, 0] == {4: 0.25, 6: 0.5}
    sure = proposals([trace.steps(0)], Shape(3, 4), "lru+gate:threshold=0.5")
    assert (sure[0, 1, 0], sure[0, 0, 0]) == ({7: 0.5}, {4: 0.5, 5: 0.75})
    assert found[0, 2, 1] == {}, "nothing was picked"
    assert found[0, 0, 2] == found[0, 1, 2] == found[0, 2, 2] == {}, "the last layer"


def test_a_prefill_played_token_by_token_takes_its_picks_with_it():
    trace = by_hand().as_decode()
    found = proposals([trace.steps(0)], Shape(3, 4), "lru+gate")
    assert [found[0, step, 0] for step in (0, 1)] == [{4: 0.5, 5: 0.25}, {5: 0.5, 6: 0.25}]


TIMING = FixedTiming(dense=400, expert=90, expert_per_token=10, combine=100, head=50)
LINK = Link(latency_ns=10, ns_per_byte_num=1, ns_per_byte_den=1, expert_bytes=290)


def test_a_gate_that_is_always_right_plays_as_the_oracle_of_the_next_layer():
    trace = synthetic(requests=4, tokens=15, layers=4, experts=8, top_k=2, seed=5)
    right = with_lookahead(trace, trace.experts)
    right = replace(right, lookahead_scores=np.ones_like(right.lookahead_scores))

    def run(policy, played):
        requests = [played.steps(i) for i in range(4)]
        return simulate(gpu_run(requests, Shape(4, 8), 12, parse(policy), TIMING, LINK))

    known, foreseen, blind = run("lru+gate", right), run("lru+oracle1", trace), run("lru", trace)
    assert_logs_equal(known, foreseen)
    assert known.step_ns.sum() < blind.step_ns.sum()


def test_a_request_without_lookahead_is_not_played_as_if_nothing_were_picked():
    requests = [synthetic(1, tokens=1, layers=2, experts=4, top_k=1, seed=0).steps(0)]
    with pytest.raises(ValueError, match="gate needs the trace's lookahead"):
        proposals(requests, Shape(2, 4), "lru+gate")
    assert proposals(requests, Shape(2, 4), "lru+popular")


def test_a_trace_without_the_column_is_refused_in_one_line_before_anything_runs(tmp_path):
    trace = by_hand()
    trace = replace(trace, meta=replace(trace.meta, **SIZES))
    write_trace(replace(trace, lookahead=None, lookahead_scores=None), tmp_path / "plain")
    write_trace(trace, tmp_path / "ahead")
    arguments = ("--policies", "lru,lru+gate", "--cache-sizes", "6", "--workers", "1", "--out", "out", "--overwrite")
    done = moe_sim("sweep", "plain", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    told = "lru+gate: the trace plain has no lookahead column; record it with `moe-trace record --lookahead`"
    assert told in done.stderr
    assert not (tmp_path / "out").exists()
    done = moe_sim("sweep", "plain", *arguments, "--untimed", cwd=tmp_path)
    assert done.returncode == 0, "untimed nothing is prefetched"
    done = moe_sim("sweep", "ahead", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_of_a_recorded_model_the_gate_proposes_what_its_next_router_gives_for_this_layers_input(tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tests.support.architectures import tiny
    from tracer.prompts import Prompt
    from tracer.record import Options, record

    loaded = tiny("mixtral")
    prompts = [Prompt(f"p{i}", "", "", (text,)) for i, text in enumerate(("What is a heron?", "Hi"))]
    record(loaded, prompts, tmp_path / "t", Options(max_new_tokens=6, lookahead="1"))
    trace = Trace.read(tmp_path / "t", RUN)
    assert trace.token_id is not None
    L, E, k = trace.layers, trace.num_experts, trace.top_k
    found = proposals([trace.steps(r) for r in range(2)], Shape(L, E), "lru+gate")
    blocks = [layer.mlp for layer in loaded.model.model.layers]
    compared = differs = 0
    for r in range(2):
        rows = slice(int(trace.offsets[r]), int(trace.offsets[r + 1]))
        entered: list[Any] = []
        hooks = [
            block.register_forward_pre_hook(lambda _, args, entered=entered: entered.append(args[0][0]))
            for block in blocks
        ]
        with torch.inference_mode():
            loaded.model(input_ids=torch.tensor(trace.token_id[rows][None].astype(np.int64)))
        for hook in hooks:
            hook.remove()
        prompt = int(np.count_nonzero(trace.phase[rows] == PREFILL))
        for layer in range(L - 1):
            picked = torch.topk(entered[layer] @ blocks[layer + 1].gate.weight.detach().T, k).indices.numpy()
            picked = picked + (layer + 1) * E
            assert set(found[r, 0, layer]) == set(picked[:prompt].ravel().tolist())
            for step, own in enumerate(picked[prompt:], start=1):
                assert set(found[r, step, layer]) == set(own.tolist())
                chosen = trace.experts[rows][prompt + step - 1, layer + 1].astype(int) + (layer + 1) * E
                differs += set(own.tolist()) != set(chosen.tolist())
                compared += 1
    assert compared > 10
    assert differs, "the picks are not simply what was chosen"
