"""`moe-trace` as it is typed: what it prints, where, and how it ends."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from replay.commands import main as replay_main
from tests.support.command import Run, run
from tests.support.same import assert_same
from tracer import demo
from tracer.commands.record import Meter
from traces import Trace, demo_trace
from traces.reader import EXTRA


@pytest.fixture
def refuses(moe_trace: Run) -> Callable[..., None]:
    def check(*arguments: object, reason: str) -> None:
        result = moe_trace(*arguments)
        assert result.returncode == 2, result.stderr
        assert result.stdout == ""
        last = result.stderr.splitlines()[-1]
        assert last.startswith("moe-trace: error: ")
        assert reason in last

    return check


def test_the_shipped_trace_is_what_the_shipped_model_routes(tmp_path: Path, moe_trace: Run) -> None:
    out = tmp_path / "t"
    result = moe_trace("record", "--limit", 2, "--out", out, "--quiet", "--weights", "--no-tokens")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    made, shipped = Trace.read(out, ["weights", "token_id"]), Trace.read(demo_trace()).head(2)
    assert np.array_equal(made.experts, shipped.experts)
    assert made.weights is not None
    assert made.token_id is not None
    assert (made.token_id == -1).all()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_recording_ends_with_130_and_is_readable(
    tmp_path: Path, number: int, moe_trace: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = Meter.finished

    def interrupt_after_two(meter: Meter, requests: int) -> None:
        finished(meter, requests)
        if meter.done == 2:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Meter, "finished", interrupt_after_two)
    result = moe_trace("record", "--max-new-tokens", 3, "--out", tmp_path / "t")
    assert result.returncode == 130
    assert result.stderr.splitlines()[-1] == (
        f"moe-trace: error: interrupted after 2 of 64 requests: the 2 that finished are readable in "
        f"{tmp_path / 't'}, and --resume continues with them"
    )
    assert len(Trace.read(tmp_path / "t").requests) == 2


def test_only_recording_needs_torch() -> None:
    code = "import sys, tracer.commands; assert not {'torch', 'transformers'} & set(sys.modules), 'torch is imported'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_model_that_cannot_be_loaded_is_told_in_one_line(tmp_path: Path, refuses: Callable[..., None]) -> None:
    out = tmp_path / "t"
    (tmp_path / "empty").mkdir()
    refuses("record", "--model", tmp_path / "empty", "--out", out, reason="cannot load the model")
    refuses("record", "--model", tmp_path / "none", "--out", out, reason="no such folder")
    refuses(
        "record", "--model", "nobody/nothing", "--out", out, reason="there is no folder nobody/nothing, and the hub"
    )
    shutil.copytree(demo.MODEL, tmp_path / "broken")
    (tmp_path / "broken/model.safetensors").write_bytes(b"junk")
    refuses("record", "--model", tmp_path / "broken", "--out", out, reason="cannot load the model")
    assert not out.exists()


def changed_demo(folder: Path, config: dict[str, Any], keep: Callable[[str], bool] = lambda name: True) -> Path:
    """A copy of the shipped model with other facts in its config, and only some of its weights."""
    shutil.copytree(demo.MODEL, folder)
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(facts | config))
    weights = load_file(folder / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if keep(name)}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_weights_that_the_config_does_not_count_are_named(
    tmp_path: Path, moe_trace: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = changed_demo(tmp_path / "m", {"num_hidden_layers": 9})
    result = moe_trace("record", "--model", model, "--limit", 1, "--out", tmp_path / "t")
    assert result.returncode == 0, result.stderr
    assert "weights of the checkpoint, such as model.layers.9." in result.stderr
    live = run(replay_main, "generate", "--model", model, "--prompt", "x", "--max-new-tokens", 1, cwd=tmp_path)
    assert "weights of the checkpoint, such as model.layers.9." in live.stderr, live.stderr


@pytest.mark.parametrize(
    ("lacks", "named"),
    [
        (r"\.gate\.|\.experts\.", "experts.down_proj"),
        (r"1\.mlp\.gate\.", "gate.weight"),
        ("embed", "embed_tokens.weight"),
    ],
)
def test_a_checkpoint_that_lacks_weights_is_refused(
    tmp_path: Path, lacks: str, named: str, refuses: Callable[..., None]
) -> None:
    model = changed_demo(tmp_path / "m", {}, keep=lambda name: not re.search(lacks, name))
    refuses("record", "--model", model, "--out", tmp_path / "t", reason=named)
    assert not (tmp_path / "t").exists()


def test_an_interrupted_recording_is_resumed_by_the_same_command(
    tmp_path: Path, moe_trace: Run, refuses: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("record", "--limit", 6, "--max-new-tokens", 3, "--batch-size", 2, "--temperature", 1)
    assert moe_trace(*command, "--out", tmp_path / "whole").returncode == 0
    finished = Meter.finished

    def interrupt_after_two(meter: Meter, requests: int) -> None:
        finished(meter, requests)
        if meter.done == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as interrupted:
        interrupted.setattr(Meter, "finished", interrupt_after_two)
        assert moe_trace(*command, "--out", tmp_path / "t").returncode == 130
    refuses(*command, "--out", tmp_path / "t", reason="`record --resume` continues")
    for look in (("info",), ("check",), ("slice", "--out", tmp_path / "s"), ("cat", "--out", tmp_path / "c")):
        told = moe_trace(*look, tmp_path / "t").stderr
        assert f"{tmp_path / 't'} holds 2 of 6 requests: its recording was interrupted" in told
    refuses(*command, "--seed", 1, "--resume", "--out", tmp_path / "t", reason="seed was 0, now 1")
    refuses(*command, "--resume", "--overwrite", "--out", tmp_path / "t", reason="give one of them")
    result = moe_trace(*command, "--resume", "--out", tmp_path / "t")
    assert result.returncode == 0, result.stderr
    assert_same(Trace.read(tmp_path / "whole", EXTRA), Trace.read(tmp_path / "t", EXTRA), EXTRA)


def test_code_that_comes_with_a_model_is_never_run(
    tmp_path: Path, refuses: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    auto = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Model"}
    model = changed_demo(tmp_path / "m", {"model_type": "own", "auto_map": auto})
    (model / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    command = ("record", "--model", model, "--out", tmp_path / "t")
    refuses(*command, reason="comes with code of its own, which is never run")
    assert not (tmp_path / "ran").exists()
