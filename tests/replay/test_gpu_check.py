"""The whole of `make gpu-check` on a GPU that is not there: tiny models, every cell, one file of results."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from replay.choice import Choice, first_tokens
from replay.comparison.cell import play_cell
from replay.comparison.record import ERROR, Record
from replay.gpu_check import bounds, draw, routing
from replay.gpu_check import check as gpu_check
from replay.gpu_check.check import Check
from replay.gpu_check.routing import made_up
from sim.experiment import Experiment
from sim.loaded import TimedRun, load
from sim.loop.requests import Requests
from sim.profiles import model_profile
from sim.profiles.hardware_profile import hardware
from tests.support.fake_gpu import FakeGpu
from tests.support.small_check import FULL, shrink
from traces.commands import program
from traces.errors import InputError
from traces.steps import DECODE
from traces.synthetic import synthetic
from traces.trace import Trace
from traces.writer import write_trace

MODELS = ("olmoe-1b-7b", "qwen3-30b-a3b")


@pytest.fixture
def tiny(monkeypatch):
    shrink(monkeypatch.setattr)


@pytest.fixture
def no_baselines(tiny, monkeypatch):
    """Its cells alone: neither what others do nor a peer."""
    monkeypatch.setattr(gpu_check, "WITH_BASELINES", ())


def check(tmp_path, gpu=None, names=MODELS, resume=False, budget_s=1e9):
    record = Record.open(tmp_path / "check.json", resume)
    told = list[str]()
    one = Check(gpu or FakeGpu(1), record, told.append, names, budget_s=budget_s, host_bytes=4 << 20)
    one.run()
    return json.loads((tmp_path / "check.json").read_text()), told


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The file of a check, run once for the tests that only read it or continue from it.

    In a process with nothing installed but what a GPU machine has: so each of these tests shows that it runs there.
    """
    file = tmp_path_factory.mktemp("whole") / "check.json"
    asked = [sys.executable, "-m", "tests.support.gpu_machine", str(file), *MODELS]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "run: accelerate closed-loop layer-stream lockstep lru-swap on-demand" in done.stdout
    return file


def test_with_no_more_than_a_gpu_machine_has_every_cell_is_played_predicted_and_judged_in_one_file(whole):
    found = json.loads(whole.read_text())
    assert [cell for cell in found["cells"] if ERROR in cell] == []
    for key in ("gpu", "driver", "torch", "commit", "date", "copy_gb_per_s", "ceiling_gb_per_s"):
        assert key in found
    cells = found["cells"]
    assert all(cell["measured"]["tpot_mean_ms"] > 0 for cell in cells)
    played = {(c["model"], c["policy"], c["mode"], c["cache_experts"]) for c in cells if "predicted" in c}
    for name in MODELS:
        for policy in ("lru", "eamc", "eamc-blend"):
            assert {(name, policy, "closed-loop", slots) for slots in (2, 6, 12)} <= played
        assert (name, "belady", "lockstep", 6) in played
    modes = {cell["mode"] for cell in cells if "predicted" not in cell}
    assert modes == {
        *("resident", "on-demand", "layer-stream", "zero-copy", "sync-per-copy", "lru-swap", "accelerate"),
    }
    assert {row["model"] for row in found["kernels"]} == set(MODELS)
    assert all(row["relative_error"] <= row["tolerance"] for row in found["kernels"])
    told = {row["what"] for row in found["verdict"]}
    assert len(told) >= 4
    assert {row["over"] for row in found["ratios"]} >= {"sync-per-copy under eamc", "layer-stream", "accelerate"}
    assert "[[measured]]" in found["hardware"]


def test_halves_of_an_expert_round_up(tmp_path):
    trace = synthetic(1, tokens=3, layers=2, experts=5, top_k=2, seed=1)
    write_trace(trace, tmp_path / "trace")
    assert load(Experiment(str(tmp_path / "trace"), untimed=True)).slots(gpu_check.QUARTER) == 3


def test_a_second_run_resumes_and_plays_nothing_again(tiny, whole, tmp_path):
    first = json.loads(Path(shutil.copy(whole, tmp_path)).read_text())
    second, told = check(tmp_path, resume=True)
    assert second["cells"] == first["cells"]
    assert second["hardware"].split("[[measured]]")[-1] == first["hardware"].split("[[measured]]")[-1]
    assert second["kernels"] == first["kernels"]
    assert not any("calibration" in line or "pass " in line for line in told)
    assert not any("closed-loop" in line for line in told)


def test_what_would_not_end_in_time_is_left_out_and_named(tiny, tmp_path):
    found, _ = check(tmp_path, names=("olmoe-1b-7b",), budget_s=-1)
    assert found["cells"] == []
    assert found["left_out"] == ["olmoe-1b-7b", "olmoe-1b-7b: accelerate's offload"]


def test_a_cell_that_outlasts_the_budget_is_stopped_in_the_middle(tiny, tmp_path, monkeypatch):
    def stopping(choice, mode, timing, link, stage, on_step):
        one.budget_s = -1
        return play_cell(choice, mode, timing, link, stage, on_step)

    monkeypatch.setattr(gpu_check, "play_cell", stopping)
    one = Check(FakeGpu(1), Record.open(tmp_path / "c.json", False), print, ("olmoe-1b-7b",), host_bytes=4 << 20)
    one.run()
    found = json.loads((tmp_path / "c.json").read_text())
    assert [(cell["policy"], cell[ERROR]) for cell in found["cells"]] == [("lru", "out of time")]
    assert "olmoe-1b-7b: eamc-blend at 25%, closed-loop" in found["left_out"]
    assert "[[measured]]" in found["hardware"]


def test_a_gpu_that_fails_ends_the_check_with_all_that_is_known(tiny, tmp_path, monkeypatch):
    def play_baseline(*_):
        raise torch.AcceleratorError("an illegal memory access")

    monkeypatch.setattr(gpu_check, "play_baseline", play_baseline)
    found, _ = check(tmp_path)
    failed = [cell for cell in found["cells"] if ERROR in cell]
    assert [(cell["model"], cell["mode"]) for cell in failed] == [("olmoe-1b-7b", "resident")]
    assert "AcceleratorError: an illegal memory access (test_gpu_check.py" in failed[0][ERROR]
    assert len(found["verdict"]) > 10
    assert found["left_out"][0].startswith("everything after: AcceleratorError")


def test_a_machine_whose_rates_cannot_be_measured_is_checked_all_the_same(no_baselines, tmp_path, monkeypatch):
    def rates(gpu):
        raise RuntimeError("no such call")

    monkeypatch.setattr(gpu_check, "rates", rates)
    found, _ = check(tmp_path, names=("olmoe-1b-7b",))
    failed = [(cell["mode"], cell[ERROR]) for cell in found["cells"] if ERROR in cell]
    assert len(failed) == 1
    assert failed[0][0] == "rates"
    assert failed[0][1].startswith("RuntimeError: no such call (test_gpu_check.py")
    assert sum("predicted" in cell for cell in found["cells"]) > 8
    assert found["verdict"]


def test_where_pinning_is_refused_half_as_much_is_tried(no_baselines, tmp_path):
    class Stingy(FakeGpu):
        def register(self, memory):
            return super().register(memory) if memory.nbytes < 3 << 20 else 2

    gpu_check.LEAST_HOST_BYTES, before = 1 << 20, gpu_check.LEAST_HOST_BYTES
    found, _ = check(tmp_path, Stingy(1), names=("olmoe-1b-7b",))
    gpu_check.LEAST_HOST_BYTES = before
    assert found["host_bytes"] == 2 << 20
    assert not any(ERROR in cell for cell in found["cells"])


def test_a_model_that_cannot_be_opened_costs_its_own_cells_alone(no_baselines, tmp_path, monkeypatch):
    stage = Choice.stage

    def failing(choice, memory, gpu):
        if choice.loaded.profile.name == "olmoe-1b-7b":
            raise InputError("no\nroom")
        return stage(choice, memory, gpu)

    monkeypatch.setattr(Choice, "stage", failing)
    found, _ = check(tmp_path)
    failed = [cell for cell in found["cells"] if ERROR in cell]
    assert [(cell["model"], cell[ERROR]) for cell in failed] == [("olmoe-1b-7b", "no room")]
    assert {cell["model"] for cell in found["cells"] if ERROR not in cell} == {"qwen3-30b-a3b"}


def test_made_up_routing_has_a_prompt_and_as_many_tokens_as_are_asked():
    trace = made_up(model_profile.model("olmoe-1b-7b"), 130)
    assert trace.meta.model == "olmoe-1b-7b"
    assert (trace.phase == 1).sum() == 140 or (trace.phase == 0).sum() == 140
    assert trace.requests["prompt_tokens"].astype(int).tolist() == [routing.PROMPT_TOKENS, *[0] * 6]


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 16, 24, 100])
def test_just_so_many_tokens_are_taken_and_the_last_request_is_cut_off(tokens):
    profile = model_profile.model("olmoe-1b-7b")
    trace = synthetic(3, 8, profile.moe_layers, profile.experts, profile.top_k, seed=1, prompt_tokens=5)
    loaded = TimedRun(Experiment(trace="synthetic"), trace, profile, hardware("h200"))
    cut = first_tokens(loaded, tokens).trace
    assert isinstance(cut, Trace)
    assert (cut.phase == DECODE).sum() == min(tokens, 24)
    rows = int(cut.offsets[-1])
    np.testing.assert_array_equal(cut.experts, trace.experts[:rows])
    np.testing.assert_array_equal(cut.step, trace.step[:rows])
    assert len(cut.requests) == min(3, -(-tokens // 8))
    assert cut.requests["output_tokens"].sum() == min(tokens, 24) + len(cut.requests)
    steps = list(Requests(cut))
    assert sum(len(request.tokens) for request in steps) == min(tokens, 24) + len(steps)


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
        (
            {"errors": {"tpot_mean": 0.0, "tpot_p99": 0.0, "token_mape": 0.0, "measured_over_without_host": 1.04}},
            ["step over"],
        ),
    ],
)
def test_each_bound_is_broken_by_its_own_figure_alone(change, broken):
    rows = bounds.verdict({"ceiling_gb_per_s": 55.0}, [cell(**change)])
    found = [row["what"] for row in rows if not row["holds"]]
    assert len(found) == len(broken)
    assert all(what.startswith(start) for what, start in zip(found, broken, strict=True))
    assert len(list(bounds.lines(rows))) == len({row["what"] for row in rows}) + len(broken)


def test_bandwidth_is_judged_of_experts_of_eight_megabytes_and_more():
    transfers = [
        {"model": "a", "expert_bytes": size, "gb_per_s": gb_per_s}
        for size, gb_per_s in ((8e6, 53.0), (9e6, 54.0), (1e6, 1))
    ]
    rows = bounds.verdict({"ceiling_gb_per_s": 55.0, "transfers": transfers}, [])
    assert [row["holds"] for row in rows] == [False, True]


def test_what_was_to_be_judged_and_was_not_is_named():
    played = [cell(policy="lru"), cell(policy="eamc", mode="lockstep"), cell(policy="eamc", cache_fraction=0.5)]
    wanted = [("mixtral-8x7b", "lru"), ("mixtral-8x7b", "eamc")]
    played[0]["predicted"] = played[1]["predicted"] = {"tpot_mean_ms": 1.0}
    assert bounds.unjudged(played, wanted) == ["mixtral-8x7b: eamc at 25%"]


def test_an_error_that_is_not_finite_holds_no_bound():
    rows = bounds.verdict({}, [cell(errors={"tpot_mean": None, "tpot_p99": None, "token_mape": None}, tokens=500)])
    broken = [row["what"] for row in rows if not row["holds"]]
    assert broken == ["TPOT mean, error", "per token, mean absolute error", "TPOT p99, error"]
    assert "not finite" in "".join(bounds.lines(rows))


def test_cells_of_other_code_are_not_taken_over(tiny, whole, tmp_path, monkeypatch):
    shutil.copy(whole, tmp_path)
    monkeypatch.setattr("replay.comparison.record._code", lambda: "other")
    with pytest.raises(InputError, match="of other code"):
        check(tmp_path, resume=True)


def test_ratios_compare_like_with_like():
    own = cell(cache_experts=6, policy="eamc", tpot_first_ms=30.0)
    others = [
        {"model": own["model"], "mode": "accelerate", "policy": None, "measured": {"tpot_mean_ms": 200.0}},
        {"model": "other", "mode": "accelerate", "policy": None, "measured": {"tpot_mean_ms": 1.0}},
        {**own, "mode": "sync-per-copy", "measured": {"tpot_mean_ms": 60.0}},
    ]
    del others[2]["predicted"]
    found = bounds.ratios([own, *others])
    assert [(row["over"], row["ratio"]) for row in found] == [("accelerate", 10.0), ("sync-per-copy under eamc", 2.0)]


def test_a_check_is_drawn_and_put_into_tables(tiny, whole, tmp_path, monkeypatch, capsys):
    found, picture = json.loads(whole.read_text()), tmp_path / "check.png"
    monkeypatch.setattr("sys.argv", ["draw", str(whole), "--figure", str(picture)])
    with pytest.raises(SystemExit) as ended:
        program.main(draw.app, "draw")
    assert not ended.value.code
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("| olmoe", "| qwen"))]
    cells = draw.predicted(found)
    assert len(rows) == len(cells) + len(found["ratios"])
    tpot = cells[0]["measured"]["tpot_mean_ms"]
    assert f"| lru | {cells[0]['cache_fraction']:.0%} | closed-loop | {FULL} | {tpot:,.4g} |" in rows[0]


def test_a_file_that_is_no_check_is_refused_in_one_line(tmp_path):
    (tmp_path / "other.json").write_text("[1]")
    with pytest.raises(InputError, match="is not what make gpu-check writes"):
        draw.read(tmp_path / "other.json")


def test_a_picture_is_replaced_only_where_that_is_asked_for_and_a_damaged_check_is_one_line(
    tmp_path, monkeypatch, capsys
):
    def ended(*arguments: str) -> tuple[object, str]:
        monkeypatch.setattr("sys.argv", ["draw", *arguments])
        with pytest.raises(SystemExit) as end:
            program.main(draw.app, "draw")
        return end.value.code, capsys.readouterr().err

    check, picture = tmp_path / "check.json", tmp_path / "notes.txt"
    cell = {"model": "m", "mode": "lockstep", "measured": {"tpot_mean_ms": 1.0}}
    facts = {"gpu": "a", "torch": "2", "commit": "c", "date": "d"}
    check.write_text(json.dumps({**facts, "cells": [cell]}))
    picture.write_text("mine")
    code, said = ended(str(check), "--figure", str(picture))
    assert (code, "notes.txt exists: replace it with --overwrite" in said) == (2, True)
    assert picture.read_text() == "mine"
    assert ended(str(check), "--figure", str(picture), "--overwrite")[0] == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    damages: list[object] = [[], {**facts, "cells": 5}, {"cells": [{"predicted": 1}]}]
    for damage in (*damages, {**facts, "cells": [cell], "ratios": [{}]}):
        check.write_text(json.dumps(damage))
        code, said = ended(str(check))
        assert (code, said.count("\n"), "is not what make gpu-check writes" in said) == (2, 1, True), said
