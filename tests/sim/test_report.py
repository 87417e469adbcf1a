"""The report: it opens in a browser and sorts, escapes what data hold, and says what is missing instead of failing."""

import html
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from policies.core.spec import parse
from sim.experiment import Experiment
from sim.loaded import TimedRun, load
from sim.report import bounds, inputs, page
from sim.results.metrics import summarise
from sim.sweeps import verdict
from tests.support.browser import CHROMIUM, opened
from tests.support.command import moe_sim
from traces import Trace, demo_trace
from traces.synthetic import synthetic

SIZES = "25%,50%"


@pytest.fixture(scope="module")
def swept(tmp_path_factory) -> Path:
    """A sweep of four requests."""
    folder: Path = tmp_path_factory.mktemp("swept")
    ended = _sweep(folder, "--requests", 4)
    assert ended.returncode == 0, ended.stderr
    return folder / "sweep"


def _sweep(folder: Path, *options: object):
    asked = ("--policies", "lru,eamc-blend")
    common = ("--model-profile", "demo-stand-in", "--hardware", "a5000", "--workers", 1, "--quiet")
    return moe_sim("sweep", *asked, "--cache-sizes", SIZES, *common, "--out", "sweep", *options, cwd=folder)


@pytest.fixture
def copy(swept, tmp_path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(swept, tmp_path / "sweep"))


def _page(*folders: Path) -> tuple[str, list[str]]:
    return page.written(inputs.read(folders), "moe-sim report")


def _edit(file: Path, change) -> None:
    table = pd.read_parquet(file)
    pq.write_table(pa.Table.from_pandas(change(table), preserve_index=False), file)


@pytest.fixture(scope="module")
def whole(swept) -> str:
    text, problems = _page(swept)
    assert not problems
    return text


def test_the_page_has_every_section_and_needs_no_network(whole):
    headings = re.findall("<h2>(.*?)</h2>", whole)
    assert headings == [
        "How much memory",
        "Which policy",
        "Where the time goes",
        "Predicted against measured",
        "How to make it again",
        "All cells",
    ]
    assert whole.count("<svg") == 5
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", whole.replace("xlink:href", "href"))
    assert len(whole) < 8 * 2**20


def test_the_page_begins_with_the_verdict_that_the_sweep_printed(swept, whole):
    results = inputs.read([swept])[0]
    summary = html.unescape(whole.split('<div class="summary">')[1].split("</div>")[0])
    said = verdict.sentences(results.rows, results.cells)
    where = "Simulated on NVIDIA RTX A5000 (data sheet)"
    assert re.findall("<p>(.*?)</p>", summary) == [*said, f"{where}: these times are not measured."]
    assert whole.count(where) == 1 + 2 * 3 + 1 + 1, "in the box, in captions (twice each), above intervals and table"
    assert said[0].startswith("All 320 experts (960 MiB) fit the a5000: no cache is needed")
    assert "blocks of 95 tokens of 4 requests" in said[2]


def test_no_cell_is_faster_than_the_floor_nor_hits_more_than_belady(swept):
    rows = inputs.read([swept])[0].rows
    loaded = TimedRun.of(Experiment(trace=str(demo_trace()), model_profile="demo-stand-in", requests=4))
    lowest = {row["cache_experts"]: row["tpot_mean_ms"] for row in bounds.floor(loaded, rows, on_host=False)}
    highest = {row["cache_experts"]: row["hit_rate"] for row in bounds.belady(loaded, rows)}
    for row in rows:
        assert row["tpot_mean_ms"] > lowest[row["cache_experts"]] > 0
        assert row["policy"] != "lru" or row["hit_rate"] <= highest[row["cache_experts"]] + 1e-12
    everything = [{"cache_experts": loaded.all_experts, "cache_fraction": 1.0}]
    timing = loaded.timing(parse("lru"))
    computing = sum(timing.dense_ns(layer, 1, 1) for layer in range(loaded.trace.layers))
    computing += loaded.trace.layers * (loaded.trace.top_k * timing.expert_ns(1) + timing.combine_ns(1))
    assert bounds.floor(loaded, everything, on_host=False)[0]["tpot_mean_ms"] >= (computing + timing.head_ns(1)) / 1e6


def test_what_prefills_and_warm_up_requests_load_is_in_no_bound():
    """Of a long prompt and few tokens prefill loads most."""
    trace = synthetic(3, tokens=3, layers=2, experts=8, top_k=2, seed=5, prompt_tokens=40)
    meta = replace(trace.meta, hidden_size=1024, expert_intermediate_size=1024, expert_bytes=6 * 2**20)
    trace = replace(trace, meta=meta)
    for warmup, as_decode in ((0, False), (1, False), (2, True)):
        setup = Experiment("x", warmup_requests=warmup, as_decode=as_decode, predictor_us=0.0)
        loaded = load(setup, trace)
        for slots in (4, 8, 16):
            row = summarise(loaded.log(parse("belady"), slots), loaded.cell(parse("belady"), slots), trace.requests)[0]
            floor = bounds.floor(loaded, [row], on_host=False)[0]["tpot_mean_ms"]
            assert row["tpot_mean_ms"] >= floor


def test_what_decoded_tokens_do_not_compute_is_not_in_the_floor():
    """No encoder, no expert where nothing was routed, and what the host may compute faster at its rate."""
    chosen = np.full((40, 12, 2), -1)
    chosen[0], chosen[1:, 6:10] = (0, 1), (2, 3)
    trace = Trace.from_arrays([chosen], 128, 1, model="nllb-moe-54b")
    loaded = TimedRun.of(Experiment("x", model_profile="nllb-moe-54b", hardware="h100", predictor_us=0.0), trace)
    fast: dict[str, Any] = {"host_memory_bandwidth_gb_per_s": 1e6, "host_compute_tflop_per_s": 1e6, "host_hop_us": 0.0}
    for here, policy in (loaded, "lru"), (replace(loaded, hardware=replace(loaded.hardware, **fast)), "lru/split"):
        row = summarise(here.log(parse(policy), 1536), here.cell(parse(policy), 1536), trace.requests)[0]
        floor = bounds.floor(here, [row], on_host=row["on_host"] > 0)[0]["tpot_mean_ms"]
        assert 0.5 * row["tpot_mean_ms"] < floor <= row["tpot_mean_ms"]


def test_what_the_host_computes_takes_no_slot_in_the_floor():
    """A cache that leaves misses to the host keeps what one that takes each of them in has to evict."""
    rng = np.random.default_rng(0)
    chosen = np.stack([np.zeros((100, 3), int), rng.integers(1, 8, (100, 3))], axis=2)
    trace = Trace.from_arrays([chosen], 8)
    meta = replace(trace.meta, hidden_size=4096, expert_intermediate_size=4096, expert_bytes=6 * 4096**2)
    loaded = TimedRun.of(Experiment("x", predictor_us=0.0), replace(trace, meta=meta))
    instant: dict[str, Any] = {
        "memory_bandwidth_gb_per_s": 1e5,
        "compute_tflop_per_s": 1e5,
        "host_compute_tflop_per_s": 1e3,
    }
    instant |= dict.fromkeys(("link_latency_us", "launch_us", "framework_us_per_layer", "host_hop_us"), 0.001)
    hardware = replace(loaded.hardware, **instant, link_bandwidth_gb_per_s=24.0, host_memory_bandwidth_gb_per_s=160.0)
    here = replace(loaded, hardware=hardware, profile=replace(loaded.profile, vocabulary=1, heads=1, head_size=1))
    policy = "lru+popular:n=1/host"
    row = summarise(here.log(parse(policy), 2), here.cell(parse(policy), 2), here.trace.requests)[0]
    floor = bounds.floor(here, [row], on_host=row["on_host"] > 0)[0]["tpot_mean_ms"]
    assert 0.5 * row["tpot_mean_ms"] < floor <= row["tpot_mean_ms"]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_in_a_browser_it_opens_without_errors_sorts_and_draws(swept, tmp_path):
    ended = moe_sim("report", swept, "--out", "report.html", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    text = (tmp_path / "report.html").read_text("utf-8")
    probe = """<script>
    const table = document.querySelector("table.sortable");
    const column = () => [...table.tBodies[0].rows].map(row => row.cells[4].textContent);
    const found = {drawn: 0, before: column()};
    for (const svg of document.querySelectorAll("figure svg")) found.drawn += svg.getBoundingClientRect().height > 50;
    table.tHead.rows[0].cells[4].querySelector("button").click(); found.up = column();
    table.tHead.rows[0].cells[4].querySelector("button").click(); found.down = column();
    const input = table.closest("section").querySelector("input.filter");
    input.value = "blend"; input.dispatchEvent(new Event("input"));
    found.shown = [...table.tBodies[0].rows].filter(row => !row.hidden).length;
    document.title = JSON.stringify(found);
    </script>"""
    (tmp_path / "probed.html").write_text(text.replace("</body>", f"{probe}</body>"), "utf-8")
    found = opened(tmp_path / "probed.html")
    before, up, down = ([float(each.rstrip("%")) for each in found[name]] for name in ("before", "up", "down"))
    assert up == sorted(before)
    assert down == up[::-1]
    assert found["drawn"] == text.count("<figure")
    assert found["shown"] == 2


def test_markup_in_data_is_escaped(copy):
    evil = "<script>alert(1)</script>$x$ & co"

    def changed(table):
        return table.assign(**{name: evil for name in ("trace", "model") if name in table.columns})

    def renamed(table):
        return table.assign(policy=table["policy"].replace("eamc-blend", f"x{evil}"))

    for name in ("results.parquet", "requests.parquet"):
        _edit(copy / name, lambda table: renamed(changed(table)))
    text, _ = _page(copy)
    assert "<script>alert" not in text
    assert text.count("&lt;script&gt;alert(1)") > 5
    assert text.count("<script") == 1


def test_a_damaged_and_a_missing_table_are_sentences_of_the_page(copy):
    (copy / "results.parquet").write_bytes(b"PAR1")
    text, problems = _page(copy)
    assert "There is no result to recommend anything by" in text
    (copy / "results.parquet").unlink()
    assert len(problems) == len(_page(copy)[1]) == 1


def test_a_missing_replay_is_said_and_only_missing_folders_are_refused(swept, tmp_path):
    text, problems = _page(swept, tmp_path / "replay")
    assert problems
    assert "Nothing was measured" in text
    refused = moe_sim("report", "nowhere", cwd=tmp_path)
    assert refused.returncode == 2
    assert "no such folder: nowhere" in refused.stderr
    assert not (tmp_path / "report.html").exists()


def test_a_measured_run_stands_beside_its_prediction(copy, tmp_path):
    replay = Path(shutil.copytree(copy, tmp_path / "replay"))
    told = {"device": "disk", "device_name": "Some CPU", "predicted_tpot_mean_ms": 2.0, "predicted_hit_rate": 0.5}
    _edit(replay / "results.parquet", lambda table: table.head(1).assign(**told, tpot_mean_ms=2.5))
    clocked = Path(shutil.copytree(copy, tmp_path / "clocked"))
    _edit(clocked / "results.parquet", lambda table: table.head(1).assign(**told | {"device": "virtual"}))
    assert "Nothing was measured" in _page(copy, clocked)[0]
    text, problems = _page(copy, replay, clocked)
    section = text.split("Predicted against measured</h2>")[1]
    assert "-20.0%" in section
    assert section.count("Some CPU</td>") == 1, "what ran on a logical clock is no measurement"
    assert "<svg" in section
    assert not problems


def test_a_sweep_of_several_tables_is_read_table_by_table(tmp_path):
    assert _sweep(tmp_path, "--requests", 2, "--max-batch", "1,2", "--policies", "lru,belady").returncode == 0
    text, problems = _page(tmp_path / "sweep")
    assert problems == []
    assert "Not computed: the physical floor, since several requests run at a time." in text
    assert "users-2: " in text
    assert text.count("All cells (users-") == 2
    assert "2 requests at a time, arrivals closed; " in text
    assert ">belady (oracle)<" in text
    assert ">belady<" not in text
    assert text.count("moe-sim sweep --config") == 1
    again = (tmp_path / "sweep" / "users-1", tmp_path / "sweep" / ".." / "sweep" / "users-2")
    assert len(inputs.read([tmp_path / "sweep", *again])) == 2
