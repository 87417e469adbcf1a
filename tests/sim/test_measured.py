"""What was measured of a model on a machine: read from a profile, and asked by the engines."""

import tomllib
from dataclasses import replace
from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.core.spec import parse
from sim.catalogue.parts import FOLDER
from sim.experiment import Experiment
from sim.loaded import TimedRun
from sim.profiles.hardware_profile import hardware
from sim.profiles.measured import MeasuredModel
from sim.sweeps.grid import Grid
from sim.sweeps.notes import warnings
from traces import InputError, demo_trace
from traces.typed import typed

A5000 = FOLDER / "machines" / "a5000.toml"

DEMO = """
[calibration]
gpu = "none"
pinned_gb_per_s = [[65536, 4.5], [1048576, 9.0]]

[calibration.noise]
demo-olmoe = 0.01

[[measured]]
model = "demo-olmoe"
expert_bytes = 49152
transfer_ns = 5_001
latency_ns = 900
turnaround_ns = 70
launch_ns = 8
first_dense = [[1, 10, 1000], [1, 30, 1400], [4, 4, 1500]]
dense = [[1, 10, 100], [1, 30, 140], [4, 4, 160], [16, 16, 400]]
expert = [[1, 40], [4, 70], [16, 71]]
combine = [[1, 5]]
head = [[1, 300], [16, 330]]

[measured.predictor_us]
eamc = 12.5
"""


def model_of(**changes):
    (table,) = tomllib.loads(DEMO)["measured"]
    return replace(typed(MeasuredModel, table), **changes)


@pytest.fixture
def mine(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(A5000.read_text() + DEMO)
    return file


def test_every_measured_point_comes_back_as_it_was_measured():
    model, timing = model_of(turnaround_ns=0), model_of(turnaround_ns=0).timing()
    for tokens, context, ns in model.first_dense:
        assert timing.dense_ns(0, tokens, context) == ns
    for tokens, context, ns in model.dense:
        assert {timing.dense_ns(layer, tokens, context) for layer in (1, 2, 9)} == {ns}
    for tokens, ns in model.expert:
        assert timing.expert_ns(tokens) == ns + (8 if tokens == 1 else 0)
    for tokens, ns in model.head:
        assert timing.head_ns(tokens) == ns
    assert timing.combine_ns(7) == 5


@pytest.mark.parametrize(
    ("tokens", "context", "ns"),
    [
        (1, 20, 120),  # half-way
        (1, 11, 102),
        (1, 50, 180),  # beyond the last: on the line through the last two
        (1, 3, 100),  # before the first: as the first
        (10, 10, 280),  # between two numbers of tokens
        (2, 20, 134),  # 120 + (160 - 120) / 3, rounded up
        (28, 28, 640),  # beyond the last number of tokens
    ],
)
def test_between_points_durations_lie_on_lines(tokens, context, ns):
    timing = model_of(turnaround_ns=0).timing()
    assert timing.dense_ns(1, tokens, context) == ns
    assert model_of().timing().dense_ns(1, tokens, context) == ns + 70


POINT = st.tuples(st.integers(1, 200), st.integers(0, 10**9))
CURVES = st.lists(POINT, min_size=2, max_size=6, unique_by=lambda point: point[0])


@given(CURVES, st.integers(1, 400))
def test_a_curve_is_the_line_through_its_neighbours_rounded_up(points, tokens):
    points.sort()
    timing = model_of(expert=tuple(points), launch_ns=0).timing()
    if tokens <= points[0][0]:
        expected = points[0][1]
    else:
        right = next((place for place, (x, _) in enumerate(points) if x >= tokens), len(points) - 1)
        (x0, y0), (x1, y1) = points[right - 1], points[right]
        expected = max(0, ceil(y0 + Fraction(y1 - y0, x1 - x0) * (tokens - x0)))
    assert timing.expert_ns(tokens) == expected


def test_the_link_is_exact_at_a_whole_expert_and_pays_its_latency_once():
    link = model_of().link(chunk_bytes=4096)
    assert link.used_ns(49152) == 5_001
    assert link.used_ns(0) == 0
    assert link.used_ns(24576) == 900 + ceil(4_101 / 2)
    assert link.chunk_bytes == 4096
    assert model_of().link().chunk_bytes is None


def test_without_the_host_neither_turnaround_nor_predictor_takes_time():
    timing = model_of().timing(predictor_ns=12_500)
    alone = timing.without_host()
    assert (timing.predictor_ns, alone.predictor_ns) == (12_500, 0)
    assert timing.dense_ns(0, 1, 10) - alone.dense_ns(0, 1, 10) == 70
    assert timing.expert_ns(1) - alone.expert_ns(1) == 8
    assert timing.expert_ns(4) == alone.expert_ns(4)


def test_a_launch_may_be_negative_but_no_duration() -> None:
    assert model_of(launch_ns=-15).timing().expert_ns(1) == 40 - 15
    assert model_of(launch_ns=-40).timing().expert_ns(1) == 0
    with pytest.raises(InputError):
        model_of(launch_ns=-41)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("latency_ns = 900", "latency_ns = 9000"),
        ("[4, 70], [16, 71]", "[4, 70], [4, 71]"),
        ("eamc = 12.5", "eamc = nan"),
    ],
)
def test_an_impossible_measurement_is_refused_with_file_and_table(mine, old, new):
    text = mine.read_text()
    assert text.count(old) == 1
    mine.write_text(text.replace(old, new))
    with pytest.raises(InputError, match=r"mine\.toml: "):
        hardware(str(mine))


def test_a_model_that_was_measured_there_is_simulated_from_the_tables(mine):
    loaded = TimedRun.of(Experiment(str(demo_trace()), hardware=str(mine)))
    assert loaded.measured == model_of()
    timing = loaded.timing(parse("lru"))
    assert timing.dense_ns(1, 1, 20) == 120 + 70
    assert loaded.link == model_of().link()
    assert loaded.cell(parse("lru"), 80).hardware == "mine (measured)"
    assert not [each for each in warnings(loaded, Grid((parse("lru"),), {"50%": 80})) if "measured with" in each]


@pytest.mark.parametrize("change", [('"demo-olmoe"', '"olmoe"'), ("= 49152", "= 49153")])
def test_another_model_and_another_size_of_expert_go_by_the_rates(mine, change):
    mine.write_text(mine.read_text().replace(*change))
    loaded = TimedRun.of(Experiment(str(demo_trace()), hardware=str(mine)))
    rates = TimedRun.of(Experiment(str(demo_trace())))
    assert loaded.measured is None
    assert loaded.link == rates.link
    assert loaded.timing(parse("lru")).dense_ns(1, 1, 20) == rates.timing(parse("lru")).dense_ns(1, 1, 20)
    assert loaded.cell(parse("lru"), 80).hardware == "mine"
    (told,) = (each for each in warnings(loaded, Grid((parse("lru"),), {"50%": 80})) if "measured with" in each)
    assert told.endswith("not with demo-olmoe (49152): times go by its rates")


def test_experts_of_several_sizes_go_by_what_was_measured_of_these(mine):
    sizes = (49152, 24576) * 5
    text = mine.read_text()
    mine.write_text(text.replace("expert_bytes = 49152", f"expert_bytes = 49152\nlayer_bytes = {list(sizes)}"))
    loaded = TimedRun.of(Experiment(str(demo_trace()), hardware=str(mine)))
    assert loaded.measured is None
    sized = replace(loaded, profile=replace(loaded.profile, layer_expert_bytes=sizes))
    assert sized.measured == replace(model_of(), layer_bytes=sizes)
    assert sized.link.layer_bytes == sizes
    assert sized.link.used_ns(49152) == model_of().transfer_ns


def test_experts_of_several_sizes_go_by_the_rates_where_only_the_largest_is_of_the_size_measured(mine):
    loaded = TimedRun.of(Experiment(str(demo_trace()), hardware=str(mine)))
    assert loaded.profile
    sized = replace(loaded, profile=replace(loaded.profile, layer_expert_bytes=(49152, 24576) * 5))
    assert sized.measured is None
    assert sized.link.layer_bytes == (49152, 24576) * 5
    cell = parse("lru"), sized.slots("50%")
    (told,) = (each for each in warnings(sized, Grid(cell[:1], {"50%": cell[1]})) if "measured with" in each)
    assert told.endswith("not with demo-olmoe (experts of several sizes): times go by its rates")


def test_a_policys_cost_is_the_setups_then_the_machines_then_the_shipped_one(mine):
    loaded = TimedRun.of(Experiment(str(demo_trace()), hardware=str(mine)))
    assert loaded.predictor_us(parse("eamc")) == 12.5
    assert loaded.timing(parse("eamc")).predictor_ns == 12_500
    assert loaded.predictor_us(parse("lfu+eamc")) == TimedRun.of(Experiment(str(demo_trace()))).predictor_us(
        parse("lfu+eamc")
    )
    assert (
        TimedRun.of(Experiment(str(demo_trace()), hardware=str(mine), predictor_us=3)).predictor_us(parse("eamc")) == 3
    )


def test_a_step_in_which_all_is_there_takes_the_sum_of_the_tables(mine):
    """One request, every expert resident from its first use on: what is left of a token is the tables'."""
    loaded = TimedRun.of(Experiment(str(demo_trace()), hardware=str(mine), requests=1, as_decode=True))
    log = loaded.log(parse("lru"), loaded.all_experts)
    timing, layers, top_k = loaded.timing(parse("lru")), loaded.trace.layers, loaded.trace.top_k
    steps = loaded.trace.steps(0)
    hit = [place for place in range(len(steps.tokens)) if log.misses[place] == 0]
    assert hit
    for place in hit:
        dense = sum(timing.dense_ns(layer, 1, int(steps.context[place])) for layer in range(layers))
        experts = layers * (top_k * timing.expert_ns(1) + timing.combine_ns(1))
        assert log.step_ns[place] == dense + experts + timing.head_ns(1)
