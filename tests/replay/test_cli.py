"""The command as it is typed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

from policies.core.policy import Shape
from policies.core.spec import parse
from replay import files
from replay.calibration import measure
from replay.choice import first_steps
from replay.comparison.cell import CALLS
from replay.device_choice import DeviceChoice
from sim.experiment import Experiment
from sim.loaded import TimedRun
from sim.loop.log import COLUMNS, Share, StepRow
from sim.loop.requests import Requests
from sim.results.metrics import REQUESTS, RESULTS
from sim.sweeps import winner
from sim.sweeps.winner import Winner
from traces import InputError, Trace, demo_trace
from traces.models.profile import MODELS


def test_virtual_measures_what_was_predicted(command, tmp_path: Path) -> None:
    status, out, err = command("--policy", "eamc", "--device", "virtual", "--requests", "3", "--out", "here")
    assert status == 0, err
    assert re.match(r"Simulated [\d.]+ ms a token for a5000, as in moe-sim: nothing was measured\. eamc .* LRU", out)
    assert "predicted for" not in out
    assert str(demo_trace()) in err
    row = pd.read_parquet(tmp_path / "here/results.parquet").iloc[0]
    assert list(row.index)[: len(RESULTS.names)] == RESULTS.names
    assert row["tpot_mean_ms"] == row["predicted_tpot_mean_ms"]
    assert row["hit_rate"] == row["predicted_hit_rate"]
    assert row["host_ms"] == 0
    assert row["hardware"] == "a5000"
    by_request = pd.read_parquet(tmp_path / "here/requests.parquet")
    assert list(by_request.columns) == REQUESTS.names
    assert len(by_request) == 3
    steps = pd.read_csv(tmp_path / "here/per_token.csv")
    assert list(steps.columns) == ["request", *COLUMNS, "latency_ns"]
    decoded = steps[steps["phase"] == 1]
    assert decoded["latency_ns"].mean() / 1e6 == pytest.approx(row["tpot_mean_ms"])


def test_the_cpu_moves_bytes_and_sets_predicted_beside_measured(command, tmp_path: Path) -> None:
    arguments = (
        "--policy",
        "lru",
        "--device",
        "cpu",
        "--trace",
        str(demo_trace()),
        "--requests",
        "3",
        "--verify",
        "--chunk-bytes",
        "4kB",
    )
    status, out, err = command("run", *arguments, "--cache-size", "40")
    assert status == 0, err
    verdict = r"Measured [\d.]+ ms a token; predicted [\d.]+ ms \([\d.]+ to [\d.]+\): .*(too|right).*range\.$"
    assert re.match(verdict, out.splitlines()[0])
    row = pd.read_parquet(tmp_path / "results/demo-replay/results.parquet").iloc[0]
    assert row["device"] == "cpu"
    assert row["others_processors"] >= 0
    assert row["hardware"] == row["device_name"]
    assert row["cache_experts"] == 40
    assert row["lookups"] == row["hits"] + row["late"] + row["misses"]
    assert row["bytes_demand"] == row["misses"] * row["expert_bytes"]
    assert row["copy_gb_per_s"] > 0
    assert min(row[f"{part}_us_per_layer"] for part in ("host", *CALLS)) > 0
    assert row["host_experts"] == row["cache_experts"] / row["cache_fraction"]
    assert row["torch"] == torch.__version__


def test_options_without_a_command_are_those_of_run(command) -> None:
    arguments = ("--policy", "lru", "--device", "virtual", "--requests", "2", "--json")
    first, second = (json.loads(command(*prefix, *arguments)[1]) for prefix in ((), ("run",)))
    assert first == second
    assert first["predictions"]["a5000"]["tpot_mean_ms"] == first["tpot_mean_ms"]


def test_a_real_device_plays_about_a_thousand_steps_unless_told_otherwise() -> None:
    loaded = TimedRun.of(Experiment(trace=str(demo_trace())))
    short = first_steps(loaded, 40)
    played = [len(loaded.trace.steps(i).tokens) for i in range(len(short.trace.requests))]
    assert sum(played) >= 40 > sum(played[:-1])
    assert short.experiment.requests == len(played)
    assert first_steps(loaded, 10**9) is loaded


@pytest.fixture
def swept(tmp_path: Path) -> Path:
    """A folder with what a sweep of the demo trace recommends."""
    trace = Trace.read(demo_trace())
    total = Shape(trace.layers, trace.num_experts).total
    setup = Experiment(trace=str(demo_trace()), hardware="h100", requests=2, cold=True)
    winners = [Winner("10%", round(total / 10), "lfu", {}), Winner("50%", total // 2, "lru+eamc", {})]
    (tmp_path / "swept").mkdir()
    winner.write(tmp_path / "swept" / winner.NAME, setup, "tpot_mean_ms", winners)
    return tmp_path / "swept"


def test_from_replays_the_winner_on_the_sweeps_hardware_and_trace(command, swept: Path) -> None:
    status, out, err = command("--from", str(swept), "--device", "virtual", "--json", "--cache-size", "50%")
    assert status == 0, err
    row = json.loads(out)
    assert (row["policy"], row["hardware"], row["requests"], row["cold"]) == ("lru+eamc", "h100", 2, True)
    assert row["cache_fraction"] == 0.5
    _, out, err = command("--from", str(swept), "--device", "virtual", "--json", "--requests", "1")
    assert json.loads(out)["policy"] == "lfu"
    assert json.loads(out)["requests"] == 1
    assert "the winner of" in err
    assert "50%" in err


def test_on_a_real_device_the_policys_own_work_is_measured_and_the_profile_pays_what_ships(
    command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "policy_ns", lambda run, device: 123_456)
    row = json.loads(
        command("--trace", str(demo_trace()), "--device", "cpu", "--policy", "eamc", "--requests", "1", "--json")[1]
    )
    named = {name: each["hardware"] for name, each in row["predictions"].items()}
    assert named == {"this machine as measured": "this machine as measured", "a5000": "a5000"}
    here, there = row["predictions"]["this machine as measured"], row["predictions"]["a5000"]
    assert row["predictor_us"] == here["predictor_us"] == 123.456
    loaded = TimedRun.of(Experiment(trace=str(demo_trace())))
    events = loaded.trace.layers * len(Requests(loaded.trace)[0].tokens)
    for each in (here, there):  # every event pays (rule 14)
        assert 1_000 * each["stall_predictor_ms"] == pytest.approx(each["predictor_us"] * events)
    assert there["predictor_us"] == pytest.approx(loaded.predictor_us(parse("eamc")), abs=0.0005)


def test_a_sweep_of_another_model_is_refused(command, swept: Path) -> None:
    text = (swept / winner.NAME).read_text().replace("cache_experts = ", "cache_experts = 9")
    (swept / winner.NAME).write_text(text)
    status, _, err = command("--from", str(swept), "--device", "virtual", "-q")
    assert status == 2
    assert "another model" in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_is_refused_where_there_is_none(command) -> None:
    status, _, err = command("--policy", "lru", "--device", "cuda")
    assert status == 2
    assert "--device cuda: " in err
    assert DeviceChoice().resolved().device == "cpu"


def test_a_model_that_memory_cannot_hold_is_refused(command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replay.devices.store.available_memory_bytes", lambda: 512 << 20)
    status, _, err = command(
        "--policy", "lru", "--device", "cpu", "--trace", str(demo_trace()), "--requests", "1", "-q"
    )
    assert status == 2
    assert "--host-dedup" in err


STAND_IN = MODELS.find("demo-stand-in").read_text()


KILLED = """
import os, signal
from replay import commands, files
from tests.support.short_calibrations import shorten

line, left = files._line, [None] * 60

def counted(row):
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    left.pop()
    return line(row)

shorten()
files._line = counted
commands.main()
"""
"""Is killed when 60 steps are written."""


@pytest.mark.parametrize("device", ["cpu", pytest.param("disk", marks=pytest.mark.slow)])  # half a minute
def test_a_run_killed_goes_on_behind_its_last_whole_request(command, tmp_path: Path, device: str) -> None:
    """What was measured before SIGKILL stays to the digit."""
    asked: tuple[str, ...] = ("--policy", "lru", "--device", device, "--requests", "4", "--out", "here", "-q")
    asked += ("--trace", str(demo_trace()))
    if device == "disk":
        shapes = re.sub(r"(?m)^(hidden_size|expert_intermediate_size) = .*", r"\1 = 128", STAND_IN)
        (tmp_path / "small.toml").write_text(shapes)
        assert command("store", "experts", "--model-profile", "small.toml")[0] == 0
        asked = (*asked, "--store", "experts", "--model-profile", "small.toml")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    assert subprocess.run([sys.executable, "-c", KILLED, *asked], cwd=tmp_path, env=environment).returncode == -9
    steps = tmp_path / "here" / "per_token.csv"
    before = steps.read_text().splitlines()
    assert len(before) == 1 + 60
    kept = [line for line in before[1:] if line.split(",")[0] == "0"]
    status, _, err = command(*asked)
    assert (status, "continue with --resume, drop them with --overwrite" in err) == (2, True)
    assert command(*asked, "--resume", "--overwrite")[0] == 2
    assert steps.read_text().splitlines() == before
    assert command("--policy", "lfu", *asked[2:], "--resume")[0] == 2, "another run"
    status, _, err = command(*asked, "--resume")
    assert status == 0, err
    after = steps.read_text().splitlines()
    assert after[: 1 + len(kept)] == [before[0], *kept]
    row = pq.read_table(tmp_path / "here" / "results.parquet").to_pylist()[0]
    assert row["requests"] == 4
    assert len(kept) <= row["resumed_steps"] < len(after) - 1
    status, _, err = command(*asked, "--resume")
    assert (status, "has ended" in err) == (2, True)


def test_a_line_of_steps_that_was_cut_off_is_not_counted(tmp_path: Path) -> None:
    requests = list(Requests(Trace.read(demo_trace()).head(3)))
    with files.step_writer(tmp_path, "a key") as write:
        for request in requests[:2]:
            for step in range(len(request.tokens)):
                phase, tokens = int(request.phase[step]), int(request.tokens[step])
                write(StepRow([phase, tokens, *[5] * (len(COLUMNS) - 2)], [Share(request.request, tokens, 5)]))
    file = tmp_path / "per_token.csv"
    file.write_text(file.read_text()[:-4])
    done = files.done_before(tmp_path, "a key", requests)
    assert {share.request for row in done for share in row.shares} == {0}
    with pytest.raises(InputError, match="another run"):
        files.done_before(tmp_path, "other", requests)
