import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from policies.core.policy import ScorePolicy
from policies.core.spec import PolicySpec, parse
from sim.engines import compiling
from sim.experiment import Experiment
from sim.loaded import TimedRun, load
from sim.loop.requests import Requests
from sim.results.files import REQUESTS_FILE, RESULTS_FILE
from sim.results.metrics import Summary
from sim.sweeps import notes, winner
from sim.sweeps.config import specs
from sim.sweeps.grid import Grid, Table, grid_of, key, outcome, run_grid, save, sweep
from sim.sweeps.store import Store
from sim.sweeps.winner import Winner
from sim.sweeps.workers import Local
from tests.support.ahead import with_lookahead
from tests.support.tiny import SIZES
from traces import DECODE, InputError, Trace
from traces.models.profile import model
from traces.output import MARKER
from traces.synthetic import synthetic
from traces.writer import write_trace

LAYERS, EXPERTS, TOP_K = 4, 16, 3
SCOPES = ("lru", "lru@layer")


def written(trace, folder):
    write_trace(replace(trace, meta=replace(trace.meta, model="tiny", **SIZES)), folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = synthetic(4, tokens=12, layers=LAYERS, experts=EXPERTS, top_k=TOP_K, seed=3, prompt_tokens=6)
    return written(made, tmp_path_factory.mktemp("traces") / "tiny")


@pytest.fixture(scope="module")
def prefill(tmp_path_factory):
    made = synthetic(2, tokens=0, layers=LAYERS, experts=EXPERTS, top_k=TOP_K, seed=1, prompt_tokens=8)
    return written(made, tmp_path_factory.mktemp("traces") / "prompts")


def grid(policies="lru,lfu", **sizes):
    return Grid(tuple(parse(policy) for policy in policies.split(",")), sizes or {"25%": 16, "50%": 32})


def test_a_trace_read_whole_lets_policies_hear_what_its_files_do(tmp_path):
    made = synthetic(3, tokens=5, layers=LAYERS, experts=EXPERTS, top_k=TOP_K, seed=2, prompt_tokens=4)
    ids = np.arange(len(made.experts), dtype=np.int32)
    loaded = TimedRun.of(
        Experiment(written(with_lookahead(replace(made, token_id=ids), made.experts), tmp_path / "told"))
    )
    for read, whole in zip(Requests(loaded.trace), Requests(loaded.whole), strict=True):
        assert read.lookahead
        assert whole.lookahead
        np.testing.assert_array_equal(read.token_ids, whole.token_ids)
        np.testing.assert_array_equal(read.lookahead.experts, whole.lookahead.experts)


def test_a_size_that_holds_as_many_experts_as_another_one_is_not_run_and_said(folder):
    loaded, sizes = TimedRun.of(Experiment(folder)), ["25%", "16", "25.1%", "25%", "50%"]
    asked = grid_of(loaded, [parse("lru")], sizes)
    assert list(asked.sizes) == ["25%", "50%"]
    said = [f"a cache of {size} holds 16 experts, as many as one of 25%, which alone is run" for size in sizes[1:3]]
    assert list(notes.sizes_note(loaded, asked, sizes)) == said


def test_gpu_memory_holds_the_cache_dense_weights_kv_cache_of_all_users_and_the_draft_model(folder):
    alone, olmoe = TimedRun.of(Experiment(folder)), model("olmoe-1b-7b")
    drafting = Experiment(folder, hardware="h100", draft=1, acceptance=1.0, draft_model="olmoe-1b-7b")
    several = TimedRun.of(replace(drafting, max_batch=3))
    own, context = alone.profile, 6 + 12
    assert alone.needed(5) == 5 * own.expert_bytes + own.dense_bytes + own.kv_cache_bytes(context)
    drafter = olmoe.dense_bytes + olmoe.moe_layers * olmoe.experts * olmoe.expert_bytes
    kept = 3 * (own.kv_cache_bytes(context) + olmoe.kv_cache_bytes(context))
    assert several.needed(5) == 5 * own.expert_bytes + own.dense_bytes + drafter + kept
    assert several.fits(5)
    assert not TimedRun.of(replace(drafting, hardware="rtx4060-laptop")).fits(5)


def test_belady_is_drawn_unasked_but_gets_no_row(folder):
    found = run_grid(TimedRun.of(Experiment(folder)), grid("lru"))[0]
    assert {row["policy"] for row in found.rows} == {"lru"}
    assert [row["cache_experts"] for row in found.bound] == [16, 32]
    assert {row["policy"] for row in found.bound} == {"belady"}
    asked = run_grid(TimedRun.of(Experiment(folder)), grid("lru,belady"))[0]
    assert [row for row in asked.rows if row["policy"] == "belady"] == found.bound == asked.bound


def test_an_oracle_never_wins(folder):
    found = run_grid(TimedRun.of(Experiment(folder)), grid("belady,lru+oracle1,lfu,lru"))[0]
    assert {won.policy for won in found.winners} <= {"lfu", "lru"}
    best = min(row["tpot_mean_ms"] for row in found.rows if not row["oracle"] and row["cache_experts"] == 16)
    assert found.winners[0].predicted["tpot_mean_ms"] == best
    assert run_grid(TimedRun.of(Experiment(folder)), grid("belady"))[0].winners == []


def test_equal_policies_are_won_by_the_first_typed(folder):
    everything_fits = {"100%": LAYERS * EXPERTS}
    for policies in ("lru,lfu", "lfu,lru"):
        found = run_grid(TimedRun.of(Experiment(folder)), grid(policies, **everything_fits))[0]
        assert found.winners[0].policy == policies.split(",")[0]


def test_coverage_is_known_where_the_grid_holds_the_cell_without_prefetch(folder):
    loaded = TimedRun.of(Experiment(folder))
    lru, pair = run_grid(loaded, grid("lru,lru+popular", **{"16": 16}))[0].rows
    assert lru["prefetch_coverage"] is None
    assert pair["prefetch_coverage"] == (lru["misses"] - pair["misses"]) / lru["misses"]
    assert run_grid(loaded, grid("lfu,lru+popular", **{"16": 16}))[0].rows[1]["prefetch_coverage"] is None
    eamc = run_grid(loaded, grid("eamc,eamc+none", **{"16": 16}))[0].rows[0]
    assert eamc["prefetch_coverage"] is not None


@pytest.mark.parametrize("untimed", [False, True])
def test_an_encoder_is_not_run_as_decode(untimed):
    trace = Trace.from_arrays([np.tile([0, 1], (4, 12, 1))], 128, 2, model="nllb-moe-54b")
    with pytest.raises(InputError, match="is an encoder-decoder"):
        load(Experiment("x", hardware="h100", as_decode=True, untimed=untimed), trace)
    TimedRun.of(Experiment("x", hardware="h100"), trace)


@pytest.mark.parametrize("untimed", [True, False])
def test_prompts_count_apart_and_may_bypass_the_cache(folder, untimed):
    loaded = load(Experiment(folder, untimed=untimed))
    log, (row,) = loaded.log(parse("lru"), 16), run_grid(loaded, grid("lru", **{"4/layer": 16}))[0].rows
    decoded = log.phase == DECODE
    assert 0 < decoded.sum() < len(decoded)
    assert row["hit_rate"] == log.hits.sum() / row["lookups"]
    assert row["decode_hit_rate"] == log.hits[decoded].sum() / (log.hits + log.misses)[decoded].sum()
    trace = Trace.read(folder)
    apart = Trace.from_arrays(
        [trace.experts[a:b][trace.phase[a:b] == DECODE] for a, b in itertools.pairwise(trace.offsets)], EXPERTS
    )
    bypassing = load(Experiment(folder, untimed=untimed, decode_only=True)).log(parse("lru"), 16)
    assert bypassing.hits.tolist() == load(Experiment("x", untimed=True), apart).log(parse("lru"), 16).hits.tolist()
    assert bypassing.hits.sum() < log.hits[decoded].sum(), "without the prompt the cache is cold"
    with pytest.raises(InputError, match="`as_decode` runs prompts and `decode_only` leaves them out"):
        Experiment(folder, as_decode=True, decode_only=True)


def test_slots_a_layer_are_shared_unless_the_scope_divides_them(folder):
    loaded = load(Experiment(folder, untimed=True))
    sizes = ["3/layer", "12"]
    assert grid_of(loaded, specs(["lru"], None), sizes).sizes == {"3/layer": 12}
    shared, apart = (list(notes.sizes_note(loaded, grid_of(loaded, specs([p], None), sizes), sizes)) for p in SCOPES)
    assert shared[-1] == ("3/layer: all layers share these slots under lru; --scope layer gives each layer its own")
    assert len(shared) == len(apart) + 1
    assert parse("lru@layer").divide(loaded.shape, 12) == (3, 3, 3, 3)


def test_a_prefill_is_judged_by_ttft_and_as_decode_by_tpot(prefill):
    assert run_grid(TimedRun.of(Experiment(prefill)), grid())[0].judged_by == "ttft_mean_ms"
    found = run_grid(TimedRun.of(Experiment(prefill, as_decode=True)), grid())[0]
    assert found.judged_by == "tpot_mean_ms"
    assert all("as decode" in row["trace"] and row["phase"] == "decode" for row in found.rows)


def saved(loaded, cells, folder):
    """The files of a sweep of one table."""
    table, store = Table(loaded, cells, folder), Store(folder)
    sweep([table], store)
    found = outcome(table, store)
    return found, save([found], store, folder)


def test_all_files_are_written_and_the_winner_can_be_replayed(folder, tmp_path):
    setup = Experiment(folder, requests=3, warmup_requests=1, chunk_bytes=4096, predictor_us=1.5, cold=True)
    found, files = saved(load(setup), grid("lru,eamc:capacity=3"), tmp_path)
    expected = {"results.parquet", "requests.parquet", "winner.toml", "hit_rate.png", "tpot.png"}
    assert {file.name for file in files} == expected
    assert {file.name for file in tmp_path.iterdir()} == {*expected, MARKER}
    assert len(pd.read_parquet(tmp_path / "results.parquet")) == 4
    assert len(pd.read_parquet(tmp_path / "requests.parquet")) == 4 * 2
    again, winners = winner.read(tmp_path)
    assert (again, winners) == (setup, found.winners)
    assert all(isinstance(won, Winner) and won.policy in ("lru", "eamc:capacity=3") for won in winners)


def test_an_interrupted_sweep_keeps_what_was_finished_and_goes_on_to_the_same_files(folder, tmp_path):
    loaded, whole, cut = TimedRun.of(Experiment(folder)), tmp_path / "whole", tmp_path / "cut"
    saved(loaded, grid("lru,lfu"), whole)
    told = []

    def interrupt_in_the_third_cell(requests):
        told.append(requests)
        if len(told) == 10:
            raise KeyboardInterrupt

    table = Table(loaded, grid("lru,lfu"), cut)
    with pytest.raises(KeyboardInterrupt):
        sweep([table], Store(cut), advance=interrupt_in_the_third_cell)
    rows = pd.read_parquet(cut / "cells" / "results")
    assert sorted(zip(rows["cache_experts"], rows["policy"], strict=True)) == [(16, "lfu"), (16, "lru")]
    assert set(pd.read_parquet(cut / "cells" / "requests")["cell"]) == set(rows["cell"])
    assert {file.name for file in cut.iterdir()} == {"cells", MARKER}
    store, again = Store(cut), list[int]()
    sweep([table], store, advance=again.append)
    assert sum(again) == 4 * 4  # the two cells that were missing, and Belady's two
    save([outcome(table, store)], store, cut)
    for name in (RESULTS_FILE, REQUESTS_FILE):
        assert (cut / name).read_bytes() == (whole / name).read_bytes()
    assert not (cut / "cells").exists()


def test_a_larger_grid_plays_only_what_a_finished_sweep_has_not(folder, tmp_path):
    loaded = TimedRun.of(Experiment(folder))
    first, _ = saved(loaded, grid("lru", **{"25%": 16}), tmp_path)
    table, store, told = Table(loaded, grid("lru,lfu"), tmp_path), Store(tmp_path), list[int]()
    sweep([table], store, advance=told.append)
    assert sum(told) == 4 * (4 - 1 + 2)
    found = outcome(table, store)
    assert found.rows[0] == first.rows[0]
    save([found], store, tmp_path)
    assert len(pd.read_parquet(tmp_path / REQUESTS_FILE)) == 4 * 4


def test_coverage_does_not_outlive_the_cell_that_it_was_measured_against(folder, tmp_path):
    loaded = TimedRun.of(Experiment(folder))
    both, _ = saved(loaded, grid("lru,lru+popular", **{"16": 16}), tmp_path)
    assert both.rows[1]["prefetch_coverage"] is not None
    alone = outcome(Table(loaded, grid("lru+popular,belady", **{"16": 16}), tmp_path), filled(loaded, tmp_path))
    assert alone.rows[0]["prefetch_coverage"] is None


def filled(loaded, folder):
    store = Store(folder)
    sweep([Table(loaded, grid("lru+popular,belady", **{"16": 16}), folder)], store)
    return store


def test_a_key_tells_apart_all_that_a_cell_depends_on(folder, prefill, tmp_path):
    mine = tmp_path / "mine.py"
    text = "from policies.core.policy import ScorePolicy\nclass Mine(ScorePolicy):\n    name = 'mine'\n"
    mine.write_text(text)
    one = TimedRun.of(Experiment(folder, hardware="a5000"))
    cells = [
        (one, parse("lru"), 16),
        (one, parse("lru"), 17),
        (one, parse("lru+none"), 16),
        (one, parse("eamc:capacity=3"), 16),
        (one, parse(f"{mine}:Mine"), 16),
        *[
            (load(Experiment(folder, **changed)), parse("lru"), 16)
            for changed in (
                {"hardware": "h200"},
                {"predictor_us": 1.0},
                {"cold": True},
                {"untimed": True},
                {"chunk_bytes": 4096},
                {"requests": 3},
                {"warmup_requests": 1},
            )
        ],
        (TimedRun.of(Experiment(prefill, as_decode=True)), parse("lru"), 16),
        (TimedRun.of(Experiment(prefill)), parse("lru"), 16),
    ]
    keys = [key(*cell) for cell in cells]
    assert len(set(keys)) == len(cells)
    assert keys[0] == key(TimedRun.of(Experiment(folder, hardware="a5000")), parse("lru"), 16)
    mine.write_text(text + "    # changed\n")
    assert key(*cells[4]) == keys[4]  # it is what was imported that runs
    assert key(one, parse(f"{mine}:Mine"), 16) != keys[4]


def test_the_key_of_a_class_does_not_depend_on_who_else_holds_its_code(folder):
    class Mine(ScorePolicy):
        def observe(self, event):
            self.keep[0, event.experts] = max(event.experts, key=lambda expert: expert + 0.5)

    cell = TimedRun.of(Experiment(folder, hardware="a5000")), parse(Mine), 16
    before, code = key(*cell), Mine.observe.__code__
    held = [code.co_consts, code.co_names, *code.co_consts, *code.co_names]
    assert key(*cell) == before, held


def test_tables_of_two_machines_have_a_folder_each_and_one_table_of_all(folder, tmp_path):
    tables = [
        Table(TimedRun.of(Experiment(folder, hardware=name)), grid("lru"), tmp_path / name)
        for name in ("a5000", "h200")
    ]
    store = Store(tmp_path)
    sweep(tables, store, Local(2))
    save([outcome(table, store) for table in tables], store, tmp_path)
    together = pd.read_parquet(tmp_path / RESULTS_FILE)
    assert together["hardware"].tolist() == ["a5000", "a5000", "h200", "h200"]
    for name in ("a5000", "h200"):
        alone = pd.read_parquet(tmp_path / name / RESULTS_FILE)
        pd.testing.assert_frame_equal(alone, together[together["hardware"] == name].reset_index(drop=True))
        assert winner.read(tmp_path / name)[0].hardware == name


def test_a_run_of_which_every_step_has_a_warm_up_request_is_refused(tmp_path):
    alike = written(synthetic(4, tokens=4, layers=LAYERS, experts=EXPERTS, top_k=TOP_K, seed=3), tmp_path / "alike")
    loaded = TimedRun.of(Experiment(alike, max_batch=4, warmup_requests=3))
    found = Summary(loaded.cell(parse("lru"), 6), loaded.trace.requests)
    found.add(loaded.log(parse("lru"), 6))
    with pytest.raises(InputError, match="no step counts: each is shared with one of the 3 warm-up requests"):
        found.row()


def test_what_cannot_be_run_is_refused_before_anything_runs(folder):
    for options in ({"warmup_requests": 4}, {"model_profile": "olmoe-1b-7b"}):
        with pytest.raises(InputError):
            load(Experiment(folder, **options))
    with pytest.raises(InputError):
        TimedRun.of(Experiment(folder, max_batch=1, arrivals="poisson", arrival_rate=1e-14))
    with pytest.raises(InputError, match="brainstorm: it needs a trace to take popularity from"):
        grid_of(TimedRun.of(Experiment(folder)), [parse("lru"), parse("brainstorm")], ["50%"])  # before lru has run


def test_a_policy_is_constructed_once_a_cell(folder, monkeypatch, tmp_path):
    built, build = list[str](), PolicySpec.build

    def counted(policy, *arguments):
        built.append(policy.text)
        return build(policy, *arguments)

    monkeypatch.setattr(PolicySpec, "build", counted)
    loaded = TimedRun.of(Experiment(folder))
    table = Table(loaded, grid_of(loaded, specs(["lru", "clock", "random"], None, [1, 2]), ["25%", "50%"]), tmp_path)
    store = Store(tmp_path)
    compiling.notes(loaded.versions(policy for policy, _ in table.grid.cells()))
    sweep([table], store)
    save([outcome(table, store)], store, tmp_path)
    once = {"random:seed=1": 2, "random:seed=2": 2, "clock": 2, "lru": 3, "belady": 1}  # of all experts too
    assert Counter(built) == once


def test_files_that_a_winner_names_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    setup = Experiment("trace", hardware="mine.toml", model_profile="model.toml", expert_sizes="model.gguf")
    for name in (setup.hardware, "model.toml"):
        Path(name).touch()
    winner.write(Path(winner.NAME), setup, "misses", [])
    found = winner.read(tmp_path)[0]
    for name in ("trace", "hardware", "model_profile", "expert_sizes"):
        assert getattr(found, name) == str(tmp_path / getattr(setup, name)), name
