"""`make gpu-check`, `disk-check` and `live-check` with tiny models: every cell, one file of results."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.checks import __main__ as command
from benchmarks.checks import bounds, cells, draw, live, runner
from benchmarks.checks.cells import DISK, synthetic_trace
from benchmarks.checks.limits import page_cache_of
from benchmarks.checks.live import ACCELERATE, ALONE, CACHED, LIVE, LLAMA, LRU, READ_AHEAD_KIB, REPLAY, LiveCheck
from benchmarks.checks.runner import Check
from replay.choice import Choice, first_tokens
from replay.comparison.record import ERROR, Record
from replay.comparison.sweep import Machine
from replay.devices.expert_file import write
from replay.devices.store import Stamps
from sim.experiment import Experiment
from sim.loaded import TimedRun
from sim.loop.requests import Requests
from sim.profiles.hardware_profile import hardware
from terminal import program
from tests.support.fake_gpu import FakeGpu
from tests.support.profiles import HALF, plain
from tests.support.short_calibrations import shorten
from tests.support.small_check import FULL, MODELS, PLAN, shrink
from traces import DECODE, InputError, Trace
from traces.models import profile as model_profile
from traces.models.profile import written
from traces.synthetic import synthetic

ALONE_PLAN = PLAN._replace(compared=())
"""Its cells alone: neither what others do nor a peer."""


@pytest.fixture
def tiny(monkeypatch):
    shrink(monkeypatch.setattr)


def check(tmp_path, gpu=None, plan=PLAN, names=MODELS, resume=False, **options):
    record, said = Record.open(tmp_path / "check.json", resume), list[str]()
    Check(plan, record, said.append, names, gpu=gpu or FakeGpu(1), **{"host_bytes": 4 << 20, **options}).run()
    return json.loads(record.path.read_text()), said


# On a GPU


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The file of a check, run once for the tests that only read it or continue from it.

    In a process with nothing installed but what a GPU machine has: so each of these tests shows that it runs there.
    """
    file = tmp_path_factory.mktemp("whole") / "check.json"
    arguments = [sys.executable, "-m", "tests.support.gpu_machine", str(file)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    assert "run: accelerate closed-loop layer-stream lockstep lru-swap on-demand" in done.stdout
    return file


def test_with_no_more_than_a_gpu_machine_has_every_cell_is_run_predicted_and_judged_in_one_file(whole):
    result = json.loads(whole.read_text())
    for key in ("gpu", "driver", "torch", "commit", "date", "copy_gb_per_s", "ceiling_gb_per_s"):
        assert key in result
    assert all(cell["measured"]["tpot_mean_ms"] > 0 for cell in result["cells"])
    ran = {(c["model"], c["policy"], c["mode"], c["cache_experts"]) for c in result["cells"] if "predicted" in c}
    for name in MODELS:
        for policy in ("lru", "eamc", "eamc-blend"):
            assert {(name, policy, "closed-loop", slots) for slots in (2, 6, 12)} <= ran
        assert (name, "belady", "lockstep", 6) in ran
    modes = {cell["mode"] for cell in result["cells"] if "predicted" not in cell}
    assert modes == {
        *("resident", "on-demand", "layer-stream", "zero-copy", "sync-per-copy", "lru-swap", "accelerate"),
    }
    assert {row["model"] for row in result["kernels"]} == set(MODELS)
    assert all(row["relative_error"] <= row["tolerance"] for row in result["kernels"])
    assert len({row["what"] for row in result["verdict"]}) >= 4
    assert {row["over"] for row in result["ratios"]} >= {"sync-per-copy under eamc", "layer-stream", "accelerate"}
    assert "[[measured]]" in result["hardware"]


def test_a_second_run_resumes_and_runs_nothing_again(tiny, whole, tmp_path):
    first = json.loads(Path(shutil.copy(whole, tmp_path)).read_text())
    second, said = check(tmp_path, resume=True)
    assert second["cells"] == first["cells"]
    assert second["hardware"].split("[[measured]]")[-1] == first["hardware"].split("[[measured]]")[-1]
    assert second["kernels"] == first["kernels"]
    assert not any("pass " in line or "closed-loop" in line for line in said)


def test_what_does_not_end_in_time_is_left_out_and_named(tiny, tmp_path):
    result, _ = check(tmp_path, names=MODELS[:1], budget_s=-1)
    assert result["cells"] == []
    assert result["left_out"] == ["the machine", "olmoe-1b-7b", "olmoe-1b-7b: accelerate's offload", "the machine"]


def test_a_cell_that_outlasts_the_budget_is_stopped_in_the_middle(tiny, tmp_path, monkeypatch):
    class Stopping(Machine):
        def outcome(self, *cell: Any) -> Any:
            stopped.budget_s = -1
            return super().outcome(*cell)

    monkeypatch.setattr(runner, "Machine", Stopping)
    record = Record(tmp_path / "c.json")
    stopped = Check(PLAN, record, print, MODELS[:1], gpu=FakeGpu(1), host_bytes=4 << 20)
    stopped.run()
    assert list(record) == []
    left_out = [f"olmoe-1b-7b: {policy} at 25%, closed-loop" for policy in ("lru", "eamc", "eamc-blend")]
    assert record.facts["left_out"][:3] == left_out
    assert "[[measured]]" in record.facts["hardware"]


def test_where_pinning_is_refused_half_as_much_is_tried(tiny, tmp_path, monkeypatch):
    class Stingy(FakeGpu):
        def register(self, memory):
            return super().register(memory) if memory.nbytes < 3 << 20 else 2

    monkeypatch.setattr(runner, "LEAST_HOST_BYTES", 1 << 20)
    result, _ = check(tmp_path, Stingy(1), ALONE_PLAN, names=MODELS[:1])
    assert result["host_bytes"] == 2 << 20
    assert not any(ERROR in cell for cell in result["cells"])


def test_what_cannot_be_run_costs_its_own_cells_alone(tiny, tmp_path, monkeypatch):
    stage = Choice.stage

    def failing(choice, memory, gpu):
        if choice.loaded.profile.name == "olmoe-1b-7b":
            raise RuntimeError("no\ncapacity")
        return stage(choice, memory, gpu)

    monkeypatch.setattr(Choice, "stage", failing)
    result, _ = check(tmp_path, plan=ALONE_PLAN)
    failed = [(cell["model"], cell[ERROR]) for cell in result["cells"] if ERROR in cell]
    assert [model for model, _ in failed] == ["olmoe-1b-7b"]
    assert failed[0][1].startswith("RuntimeError: no capacity (test_checks.py")
    assert {cell["model"] for cell in result["cells"] if ERROR not in cell} == {"qwen3-30b-a3b"}


def test_synthetic_routing_has_a_prompt_and_as_many_tokens_as_are_requested():
    trace = synthetic_trace(model_profile.model("olmoe-1b-7b"), 130)
    assert trace.meta.model == "olmoe-1b-7b"
    assert (trace.phase == DECODE).sum() == 140
    assert trace.requests["prompt_tokens"].astype(int).tolist() == [cells.PROMPT_TOKENS, *[0] * 6]


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 16, 24, 100])
def test_just_so_many_tokens_are_taken_and_the_last_request_is_cut_off(tokens):
    profile = model_profile.model("olmoe-1b-7b")
    trace = synthetic(3, 8, profile.moe_layers, profile.experts, profile.top_k, seed=1, prompt_tokens=5)
    cut = first_tokens(TimedRun(Experiment("synthetic"), trace, profile, hardware("h200")), tokens).trace
    assert isinstance(cut, Trace)
    assert (cut.phase == DECODE).sum() == min(tokens, 24)
    rows = int(cut.offsets[-1])
    np.testing.assert_array_equal(cut.experts, trace.experts[:rows])
    np.testing.assert_array_equal(cut.step, trace.step[:rows])
    assert len(cut.requests) == min(3, -(-tokens // 8))
    assert cut.requests["output_tokens"].sum() == min(tokens, 24) + len(cut.requests)
    steps = list(Requests(cut))
    assert sum(len(request.tokens) for request in steps) == min(tokens, 24) + len(steps)


# Bounds, ratios and tables


def cell(**other):
    """A cell that holds every bound."""
    errors = {"tpot_mean": 0.01, "tpot_p99": -0.05, "token_mape": 0.05, "measured_over_without_host": 1.02}
    measured = {"host_us_per_layer": 20.0, "tpot_mean_ms": 20.0}
    head = {"model": "mixtral-8x7b", "policy": "lru", "mode": "closed-loop", "cache_fraction": 0.25, "tokens": 500}
    return {**head, "expert_bytes": 3e8, "measured": measured, "predicted": {}, "errors": errors} | other


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        ({}, []),
        ({"measured": {"host_us_per_layer": 31.0}}, ["host bookkeeping"]),
        ({"errors": {"tpot_mean": -0.031, "tpot_p99": 0.0, "token_mape": 0.0}}, ["TPOT mean"]),
        ({"errors": {"tpot_mean": 0.0, "tpot_p99": 0.09, "token_mape": 0.11}}, ["per token", "TPOT p99"]),
        ({"errors": {"tpot_mean": 0.0, "tpot_p99": 0.09, "token_mape": 0.1}, "tokens": 499}, []),
        ({"errors": dict.fromkeys(("tpot_mean", "tpot_p99", "token_mape"))}, ["TPOT mean", "per token", "TPOT p99"]),
        (
            {"errors": {"tpot_mean": 0.0, "tpot_p99": 0.0, "token_mape": 0.0, "measured_over_without_host": 1.04}},
            ["step over"],
        ),
    ],
)
def test_each_bound_is_broken_by_its_own_figure_alone(change, broken):
    rows = bounds.verdict({"ceiling_gb_per_s": 55.0}, [cell(**change)])
    judged = [row["what"] for row in rows if not row["holds"]]
    assert len(judged) == len(broken)
    assert all(what.startswith(start) for what, start in zip(judged, broken, strict=True))
    assert len(list(bounds.lines(rows))) == len({row["what"] for row in rows}) + len(broken)


def test_bandwidth_is_judged_of_experts_of_eight_megabytes_and_more():
    transfers = [
        {"model": "a", "expert_bytes": size, "gb_per_s": gb_per_s}
        for size, gb_per_s in ((8e6, 53.0), (9e6, 54.0), (1e6, 1))
    ]
    rows = bounds.verdict({"ceiling_gb_per_s": 55.0, "transfers": transfers}, [])
    assert [row["holds"] for row in rows] == [False, True]


def test_what_was_to_be_judged_and_was_not_is_named():
    ran = [cell(policy="lru"), cell(policy="eamc", mode="lockstep"), cell(policy="eamc", cache_fraction=0.5)]
    ran[0]["predicted"] = ran[1]["predicted"] = {"tpot_mean_ms": 1.0}
    wanted = [("mixtral-8x7b", "lru"), ("mixtral-8x7b", "eamc")]
    assert bounds.unjudged(ran, wanted) == ["mixtral-8x7b: eamc at 25%"]


def test_ratios_compare_like_with_like():
    own = cell(cache_experts=6, policy="eamc", tpot_first_ms=30.0)
    others = [
        {"model": own["model"], "mode": "accelerate", "policy": None, "measured": {"tpot_mean_ms": 200.0}},
        {"model": "other", "mode": "accelerate", "policy": None, "measured": {"tpot_mean_ms": 1.0}},
        {**own, "mode": "sync-per-copy", "measured": {"tpot_mean_ms": 60.0}},
    ]
    del others[2]["predicted"]
    ratios = bounds.ratios([own, *others])
    assert [(row["over"], row["ratio"]) for row in ratios] == [("accelerate", 10.0), ("sync-per-copy under eamc", 2.0)]


def test_a_check_is_drawn_and_put_into_tables(whole, tmp_path, monkeypatch, capsys):
    result, picture = draw.read(whole), tmp_path / "check.png"
    monkeypatch.setattr("sys.argv", ["checks", "draw", str(whole), "--figure", str(picture)])
    with pytest.raises(SystemExit) as ended:
        program.main(command.app, "checks")
    assert not ended.value.code
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("| olmoe", "| qwen"))]
    predicted = draw.predicted(result)
    assert len(rows) == len(predicted) + len(result["ratios"])
    tpot = predicted[0]["measured"]["tpot_mean_ms"]
    assert f"| lru | {predicted[0]['cache_fraction']:.0%} | closed-loop | {FULL} | {tpot:,.4g} |" in rows[0]


def test_committed_results_are_drawn():
    for path in Path("replay/results").glob("[Hd]*.json"):
        assert len(list(draw.tables(draw.read(path)))) > 10


# On a disk


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    shorten(monkeypatch.setattr)
    path = tmp_path / "olmoe-1b-7b.toml"
    path.write_text(
        written(plain("tiny", "3 moe", hidden_size=64, expert_intermediate_size=48, vocabulary=256, **HALF), "")
    )
    return str(path)


def test_on_a_disk_every_cell_is_run_predicted_and_reported(tmp_path: Path, small: str) -> None:
    record, files, said = Record(tmp_path / "check.json"), tmp_path / "files", list[str]()
    files.mkdir()
    Check(DISK, record, said.append, (small,), folder=files, tokens=4).run()
    result = json.loads(record.path.read_text())
    assert (result["device"], bool(result["commit"]), bool(result["machine"])) == ("disk", True, True)
    ran = [each for each in result["cells"] if "predicted" in each]
    assert [each["policy"] for each in ran] == ["lru", "eamc", "eamc-blend", "lru", "lru", "eamc-blend"]
    for each in ran:
        assert each["tokens"] == 4
        low, high = each["predicted_interval_ms"]
        assert 0 < low <= high
        assert each["measured"]["lookups"] == each["predicted"]["lookups"]
    (lockstep,) = (each for each in ran if each["mode"] == "lockstep")
    for name in ("hits", "late", "misses", "bytes_demand"):
        assert lockstep["measured"][name] == lockstep["predicted"][name]
    others = {each["mode"]: each for each in result["cells"] if "predicted" not in each}
    assert set(others) == {"on-demand", "page cache"}
    assert "measured" in others["on-demand"]
    assert {row["over"] for row in result["ratios"]} >= {"on-demand"}
    assert len(list(command.lines(record))) >= 6
    assert list(files.iterdir()) == []
    again: list[str] = []
    record = Record.open(record.path, resume=True)
    Check(DISK, record, again.append, (small,), folder=files, tokens=4).run()
    assert not any("closed-loop" in line for line in again)


@pytest.mark.skipif(os.geteuid() != 0, reason="a control group takes root")
def test_the_page_cache_keeps_no_more_than_it_may(tmp_path: Path, small: str) -> None:
    profile, path = model_profile.model(small), tmp_path / "file"
    write(path, profile, Stamps(24, profile.expert_bytes, 0).write, "random", 24)
    before = Path("/proc/self/cgroup").read_text()
    try:
        with page_cache_of(64 << 20, path):
            inside = Path("/proc/self/cgroup").read_text()
            assert path.read_bytes()
    except InputError as error:
        pytest.skip(str(error))
    assert inside != before
    assert Path("/proc/self/cgroup").read_text() == before


# Live


def test_each_part_of_a_live_check_is_run_and_recorded(
    tmp_path: Path, small: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[int] = []

    @contextmanager
    def limited(size: int, files: Path) -> Iterator[None]:
        limits.append(size)
        yield

    monkeypatch.setattr(live, "page_cache_of", limited)
    monkeypatch.setattr(live, "read_ahead_of", lambda folder, kib: nullcontext())  # takes root
    monkeypatch.setattr(live, "DEMO_TOKENS", 3)
    monkeypatch.setattr(live, "ROUNDS", 2)
    files = tmp_path / "files"
    files.mkdir()
    record = Record(tmp_path / "check.json")
    turns = 2
    ratios = LiveCheck(record, print, files, small, tokens=4, turns=turns).run()
    result = json.loads(record.path.read_text())
    ran = {each["mode"]: each for each in result["cells"]}
    llama = [LLAMA.format(kib) for kib in READ_AHEAD_KIB] if find_spec("xllamacpp") else []
    in_turns = [LIVE, LRU, REPLAY, *llama]
    assert set(ran) == {*in_turns, ACCELERATE, CACHED, ALONE}
    assert all(each["measured"]["tpot_mean_ms"] > 0 for each in ran.values())
    generated = ran[LIVE]
    assert (generated["tokens"], generated["policy"], generated["cache_fraction"]) == (3, "eamc-blend", 1.0)
    parts = turns * len(in_turns) + 1
    assert limits[1:] == [generated["checkpoint_bytes"] // 2] * parts == [ran[ACCELERATE]["memory_bytes"]] * parts
    for mode in in_turns:
        assert ran[mode]["measured"]["tpot_mean_ms"] == min(ran[mode]["turns_ms"])
        assert len(ran[mode]["turns_ms"]) == turns
    assert all(ran[mode]["same_experts"] > 0.9 for mode in llama)
    assert 0 < result["routing"]["used_by_the_token_before"] < 1
    took = {mode: ran[mode]["measured"]["tpot_mean_ms"] for mode in ran}
    assert ratios["live over replay"] == pytest.approx(took[LIVE] / took[REPLAY])
    assert list(files.iterdir()) == []
