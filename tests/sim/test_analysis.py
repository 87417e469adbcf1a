from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from policies.core.spec import parse
from sim.analysis.misses import CURVES, SPLITS, analyse, figure, save, sentences, to_play
from sim.experiment import Experiment
from sim.loaded import load
from sim.results.metrics import Row
from sim.sweeps.grid import Grid
from tests.support.command import moe_sim
from traces import Trace
from traces.output import MARKER
from traces.synthetic import synthetic
from traces.writer import write_trace


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    trace = synthetic(4, tokens=20, layers=3, experts=16, top_k=2, seed=3, prompt_tokens=6)
    write_trace(replace(trace, meta=replace(trace.meta, model="unheard-of")), home / "both")
    return home


@pytest.fixture(scope="module")
def loaded(home):
    return load(Experiment(trace=home / "both", as_decode=True, untimed=True))


GRID = Grid(tuple(map(parse, ("lru", "lfu", "belady", "lru+popular"))), {"10%": 5, "25%": 12, "100%": 48})


def split(policy="lru", compulsory=0, capacity=0, own=0, slots=12, oracle=False) -> Row:
    lost = compulsory + capacity + own
    parts = {"misses": lost, "compulsory": compulsory, "capacity": capacity, "policy_misses": own}
    cell = {"policy": policy, "oracle": oracle, "cache_experts": slots, "cache_fraction": slots / 48}
    return {**cell, "lookups": 1_000, **parts}


def test_misses_split_into_parts_that_sum_to_the_untimed_count(loaded):
    found = analyse(loaded, GRID)
    cells = [(policy, slots) for slots in GRID.sizes.values() for policy in GRID.policies]
    assert [(one["policy"], one["cache_experts"]) for one in found.splits] == [
        (policy.text, slots) for policy, slots in cells
    ]
    for one, (policy, slots) in zip(found.splits, cells, strict=True):
        log, belady = loaded.log(policy, slots), loaded.log(parse("belady"), slots)
        assert one["misses"] == log.misses.sum()
        assert one["lookups"] == (log.misses + log.hits).sum()
        assert one["compulsory"] == len(
            np.unique(np.concatenate([r.experts for r in map(loaded.trace.steps, range(4))]))
        )
        assert one["compulsory"] + one["capacity"] == belady.misses.sum()
        assert min(one["compulsory"], one["capacity"], one["policy_misses"]) >= 0


def test_of_a_large_trace_a_sample_from_all_over_it_is_analysed(home, monkeypatch):
    made = synthetic(70, tokens=20, layers=3, experts=16, top_k=2, seed=4)
    write_trace(made, home / "many")
    monkeypatch.setattr("sim.loaded.SAMPLE", 2_900)
    whole = load(Experiment(trace=home / "many", untimed=True, warmup_requests=20))
    few = whole.sampled()
    assert few.trace.requests.index.tolist() == [*range(16), *range(48, 64)]
    assert few.experiment.warmup_requests == 16
    found, grid = analyse(few, GRID), replace(few, trace=made.select(few.trace.requests.index.to_numpy()))
    assert found.lookups == 32 * 20 * 3 * 2
    assert found.splits == analyse(grid, GRID).splits


def test_with_room_for_all_only_first_uses_miss(loaded):
    for one in analyse(loaded, GRID).splits:
        if one["cache_experts"] == 48:
            assert (one["capacity"], one["policy_misses"]) == (0, 0)


def test_experts_of_several_sizes_are_counted_as_of_their_mean_size(home, tmp_path):
    trace = Trace.read(home / "both")
    for name, sizes in (("sized", (10, 20, 30)), ("mean", (20, 20, 20))):
        write_trace(replace(trace, meta=replace(trace.meta, model="?", layer_expert_bytes=sizes)), tmp_path / name)
    found = [
        moe_sim("analyze", name, "--policies", "lru,lfu", "--cache-sizes", "300B,50%", "--json", cwd=tmp_path)
        for name in ("sized", "mean")
    ]
    assert found[0].stdout == found[1].stdout != ""
    assert "experts differ in size: the curves count experts, here of their mean size" in found[0].stderr
    assert "differ in size" not in found[1].stderr


def test_only_what_no_curve_gives_is_played(loaded):
    played = list[int]()
    analyse(loaded, GRID, played.append)
    assert sum(played) == to_play(GRID) * 4 == 2 * 3 * 4


@pytest.mark.parametrize(
    ("parts", "verdict"),
    [
        ({"own": 60, "capacity": 40}, "the policy is the main cause: 60% of lru's misses are not Belady's"),
        (
            {"own": 30, "capacity": 70},
            "the cache size is the main cause: 70% of lru's misses are Belady's too, for lack of room",
        ),
        (
            {"own": 10, "capacity": 10, "compulsory": 80},
            "neither policy nor size is the main cause: 80% of lru's misses are first uses",
        ),
        ({}, "neither policy nor cache size causes misses: lru has none"),
    ],
)
def test_the_sentence_names_the_largest_part(parts, verdict):
    (text,) = sentences([split(**parts)])
    assert text.startswith("At 12 slots (25%) lru misses ")
    assert text.endswith(f"% of lookups; {verdict}.")


def test_the_sentence_judges_the_best_policy_that_is_no_oracle_at_each_size():
    found = sentences(
        [
            split("lru", own=9, capacity=1),
            split("lfu", own=3, capacity=1),
            split("belady", capacity=1, oracle=True),
            split("lru", capacity=2, slots=24),
            split("lfu", own=8, slots=24),
        ]
    )
    assert found == [
        "At 12 slots (25%) lfu misses least, 0.4% of lookups, 0.6 points fewer than LRU, and closes 67% of the gap "
        "from LRU to Belady; the policy is the main cause: 75% of lfu's misses are not Belady's.",
        "At 24 slots (50%) lru misses least, 0.2% of lookups; the cache size is the main cause: 100% of lru's misses "
        "are Belady's too, for lack of room.",
    ]


def test_tables_and_plot_are_written(loaded, tmp_path):
    found = analyse(loaded, GRID)
    files = save(found, loaded, tmp_path / "out")
    assert {MARKER, *(file.name for file in files)} == {file.name for file in (tmp_path / "out").iterdir()}
    tables = {file.stem: pd.read_parquet(file) for file in files if file.suffix == ".parquet"}
    for name, schema in {"misses": SPLITS, "curves": CURVES}.items():
        assert tables[name].columns.tolist() == schema.names
    assert tables["curves"]["cache_experts"].tolist() == list(range(2, 49))
    lru = tables["misses"][tables["misses"]["policy"] == "lru"].set_index("cache_experts")
    curve = tables["curves"].set_index("cache_experts")
    assert curve.loc[lru.index, "lru_misses"].tolist() == lru["misses"].tolist()
    assert curve.loc[lru.index, "lru_hit_rate"].tolist() == pytest.approx(lru["hit_rate"].tolist())
    assert (tmp_path / "out" / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_the_plot_has_both_curves_the_demand_and_a_point_for_each_other_cell(loaded):
    found = analyse(loaded, GRID)
    lines = {line.get_label(): line for line in figure(found, loaded).axes[0].lines}
    assert list(lines) == ["lru", "belady (oracle)", "lfu", "lru+popular", "working set of one token"]
    assert np.asarray(lines["lru"].get_ydata())[12 - 2] == pytest.approx(1 - found.lru[12] / found.lookups)
    assert lines["lfu"].get_xdata() == pytest.approx([100 * 5 / 48, 25, 100])
    assert np.asarray(lines["working set of one token"].get_xdata())[0] == 100 * 6 / 48


def test_analyze_answers_first_and_writes_beside_the_results_of_sweeps(home):
    done = moe_sim(
        "analyze", "both", "--policies", "lru/host,belady", "--cache-size", "25%", "--requests", "2", cwd=home
    )
    assert done.returncode == 0, done.stderr
    assert "of lru/host only the eviction policy counts" in done.stderr
    assert done.stdout.startswith("At 12 slots (25%) ")
    for heading in (" belady (oracle) ", "compulsory"):
        assert heading in done.stdout
    assert (home / "results" / "both" / "analysis" / "curves.png").exists()
