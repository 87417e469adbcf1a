"""`moe-sim eamc build` and `moe-sim profile build`, through the command line."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pandas as pd
import pytest

from sim.commands import main
from tests.support.command import run
from tests.support.tiny import SIZES
from traces.synthetic import synthetic
from traces.writer import write_trace


@pytest.fixture
def moe_sim(tmp_path, monkeypatch):
    """Run a command in a folder with a small trace: (exit status, output, errors)."""
    trace = synthetic(3, tokens=6, layers=3, experts=16, top_k=2, seed=3)
    write_trace(replace(trace, meta=replace(trace.meta, model="tiny", **SIZES)), tmp_path / "tiny")
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    return partial(run, main)


def test_a_trace_is_learned_and_started_from(moe_sim):
    status, out, _ = moe_sim("eamc", "build", "tiny", "--capacity", "2", "--out", "two.npz")
    assert (status, out) == (0, "learned 3 requests of tiny: 0 EAMs of prefill, 2 EAMs of decode\nwrote two.npz\n")
    arguments = ("--policies", "eamc:capacity=2,eamc:capacity=2:collection=two.npz", "--cache-sizes", "50%")
    status, out, err = moe_sim("sweep", "tiny", *arguments, "--out", "from-two", "--workers", "1")
    assert status == 0, err
    rows = pd.read_parquet("from-two/results.parquet").set_index("policy")
    assert rows["bytes_prefetch"].nunique() == 2


@pytest.mark.parametrize("policy", ["eamc@layer", "eamc/layers:n=1", "lru+eamc@layer", "eamc+eamc:matches=2"])
def test_the_capacity_is_that_of_the_eamc_whatever_stands_beside_it(moe_sim, policy):
    status, out, err = moe_sim("eamc", "build", "tiny", "--policy", policy, "--capacity", "2", "--out", "two.npz")
    assert (status, err) == (0, "")
    assert ", 2 EAMs of decode\n" in out


def test_a_class_derived_from_the_eamc_is_one(moe_sim):
    Path("mine.py").write_text("from policies.eamc.eamc import EamcPrefetcher\nclass Mine(EamcPrefetcher):\n    pass\n")
    status, out, _ = moe_sim(
        *("eamc", "build", "tiny", "--policy", "lru+mine.py:Mine", "--capacity", "2", "--out", "two.npz")
    )
    assert status == 0
    assert "2 EAMs" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["build", "tiny", "--policy", "lru", "--out", "x.npz"], "lru learns no EAMs"),
        (["build", "tiny", "--capacity", "0", "--out", "x.npz"], "capacity of at least 1"),
        (
            ["build", "tiny", "--policy", "eamc:capacity=3", "--capacity", "2", "--out", "x.npz"],
            "eamc:capacity=3 states its capacity: leave out --capacity 2",
        ),
    ],
)
def test_bad_input_is_told_in_one_line_and_nothing_is_written(moe_sim, tmp_path, arguments, says):
    status, out, err = moe_sim("eamc", *arguments)
    assert (status, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1
    assert not (tmp_path / "x.npz").exists()


def test_a_profile_is_learned_continued_and_started_from(moe_sim):
    status, out, _ = moe_sim("profile", "build", "tiny", "--out", "tiny.npz")
    assert (status, out) == (0, "learned 3 requests of tiny\nwrote tiny.npz\n")
    Path("tiny.npz").rename("tiny:1,2.npz")
    status, out, _ = moe_sim("profile", "build", "tiny", "tiny", "--start", "tiny:1,2.npz", "--out", "more.npz")
    assert (status, out) == (0, "learned 6 requests of tiny, tiny, tiny\nwrote more.npz\n")
    arguments = ("--policies", "eamc-blend,eamc-blend:profile=more.npz", "--cache-sizes", "25%", "--out", "from")
    status, out, err = moe_sim("sweep", "tiny", *arguments, "--workers", "1")
    assert status == 0, err
    cold, warm = pd.read_parquet("from/results.parquet").set_index("policy")["misses"]
    assert cold != warm


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("tiny", "--out", "new.npz", "--start", "file"), "holds no profile of eamc-blend"),
        (("tiny", "wider", "--out", "new.npz"), "wider is of another model than tiny"),
        (("tiny", "--as-decode", "--out", "new.npz", "--start", "wider.npz"), "does not fit this model"),
    ],
)
def test_what_cannot_become_a_profile_is_refused_in_one_line(arguments, says, moe_sim, tmp_path):
    write_trace(synthetic(1, tokens=6, layers=3, experts=17, top_k=2, seed=3), tmp_path / "wider")
    moe_sim("profile", "build", "wider", "--out", "wider.npz")
    status, _, err = moe_sim("profile", "build", *arguments)
    assert status != 0
    assert says in err
    assert "Traceback" not in err
    assert not (tmp_path / "new.npz").exists()
