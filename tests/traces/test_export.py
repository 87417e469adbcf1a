"""What is exported is what untimed mode runs, and what import takes back."""

import csv
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from policies.core.spec import parse
from sim.engines.untimed import count
from tests.support import strategies
from tests.support.dumps import known
from traces import DECODE, PREFILL, InputError, Trace, demo_trace, export
from traces.edit import Source, join
from traces.importers import import_dump
from traces.reader import open_folder
from traces.trace import Phases
from traces.writer import write_trace

WHY = "libcachesim, the independent oracle, is not installed"


def accesses(trace: Trace) -> np.ndarray:
    """Ids in the order of untimed mode, in plain Python."""
    found: list[int] = []
    for r in range(len(trace.requests)):
        at = np.arange(trace.offsets[r], trace.offsets[r + 1])
        prompt = at[trace.phase[at] == PREFILL]
        for step in ([prompt] if len(prompt) else []) + [np.array([i]) for i in at[trace.phase[at] == DECODE]]:
            for layer in range(trace.layers):
                chosen = set(trace.experts[step, layer].ravel().tolist()) - {trace.sentinel}
                found += [layer * trace.num_experts + e for e in sorted(chosen)]
    return np.array(found, np.int64)


def records(trace: Trace, **options: Any) -> np.ndarray:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "x.oracleGeneral"
        written = export.export_oracle_general(trace, out, **options)
        made = np.fromfile(out, export.ORACLE_GENERAL)
        assert written == len(made)
        assert [file.name for file in Path(folder).iterdir()] == [out.name]
    return made


@given(strategies.traces())
def test_oracle_general_is_the_accesses_of_untimed_mode(trace: Trace) -> None:
    assume(len(trace.experts))
    made = records(trace)
    assert np.array_equal(made["obj_id"], accesses(trace))
    assert (made["size"] == 1).all()
    assert (np.diff(made["time"].astype(np.int64)) >= 0).all()


def test_libcachesim_writes_the_same_bytes_from_the_same_accesses(tmp_path: Path) -> None:
    oracle = pytest.importorskip("libcachesim", reason=WHY)
    mine = records(known())
    with (tmp_path / "x.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("time", "id", "size"), *((r["time"], r["obj_id"], 1) for r in mine)])
    told = oracle.ReaderInitParam(delimiter=",", has_header=True, obj_id_is_num=True)
    told.has_header_set = told.obj_id_is_num_set = True
    told.time_field, told.obj_id_field, told.obj_size_field = 1, 2, 3
    reader = oracle.TraceReader(str(tmp_path / "x.csv"), oracle.TraceType.CSV_TRACE, told)
    oracle.Util.convert_to_oracleGeneral(reader._reader, str(tmp_path / "theirs"))
    assert np.array_equal(np.fromfile(tmp_path / "theirs", export.ORACLE_GENERAL), mine)


@pytest.mark.parametrize("phase", ["prefill", "decode", "both"])
def test_libcachesim_counts_the_misses_of_untimed_mode(phase: Phases, tmp_path: Path) -> None:
    oracle = pytest.importorskip("libcachesim", reason=WHY)
    trace = export.of_phase(Trace.read(demo_trace()).head(4), phase)
    out = tmp_path / "x.oracleGeneral"
    total = export.export_oracle_general(trace, out)
    requests = [trace.steps(i) for i in range(len(trace.requests))]
    for slots in (9, 64, 200):
        for ours, theirs in (("lru", "LRU"), ("fifo", "FIFO"), ("belady", "Belady")):
            log = count(requests, trace.layers, trace.num_experts, slots, parse(ours), one_at_a_time=True)
            reader = oracle.TraceReader(str(out), oracle.TraceType.ORACLE_GENERAL_TRACE)
            ratio, _ = getattr(oracle, theirs)(slots).process_trace(reader)
            assert round(ratio * total) == log.misses.sum(), (ours, slots)
            assert total == log.misses.sum() + log.hits.sum()


@settings(max_examples=40)
@given(strategies.traces(), st.sampled_from(["prefill", "decode", "both"]))
def test_an_npz_comes_back_as_the_same_trace(trace: Trace, phase: Phases) -> None:
    try:
        trace = export.of_phase(trace, phase)
    except InputError:
        assume(False)
    routed = np.where(trace.experts == trace.sentinel, -1, trace.experts.astype(np.int64))
    assume(trace.num_experts == 1 or routed.any())
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "x.npz"
        assert export.export_npz(trace, out) == len(trace.experts)
        made, notes = import_dump(out, out.with_suffix(".json"))
    assert not notes
    for name in ("experts", "offsets", "phase", "position", "step", "weights", "token_id"):
        assert np.array_equal(getattr(made, name), getattr(trace, name)) or getattr(trace, name) is None
    assert made.meta == replace(trace.meta, mode="import", tools=made.meta.tools, lookahead=None)
    frames = [one.requests.drop(columns="mode").astype(object) for one in (made, trace)]
    ours, theirs = (frame.where(frame.notna(), None).reset_index(drop=True) for frame in frames)
    pd.testing.assert_frame_equal(ours, theirs)


@given(strategies.traces())
def test_a_csv_tells_each_choice_of_an_expert(trace: Trace) -> None:
    assume(len(trace.experts))
    with tempfile.TemporaryDirectory() as folder:
        written = export.export_csv(trace, Path(folder) / "x.csv")
        frame = pd.read_csv(Path(folder) / "x.csv", dtype={"request": str}, keep_default_na=False)
    assert len(frame) == written == int((trace.experts != trace.sentinel).sum())
    held = np.full_like(trace.experts, trace.sentinel)
    number = {name: i for i, name in enumerate(trace.requests["id"])}
    request = np.repeat(np.arange(len(trace.requests)), np.diff(trace.offsets))
    row = {(int(r), int(p)): i for i, (r, p) in enumerate(zip(request, trace.position, strict=True))}
    at = np.array([row[number[r], p] for r, p in zip(frame["request"], frame["position"], strict=True)], np.int64)
    held[at, frame["layer"], frame["rank"]] = frame["expert"]
    assert np.array_equal(held, trace.experts)
    assert frame["phase"].tolist() == [["prefill", "decode"][p] for p in trace.phase[at]]
    if trace.weights is not None and written:
        weights = trace.weights[at, frame["layer"], frame["rank"]]
        assert np.array_equal(frame["weight"].to_numpy(np.float16), weights)


def test_an_older_trace_whose_metadata_lacks_fields_is_exported_and_joined(tmp_path: Path) -> None:
    trace, shipped = Trace.read(demo_trace()).head(2), Source.open(demo_trace())
    export.export_npz(trace, tmp_path / "x.npz")
    assert json.loads((tmp_path / "x.json").read_text())["model"] == trace.meta.model
    write_trace(replace(trace, requests=trace.requests.assign(id=["a", "b"])), tmp_path / "other")
    join([shipped, Source.open(tmp_path / "other")], tmp_path / "both")
    assert open_folder(tmp_path / "both").meta.layer_expert_bytes == ()


def test_one_phase_is_the_rows_of_that_phase() -> None:
    trace = known()
    prefill, decode = export.of_phase(trace, "prefill"), export.of_phase(trace, "decode")
    assert (prefill.phases, decode.phases) == ("prefill", "decode")
    assert len(prefill.experts) + len(decode.experts) == len(trace.experts)
    assert np.array_equal(decode.eams(DECODE), trace.eams(DECODE))
    assert export.of_phase(trace, "both") is trace
    with pytest.raises(InputError, match="holds no prefill"):
        export.of_phase(decode, "prefill")
