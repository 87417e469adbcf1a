"""No command of moe-sim destroys a trace, a file that is not its own, or the results of another one beside it."""

import shutil
from dataclasses import replace

import pytest

from sim.sweeps.store import CELLS, MAKER
from tests.support.command import moe_sim
from tests.support.tiny import SIZES
from traces.output import claim, only_writer
from traces.synthetic import synthetic
from traces.writer import write_trace

RESULTS = {
    "sweep": ("--untimed", "--policies", "lru", "--cache-sizes", "24", "--workers", "1"),
    "analyze": ("--policies", "lru", "--cache-size", "24"),
}
"""Commands that write results to a folder, with options that keep them short."""

SWEEP = ("sweep", "tiny", *RESULTS["sweep"], "--quiet", "--out", "out")


@pytest.fixture
def home(tmp_path):
    made = synthetic(6, tokens=6, layers=3, experts=16, top_k=2, seed=3)
    tasks = ["a", "b"] * 3
    made = replace(made, meta=replace(made.meta, model="tiny", **SIZES), requests=made.requests.assign(task=tasks))
    for name in ("tiny", "other"):
        write_trace(made, tmp_path / name)
    return tmp_path


def refused(done, *parts):
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    for part in parts:
        assert part in done.stderr


@pytest.mark.parametrize("command", RESULTS)
def test_two_commands_do_not_write_to_one_folder(home, command):
    with only_writer(home / "out"):
        done = moe_sim(command, "tiny", *RESULTS[command], "--quiet", "--out", "out", cwd=home)
    refused(done, "another command is writing to out")


def test_dropping_a_sweep_leaves_alone_what_sweeps_have_not_written(home):
    assert moe_sim(*SWEEP, cwd=home).returncode == 0
    claim(home / "out", MAKER, [CELLS])
    names = ("cells/notes/keep.txt", "cells/results/keep.txt", "mine.txt", "sub/requests.parquet")
    kept = [home / "out" / name for name in names]
    for file in kept:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("mine")
    cell = home / "out/cells/results/0123456789abcdef.parquet"
    shutil.copy(home / "out/results.parquet", cell)
    assert moe_sim(*SWEEP, "--overwrite", cwd=home).returncode == 0
    assert [file.read_text() for file in kept] == ["mine"] * len(kept)
    assert not cell.exists()


@pytest.mark.parametrize("name", ["cells", "results.parquet", "winner.toml", "hit_rate.png"])
def test_a_file_of_that_name_that_a_sweep_has_not_written_is_left_alone(home, name):
    (home / "out").mkdir()
    (home / "out" / name).write_text("mine")
    for more in ((), ("--overwrite",), ("--resume",)):
        refused(moe_sim(*SWEEP, *more, cwd=home), f"out/{name} was not written by moe-sim sweep")
    assert (home / "out" / name).read_text() == "mine"
    assert {file.name for file in (home / "out").iterdir()} == {name}


FILES = {
    "run": ("tiny", "--policy", "lru", "--quiet", "--timeline"),
    "eamc build": ("tiny", "--out"),
}
"""Commands that write a single file."""


@pytest.mark.parametrize("command", FILES)
def test_a_file_is_replaced_only_where_that_is_asked_for(home, command):
    (home / "notes.txt").write_text("mine")
    asked = (*command.split(), *FILES[command])
    refused(moe_sim(*asked, "notes.txt", cwd=home), "notes.txt exists: replace it with --overwrite")
    assert (home / "notes.txt").read_text() == "mine"
    done = moe_sim(*asked, "notes.txt", "--overwrite", cwd=home)
    assert done.returncode == 0, done.stderr
    assert (home / "notes.txt").read_bytes() != b"mine"
