"""What a policy costs (rule 14): the shipped table, how it is read between its points, and who pays it."""

import json
import time
from dataclasses import replace
from fractions import Fraction

import pandas as pd
import pytest

from benchmarks import predictors as benchmark
from policies.core.policy import Shape
from policies.core.presets import PRESETS
from policies.core.spec import parse
from sim.profiles import policy_overhead
from sim.profiles.policy_overhead import MEASURED, cost_us
from sim.profiles.roofline import Roofline
from sim.sweeps.grid import Grid, played
from sim.sweeps.setup import Setup
from tests.support.command import moe_sim
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
    monkeypatch.setattr(policy_overhead, "_table", lambda: held)


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
    typed = next(preset for preset in PRESETS if preset.name == "eamc-code").policy
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


PAIRS = ("eamc", "eamc-blend", "expert-map")
TODAY = {
    "retention": (
        *("arc", "belady", "clock", "fifo", "least-stale", "lfu", "lfu-aged", "lfu-perfect", "lrfu", "lru"),
        *("multi-criteria", "random", "s3fifo", "sieve", "static", *PAIRS),
    ),
    "prefetch": (*("all", "gate", "markov", "none", "oracle", "oracle1", "popular", "previous", "stride", *PAIRS),),
    "pair": PAIRS,
    "preset": ("eamc-code", "eamc-v1"),  # these set options
}
"""What has been measured: a policy that comes later may lack a row until it is."""


def test_every_policy_of_today_has_a_row_that_was_measured():
    rows = policy_overhead._table()
    assert rows.keys() == TODAY.keys()
    for kind, names in TODAY.items():
        assert rows[kind].keys() >= set(names), "python -m benchmarks predictors --write"
        assert all(min(rows[kind][name]) >= 0 for name in names)


def test_what_ships_is_what_the_benchmark_measures():
    shipped = {(kind, name) for kind, rows in policy_overhead._table().items() for name in rows}
    assert {(row.kind, row.name) for row in benchmark.rows()} >= shipped


def test_what_the_benchmark_writes_is_read_back_and_oracles_are_free(tmp_path, monkeypatch):
    file = tmp_path / "predictors.toml"
    rows = list(benchmark.rows())
    found = {row: [benchmark.Measured(1.234 + i, 9.0), benchmark.Measured(5.0, 9.0)] for i, row in enumerate(rows)}
    monkeypatch.setattr(benchmark, "TABLE", file)
    monkeypatch.setattr(benchmark, "cpu", lambda: "a CPU")
    benchmark.write(found)
    monkeypatch.setattr(policy_overhead, "TABLE", file)
    read = policy_overhead._table.__wrapped__()
    for i, row in enumerate(rows):
        assert read[row.kind][row.name] == ((0, 0) if row.oracle else (round(1.234 + i, 2), 5))
    assert 'cpu = "a CPU"' in file.read_text()


def test_the_benchmark_finds_the_work_that_a_policy_does(monkeypatch, tmp_path):
    monkeypatch.setattr(benchmark, "WARM_UP", 1)
    monkeypatch.setattr(benchmark, "SETS", 2)
    monkeypatch.setattr(benchmark, "ROUNDS", 3)
    made = synthetic(7, benchmark.TOKENS, LAYERS, EXPERTS, TOP_K, seed=1)
    requests = [made.steps(i) for i in range(7)]
    own = "from policies.core.policy import ScorePolicy\n\nclass Busy(ScorePolicy):\n    def observe(self, event):\n"
    (tmp_path / "busy.py").write_text(own + "        sum(range(20_000))\n")
    busy = benchmark.measure(f"{tmp_path}/busy.py:Busy", Shape(LAYERS, EXPERTS), requests)
    began = time.process_time()
    for _ in range(50):
        sum(range(20_000))
    took = (time.process_time() - began) * 1e6 / 50
    assert took / 3 < busy.event < took * 3
    assert benchmark.measure("lru", Shape(LAYERS, EXPERTS), requests) == benchmark.Measured(0, 0)


def test_of_the_sets_medians_the_least_counts_and_never_less_than_nothing(monkeypatch):
    monkeypatch.setattr(benchmark, "WARM_UP", 2)
    monkeypatch.setattr(benchmark, "ROUNDS", 3)
    assert benchmark.least([0, 0, 5, 9, 7, 6, 100, 4, 8, 8, 8]) == 6
    assert benchmark.least([50, 50, -1, 1, -2]) == 0


def test_whatever_watches_events_costs_something_and_what_the_machine_does_anyway_nothing():
    for policy in ("lru", "lfu", "fifo", "clock", "static", "flashmoe"):
        assert at(policy) == at(policy, LARGE) == 0
    for policy in ("eamc", "eamc-blend", "expert-map", "lru+markov", "lru+stride", "eamc-code"):
        assert 0 < at(policy) < at(policy, LARGE) < 1_000
    for oracle in ("belady", "belady+oracle", "pre-gated"):
        assert at(oracle) == 0


def play(folder, policy, **setup):
    return played(Setup(folder, **setup).load(), Grid((parse(policy),), {"50%": 24})).rows[0]


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
    loaded = Setup(folder).load()
    assert isinstance(loaded.timing(parse("eamc")), Roofline)
    assert loaded.timing(parse("eamc")).predictor_ns == round(1_000 * at("eamc", (LAYERS, EXPERTS))) > 0


def test_a_cost_that_nobody_knows_is_told_in_one_line_and_may_be_given(folder):
    asked = (
        "sweep",
        "tiny",
        "--cache-sizes",
        "50%",
        "--policies",
        "lru,mine.py:Mine",
        "--workers",
        "1",
        "--out",
        "own",
        "--overwrite",
        "--json",
    )
    done = moe_sim(*asked, cwd=folder.parent)
    assert done.stderr.count("mine.py:Mine") == 1, done.stderr
    assert "no measured policy overhead for mine.py:Mine: assuming 0 (set --predictor-us)" in done.stderr
    assert [row["predictor_us"] for row in json.loads(done.stdout)] == [0, 0]
    done = moe_sim(*asked, "--predictor-us", "3", cwd=folder.parent)
    assert "no measured policy overhead" not in done.stderr
    assert pd.read_parquet(folder.parent / "own" / "results.parquet")["predictor_us"].tolist() == [3, 3]
