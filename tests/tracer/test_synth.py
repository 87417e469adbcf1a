"""`moe-trace synth` as it is typed."""

import json
from pathlib import Path

import pytest

from tests.support.command import Run
from traces import Trace, demo_trace, fit


def test_a_synthetic_trace_has_the_shape_of_the_model_and_says_what_it_is(moe_trace: Run, tmp_path: Path) -> None:
    options = ("--model", "mixtral-8x7b", "--requests", 12, "--seed", 3)
    ended = moe_trace("synth", "--like", demo_trace(), *options, "--out", tmp_path / "a")
    assert ended.returncode == 0, ended.stderr
    assert "real" in ended.stdout
    assert "synthetic" in ended.stdout
    assert moe_trace("check", tmp_path / "a").returncode == 0
    meta = Trace.read(tmp_path / "a").meta
    assert (meta.layers, meta.experts, meta.top_k, meta.mode) == (32, 8, 2, "synthetic")
    assert meta.model == "mistralai/Mixtral-8x7B-v0.1"
    assert meta.settings["like"] == "demo"
    assert meta.settings["like_model"] == "demo-olmoe"
    assert meta.settings["seed"] == 3


def test_a_fit_to_some_requests_says_so_and_makes_as_many_as_there_are(
    moe_trace: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "REQUESTS", 12)
    ended = moe_trace("synth", "--like", demo_trace(), "--json", "--out", tmp_path / "a")
    facts = json.loads(ended.stdout)
    assert [facts[name]["decode"]["requests"] for name in ("real", "synthetic")] == [12, 64]
    assert "fitting to 12 of the 64 requests of demo, of which the statistics called real are" in ended.stderr


def test_lengths_and_shape_can_be_given(moe_trace: Run, tmp_path: Path) -> None:
    arguments = ("--layers", 3, "--experts", 300, "--top-k", 5, "--prompt-tokens", 7, "--decode-tokens", 4)
    assert moe_trace("synth", "--like", demo_trace(), *arguments, "--out", tmp_path / "a").returncode == 0
    trace = Trace.read(tmp_path / "a")
    assert trace.experts.shape == (64 * 11, 3, 5)
    assert trace.requests["prompt_tokens"].unique().tolist() == [7]
    assert trace.requests["output_tokens"].unique().tolist() == [5]
