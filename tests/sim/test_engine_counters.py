"""Hit rates that engines printed of their own caches, against `moe-sim` over the routing that they recorded."""

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from sim import simulate, sweep
from sim.analysis import recorded_hits
from sim.experiment import Experiment
from sim.loaded import load
from tests.support.untimed_oracle import SHARED
from traces import Trace
from traces.importers import import_dump
from traces.synthetic import synthetic
from traces.writer import write_trace

FOREIGN = SHARED.parent / "foreign"


def published(folder: str, *names: str) -> Path:
    """Return the first of these files that is there."""
    for name in names:
        if (path := FOREIGN / folder / name).exists():
            return path
    pytest.skip(f"needs {folder}/{names[0]} of ../shared/foreign")


def bigmoeonedge(name: str) -> tuple[Trace, pd.DataFrame]:
    """A `--route-trace` of BigMoeOnEdge (github.com/Helldez/BigMoeOnEdge, Apache-2.0), and its rows."""
    path = published("bigmoeonedge", f"{name}.route.csv.gz", f"{name}.route.csv")
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        header = "".join(line for line in file if line.startswith("#"))
    rows = pd.read_csv(path, comment="#")
    sizes = tuple(int(size) for size in re.findall(r"layer=\d+ expert_bytes=(\d+)", header))
    experts = int(re.findall(r"n_expert=(\d+)", header)[0])
    ids = np.full((rows.step.max() + 1, len(sizes), rows.slot.max() + 1), -1)
    ids[rows.step, rows.layer, rows.slot] = rows.expert
    trace = Trace.from_arrays([ids], experts, prompt_tokens=rows[rows.phase == 0].step.nunique(), name=name)
    return replace(trace, meta=replace(trace.meta, layer_expert_bytes=sizes)), rows


COUNTED = {"qwen": (4000, 0.7488), "gemma": (4000, 0.7678), "gptoss": (3000, 0.3241)}
"""MiB of the cache, and the last `cache_hit_pct` of NAME.metrics in docs/bench-data/2026-07-15-route-trace: one LRU in
bytes for all layers; a prompt passes through it and counts, an expert once for all tokens that chose it."""


@pytest.mark.parametrize("name", COUNTED)
def test_bigmoeonedge_counted_as_many_hits_on_the_phone(name: str) -> None:
    mib, counted = COUNTED[name]
    trace, rows = bigmoeonedge(name)
    run = simulate(trace, "lru", f"{mib}MiB", untimed=True)
    assert run.hit_rate == pytest.approx(counted, abs=1e-3)
    assert run["cache_bytes"] == mib << 20
    hits = rows[rows.phase == 1].assign(hit=lambda row: row.residency > 0).groupby("step").hit.sum().to_numpy()
    ours = run.steps.hits.to_numpy()[1:]  # of each decoded token
    assert np.abs(ours - hits).max() <= 2, "where experts of one event are equally old, the engine takes another"
    assert np.abs(ours - hits).sum() <= 1e-3 * hits.sum()


def test_bigmoeonedge_counted_qwen_so_all_the_way() -> None:
    """`cache_hit_pct` of qwen.metrics, behind so many decoded tokens."""
    printed = {1: 4.37, 8: 30.10, 32: 59.52, 64: 70.12, 96: 74.10, 128: 74.88}
    steps = simulate(bigmoeonedge("qwen")[0], "lru", "4000MiB", untimed=True).steps
    hits = steps.hits.cumsum() / (steps.hits + steps.misses).cumsum()
    assert [100 * hits[tokens] for tokens in printed] == pytest.approx(list(printed.values()), abs=0.1)


REPLAYED = {
    "lru": {500: 0.0, 750: 0.0, 3000: 0.706, 4000: 0.803},
    "lfu-perfect": {3000: 0.713, 4000: 0.808},
    "belady": {500: 0.453, 3000: 0.878, 4000: 0.927},
}
"""Hit rates of decoded tokens in docs/bench-data/2026-07-20-cache-replay/findings.md, by policy and MiB."""


@pytest.mark.filterwarnings("ignore:a cache of")
def test_bigmoeonedge_replayed_its_trace_to_the_same_hit_rates_of_decoded_tokens() -> None:
    trace = bigmoeonedge("qwen")[0]
    for policy, rates in REPLAYED.items():
        rows = sweep(trace, [policy], [f"{mib}MiB" for mib in rates], untimed=True).rows
        assert [row["decode_hit_rate"] for row in rows] == pytest.approx(list(rates.values()), abs=1e-3), policy


@pytest.mark.parametrize(("policy", "hits"), [("lru", 354), ("lfu-perfect", 460)])
def test_stratamoe_counted_the_same_hits(policy: str, hits: int) -> None:
    """`gpuHits` of evidence/switch-base-8/comparison.json (github.com/Labeeb2339/stratamoe-lab, Apache-2.0)."""
    held: dict[str, Any] = json.loads(published("stratamoe", "router-trace.v2.json").read_text())
    trace = Trace.from_arrays([np.array(held["selections"])], held["expertsPerLayer"])
    run = simulate(trace, policy, 12, untimed=True)
    assert (run["hits"], run["lookups"]) == (hits, 1290)


def found(trace: Trace, folder: Path) -> recorded_hits.Recorded:
    write_trace(trace, folder)
    found = recorded_hits.of_trace(load(Experiment.of({"trace": str(folder), "untimed": True})))
    assert found is not None
    return found


def test_policy_and_size_are_found_that_counted_the_phones_hits(tmp_path: Path) -> None:
    trace, _ = import_dump(published("bigmoeonedge", "qwen.route.csv.gz"))
    best = found(trace, tmp_path / "t").matches[0]
    assert best.policy == "lru"
    assert np.array(best.cache_bytes) == pytest.approx(4000 << 20, rel=1e-3)
    assert best.differ < 12


@pytest.mark.parametrize(("policy", "slots"), [("fifo", 40), ("lru@layer", 36)])
def test_policy_and_size_are_found_that_made_the_hits(policy: str, slots: int, tmp_path: Path) -> None:
    """Only the number of hits of a step counts, so any of its choices may be marked."""
    trace = synthetic(2, tokens=60, layers=3, experts=32, top_k=4, seed=1)
    hits = simulate(trace, policy, slots, untimed=True).steps.hits.to_numpy()
    cells = np.arange(trace.experts[0].size)[None] < hits[:, None]
    best = found(replace(trace, hits=cells.reshape(trace.experts.shape).astype(np.int8)), tmp_path / "t").matches[0]
    assert (best.policy, best.cache_experts, best.differ) == (policy, (slots, slots), 0)


def test_hits_that_no_policy_makes_are_said_to_be_so(tmp_path: Path) -> None:
    trace = synthetic(1, tokens=40, layers=2, experts=16, top_k=2, seed=1)
    hits = np.random.default_rng(0).integers(0, 2, trace.experts.shape).astype(np.int8)
    assert "no policy here reproduces them" in found(replace(trace, hits=hits), tmp_path / "t").sentence()
