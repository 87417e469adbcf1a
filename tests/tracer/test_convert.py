"""`moe-trace import` and `export` as they are typed."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.command import Run
from tests.support.dumps import KNOWN, MAPPING, known, passes, same, stat, vllm_answer, write_lines
from tracer.commands.convert import load
from traces import Trace


def tensors(value: Any) -> Any:
    """The same content with tensors for arrays, as torch saves it."""
    if isinstance(value, dict):
        return {key: tensors(one) for key, one in value.items()}
    if isinstance(value, list):
        return [tensors(one) for one in value]
    return torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value


def test_a_refused_dump_leaves_nothing(tmp_path: Path, moe_trace: Run) -> None:
    answers = [vllm_answer(known(), i) for i in range(3)]
    del answers[2]["choices"][0]["routed_experts"]
    ended = moe_trace("import", write_lines(tmp_path / "a.jsonl", answers), "--out", tmp_path / "t")
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"moe-trace: error: {tmp_path / 'a.jsonl'} answer 2: routed_experts is missing")
    assert not (tmp_path / "t").exists()


def test_a_recording_of_sglang_is_loaded_with_torch(tmp_path: Path, moe_trace: Run) -> None:
    torch.save(tensors(passes(KNOWN, MAPPING, together=1)), tmp_path / "d.pt")
    (tmp_path / "d.json").write_text('{"concurrency": 1}')
    ended = moe_trace("import", tmp_path / "d.pt", "--layer-map", "1:", "--out", tmp_path / "t")
    assert ended.returncode == 0, ended.stderr
    assert f"no --meta given: taking {tmp_path / 'd.json'}" in ended.stderr
    same(Trace.read(tmp_path / "t"), KNOWN, steps=True)
    torch.save(tensors(stat(KNOWN)), tmp_path / "s.pt")
    counted = ("--layer-map", "1:", "--top-k", 2, "--phase", "decode", "--out", tmp_path / "s")
    assert moe_trace("import", tmp_path / "s.pt", *counted).returncode == 0
    assert Trace.read(tmp_path / "s").aggregate is not None


def test_what_is_found_is_printed_and_what_is_wrong_is_fixed_when_told_to(tmp_path: Path, moe_trace: Run) -> None:
    trace = known()
    experts = trace.experts.astype(np.int16)
    experts[4, 1] = experts[4, 1, 0]
    np.savez(tmp_path / "x.npz", experts=experts, offsets=trace.offsets, phase=trace.phase)
    ended = moe_trace("check", tmp_path / "x.npz", "--experts", 8)
    assert ended.returncode == 1
    assert ended.stdout.startswith("fill values and repeats: request '0', row 4, layer 1 has ids ")
    assert ended.stdout.endswith("--fix does it\n")
    ended = moe_trace("import", tmp_path / "x.npz", "--experts", 8, "--out", tmp_path / "t")
    assert ended.returncode == 2
    assert not (tmp_path / "t").exists()
    ended = moe_trace("import", tmp_path / "x.npz", "--experts", 8, "--fix", "--out", tmp_path / "t")
    assert ended.returncode == 0
    assert "found: experts [tokens, layers, k] (24, 3, 2), 3 requests" in ended.stderr
    assert "warning: fixed: fill values and repeats: " in ended.stderr
    assert moe_trace("check", tmp_path / "t").returncode == 0


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("harm"),)


def test_a_torch_file_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"records": Harmful()}, tmp_path / "d.pt")
    with pytest.raises(pickle.UnpicklingError):
        load(tmp_path / "d.pt")
    assert not (tmp_path / "harm").exists()
