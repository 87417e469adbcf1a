"""What is written is what is read."""

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings

from tests.strategies import traces
from traces.reader import OPTIONAL
from traces.schema import ROUTING
from traces.synthetic import synthetic
from traces.trace import Trace
from traces.writer import TraceWriter, write_trace

ARRAYS = ("offsets", "experts", "phase", "position", "step")


def assert_same(a: Trace, b: Trace) -> None:
    assert a.meta == b.meta
    pd.testing.assert_frame_equal(a.requests.reset_index(drop=True), b.requests, check_dtype=False)
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


@settings(max_examples=60, deadline=None)
@given(traces())
def test_a_trace_reads_back_as_it_was_written(trace: Trace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        write_trace(trace, path)
        again = Trace.read(path, OPTIONAL)
    assert_same(trace, again)
    assert again.experts.dtype == trace.meta.id_type
    np.testing.assert_array_equal(again.token_id, trace.token_id)
    if trace.weights is None:
        assert again.weights is None
    else:
        np.testing.assert_array_equal(again.weights, trace.weights)


@settings(max_examples=20, deadline=None)
@given(traces())
def test_a_trace_written_request_by_request_is_the_same_trace(trace: Trace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        with TraceWriter(path, trace.meta) as writer:
            for r in range(len(trace.requests)):
                writer.add(one_request(trace, r))
                writer.flush()
        assert_same(trace, Trace.read(path))


def one_request(trace: Trace, r: int) -> Trace:
    rows = slice(int(trace.offsets[r]), int(trace.offsets[r + 1]))
    columns = {name: getattr(trace, name)[rows] for name in ("experts", "phase", "position", "step", "token_id")}
    weights = None if trace.weights is None else trace.weights[rows]
    offsets = np.array([0, rows.stop - rows.start])
    return replace(trace, requests=trace.requests.iloc[r : r + 1], offsets=offsets, weights=weights, **columns)


def test_optional_columns_are_read_only_when_asked_for(tmp_path: Path) -> None:
    trace = synthetic(2, 3, 2, 4, 2, seed=0)
    write_trace(replace(trace, weights=np.zeros(trace.experts.shape, np.float16)), tmp_path / "t")
    assert Trace.read(tmp_path / "t").weights is None
    assert Trace.read(tmp_path / "t", ["weights"]).weights is not None


def test_an_arrival_beyond_what_a_float_holds_survives_beside_an_unknown_one(tmp_path: Path) -> None:
    trace = synthetic(2, 3, 2, 4, 2, seed=0)
    arrivals = pd.array([None, 2**53 + 1], dtype="Int64")
    write_trace(replace(trace, requests=trace.requests.assign(arrival_ns=arrivals)), tmp_path / "t")
    assert Trace.read(tmp_path / "t").requests["arrival_ns"][1] == 2**53 + 1


def test_rows_on_disk_are_in_the_order_of_execution(tmp_path: Path) -> None:
    trace = synthetic(3, 4, 2, 4, 2, seed=0, prompt_tokens=2)
    together = replace(trace, step=np.tile(trace.step[: trace.offsets[1]], 3))
    write_trace(together, tmp_path / "t")
    rows = pq.read_table(tmp_path / "t" / ROUTING)
    assert rows.column("request").to_pylist()[:8] == [0, 0, 1, 1, 2, 2, 0, 1]
    assert np.all(np.diff(rows.column("step").to_numpy().astype(int)) >= 0)
    assert_same(together, Trace.read(tmp_path / "t"))


def test_a_full_row_group_starts_a_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("traces.writer.ROW_GROUP", 10)
    trace = synthetic(7, 4, 2, 4, 2, seed=0)
    with TraceWriter(tmp_path / "t", trace.meta) as writer:
        for r in range(7):
            writer.add(one_request(replace(trace, token_id=np.zeros(28, np.int32)), r))
    assert sorted(p.name for p in (tmp_path / "t" / ROUTING).iterdir()) == [f"part-0000{i}.parquet" for i in range(3)]
    assert_same(trace, Trace.read(tmp_path / "t"))
