"""What a trace answers about itself."""

import numpy as np
import pytest
from hypothesis import given, settings

from tests.support.strategies import traces
from traces import DECODE, PREFILL, InputError, Trace, demo_trace
from traces.synthetic import synthetic


@settings(max_examples=40, deadline=None)
@given(traces())
def test_eams_count_the_tokens_that_chose_each_expert(trace: Trace) -> None:
    for phase in (PREFILL, DECODE):
        slow = np.zeros((len(trace.requests), trace.layers, trace.num_experts), np.int64)
        for r in range(len(trace.requests)):
            for t in range(trace.offsets[r], trace.offsets[r + 1]):
                for layer in range(trace.layers):
                    for e in trace.experts[t, layer].tolist():
                        if trace.phase[t] == phase and e != trace.sentinel:
                            slow[r, layer, e] += 1
        np.testing.assert_array_equal(trace.eams(phase), slow)


@settings(max_examples=40, deadline=None)
@given(traces())
def test_steps_play_every_routed_choice_once(trace: Trace) -> None:
    for r in range(len(trace.requests)):
        steps = trace.steps(r)
        rows = slice(int(trace.offsets[r]), int(trace.offsets[r + 1]))
        assert steps.tokens.sum() == rows.stop - rows.start
        assert steps.counts.sum() == np.count_nonzero(trace.experts[rows] != trace.sentinel)
        assert len(steps.offsets) == len(steps.tokens) * trace.layers + 1
        decode = steps.phase == DECODE
        assert steps.context[decode].tolist() == (trace.position[rows][trace.phase[rows] == DECODE] + 1).tolist()


def test_a_prefill_is_one_step_and_each_decoded_token_another() -> None:
    steps = synthetic(2, 5, 3, 8, 2, seed=1, prompt_tokens=4).steps(1)
    assert steps.phase.tolist() == [PREFILL] + [DECODE] * 5
    assert steps.tokens.tolist() == [4, 1, 1, 1, 1, 1]
    assert steps.context.tolist() == [4, 5, 6, 7, 8, 9]


def test_a_prefill_can_be_played_as_decode_and_is_named_so() -> None:
    trace = synthetic(2, 5, 3, 8, 2, seed=1, prompt_tokens=4).as_decode()
    assert trace.name == "synthetic (prefill as decode)"
    assert trace.phases == "decode"
    assert trace.steps(0).tokens.tolist() == [1] * 9
    assert trace.steps(0).context.tolist() == list(range(1, 10))


def test_a_trace_without_prefill_cannot_be_played_as_decode() -> None:
    with pytest.raises(InputError, match="holds no prefill"):
        synthetic(2, 5, 3, 8, 2, seed=1).as_decode()


def test_without_its_prompts_a_trace_decodes_the_same_tokens_in_the_same_context() -> None:
    trace = synthetic(2, 5, 3, 8, 2, seed=1, prompt_tokens=4)
    decoded, steps = trace.without_prompts(), trace.steps(1)
    assert (decoded.name, decoded.phases) == ("synthetic (decode only)", "decode")
    alone = decoded.steps(1)
    assert alone.experts.tolist() == steps.experts[steps.offsets[3] :].tolist()
    assert alone.context.tolist() == steps.context[1:].tolist() == list(range(5, 10))


def test_head_keeps_the_first_requests_and_says_how_many_there_are() -> None:
    trace = synthetic(3, 5, 3, 8, 2, seed=1)
    assert len(trace.head(2).experts) == 10
    np.testing.assert_array_equal(trace.head(2).eams(DECODE), trace.eams(DECODE)[:2])
    with pytest.raises(InputError, match="holds 3 requests"):
        trace.head(4)


def test_synthetic_traces_are_reproducible_and_differ_by_seed() -> None:
    a, b, c = (synthetic(3, 5, 3, 8, 2, seed=s) for s in (1, 1, 2))
    assert np.array_equal(a.experts, b.experts)
    assert not np.array_equal(a.experts, c.experts)


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.uint64])
def test_ids_of_any_integer_type_are_those_of_a_trace_of_more_experts(kind: type[np.integer]) -> None:
    ids = np.array([[[3, 1], [2, 0]]], kind)
    if ids.dtype.kind == "i":
        ids[0, 0, 1] = -1
    trace = Trace.from_arrays([ids], 300)
    assert trace.experts.dtype == np.uint16
    assert np.array_equal(np.where(trace.experts == 65_535, -1, trace.experts.astype(int)), ids.astype(int))


def test_an_unknown_column_is_refused_with_near_names() -> None:
    with pytest.raises(InputError, match="did you mean weights"):
        Trace.read(demo_trace(), ["weight"])


def test_the_shipped_trace_is_valid_small_and_of_eight_tasks() -> None:
    trace = Trace.read(demo_trace())
    assert trace.phases == "both"
    assert (len(trace.requests), trace.layers, trace.num_experts, trace.top_k) == (64, 10, 32, 4)
    assert trace.requests["task"].nunique() == 8
    assert sum(file.stat().st_size for file in demo_trace().rglob("*.parquet")) < 2 * 2**20
