"""Hot-expert profiles: what engines read from them, and what share of choices they serve, against plain counting."""

import json
import shlex
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.support.command import run
from tracer.commands import main
from traces import DECODE, PREFILL, Trace
from traces.hot_experts import FORMATS, carry_over
from traces.synthetic import synthetic
from traces.writer import write_trace

NAMES = ("model.layers.1.mlp", "model.layers.2.mlp", "model.layers.5.mlp")


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Of a model whose layers 0, 3 and 4 are dense."""
    made = synthetic(6, tokens=9, layers=3, experts=8, top_k=2, seed=2, prompt_tokens=4)
    return replace(made, meta=replace(made.meta, layer_names=NAMES))


def test_exllamav3_gets_the_counts_of_each_request_and_phase(trace: Trace, tmp_path: Path) -> None:
    choices = FORMATS["exllamav3"].write(trace, tmp_path / "hot.npz")
    held = np.load(tmp_path / "hot.npz")
    np.testing.assert_array_equal(held["counts_decode"], trace.eams(DECODE))
    np.testing.assert_array_equal(held["counts_prefill"], trace.eams(PREFILL))
    assert choices == 6 * 13 * 3 * 2 == sum(held[name].sum() for name in held)


def test_sglang_gets_a_row_for_each_layer_of_the_model(trace: Trace, tmp_path: Path) -> None:
    FORMATS["sglang"].write(trace, tmp_path / "hot.json")
    counts = np.array(json.loads((tmp_path / "hot.json").read_text())["logical_count"])
    assert counts.shape == (6, 8)
    assert not counts[[0, 3, 4]].any()
    np.testing.assert_array_equal(counts[[1, 2, 5]], (trace.eams(PREFILL) + trace.eams(DECODE)).sum(axis=0))


def test_ktransformers_gets_the_same_as_a_file_of_torch(trace: Trace, tmp_path: Path, monkeypatch: Any) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    FORMATS["sglang"].write(trace, tmp_path / "hot.json")
    page = (Path(__file__).parents[2] / "docs" / "howto" / "ktransformers.md").read_text(encoding="utf-8")
    (line,) = [each for each in page.splitlines() if each.startswith("python -c")]
    exec(shlex.split(line)[2])
    counts = torch.load("hot.pt", weights_only=True)["logical_count"]
    assert counts.tolist() == json.loads((tmp_path / "hot.json").read_text())["logical_count"]


def test_llama_cpp_gets_routing_whose_decoded_lines_are_the_decoded_tokens(trace: Trace, tmp_path: Path) -> None:
    FORMATS["llama-moe-trace"].write(trace, tmp_path / "hot.csv")
    rows = pd.read_csv(tmp_path / "hot.csv", header=None)
    assert (rows[0] < 0).sum() == 6 * 4 * 3
    decoded = rows[rows[0] >= 0]
    assert decoded[0].nunique() == 6 * 9
    used = Counter((layer, expert) for _, layer, *experts in decoded.itertuples(index=False) for expert in experts)
    counts = trace.eams(DECODE).sum(axis=0)
    assert used == {(n, e): counts[i, e] for i, n in enumerate((1, 2, 5)) for e in range(8) if counts[i, e]}


def served(profile: Trace, used: Trace, slots: int) -> tuple[int, int]:
    """Choices of `used` on the experts that `profile` uses most in a layer, ties to the lower id; and all choices."""
    hits = 0
    for layer in range(profile.layers):
        counts = Counter(profile.experts[:, layer].ravel().tolist())
        hot = sorted(range(profile.num_experts), key=lambda expert: (-counts[expert], expert))[:slots]
        hits += sum(expert in hot for expert in used.experts[:, layer].ravel().tolist())
    return hits, used.experts.size


def test_a_profile_is_tried_on_what_it_did_not_see() -> None:
    trace = synthetic(40, tokens=30, layers=2, experts=6, top_k=2, seed=4)  # 8 topics
    found = carry_over(trace, [1, 3])
    assert found["chance"] == [1 / 6, 1 / 2]
    assert "other dataset" not in found, "there is one"
    tasks = trace.requests["task"].to_numpy()
    even, odd = (trace.select(np.arange(first, 40, 2)) for first in (0, 1))
    by_task = {task: trace.select(np.flatnonzero(tasks == task)) for task in np.unique(tasks)}
    known = [task for task, each in by_task.items() if each.experts.size >= 20 * 2 * 6]
    for i, slots in enumerate((1, 3)):
        tried = {
            "itself": [(trace, trace)],
            "other half": [(even, odd), (odd, even)],
            "other task": [(by_task[a], by_task[b]) for a in known for b in by_task if a != b],
        }
        for name, pairs in tried.items():
            hits, total = np.sum([served(one, other, slots) for one, other in pairs], axis=0)
            assert found[name][i] == pytest.approx(hits / total), (name, slots)
    assert found["other task"][1] < found["other half"][1] < found["itself"][1]


def test_of_one_request_each_half_of_the_tokens_is_tried_on_the_other() -> None:
    ids = np.repeat([[[0, 1]], [[2, 3]]], 10, axis=0)
    found = carry_over(Trace.from_arrays([ids], 4), [2])
    assert (found["itself"], found["other half"]) == ([0.5], [0.0])


def test_export_prints_what_a_profile_serves(trace: Trace, tmp_path: Path) -> None:
    write_trace(trace, tmp_path / "t")
    done = run(main, "export", "t", "--to", "sglang", "--out", "hot.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "hot.json: 468 choices of experts, for SGLang's --init-expert-location" in done.stdout
    names = [line[:20].rstrip() for line in done.stdout.splitlines()]
    assert names[2:] == ["slots a layer", "chance", "itself", "other half"]
    refused = run(main, "export", "t", "--to", "exllamav3", "--out", "hot.json", cwd=tmp_path)
    assert refused.returncode == 2
    assert "hot.json must end in .npz" in refused.stderr
