"""The command `moe-sim run`: its figures against the same cell of a sweep, its windows, and bad input."""

import gzip
import json
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest

from policies.core.spec import parse
from sim.experiment import Experiment
from sim.loaded import TimedRun, load
from sim.loop.requests import Requests
from sim.results.metrics import summarise
from sim.timeline import window as timeline_window
from sim.timeline.window import Window
from tests.support.command import moe_sim
from tests.support.tiny import SIZES
from traces import PREFILL, InputError
from traces.synthetic import synthetic
from traces.writer import write_trace


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    made = synthetic(4, tokens=8, layers=3, experts=16, top_k=2, seed=3, prompt_tokens=3)
    write_trace(replace(made, meta=replace(made.meta, model="tiny", **SIZES)), home / "tiny")
    (home / "file").touch()
    return home


@pytest.fixture
def moe_sim_run(tmp_path):
    """Runs the command in a folder of its own; status, standard output, standard error."""
    return partial(moe_sim, "run", cwd=tmp_path)


def steps_of(path):
    """Names of the steps in a timeline, and its description."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    shown = json.loads(text)
    steps = [e for e in shown["traceEvents"] if e["ph"] == "X" and "phase" in e["args"]]
    return [(e["name"], e["args"]["request"]) for e in steps], shown["otherData"]


def test_a_trace_without_tokens_is_refused():
    with pytest.raises(InputError, match="t has no tokens: there is nothing to run"):
        load(Experiment(trace="t", untimed=True), synthetic(2, 0, 2, 4, 2, seed=0))


def test_the_row_is_the_cells_with_a_timeline_as_well(moe_sim_run, home, tmp_path):
    loaded = TimedRun.of(Experiment(trace=str(home / "tiny"), warmup_requests=1))
    log = loaded.log(parse("lru+popular"), 24)
    expected, _ = summarise(log, loaded.cell(parse("lru+popular"), 24), loaded.trace.requests)
    cell = (str(home / "tiny"), "--policy", "lru+popular", "--cache-size", "50%", "--warmup-requests", "1", "--json")
    for more in ((), ("--timeline", "out.json")):
        status, out, err = moe_sim_run(*cell, *more)
        assert status == 0, err
        row = json.loads(out)
        for column, value in expected.items():
            assert row[column] == value, column
    assert row["misses"] > 0
    prefills = log.step_ns[(log.phase == PREFILL) & (log.request >= 1)] / 1e6
    assert len(prefills) == 3
    assert row["ttft_p95_ms"] == pytest.approx(np.percentile(prefills, 95))
    assert row["ttft_max_ms"] == prefills.max()
    assert [file.name for file in tmp_path.iterdir()] == ["out.json"]


def test_tokens_choose_decode_steps_of_the_whole_run_and_play_stops_after_them(moe_sim_run, home, tmp_path):
    status, out, err = moe_sim_run(str(home / "tiny"), "--timeline", "out.json.gz", "--tokens", "9:11", "--json")
    assert status == 0, err
    steps, about = steps_of(tmp_path / "out.json.gz")
    assert [name for name, _ in steps] == ["decode 9", "decode 10"]
    assert json.loads(out)["requests"] == 2
    assert about["policy"] == "eamc-blend"
    assert "figures are of that" in err


def test_a_window_may_reach_to_the_end(moe_sim_run, home, tmp_path):
    status, _, err = moe_sim_run(str(home / "tiny"), "--timeline", "out.json", "--tokens", "16:")
    assert status == 0, err
    steps, _ = steps_of(tmp_path / "out.json")
    assert [name for name, _ in steps] == [
        *("prefill", *(f"decode {n}" for n in range(16, 24))),
        *("prefill", *(f"decode {n}" for n in range(24, 32))),
    ]
    assert len({request for _, request in steps}) == 2


def test_a_long_run_shows_its_beginning_unasked_and_is_played_whole(moe_sim_run, home, tmp_path):
    with patch.object(timeline_window, "SHOWN_WHOLE", 9), patch.object(timeline_window, "FIRST", 3):
        status, out, err = moe_sim_run(str(home / "tiny"), "--timeline", "out.json", "--json")
    assert status == 0
    assert "first 3 decode steps" in err
    steps, _ = steps_of(tmp_path / "out.json")
    assert [name for name, _ in steps] == ["prefill", "decode 0", "decode 1", "decode 2"]
    assert json.loads(out)["requests"] == 4


@pytest.mark.parametrize(
    ("text", "window"),
    [("5:9", (5, 9)), (":4", (0, 4)), ("7:", (7, None)), (":", (0, None))],
)
def test_either_end_of_a_window_may_be_left_out(text, window):
    trace = synthetic(4, tokens=8, layers=3, experts=16, top_k=2, seed=3)
    assert timeline_window.chosen(text, Requests(trace)) == Window(*window)


SHOW = ("--timeline", "out.json")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--warmup-requests", "4"), "4 warm-up requests leave none of 4 to count: use a smaller --warmup-requests"),
        ((*SHOW, "--tokens", "5:3"), "--tokens '5:3': write FROM:TO"),
        ((*SHOW, "--tokens", "9999:"), "--tokens begins at 9999: the run has 32 decode steps"),
        (("--tokens", "1:2"), "--timeline out.json"),
        (("--timeline", "absent/out.json"), "cannot write absent/out.json"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(moe_sim_run, home, tmp_path, arguments, complaint):
    status, out, err = moe_sim_run(str(home / "tiny"), "--quiet", *arguments)
    assert (status, out) == (2, "")
    assert complaint in err
    assert err.startswith("moe-sim: error: ")
    assert err.count("\n") == 1
    assert not any(tmp_path.iterdir())
