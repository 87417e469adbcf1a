import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from unittest.mock import patch

import pandas as pd
import pytest

import sim.commands
from tests.support.command import moe_sim
from tests.support.tiny import SIZES
from traces.importers import Options, import_dump
from traces.output import LOCK, MARKER
from traces.synthetic import synthetic
from traces.writer import write_trace

COMMAND = [sys.executable, "-c", "from sim.commands import main; main()"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    made = synthetic(3, tokens=6, layers=3, experts=16, top_k=2, seed=3)
    write_trace(replace(made, meta=replace(made.meta, model="tiny", **SIZES)), home / "tiny")
    write_trace(replace(made, meta=replace(made.meta, model="unheard-of")), home / "sizeless")
    write_trace(replace(made, meta=replace(made.meta, model="allenai/OLMoE-1B-7B-0924")), home / "liar")
    (home / "file").touch()
    (home / "file.toml").write_text('policy = "lru"\n')
    return home


@pytest.mark.parametrize("typed", ["sweep counts", "profile build counts --out x"])
def test_a_trace_without_sequences_is_refused_as_one(typed, tmp_path):
    (tmp_path / "counts.csv").write_text("0,0\n0,1\n1,1\n")
    counts = import_dump(tmp_path / "counts.csv", None, Options(phase="decode", experts=4, top_k=1))[0]
    write_trace(counts, tmp_path / "counts")
    done = moe_sim(*typed.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert "counts holds EAMs only, no sequences that could be run" in done.stderr


def test_a_size_larger_than_the_model_is_all_experts_and_the_table_has_sizes_as_typed(home):
    asked = ("--policies", "lru,fifo", "--cache-sizes", "25%,1GiB", "--out", "large", "--workers", "1")
    done = moe_sim("sweep", "tiny", *asked, cwd=home)
    assert done.returncode == 0, done.stderr
    assert "a cache of 1GiB is larger than all 48 experts: it holds them all (100%)" in done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    mib = 48 * SIZES["expert_bytes"] / 2**20
    slots = 12 / 3  # a layer
    assert ["25%", f"{slots:g}", f"{mib / 4:.3g}", "lru"] in [line[:4] for line in lines]
    assert ["1GiB", f"{4 * slots:g}", f"{mib:.3g}", "fifo"] in [line[:4] for line in lines]


def test_a_closed_standard_output_is_no_error():
    closed, typed = patch.object(sys, "stdout", None), patch.object(sys, "argv", ["moe-sim", "policies"])
    with closed, typed, pytest.raises(SystemExit) as ended:
        sim.commands.main()
    assert ended.value.code == 0


def test_best_is_who_is_better_than_all_others_beyond_the_noise(tmp_path):
    """LRU against the same under another name, and against a policy that hits nothing."""
    cycle = synthetic(8, tokens=30, layers=2, experts=8, top_k=2, seed=5)
    write_trace(replace(cycle, meta=replace(cycle.meta, model="tiny", **SIZES)), tmp_path / "t")
    (tmp_path / "mine.py").write_text(
        "from policies.core.policy import Policy\n"
        "from policies.retention.lru import LRU\n\n\n"
        "class Same(LRU):\n    pass\n\n\n"
        "class Worst(Policy):\n"
        "    last = {}\n"
        "    def on_hit(self, expert, serial):\n        self.last[expert] = serial\n"
        "    def on_insert(self, expert, serial, start):\n        self.last[expert] = serial\n"
        "    def victim(self, evictable):\n        return max(evictable.tolist(), key=lambda e: self.last.get(e, 0))\n"
    )
    marks = {}
    for policies in ("lru,mine.py:Worst", "lru,mine.py:Same,mine.py:Worst"):
        asked = ("--policies", policies, "--cache-sizes", "75%", "--out", "o", "--overwrite", "--untimed")
        done = moe_sim("sweep", "t", *asked, "--workers", "1", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        rows = [line.split() for line in done.stdout.splitlines() if line.startswith(" 75%")]
        marks[policies] = {row[3]: row[-1] for row in rows}
        assert ("equal: the best mean, or within its noise" in done.stdout) == ("Same" in policies)
    best, equal = marks.values()
    assert best["lru"] == "best"
    assert equal["lru"] == equal["mine.py:Same"] == "equal"
    assert {found["mine.py:Worst"] for found in (best, equal)}.isdisjoint({"best", "equal"})


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["tiny", "--cache-sizes", "10%,101%"], "a cache of 101% is impossible"),
        (["tiny", "--policies", "lru,lfuu"], "unknown policy 'lfuu'; did you mean lfu"),
        (["tiny", "--hardware", "a500"], "unknown hardware profile 'a500'; did you mean a5000 or"),
        (["tiny", "--untimed", "--hardware", "nothing"], "--untimed counts without a clock: it cannot have --hardware"),
        (["tiny", "--config", "file.toml"], "file.toml: unknown key 'policy'; did you mean policies"),
        (["tiny", "--scheduler", "tcp://127.0.0.1:9"], "no Dask scheduler answers at tcp://127.0.0.1:9"),
        (
            ["sizeless"],
            "its trace does not state expert_bytes, hidden_size, expert_intermediate_size; choose one with --model",
        ),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(home, monkeypatch, arguments, complaint):
    monkeypatch.setattr("sim.sweeps.workers.ANSWER_S", 1)
    status, out, err = moe_sim("sweep", *arguments, "--out", "bad", "--quiet", cwd=home)
    assert (status, out) == (2, "")
    assert complaint in err
    assert err.startswith("moe-sim: error: ")
    assert err.count("\n") == 1
    assert not (home / "bad").exists()


def test_counting_needs_no_sizes_of_experts(home):
    done = moe_sim("sweep", "sizeless", "--untimed", "--cache-sizes", "24", "--json", "--workers", "1", cwd=home)
    assert done.returncode == 0, done.stderr
    assert all(row["bytes_demand"] is None and row["misses"] > 0 for row in json.loads(done.stdout))


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT to a process group")
def test_ctrl_c_ends_all_workers_quietly(home, tmp_path):
    long = synthetic(40, tokens=200, layers=3, experts=16, top_k=2, seed=3)
    write_trace(replace(long, meta=replace(long.meta, **SIZES)), tmp_path / "long")
    asked = ["sweep", "long", "--cache-sizes", "25%,50%", "--workers", "2", "--out", "out"]
    running = subprocess.Popen(
        [*COMMAND, *asked], cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while running.poll() is None and not (tmp_path / "out" / "sweep.toml").exists():
        time.sleep(0.05)
    os.killpg(running.pid, signal.SIGINT)
    _, told = running.communicate(timeout=300)
    assert running.returncode == 130
    assert "Traceback" not in told
    assert {file.name for file in (tmp_path / "out").iterdir()} <= {"sweep.toml", "cells", MARKER, LOCK}


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGKILL")
def test_a_sweep_killed_again_and_again_ends_with_the_same_results(home, tmp_path):
    long = synthetic(12, tokens=40, layers=3, experts=16, top_k=2, seed=3)
    write_trace(replace(long, meta=replace(long.meta, **SIZES)), tmp_path / "long")
    asked = ["sweep", "long", "--policies", "lru,clock,eamc,lru+popular", "--cache-sizes", "10%,25%,50%"]
    asked += ["--quiet"]
    assert moe_sim(*asked, "--workers", 1, "--out", "whole", cwd=tmp_path).returncode == 0
    found, cells = tmp_path / "cut/cells/results", [0]
    for kills in range(3):
        running = subprocess.Popen(
            [*COMMAND, *asked, "--workers", "2", "--out", "cut", "--resume"], cwd=tmp_path, start_new_session=True
        )
        if kills == 2:
            break
        while running.poll() is None and len(list(found.glob("*.parquet"))) < cells[-1] + 2:
            time.sleep(0.01)
        os.killpg(running.pid, signal.SIGKILL)
        assert running.wait() == -signal.SIGKILL, "it ended before it was killed"
        cells.append(len(pd.read_parquet(found)))
    assert running.wait() == 0
    assert cells == sorted(cells)
    for name in ("results.parquet", "requests.parquet", "winner.toml"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not (tmp_path / "cut" / "cells").exists()


def test_a_config_file_and_what_a_sweep_writes_beside_its_results_play_the_same(home, tmp_path):
    (tmp_path / "my.toml").write_text(
        f'traces = ["{home / "tiny"}"]\npolicies = ["random", "eamc:capacity=2|3"]\ncache_sizes = ["50%"]\n'
        'hardware = ["a5000", "h200"]\nseeds = [1, 2]\nwarmup_requests = 1\nchunk_bytes = "4096B"\n'
    )
    asked = ["sweep", "--json", "--workers", "1"]
    done = moe_sim(*asked, "--config", "my.toml", "--out", "one", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    policies = ["random:seed=1", "random:seed=2", "eamc:capacity=2", "eamc:capacity=3"]
    assert [(row["hardware"], row["policy"]) for row in rows] == [
        (machine, policy) for machine in ("a5000", "h200") for policy in policies
    ]
    assert [row["seed"] for row in rows] == [1, 2, None, None] * 2
    (tmp_path / "elsewhere").mkdir()
    again = moe_sim(*asked, "--config", "../one/sweep.toml", "--out", "two", cwd=tmp_path / "elsewhere")
    assert json.loads(again.stdout) == rows
    typed = moe_sim(*asked, "--config", "one/sweep.toml", "--hardware", "h200", "--out", "3", cwd=tmp_path)
    assert json.loads(typed.stdout) == rows[4:]


def test_help_loads_neither_simpy_nor_matplotlib_nor_pandas():
    code = "import sys, sim.commands; print({'simpy', 'matplotlib', 'pandas', 'torch'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_what_another_sweep_has_finished_is_neither_replaced_nor_thinned_out_unasked(home, tmp_path):
    def swept(*arguments):
        return moe_sim("sweep", str(home / "tiny"), "--cache-sizes", "24", "--out", "o", "-q", *arguments, cwd=tmp_path)

    assert swept("--policies", "lru,lfu", "--hardware", "a5000,h200").returncode == 0
    before = (tmp_path / "o/results.parquet").read_bytes()
    refused = {
        "holds 4 finished cells: continue with --resume, drop them with --overwrite": ("--policies", "lru,lfu"),
        "holds 3 cells that this sweep does not have": ("--policies", "lru", "--resume"),
    }
    for complaint, arguments in refused.items():
        done = swept(*arguments)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert complaint in done.stderr
        assert (tmp_path / "o/results.parquet").read_bytes() == before
    (tmp_path / "o/mine.txt").touch()
    assert swept("--policies", "lru", "--overwrite").returncode == 0
    assert len(pd.read_parquet(tmp_path / "o/results.parquet")) == 1
    names = {"results.parquet", "requests.parquet", "winner.toml", "sweep.toml", "hit_rate.png", "tpot.png", "mine.txt"}
    names.add(MARKER)
    assert {file.name for file in (tmp_path / "o").iterdir()} == names
