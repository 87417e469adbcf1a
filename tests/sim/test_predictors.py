"""What a policy costs (rule 14): the shipped table, how it is read between its points, and who pays it."""

from dataclasses import replace
from fractions import Fraction

import pytest

from benchmarks import predictors as benchmark
from policies.core.spec import parse
from policies.core.systems import systems
from sim.experiment import Experiment
from sim.loaded import TimedRun, load
from sim.profiles import policy_overhead
from sim.profiles.policy_overhead import MEASURED, cost_us
from sim.profiles.roofline import Roofline
from sim.sweeps.grid import Grid, run_grid
from tests.support.tiny import SIZES
from traces.synthetic import synthetic
from traces.writer import write_trace

LAYERS, EXPERTS, TOP_K = 3, 16, 2
SMALL, LARGE = MEASURED[0][:2], MEASURED[1][:2]

OWN = """
from policies.core.policy import ScorePolicy

class Mine(ScorePolicy):
    "Keep."
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = synthetic(3, tokens=6, layers=LAYERS, experts=EXPERTS, top_k=TOP_K, seed=3, prompt_tokens=4)
    folder = tmp_path_factory.mktemp("home") / "tiny"
    write_trace(replace(made, meta=replace(made.meta, model="tiny", **SIZES)), folder)
    (folder.parent / "mine.py").write_text(OWN)
    return folder


@pytest.fixture
def table(monkeypatch):
    """Made-up costs in place of the shipped ones: (26 x 64, 58 x 256)."""
    held = {
        "retention": {"lru": (0.0, 0.0), "eamc": (3.0, 9.0), "fifo": (1.0, 1.0)},
        "prefetch": {"none": (0.0, 0.0), "eamc": (5.0, 50.0), "popular": (2.0, 2.0)},
        "pair": {"eamc": (6.0, 19.184)},
        "preset": {"eamc-code": (20.0, 40.0)},
    }
    monkeypatch.setattr(policy_overhead, "COSTS", held)


def at(policy, shape=SMALL):
    return cost_us(parse(policy), *shape)


@pytest.mark.usefixtures("table")
def test_halves_of_one_name_and_options_are_one_predictor_and_others_add_up():
    assert at("eamc") == at("eamc:capacity=7") == at("eamc@layer") == at("eamc:capacity=7+eamc:capacity=7") == 6
    assert at("eamc:capacity=7+eamc") == 3 + 5
    assert at("eamc+none") == 3
    assert at("lru+eamc") == at("lru+eamc@layer") == 5
    assert at("fifo+popular:n=9") == 1 + 2
    assert at("lru") == 0


@pytest.mark.usefixtures("table")
def test_a_preset_costs_what_its_halves_do_unless_it_has_a_row_of_its_own():
    assert at("eamc-code") == at("eamc-code:capacity=5") == 20
    assert at("eamc-v1") == at("eamc") == 6
    typed = systems()["eamc-code"].policy
    assert at(typed) == 20


@pytest.mark.usefixtures("table")
def test_a_cost_lies_on_the_higher_line_through_both_points():
    over_all = Fraction("13.184") / (58 * 256 - 26 * 64)  # 1 ns an expert
    over_layer = Fraction("13.184") / (256 - 64)
    for layers, experts in (SMALL, LARGE, (48, 128), (24, 32), (61, 384), (3, 512)):
        lines = over_all * (layers * experts - 26 * 64), over_layer * (experts - 64)
        assert at("eamc", (layers, experts)) == pytest.approx(6 + float(max(lines)))
    assert at("eamc", (24, 32)) == pytest.approx(6 - 0.896)
    assert at("eamc", (3, 512)) == pytest.approx(6 + 13.184 * 448 / 192)


@pytest.mark.usefixtures("table")
def test_a_cost_never_falls_below_half_of_the_lower_point():
    assert at("lru+eamc", (24, 32)) == 2.5  # the line says 1.94
    assert at("lru+eamc", (1, 2)) == 2.5


@pytest.mark.usefixtures("table")
def test_a_policy_of_a_users_own_has_no_cost_that_is_known(folder):
    own = f"{folder.parent}/mine.py:Mine"
    assert at(own) is at(f"{own}+popular") is None


def test_every_policy_that_ships_has_a_row_that_was_measured_and_nothing_else_has():
    rows = policy_overhead.COSTS
    assert {(row.kind, row.name) for row in benchmark.rows()} == {(kind, name) for kind in rows for name in rows[kind]}
    assert all(min(both) >= 0 for kind in rows.values() for both in kind.values())


def test_whatever_watches_events_costs_something_and_what_the_machine_does_anyway_nothing():
    for policy in ("lru", "lfu", "fifo", "clock", "static", "flashmoe"):
        assert at(policy) == at(policy, LARGE) == 0
    for policy in ("eamc", "eamc-blend", "expert-map", "lru+markov", "eamc-code"):
        assert 0 < at(policy) < at(policy, LARGE) < 1_000
    for oracle in ("belady", "belady+oracle", "pre-gated"):
        assert at(oracle) == 0


def play(folder, policy, **setup):
    return run_grid(load(Experiment(folder, **setup)), Grid((parse(policy),), {"50%": 24}))[0].rows[0]


def test_a_cell_pays_the_shipped_cost_once_an_event_and_its_row_says_so(folder):
    row = play(folder, "eamc")
    assert row["predictor_us"] == pytest.approx(at("eamc", (LAYERS, EXPERTS)), abs=0.0005)
    events = 3 * (1 + 6) * LAYERS
    assert row["stall_predictor_ms"] == pytest.approx(events * row["predictor_us"] / 1_000)
    assert play(folder, "lru")["predictor_us"] == play(folder, "lru")["stall_predictor_ms"] == 0


def test_a_cost_that_is_given_is_everyones(folder):
    for policy in ("lru", "eamc", "belady", f"{folder.parent}/mine.py:Mine"):
        assert play(folder, policy, predictor_us=21.5)["predictor_us"] == 21.5
        assert play(folder, policy, untimed=True)["predictor_us"] is None


def test_the_table_is_what_an_engine_is_given(folder):
    loaded = TimedRun.of(Experiment(folder))
    assert isinstance(loaded.timing(parse("eamc")), Roofline)
    assert loaded.timing(parse("eamc")).predictor_ns == round(1_000 * at("eamc", (LAYERS, EXPERTS))) > 0
