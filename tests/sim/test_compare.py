import json
import shutil
from contextlib import chdir
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from sim.commands import app
from sim.report import inputs as report_inputs
from sim.results.compare import (
    MEASURES,
    Difference,
    Sample,
    SweptRun,
    choose,
    differences,
    indistinct,
    interval,
    paired,
    pairs_across,
    read,
    sample,
    split_name,
)
from tests.support.profiles import HALF, plain
from tests.support.tiny import SIZES
from traces import InputError
from traces.models.profile import written
from traces.synthetic import synthetic
from traces.writer import write_trace

HIT_RATE, TPOT, _ = MEASURES


def moe_sim(*arguments: str, cwd: Path) -> str:
    """What the command prints; raises what it raises."""
    with chdir(cwd):
        return CliRunner().invoke(app, arguments, catch_exceptions=False).stdout


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    trace = synthetic(6, tokens=15, layers=3, experts=16, top_k=2, seed=3, prompt_tokens=6)
    write_trace(replace(trace, meta=replace(trace.meta, model="tiny", **SIZES)), home / "tiny")
    write_trace(replace(trace, meta=replace(trace.meta, model="tiny", **SIZES)), home / "other")
    long = synthetic(1, tokens=60, layers=3, experts=16, top_k=2, seed=4, prompt_tokens=6)
    write_trace(replace(long, meta=replace(long.meta, model="tiny", **SIZES)), home / "long")

    def sweep(out, *arguments, trace="tiny", policies="lru,lfu,eamc"):
        sizes = ("--cache-sizes", "25%,50%") if "--cache-sizes" not in arguments else ()
        options = ("--policies", policies, *sizes, *arguments, "--out", out, "--quiet", "--workers", "1")
        assert moe_sim("sweep", trace, *options, cwd=home) == ""

    sweep("x")
    sweep("fast", "--hardware", "h200")
    sweep("one", "--cache-sizes", "24", policies="lfu,belady")
    sweep("untimed", "--untimed", "--cache-sizes", "24", policies="lfu")
    sweep("fewer", "--requests", "4")
    sweep("decode", "--as-decode")
    sweep("warm", "--warmup-requests", "2")
    sweep("elsewhere", trace="other")
    sweep("together", "--max-batch", "3")
    return home


def played(**columns) -> SweptRun:
    n = len(next(iter(columns.values())))
    table = {
        "request": [str(i) for i in range(n)],
        "lookups": 8,
        "decoded": 1,
        "hit_rate": np.nan,
        "ttft_ms": np.nan,
        "steps": None,
    }
    requests = pd.DataFrame({**table, "tpot_mean_ms": np.nan, **columns})
    row = {"policy": "lru", "oracle": False, "cache_experts": 4, "trace": "t", "phase": "decode"}
    return SweptRun(Path("x"), {**row, "warmup_requests": 0, "routing": None}, requests)


def alone(values):
    """Totals of requests with these values, of one token each, beside a baseline of 0."""
    return Sample(np.array([values, np.ones(len(values)), np.zeros(len(values)), np.ones(len(values))]), 0)


def mean_interval_of_normal(values):
    """What theory gives for a mean: the normal interval at 95%."""
    half = 1.959964 * values.std() / np.sqrt(len(values))
    return values.mean() - half, values.mean() + half


def test_the_interval_of_many_values_is_that_of_the_central_limit_theorem():
    values = np.random.default_rng(1).gamma(4.0, 2.0, 3_000)
    assert interval(alone(values), seed=2) == pytest.approx(mean_interval_of_normal(values), abs=0.02)


def test_the_interval_of_two_values_is_known_exactly():
    """Means are 0, 1/2 and 1 with chances 1/4, 1/2, 1/4, so that the middle 95% are all of them."""
    assert interval(alone([0.0, 1.0])) == (0.0, 1.0)


def test_intervals_hold_the_true_mean_about_as_often_as_they_claim():
    """400 samples of 40 from a skewed law of mean 3: the share held, whose own deviation is one point, is near 95%."""
    rng = np.random.default_rng(7)
    held = sum(
        low <= 3 <= high for low, high in (interval(alone(rng.exponential(3, 40)), i, 1_000) for i in range(400))
    )
    assert 0.88 <= held / 400 <= 0.98


def test_blocks_of_tokens_hold_the_true_mean_more_often_than_tokens_by_themselves():
    """200 answers of 400 tokens, each token's value half of the one before and noise: their mean is 0."""
    rng, held = np.random.default_rng(7), {0: 0, 400: 0}
    for i in range(200):
        noise, values = rng.normal(size=500), np.zeros(500)
        for t in range(1, 500):
            values[t] = 0.5 * values[t - 1] + noise[t]
        for tokens in held:
            low, high = interval(alone(values[100:])._replace(tokens=tokens), i, 500)
            held[tokens] += low <= 0 <= high
    assert 0.88 <= held[400] / 200 <= 0.98
    assert held[0] / 200 < 0.8


def test_of_one_request_tokens_add_up_to_its_figures(home):
    options = "--policies", "lru,lfu", "--cache-sizes", "25%", "--quiet", "--workers", "1"
    moe_sim("sweep", "tiny", "--requests", "1", *options, "--out", "alone", cwd=home)
    moe_sim("sweep", "long", *options, "--out", "long-alone", cwd=home)
    lru, lfu = read(home / "alone")
    assert sample(lru, lfu, TPOT).tokens == 0  # too short
    lru, lfu = read(home / "long-alone")
    for measure in (TPOT, HIT_RATE):
        found = sample(lru, lfu, measure)
        assert (found.tokens, found.is_enough) == (60, True)
        whole = found.totals.sum(axis=1, keepdims=True) + found.fixed
        np.testing.assert_allclose(whole, paired(lru, lfu, measure))
    said = moe_sim("compare", "long-alone", "--policies", "lru,lfu", cwd=home)
    assert "over blocks of 60 tokens of one request" in said
    assert "not for other requests" in said


def test_the_same_seed_gives_the_same_interval_however_many_are_drawn_at_once(monkeypatch):
    values = alone(np.random.default_rng(3).normal(size=50))
    whole = interval(values, 5, 500)
    assert interval(values, 5, 500) == whole
    assert interval(values, 6, 500) != whole
    monkeypatch.setattr("sim.results.compare.DRAWN_AT_ONCE", 120)
    assert interval(values, 5, 500) == whole


def test_differences_are_paired_by_request_so_what_requests_have_of_their_own_cancels():
    own = np.random.default_rng(4).normal(100, 30, 50)
    slower = own + 2 + np.tile([-0.1, 0.1], 25)
    found = differences(played(tpot_mean_ms=own), played(tpot_mean_ms=slower))
    assert [difference.measure for difference in found] == [TPOT]
    assert found[0].more == pytest.approx(2)
    assert (found[0].low, found[0].high) == pytest.approx((2 - 0.0277, 2 + 0.0277), abs=0.004)  # 1.96 * 0.1 / 50**0.5


def test_requests_count_by_their_tokens_as_in_the_row_of_a_cell():
    """Of 9 tokens 1 ms longer and 1 token 11 ms longer, a token takes 2 ms longer; the mean of requests is 6."""
    less = played(tpot_mean_ms=[5.0, 5.0], decoded=[9, 1])
    (found,) = differences(less, played(tpot_mean_ms=[6.0, 16.0], decoded=[9, 1]))
    assert (found.more, found.low, found.high) == (2, 1, 11)


def test_a_request_that_lacks_a_measure_is_left_out_of_it():
    less = played(tpot_mean_ms=[1.0, np.nan, 3.0, 5.0], hit_rate=[0.5] * 4)
    more = played(tpot_mean_ms=[2.0, 9.0, 4.0, 6.0], hit_rate=[0.75] * 4)
    by_measure = {difference.measure: difference for difference in differences(less, more)}
    assert (by_measure[TPOT].more, by_measure[TPOT].requests) == (1.0, 3)
    assert (by_measure[HIT_RATE].more, by_measure[HIT_RATE].requests) == (25.0, 4)


@pytest.mark.parametrize(
    ("measure", "mean", "low", "high", "sentence"),
    [
        (TPOT, 3.2, 2.1, 4.4, "eamc is 3.2 ms (95%: 2.1 to 4.4) slower per token than lru over 40 requests"),
        (TPOT, -3.2, -4.4, -2.1, "eamc is 3.2 ms (95%: 2.1 to 4.4) faster per token than lru over 40 requests"),
        (HIT_RATE, 7.0, 5.0, 9.0, "eamc is 7.0 points (95%: 5.0 to 9.0) higher in hit rate than lru over 40 requests"),
        (
            *(TPOT, -0.012, -0.034, 0.010),
            "eamc is 0.012 ms (95%: -0.010 to 0.034) faster per token than lru over 40 requests, which may be chance",
        ),
        (TPOT, 0.0, 0.0, 0.0, "eamc and lru do not differ in time per token over 40 requests"),
    ],
)
def test_a_difference_is_said_in_a_plain_sentence(measure, mean, low, high, sentence):
    assert Difference(measure, "eamc", "lru", mean, low, high, 40, 0, 16).sentence() == sentence


@pytest.mark.parametrize(("requests", "told"), [(2, False), (5, False), (6, True)])
def test_fewer_than_six_requests_cannot_tell_a_difference_from_chance(requests, told):
    """Even if all are worse: five have one sign by chance in 2 of 32 cases, six in 2 of 64."""
    best = played(tpot_mean_ms=np.ones(requests))
    worse = played(tpot_mean_ms=np.full(requests, 2.0))
    assert indistinct(best, [worse], TPOT) == ([] if told else [worse])
    (found,) = differences(best, worse)
    assert found.sentence().endswith(
        f"over {requests} requests" + ("" if told else ", which may be chance: there are fewer than 6 requests")
    )


def test_a_cell_is_named_by_folder_policy_and_size(home, monkeypatch):
    monkeypatch.chdir(home)
    assert split_name("x") == (Path("x"), None, None)
    assert split_name("x:lru@25%") == (Path("x"), "lru", "25%")
    assert split_name("x:lru+popular:n=8") == (Path("x"), "lru+popular:n=8", None)
    assert split_name("x:@12") == (Path("x"), None, "12")
    assert [cell.cache_experts for cell in choose(read(Path("x")), "lru", None)] == [12, 24]
    assert [cell.policy for cell in choose(read(Path("x")), None, "900kB")] == ["lru", "lfu", "eamc"]


def test_folders_are_compared_cell_by_cell(home):
    cells = [read(home / name) for name in ("x", "fast")]
    pairs = pairs_across(*cells)
    assert [(one.policy, one.cache_experts) for one, _ in pairs] == [(c.policy, c.cache_experts) for c in cells[0]]
    for one, other in pairs:
        found = {difference.measure: difference for difference in differences(one, other)}
        assert found[TPOT].more < 0  # a machine that is faster in everything


def test_compare_within_a_sweep_takes_the_first_policy_as_the_baseline(home):
    rows = json.loads(moe_sim("compare", "x", "--policies", "lru,lfu", "--cache-size", "50%", "--json", cwd=home))
    assert [row["measure"] for row in rows] == ["hit_rate", "tpot_mean_ms", "ttft_ms"]
    assert {row["baseline_policy"] for row in rows} == {"lru"}
    swept = pd.read_parquet(home / "x" / "results.parquet").query("cache_experts == 24").set_index("policy")
    for row, column, scale in zip(rows, ("hit_rate", "tpot_mean_ms", "ttft_mean_ms"), (100, 1, 1), strict=True):
        assert row["more"] == pytest.approx(scale * (swept[column]["lfu"] - swept[column]["lru"])), "the table's"


def test_untimed_cells_are_compared_in_what_they_have(home):
    rows = json.loads(moe_sim("compare", "one", "untimed", "--json", cwd=home))
    assert [row["measure"] for row in rows] == ["hit_rate"]


@pytest.mark.parametrize(
    ("first", "second"),
    [("x", "elsewhere"), ("x", "fewer"), ("x", "decode"), ("x", "warm"), ("x:lru", "one"), ("x:lru@12", "one:lfu@12")],
)
def test_what_cannot_be_paired_is_refused(home, first, second):
    with pytest.raises(InputError):
        moe_sim("compare", first, second, cwd=home)


@pytest.mark.parametrize("table", ["requests.parquet", "results.parquet"])
def test_a_changed_bit_of_any_column_is_noticed(home, tmp_path, table):
    folder = Path(shutil.copytree(home / "x", tmp_path / "x"))
    written = (folder / table).read_bytes()
    group = pq.read_metadata(folder / table).row_group(0)
    for column in (group.column(at) for at in range(group.num_columns)):
        start = column.dictionary_page_offset or column.data_page_offset
        last = start + column.total_compressed_size - 1
        (folder / table).write_bytes(written[:last] + bytes([written[last] ^ 1]) + written[last + 1 :])
        with pytest.raises(InputError):
            read(folder)
    assert report_inputs.read([folder])[0].problems


def test_requests_that_shared_steps_have_no_lookups_and_are_read(home):
    assert all(cell.requests["lookups"].isna().all() for cell in read(home / "together"))
    assert report_inputs.read([home / "together"])[0].problems == []
    for second in ("together:lfu@25%", "x:lru@25%"):
        told = moe_sim("compare", "together:lru@25%", second, cwd=home)
        assert "per token" in told
        assert "to the first token" in told
        assert "hit rate" not in told


def test_a_size_in_bytes_finds_the_cache_that_was_swept_with_it_where_experts_differ_in_size(home, tmp_path):
    profile = tmp_path / "sized.toml"
    made = plain("sized", "3 moe", experts=16, layer_expert_bytes=(10_000, 20_000, 30_000), **HALF)  # mean 20,000
    profile.write_text(written(made, ""))
    sizes = ("--cache-sizes", "605kB,20,30,100%", "--policies", "lru,lfu", "--workers", "1", "--quiet")
    moe_sim("sweep", "tiny", "--model-profile", str(profile), *sizes, "--out", str(tmp_path / "sized"), cwd=home)
    cells = read(tmp_path / "sized")
    found = [(cell.cache_experts, cell.row["cache_bytes"]) for cell in cells if cell.policy == "lru"]
    assert found == [(30, 605_000), (20, 400_000), (48, 960_000)], "30 would be the same number of experts again"
    assert {len(cell.requests) for cell in cells} == {6}
    for size, held in (("605kB", 30), ("610kB", 30), ("400kB", 20), ("5MB", 48), ("30", 30), ("100%", 48)):
        assert [cell.cache_experts for cell in choose(cells, "lru", size)] == [held], size
    with pytest.raises(InputError, match=r"unknown cell .lru@500kB.; did you mean lru@"):
        choose(cells, "lru", "500kB")
