"""What is written is what is read."""

import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.same import assert_same
from tests.support.strategies import traces
from traces import InputError, Trace
from traces.reader import EXTRA, open_folder
from traces.schema import GROWING, ROUTING
from traces.stream import pieces
from traces.synthetic import synthetic
from traces.writer import TraceWriter, write_trace


@settings(max_examples=40, deadline=None)
@given(traces())
def test_a_trace_reads_back_as_it_was_written(trace: Trace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        write_trace(trace, path)
        again = Trace.read(path, EXTRA)
    assert_same(trace, again, EXTRA)
    assert again.experts.dtype == trace.meta.id_type


def one_request(trace: Trace, r: int) -> Trace:
    return trace.select(np.array([r]))


@settings(max_examples=40, deadline=None)
@given(traces(), st.data())
def test_a_trace_resumed_wherever_it_stopped_is_the_same_trace(trace: Trace, data: st.DataObject) -> None:
    R = len(trace.requests)
    lengths = np.diff(trace.offsets)
    trace = replace(
        trace, step=trace.step + np.repeat(10 * np.arange(R, dtype=np.uint32), lengths)
    )  # one after another
    stops = data.draw(st.lists(st.integers(0, R), max_size=3).map(sorted))
    with tempfile.TemporaryDirectory() as folder:
        path, done = Path(folder) / "trace", 0
        for stop in [*stops, R]:
            writer = TraceWriter(path, trace.meta, resume=True)
            assert writer.written == done
            assert writer.next_step == (int(trace.step[: trace.offsets[done]].max()) + 1 if trace.offsets[done] else 0)
            for r in range(done, stop):
                writer.add(one_request(trace, r))
            if data.draw(st.booleans()) or stop == R:
                writer.close()
            else:
                writer.flush()
                del writer  # killed
            done = stop
        assert_same(trace, Trace.read(path, EXTRA), EXTRA)
        assert sorted(file.name for file in path.iterdir()) == ["requests.parquet", "routing"]


@pytest.mark.parametrize("killed", [True, False])
@pytest.mark.parametrize("stop", [1, 3, 4, 5, 8, 9])
def test_a_resumed_trace_equals_the_uninterrupted_one_byte_for_byte(
    stop: int, killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = synthetic(10, 6, 2, 4, 2, seed=0, prompt_tokens=3)
    rows = np.random.default_rng(0).random((len(trace.experts), 2, 2)).astype(np.float16)
    trace = replace(trace, weights=rows, step=np.sort(trace.step))
    monkeypatch.setattr("traces.writer.FILE_ROWS", 25)
    monkeypatch.setattr("traces.writer.REQUEST_BYTES", 4 * 8 * 2 * 4)  # four requests a file
    monkeypatch.setattr("traces.parquet.ROW_GROUP_BYTES", 200)
    for name, parts in (("whole", [range(10)]), ("resumed", [range(stop), range(stop, 10)])):
        for part in parts:
            writer = TraceWriter(tmp_path / name, trace.meta, resume=True)
            for r in part:
                writer.add(one_request(trace, r))
            if killed and part[-1] < 9:
                writer.flush()
                del writer
            else:
                writer.close()
    files = {name: sorted((tmp_path / name).rglob("*.parquet")) for name in ("whole", "resumed")}
    assert [file.name for file in files["whole"]] == [file.name for file in files["resumed"]]
    assert len(files["whole"]) > 3
    for whole, resumed in zip(*files.values(), strict=True):
        assert whole.read_bytes() == resumed.read_bytes(), whole.name
    assert open_folder(tmp_path / "whole").fingerprint == open_folder(tmp_path / "resumed").fingerprint


def test_routing_of_unlisted_requests_is_dropped_when_a_trace_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("traces.writer.FILE_ROWS", 8)
    trace = synthetic(3, 4, 2, 4, 2, seed=0)
    other = synthetic(3, 4, 2, 4, 2, seed=1)
    writer = TraceWriter(tmp_path / "t", trace.meta)
    writer.add(one_request(trace, 0))
    writer.flush()
    with monkeypatch.context() as killed:
        killed.setattr(writer, "_requests", SimpleNamespace(grown=False, add=lambda table: None, rows=0, limit=9))
        killed.setattr(writer._requests, "flushed", lambda: None, raising=False)
        writer.add(one_request(other, 1))  # fills the part, and is killed before its request is listed
    assert len(pq.read_table(tmp_path / "t" / ROUTING)) == 8
    del writer
    writer = TraceWriter(tmp_path / "t", trace.meta, resume=True)
    assert writer.written == 1
    for r in (1, 2):
        writer.add(one_request(trace, r))
    writer.close()
    assert_same(trace, Trace.read(tmp_path / "t"))


def test_a_trace_that_was_recorded_otherwise_is_not_resumed(tmp_path: Path) -> None:
    trace = synthetic(1, 2, 2, 4, 2, seed=0)
    write_trace(replace(trace, meta=replace(trace.meta, settings={"seed": 1})), tmp_path / "t")
    with pytest.raises(InputError, match="recorded otherwise: seed was 1, now 2"):
        TraceWriter(tmp_path / "t", replace(trace.meta, settings={"seed": 2}), resume=True)


@pytest.mark.parametrize(
    "lost", [f"{ROUTING}/part-00001.parquet", f"{ROUTING}/part-00003.parquet", f"{GROWING}/part-00000.parquet"]
)
def test_a_trace_that_lost_a_file_is_not_resumed(lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("traces.writer.FILE_ROWS", 1)
    monkeypatch.setattr("traces.writer.REQUEST_BYTES", 8 * 2 * 4)  # a request a file
    trace = synthetic(4, 4, 2, 4, 2, seed=0, prompt_tokens=3)
    writer = TraceWriter(tmp_path / "t", trace.meta)
    for r in range(4):
        writer.add(one_request(trace, r))
        writer.flush()
    del writer
    (tmp_path / "t" / lost).unlink()
    held = {file: file.read_bytes() for file in (tmp_path / "t").rglob("*.parquet")}
    with pytest.raises(InputError):
        TraceWriter(tmp_path / "t", trace.meta, resume=True)
    assert held == {file: file.read_bytes() for file in (tmp_path / "t").rglob("*.parquet")}


@settings(max_examples=40, deadline=None)
@given(traces(), st.integers(1, 9), st.integers(1, 3), st.integers(1, 9))
def test_pieces_of_a_trace_are_the_trace(trace: Trace, rows: int, requests: int, group: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as small:
        small.setattr("traces.stream.ROWS", rows)
        small.setattr("traces.stream.REQUESTS", requests)
        small.setattr("traces.writer.FILE_ROWS", group)
        path = Path(folder) / "trace"
        write_trace(trace, path)
        found, first = list(pieces(path, EXTRA)), 0
    for piece in found:
        assert 1 <= len(piece.requests) <= requests
        assert_same(trace.select(np.arange(first, first + len(piece.requests))), piece, EXTRA)
        first += len(piece.requests)
    assert first == len(trace.requests)


def test_a_trace_of_counts_alone_reads_back(tmp_path: Path) -> None:
    trace = synthetic(2, 3, 2, 4, 2, seed=0)
    counts = np.arange(2 * 2 * 8, dtype=np.uint32).reshape(2, 2, 8)
    unknown = trace.requests.assign(prompt_tokens=pd.array([None] * 2, dtype="Int64"), output_tokens=0)
    empty = replace(trace.select(np.array([], int)), requests=unknown, offsets=np.zeros(3, np.int64))
    write_trace(replace(empty, meta=replace(trace.meta, mode="aggregate"), aggregate=counts), tmp_path / "t")
    again = Trace.read(tmp_path / "t")
    assert (again.eams(0).ravel() == counts[0].ravel()).all()
    assert (again.eams(1).ravel() == counts[1].ravel()).all()
    assert [len(piece.requests) for piece in pieces(tmp_path / "t")] == [2]


def test_rows_on_disk_are_in_the_order_of_execution(tmp_path: Path) -> None:
    trace = synthetic(3, 4, 2, 4, 2, seed=0, prompt_tokens=2)
    together = replace(trace, step=np.tile(trace.step[: trace.offsets[1]], 3))
    write_trace(together, tmp_path / "t")
    rows = pq.read_table(tmp_path / "t" / ROUTING)
    assert rows.column("request").to_pylist()[:8] == [0, 0, 1, 1, 2, 2, 0, 1]
    assert np.all(np.diff(rows.column("step").to_numpy().astype(int)) >= 0)
    assert_same(together, Trace.read(tmp_path / "t"))
