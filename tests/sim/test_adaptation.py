"""Shifts against closed forms, an LRU by hand, and the definition read aloud."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.core import parse
from sim.analysis import Adaptation, Protocol, adapt
from sim.analysis.adaptation import ACROSS, WITHIN, Shift, measured, plan, requests_needed, summary
from sim.experiment import Experiment
from sim.loaded import load
from sim.sweeps import Grid
from traces import InputError, Trace, write_trace
from traces.synthetic import synthetic

LAYERS, EXPERTS, TOP_K, TOKENS = 2, 8, 2, 20
DEMAND = LAYERS * TOP_K


def constant(groups: dict[str, int], experts: dict[str, int], datasets: dict[str, str] | None = None) -> Trace:
    """Group g has groups[g] requests, interleaved; in each layer all its tokens choose experts[g] and the next."""
    tasks = [name for _, name in sorted((i, name) for name, size in groups.items() for i in range(size))]
    trace = synthetic(len(tasks), TOKENS, LAYERS, EXPERTS, TOP_K, seed=0)
    chosen = np.repeat([experts[name] for name in tasks], TOKENS)[:, None, None] + np.arange(TOP_K)
    ids = np.broadcast_to(chosen, trace.experts.shape).astype(trace.experts.dtype)
    dataset = [(datasets or {}).get(name, "tests") for name in tasks]
    return replace(trace, experts=ids, requests=trace.requests.assign(task=tasks, dataset=dataset))


def loaded(trace: Trace, folder):
    write_trace(trace, folder / "trace")
    return load(Experiment(trace=folder / "trace", untimed=True))


def measure(here, policies: str, slots: int, protocol: Protocol, **options) -> Adaptation:
    grid = Grid(tuple(map(parse, policies.split(","))), {f"{slots}": slots})
    return adapt(here, grid, plan(here.whole, protocol), **options)


@pytest.fixture(scope="module")
def disjoint(tmp_path_factory):
    """Two groups that have no expert in common."""
    return loaded(constant({"a": 12, "b": 12}, {"a": 0, "b": 4}), tmp_path_factory.mktemp("disjoint"))


@pytest.fixture(scope="module")
def routed(tmp_path_factory):
    """Routing with topics, labelled by them, in two datasets."""
    trace = synthetic(60, 5, LAYERS, EXPERTS, TOP_K, seed=4)
    dataset = [f"of-{int(task[-1]) % 2}" for task in trace.requests["task"]]
    return loaded(replace(trace, requests=trace.requests.assign(dataset=dataset)), tmp_path_factory.mktemp("routed"))


SMALL = Protocol("task", warmup=2, after=3, window=2, pairs=99)


def differences(row):
    return np.subtract(row["hit_rates"], row["undisturbed_hit_rates"])


# The definition


def read_aloud(differences, window):
    for i in range(len(differences)):
        following = differences[i : i + window]
        if len(following) == window and sum(following) >= -window / 100:
            return i
    return None


@given(st.lists(st.integers(-12, 6), min_size=1, max_size=12), st.integers(1, 12))
def test_requests_needed_are_those_before_the_first_whole_window_within_one_point(eighths, window):
    """In eighths of a point, each a little less: no mean is at one point exactly, where rounding would decide."""
    differences = [eighth / 800 - 1e-9 for eighth in eighths]
    window = min(window, len(eighths))
    assert requests_needed(np.array(differences), window) == read_aloud(differences, window)


# Closed forms


@pytest.mark.parametrize(("window", "needed"), [(1, 1), (4, 1), (6, 0)])
def test_lru_needs_at_most_one_request_where_one_token_fills_the_cache(disjoint, window, needed):
    """The first token after the shift misses all it asks for, nothing else ever does: d = -1/TOKENS, 0, 0, ...

    Its mean over w requests is -1 / (20 w), within one point from w = 5 on.
    """
    found = measure(disjoint, "lru", DEMAND, Protocol("task", 3, 8, window))
    assert len(found.rows) == 2
    for one in found.rows:
        assert differences(one) == pytest.approx([-1 / TOKENS] + [0] * 7)
        assert one["undisturbed_hit_rates"] == pytest.approx(np.ones(8))
        assert one["requests_needed"] == needed


@pytest.mark.parametrize("warmup", [1, 3])
def test_a_policy_that_never_forgets_needs_the_warm_up_again(disjoint, warmup):
    """Perfect LFU, room for one token's experts: each of the old ones has W T uses, and a new one none.

    What a new expert evicts is another new one, so all miss, until in the token that gives them W T uses too the old
    ones are the longer unused: after W requests all is well at once.
    """
    for window in (1, 4):
        found = measure(disjoint, "lfu-perfect", DEMAND, Protocol("task", warmup, 8, window))
        assert len(found.rows) == 2
        for one in found.rows:
            assert differences(one) == pytest.approx([-1.0] * warmup + [0.0] * (8 - warmup))
            assert one["requests_needed"] == warmup


def test_a_static_policy_never_adapts_and_is_censored(tmp_path):
    """A profile that knows one group keeps it for good: of the other all miss, all but the one that has the slot."""
    here = loaded(constant({"a": 9, "b": 9}, {"a": 0, "b": 4}), tmp_path)
    write_trace(constant({"a": 1}, {"a": 0}), tmp_path / "profile")
    found = measure(here, f"static:profile={tmp_path / 'profile'}", DEMAND, Protocol("task", 2, 6, window=2))
    to_a, to_b = found.rows
    assert (to_a["group_after"], to_b["group_after"]) == ("a", "b")
    assert max(to_b["hit_rates"]) == 0
    assert min(to_b["undisturbed_hit_rates"]) == pytest.approx(1.0)
    assert to_b["requests_needed"] is None
    (row,) = [row for row in found.rows if row["group_after"] == "b"]
    assert (row["requests_needed"], row["requests_needed_above"]) == (None, 4)


def test_the_mean_of_censored_shifts_is_a_lower_bound_and_they_are_not_dropped():
    def shift(points):
        rates, protocol = np.full(len(points), 0.5), Protocol(after=len(points), window=2)
        row = measured(protocol, Shift("a", "b", WITHIN), rates + np.array(points) / 100, rates)
        return {"policy": "p", "oracle": False, **row}

    back, later, never = shift([0] * 6), shift([-9, -9, -9, 0, 0, 0]), shift([-9] * 6)
    some, none, all_ = (summary(shifts) for shifts in ([back, later, never], [never], [back, later]))
    assert (some["shifts"], some["censored"], some["last"]) == (3, 1, 4)
    assert (some["needed_min"], some["needed_mean"], some["needed_max"]) == (0, (0 + 3 + 5) / 3, None)
    assert (none["needed_min"], none["needed_mean"], none["needed_max"]) == (None, 5, None)
    assert (all_["needed_min"], all_["needed_mean"], all_["needed_max"], all_["needed_none"]) == (0, 1.5, 3, 0.5)
    assert (some["hit_rate_first"], some["hit_rate_settled"]) == pytest.approx((0.44, 0.47))
    assert (some["undisturbed_first"], some["undisturbed_settled"]) == pytest.approx((0.5, 0.5))


def test_identical_groups_need_nothing_under_any_policy(tmp_path):
    here = loaded(constant({"a": 8, "b": 8}, {"a": 3, "b": 3}), tmp_path)
    found = measure(here, "lru,lfu-perfect,eamc,eamc-blend,belady", DEMAND - 1, Protocol("task", 3, 5, window=1))
    assert len(found.rows) == 2 * 5
    for one in found.rows:
        assert (differences(one) == 0).all()
        assert one["requests_needed"] == 0
    assert {summary["needed_none"] for summary in found.summaries()} == {1.0}
    assert min(max(one["hit_rates"]) for one in found.rows) < 1  # there was something to lose


# Runs


def lru_by_hand(trace: Trace, order, slots: int) -> list[float]:
    held, rates = list[tuple[int, int]](), list[float]()
    for number in order:
        hits = lookups = 0
        for row in range(trace.offsets[number], trace.offsets[number + 1]):
            for layer in range(trace.layers):
                chosen = sorted(((layer, expert) for expert in trace.experts[row, layer].tolist()), reverse=True)
                lookups += len(chosen)
                hits += len(set(chosen).intersection(held))
                held = [*chosen, *(other for other in held if other not in chosen)][:slots]
        rates.append(hits / lookups)
    return rates


def test_both_runs_of_every_shift_equal_lru_by_hand(routed):
    found = measure(routed, "lru", 6, SMALL)
    assert len(found.rows) > 10
    orders = found.plan.orders
    for one in found.rows:
        after = orders[one["group_after"]][2:5]
        for rates, before in (("hit_rates", "group_before"), ("undisturbed_hit_rates", "group_after")):
            assert one[rates] == lru_by_hand(routed.whole, [*orders[one[before]][:2], *after], 6)[2:]
    assert any(differences(one).any() for one in found.rows)


def test_no_run_plays_a_request_twice_and_groups_keep_to_their_label(routed):
    made = plan(routed.whole, SMALL)
    label = routed.trace.requests["task"].tolist()
    assert made.shifts
    for run in made.runs:
        before, after = made.before(run), made.after(run)
        assert len({*before, *after}) == len(before) + len(after) == 5
        assert {label[i] for i in before} == {run.before}
        assert {label[i] for i in after} == {run.after}


# Groups and pairs


def test_shifts_are_within_where_tasks_have_a_dataset_in_common_and_drawn_by_kind():
    sizes = dict.fromkeys("abcd", 5)
    of = {"a": "one", "b": "one", "c": "one", "d": "two"}
    trace = constant(sizes, dict.fromkeys(sizes, 0), of)
    kinds = {(shift.before, shift.after): shift.kind for shift in plan(trace, SMALL).shifts}
    assert len(kinds) == 12
    for (before, after), kind in kinds.items():
        assert kind == (ACROSS if "d" in (before, after) else WITHIN)
    few = [shift.kind for shift in plan(trace, replace(SMALL, pairs=2)).shifts]
    assert few == [WITHIN] * 2 + [ACROSS] * 2
    by_dataset = plan(trace, replace(SMALL, by="dataset")).shifts
    assert {(shift.before, shift.after, shift.kind) for shift in by_dataset} == {
        ("one", "two", ACROSS),
        ("two", "one", ACROSS),
    }


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [({"": 9}, "its requests have no such label"), ({"a": 4, "b": 9}, r"the largest are b \(9\), a \(4\)")],
)
def test_groups_that_allow_no_shift_are_refused(sizes, reason):
    with pytest.raises(InputError, match=f"no shift by task can be made: one group needs 12 .*{reason}"):
        plan(constant(sizes, dict.fromkeys(sizes, 0)), replace(SMALL, after=10))


# What is kept
