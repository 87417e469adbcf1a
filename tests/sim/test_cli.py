import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pandas as pd
import pytest

from sim.cli import main
from traces.synthetic import synthetic
from traces.writer import write_trace

COMMAND = [sys.executable, "-c", "from sim.cli import main; main()"]


def moe_sim(*arguments, cwd):
    wide = {**os.environ, "COLUMNS": "200"}
    return subprocess.run([*COMMAND, *arguments], cwd=cwd, env=wide, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    made = synthetic(3, tokens=6, layers=3, experts=16, top_k=2, seed=3)
    sizes = {"hidden_size": 128, "expert_intermediate_size": 96, "expert_bytes": 73_728}
    write_trace(replace(made, meta=replace(made.meta, model="tiny", **sizes)), home / "tiny")
    write_trace(replace(made, meta=replace(made.meta, model="unheard-of")), home / "sizeless")
    write_trace(replace(made, meta=replace(made.meta, model="allenai/OLMoE-1B-7B-0924")), home / "liar")
    (home / "file").touch()
    return home


def test_a_sweep_prints_a_table_and_says_which_defaults_it_took(home):
    done = moe_sim("sweep", "tiny", "--cache-sizes", "10%,25%,50%", "--workers", "1", cwd=home)
    assert done.returncode == 0, done.stderr
    assert "taking policies lru,lfu,eamc, hardware a5000" in done.stderr
    assert "tiny has no model profile: derived one" in done.stderr
    assert "a cache of 5 experts is below one token's demand of 6" in done.stderr
    assert "NVIDIA RTX A5000" in done.stdout
    assert done.stdout.count("best") == 3
    written = {file.name for file in (home / "results" / "tiny").iterdir()}
    assert written == {"results.parquet", "requests.parquet", "winner.toml", "hit_rate.png", "tpot.png"}


def test_json_is_the_rows_and_quiet_is_quiet(home):
    arguments = ("sweep", "tiny", "--policies", "lru", "--cache-sizes", "24", "--out", "json", "--workers", "1")
    rows = json.loads(moe_sim(*arguments, "--json", cwd=home).stdout)
    frame = pd.read_parquet(home / "json" / "results.parquet")
    assert [row["tpot_mean_ms"] for row in rows] == frame["tpot_mean_ms"].tolist()
    done = moe_sim(*arguments, "--quiet", cwd=home)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_evict_and_prefetch_combine(home):
    done = moe_sim(
        *("sweep", "tiny", "--evict", "lru,lfu", "--prefetch", "none,popular", "--policies", "fifo", "--json"),
        *("--cache-sizes", "50%", "--out", "pairs", "--workers", "1"),
        cwd=home,
    )
    policies = [row["policy"] for row in json.loads(done.stdout)]
    assert policies == ["fifo", "lru+none", "lru+popular", "lfu+none", "lfu+popular"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["tiny", "--cache-sizes", "0"], "a cache of 0 is impossible: it has 0 slots"),
        (["tiny", "--cache-sizes", "0%"], "a cache of 0% is impossible"),
        (["tiny", "--cache-sizes", "10%,101%"], "a cache of 101% is impossible"),
        (["tiny", "--cache-sizes", "49"], "it has 49 slots for the model's 48 experts"),
        (["tiny", "--cache-sizes", ","], "names none"),
        (["tiny", "--policies", "lru,lfuu"], "unknown policy 'lfuu'; did you mean lfu"),
        (["tiny", "--prefetch", "eamc"], "name what to keep with --evict"),
        (["tiny", "--hardware", "a500"], "unknown hardware profile 'a500'; did you mean a5000 or"),
        (["tiny", "--requests", "0"], "cannot give the first 0"),
        (["tiny", "--requests", "9"], "cannot give the first 9"),
        (["tiny", "--workers", "0"], "at least one process"),
        (["tiny", "--chunk-bytes", "many"], "--chunk-bytes 'many' is no number of bytes"),
        (["tiny", "--model-profile", "mixtral-8x7b"], "mixtral-8x7b has 32 MoE layers, the trace of tiny has 3"),
        (["liar"], "olmoe-1b-7b has 16 MoE layers"),
        (["sizeless"], "its trace states no sizes; choose one with --model-profile"),
        (["absent"], "absent"),
        (["file"], "file"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(home, monkeypatch, capsys, arguments, complaint):
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "argv", ["moe-sim", "sweep", *arguments, "--out", "bad", "--quiet"])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert ended.value.code == 2
    assert complaint in told.err
    assert told.err.startswith("moe-sim: error: ")
    assert told.err.count("\n") == 1
    assert told.out == ""
    assert not (home / "bad").exists()


def test_an_unwritable_folder_is_told_before_the_sweep(home):
    done = moe_sim("sweep", "tiny", "--out", "file/below", "--quiet", "--cache-sizes", "24", cwd=home)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "cannot write to file/below" in done.stderr


def test_counting_needs_no_sizes_of_experts(home):
    done = moe_sim("sweep", "sizeless", "--untimed", "--cache-sizes", "24", "--json", "--workers", "1", cwd=home)
    assert done.returncode == 0, done.stderr
    assert all(row["bytes_demand"] is None and row["misses"] > 0 for row in json.loads(done.stdout))


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT to a process group")
def test_ctrl_c_ends_all_workers_quietly(home, tmp_path):
    long = synthetic(40, tokens=200, layers=3, experts=16, top_k=2, seed=3)
    sizes = {"hidden_size": 128, "expert_intermediate_size": 96, "expert_bytes": 73_728}
    write_trace(replace(long, meta=replace(long.meta, **sizes)), tmp_path / "long")
    asked = ["sweep", "long", "--cache-sizes", "25%,50%", "--workers", "2", "--engine", "simpy", "--out", "out"]
    running = subprocess.Popen(
        [*COMMAND, *asked], cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while running.poll() is None and not (tmp_path / "out").exists():
        time.sleep(0.05)
    os.killpg(running.pid, signal.SIGINT)
    _, told = running.communicate(timeout=30)
    assert running.returncode == 130
    assert "Traceback" not in told
    assert not any((tmp_path / "out").glob("*.*"))


def test_what_there_is_can_be_listed(home):
    assert "eamc" in moe_sim("policies", cwd=home).stdout
    assert "rtx4060-laptop" in moe_sim("hardware", cwd=home).stdout
    assert "deepseek-v2-lite" in moe_sim("models", cwd=home).stdout


def test_help_loads_neither_simpy_nor_matplotlib_nor_pandas():
    code = "import sys, sim.cli; print({'simpy', 'matplotlib', 'pandas', 'torch'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_sweeping_loads_no_torch():
    code = "import sys, sim.sweep, sim.report, sim.model; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_conformance_writes_whole_files_only(home, tmp_path):
    durations = {"dense_ns": 3, "expert_ns": 2, "expert_ns_per_token": 1, "combine_ns": 1, "head_ns": 1}
    link = {"link_latency_ns": 5, "link_ns_per_byte_num": 1, "link_ns_per_byte_den": 1, "chunk_bytes": None}
    policy = {"evict": "lru", "prefetch": "none", "popular_n": 1, "predictor_ns": 0, "cold": False}
    shape = {"L": 1, "E": 2, "slots": 1, "expert_bytes": 10, "requests": [[[[[0, 1]]]]]}
    case = {**shape, **link, **durations, **policy}
    (tmp_path / "cases.jsonl").write_text(json.dumps(case) + "\n")
    done = moe_sim("conformance", "cases.jsonl", cwd=tmp_path)
    assert json.loads(done.stdout)["token_ns"] == [3 + 15 + 3 + 1 + 1]
    (tmp_path / "broken.jsonl").write_text(json.dumps(case) + "\n{]\n")
    done = moe_sim("conformance", "broken.jsonl", "--out", "results.jsonl", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert not (tmp_path / "results.jsonl").exists()
