"""A broken trace is refused, and what a writer that was cut off has finished stays readable."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.ahead import with_lookahead
from traces import InputError, Trace
from traces.reader import RUN
from traces.schema import KEY, REQUESTS, ROUTING, VERSION
from traces.shards import Shards
from traces.steps import RequestSteps
from traces.stream import pieces
from traces.synthetic import synthetic
from traces.writer import UNFINISHED, TraceWriter, write_trace

GOOD = synthetic(3, 4, 2, 6, 2, seed=0, prompt_tokens=3)
PART = f"{ROUTING}/part-00000.parquet"

Change = Callable[[pa.Table], pa.Table]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_trace(GOOD, tmp_path / "t")
    return tmp_path / "t"


def refuses(folder: Path, *parts: str) -> None:
    """Read whole, or run from its files."""
    for read in (Trace.read, run):
        with pytest.raises(InputError) as error:
            read(folder)
        for part in parts:
            assert part in str(error.value)


def run(folder: Path) -> list[RequestSteps]:
    trace = Shards.open(folder)
    return [trace.steps(i) for i in range(len(trace.requests))]


def rewrite(file: Path, change: Change) -> None:
    pq.write_table(change(pq.read_table(file, partitioning=None)), file)


def with_column(name: str, change: Callable[[list], list]) -> Change:
    def apply(table: pa.Table) -> pa.Table:
        i = table.schema.get_field_index(name)
        values = pa.array(change(table.column(name).to_pylist()), table.schema.field(i).type)
        return table.set_column(i, pa.field(name, values.type), values)

    return apply


def with_meta(content: bytes) -> Change:
    return lambda table: table.replace_schema_metadata({KEY: content})


@pytest.mark.parametrize("name", ["", REQUESTS, PART])
def test_a_missing_file_or_folder(folder: Path, name: str) -> None:
    (folder / name).unlink() if name else shutil.rmtree(folder)
    refuses(folder, "no such folder" if not name else "is not a trace")


@pytest.mark.parametrize("name", [REQUESTS, PART])
@pytest.mark.parametrize("keep", [0, 3, 0.5, -1])
def test_a_truncated_file(folder: Path, name: str, keep: float) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: int(len(content) * keep) if keep == 0.5 else int(keep)])
    refuses(folder, name)


META = GOOD.meta.encode()[KEY]


@pytest.mark.parametrize(
    ("name", "change", "part"),
    [
        (REQUESTS, lambda table: pa.table({"a": [1, 2]}), "not of a trace"),
        (PART, lambda table: pa.table({"a": [1, 2]}), "not of a trace"),
        (REQUESTS, with_meta(META.replace(b'"schema_version": %d' % VERSION, b'"schema_version": 99')), "version 99"),
        (REQUESTS, with_meta(b"nonsense"), "JSON"),
        (REQUESTS, with_meta(META.replace(b'"layers": 2', b'"layers": 2.5')), "layers"),
        (REQUESTS, with_meta(META.replace(b'"layers": 2', b'"layers": 3')), "layer_names"),
        (REQUESTS, with_meta(META.replace(b'"top_k": 2', b'"top_k": 7')), "no model has"),
        (PART, with_meta(META.replace(b'"synthetic"', b'"another"')), "another trace"),
        (REQUESTS, lambda table: table.drop_columns(["task"]), "'task'"),
        (REQUESTS, lambda table: table.slice(0, 0), "no requests"),
        (REQUESTS, with_column("id", lambda rows: [None, *rows[1:]]), ""),
        (PART, with_column("position", lambda rows: [None, *rows[1:]]), ""),
        (PART, with_column("experts", lambda rows: [[0, 6, 0, 1], *rows[1:]]), "request 0, token 0, MoE layer 0"),
        (PART, with_column("experts", lambda rows: [*rows[:-1], [0, 1, 5, 5]]), "request 2, token 6, MoE layer 1"),
        (REQUESTS, with_column("eam_decode", lambda rows: [rows[0], rows[2], rows[1]]), "EAM listed for request 1"),
        (PART, lambda table: table.slice(0, len(table) - 1), "request 2"),
        (PART, with_column("phase", lambda rows: [*rows[:-1], 2]), "phase 2"),
        (REQUESTS, with_column("prompt_tokens", lambda rows: [3, 2, 3]), "request 1"),
        (REQUESTS, with_column("id", lambda rows: ["a", "b", "a"]), "'a' occurs twice"),
        (PART, with_column("position", lambda rows: [1, 0, *rows[2:]]), "request 0 are out of order"),
        (PART, with_column("phase", lambda rows: [0, 0, 1, 0, *rows[4:]]), "request 0 are out of order"),
    ],
)
def test_a_file_that_is_of_no_trace_or_contradicts_itself(folder: Path, name: str, change: Change, part: str) -> None:
    rewrite(folder / name, change)
    refuses(folder, part)


def test_routing_of_requests_that_are_not_listed_is_left_out(folder: Path) -> None:
    rewrite(folder / REQUESTS, lambda t: t.slice(0, 2))
    trace = Trace.read(folder, ["token_id"])
    assert len(trace.requests) == 2
    assert (trace.experts == GOOD.head(2).experts).all()
    assert trace.token_id is not None
    assert len(trace.token_id) == len(trace.experts)


def test_counts_alone_with_routing(folder: Path) -> None:
    meta = replace(GOOD.meta, mode="aggregate").encode()
    for name in (REQUESTS, PART):
        rewrite(folder / name, lambda t: t.replace_schema_metadata(meta))
    refuses(folder, "EAMs only, but has 21 rows of routing")


def test_a_lookahead_that_no_gate_picks(folder: Path) -> None:
    picks = GOOD.experts.copy()
    picks[9, 1] = 5
    write_trace(with_lookahead(GOOD, picks), folder, overwrite=True)
    for read in (run, lambda path: Trace.read(path, RUN)):
        with pytest.raises(InputError, match="lookahead of token row 9, MoE layer 1"):
            read(folder)
    trace = Shards.open(folder, lookahead=False)
    assert [trace.steps(i).lookahead for i in range(3)] == [None] * 3


@pytest.mark.parametrize("change", [lambda steps: steps[::-1], lambda steps: [0] * len(steps)], ids=["reverse", "0"])
def test_steps_that_do_not_follow_each_other(folder: Path, change: Callable[[list], list]) -> None:
    rewrite(folder / PART, with_column("step", change))
    for read in (Trace.read, lambda path: list(pieces(path))):
        with pytest.raises(InputError):
            read(folder)


def test_a_value_that_is_no_number(tmp_path: Path) -> None:
    array: Any = np.full(GOOD.experts.shape, 0.5, np.float16)
    write_trace(replace(GOOD, weights=array), tmp_path / "t")
    rewrite(
        tmp_path / "t" / PART,
        with_column("weights", lambda rows: [rows[0], [*rows[1][:-1], np.float16(np.nan)], *rows[2:]]),
    )
    for read in (Trace.read, lambda path, columns: list(pieces(path, columns))):
        with pytest.raises(InputError, match="row 1 of weights"):
            read(tmp_path / "t", ["weights"])
    array.ravel()[-1] = np.inf
    with pytest.raises(InputError):
        write_trace(replace(GOOD, weights=array), tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_a_writer_of_a_whole_trace_that_is_killed_leaves_the_old_one(folder: Path) -> None:
    assert subprocess.run([sys.executable, "-c", WRITER, folder, "7", "whole"]).returncode == 9
    assert (folder / UNFINISHED).is_dir()
    assert len(Trace.read(folder).requests) == 3
    assert subprocess.run([sys.executable, "-c", WRITER, folder, "-1", "whole"]).returncode == 0
    assert len(Trace.read(folder).requests) == 15
    assert not (folder / UNFINISHED).exists()


@pytest.mark.parametrize("name", ["letter.txt", "routing/letter.txt"])
def test_a_folder_with_other_files_is_never_touched(folder: Path, name: str) -> None:
    (folder / name).write_text("dear")
    with pytest.raises(InputError, match="left alone"):
        write_trace(GOOD, folder, overwrite=True)
    assert (folder / name).read_text() == "dear"
    assert (folder / REQUESTS).is_file()


def full(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_failed_write_leaves_what_was_there_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = TraceWriter(tmp_path / "t", GOOD.meta)
    writer.add(GOOD)
    writer.flush()
    more = replace(GOOD, requests=GOOD.requests.assign(id=["x", "y", "z"]))
    writer.add(more)
    monkeypatch.setattr("traces.parquet.pq.ParquetWriter.write_table", full)
    with pytest.raises(InputError, match="3 requests are readable"):
        writer.flush()
    assert len(Trace.read(tmp_path / "t").requests) == 3
    assert not list(tmp_path.rglob("*.tmp"))


def test_an_old_trace_stays_until_the_new_one_has_a_request(folder: Path) -> None:
    with TraceWriter(folder, GOOD.meta, overwrite=True):
        pass
    assert len(Trace.read(folder).requests) == 3


def test_a_recording_without_requests_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), TraceWriter(tmp_path / "t", GOOD.meta):
        raise KeyboardInterrupt
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("old", [True, False])
def test_a_trace_that_is_written_whole_replaces_nothing_until_then(tmp_path: Path, old: bool) -> None:
    folder = tmp_path / "t"
    if old:
        write_trace(GOOD, folder)

    def copy(requests: int, error: BaseException | None = None) -> None:
        with TraceWriter(folder, GOOD.meta, overwrite=True, whole=True) as writer:
            writer.add(GOOD.head(requests))
            writer.flush()
            if old:
                assert len(Trace.read(folder).requests) == 3
            if error:
                raise error

    for error in (KeyboardInterrupt(), InputError("a request is damaged")):
        with pytest.raises(type(error)):
            copy(2, error)
        assert folder.exists() == old
    copy(1)
    assert len(Trace.read(folder).requests) == 1
    assert {file.name for file in folder.iterdir()} == {REQUESTS, ROUTING}


def test_a_disk_that_fills_leaves_the_trace_that_was_to_be_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("traces.parquet.pq.ParquetWriter.write_table", full)
    with pytest.raises(InputError, match="no new trace is there"):
        write_trace(GOOD.head(1), folder, overwrite=True)
    assert len(Trace.read(folder).requests) == 3
    assert {file.name for file in folder.iterdir()} == {REQUESTS, ROUTING}


def test_a_bit_that_has_changed_on_the_disk_is_noticed(tmp_path: Path) -> None:
    rng, folder = np.random.default_rng(0), tmp_path / "t"
    made = synthetic(10, 40, 4, 32, 4, seed=0, prompt_tokens=20)
    made = replace(made, weights=rng.random(made.experts.shape).astype(np.float16))
    write_trace(made, folder)
    file = next((folder / ROUTING).iterdir())
    whole = file.read_bytes()
    refused = 0
    for place in rng.integers(0, len(whole), 60):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        try:
            read = Trace.read(folder, ["weights"])
        except InputError:
            refused += 1
            continue
        for name in ("experts", "weights", "position", "step", "phase"):
            assert getattr(read, name).tobytes() == getattr(made, name).tobytes(), place
    assert refused > 50


WRITER = """
import os, sys
from dataclasses import replace
from pathlib import Path
from traces.synthetic import synthetic
from traces.writer import TraceWriter

whole, folder, last = synthetic(3, 4, 2, 6, 2, seed=0, prompt_tokens=3), Path(sys.argv[1]), int(sys.argv[2])
rename, renamed = os.replace, 0

def counted(source, target):
    global renamed
    if renamed == last:
        os._exit(9)
    renamed += 1
    rename(source, target)

os.replace = counted
with TraceWriter(folder, whole.meta, overwrite=True, whole=sys.argv[3] == "whole") as writer:
    for n in range(5):
        names = [f"{n}-{i}" for i in range(3)]
        writer.add(replace(whole, requests=whole.requests.assign(id=names)))
        writer.flush()
"""


@pytest.mark.parametrize(("renames", "readable"), [(1, 0), (2, 3), (3, 3)])
def test_a_writer_killed_within_a_flush_leaves_what_it_flushed_before(
    tmp_path: Path, renames: int, readable: int
) -> None:
    folder = tmp_path / "t"
    assert subprocess.run([sys.executable, "-c", WRITER, folder, str(renames), "growing"]).returncode == 9
    assert list(folder.rglob(".*.tmp")), "the flush was whole: the test shows nothing"
    if readable:
        trace = Trace.read(folder)
        assert trace.requests["id"].tolist() == ["0-0", "0-1", "0-2"]
        assert (trace.experts == GOOD.experts).all()
    else:
        refuses(folder, "it has no requests.parquet")
    write_trace(GOOD.head(1), folder, overwrite=True)
    assert len(Trace.read(folder).requests) == 1
    assert sorted(file.name for file in folder.rglob("*.*")) == ["part-00000.parquet", REQUESTS]
