"""Every broken trace ends in one line that says what and where."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from traces.check import MOST_POSITIONS
from traces.errors import InputError
from traces.schema import KEY, REQUESTS, ROUTING, VERSION
from traces.shards import Shards
from traces.steps import RequestSteps
from traces.stream import pieces
from traces.synthetic import synthetic
from traces.trace import Trace
from traces.writer import UNFINISHED, TraceWriter, write_trace

GOOD = synthetic(3, 4, 2, 6, 2, seed=0, prompt_tokens=3)
PART = f"{ROUTING}/part-00000.parquet"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_trace(GOOD, tmp_path / "t")
    return tmp_path / "t"


def refuses(folder: Path, *parts: str) -> None:
    """Read whole, or run from its files."""
    for read in (Trace.read, play):
        with pytest.raises(InputError) as error:
            read(folder)
        for part in parts:
            assert part in str(error.value)
        assert "\n" not in str(error.value)


def play(folder: Path) -> list[RequestSteps]:
    trace = Shards.open(folder)
    return [trace.steps(i) for i in range(len(trace.requests))]


def rewrite(file: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    pq.write_table(change(pq.read_table(file, partitioning=None)), file)


def with_column(name: str, change: Callable[[list], list]) -> Callable[[pa.Table], pa.Table]:
    def apply(table: pa.Table) -> pa.Table:
        i = table.schema.get_field_index(name)
        values = pa.array(change(table.column(name).to_pylist()), table.schema.field(i).type)
        return table.set_column(i, pa.field(name, values.type), values)

    return apply


def test_a_missing_folder(tmp_path: Path) -> None:
    refuses(tmp_path / "none", "none", "no such folder")


def test_a_file_in_place_of_a_folder(folder: Path) -> None:
    refuses(folder / REQUESTS, "is a file")


@pytest.mark.parametrize("name", [REQUESTS, PART])
def test_a_missing_file(folder: Path, name: str) -> None:
    (folder / name).unlink()
    refuses(folder, "not a", Path(name).name[:4])


@pytest.mark.parametrize("name", [REQUESTS, PART])
def test_an_empty_file(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"")
    refuses(folder, name, "empty")


@pytest.mark.parametrize("name", [REQUESTS, PART])
@pytest.mark.parametrize("keep", [3, 0.5, -1])
def test_a_truncated_file(folder: Path, name: str, keep: float) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: int(len(content) * keep) if keep == 0.5 else int(keep)])
    refuses(folder, name, "truncated")


@pytest.mark.parametrize("name", [REQUESTS, PART])
def test_a_file_damaged_in_its_middle(folder: Path, name: str) -> None:
    content = bytearray((folder / name).read_bytes())
    content[4 : len(content) // 2] = b"\xff" * (len(content) // 2 - 4)
    (folder / name).write_bytes(content)
    refuses(folder, "damaged")


@pytest.mark.parametrize(("name", "column"), [(REQUESTS, "task"), (REQUESTS, "embedding"), (PART, "experts")])
def test_a_column_that_is_there_twice(folder: Path, name: str, column: str) -> None:
    def twice(table: pa.Table) -> pa.Table:
        for _ in range(2 - table.column_names.count(column)):
            table = table.append_column(column, table.column(0))
        return table

    rewrite(folder / name, twice)
    refuses(folder, name, f"has the column '{column}' twice")


@pytest.mark.parametrize("name", [REQUESTS, PART])
def test_a_foreign_parquet_file(folder: Path, name: str) -> None:
    pq.write_table(pa.table({"a": [1, 2]}), folder / name)
    refuses(folder, name, "not of a trace", "name a folder that moe-trace wrote")


def test_another_schema_version(folder: Path) -> None:
    meta = GOOD.meta.encode()[KEY].replace(f'"schema_version": {VERSION}'.encode(), b'"schema_version": 99')
    rewrite(folder / REQUESTS, lambda t: t.replace_schema_metadata({KEY: meta}))
    refuses(folder, REQUESTS, "schema version 99")


@pytest.mark.parametrize("meta", [b"nonsense", b"[]", b'{"schema_version": 1}'])
def test_metadata_that_makes_no_sense(folder: Path, meta: bytes) -> None:
    rewrite(folder / REQUESTS, lambda t: t.replace_schema_metadata({KEY: meta}))
    refuses(folder, REQUESTS, "cannot be understood")


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"layers": 8.0}, "layers is 8.0"),
        ({"layers": True}, "layers is True"),
        ({"experts": 0}, "experts is 0"),
        ({"model": None}, "model is None"),
        ({"model": 5}, "model is 5"),
        ({"mode": None}, "mode is None"),
        ({"expert_bytes": "x"}, "expert_bytes is 'x'"),
        ({"expert_bytes": -4}, "expert_bytes is -4"),
        (
            {"expert_bytes": 2**62},
            "expert_bytes is 4611686018427387904; a whole number from 1 to 1099511627776 is needed",
        ),
        ({"hidden_size": "a"}, "hidden_size is 'a'"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"dtype": 5}, "dtype is 5"),
        ({"revision": [1]}, "revision is [1]"),
        ({"tools": 3}, "tools is 3"),
        ({"tools": {"torch": 2}}, "tools is 2"),
        ({"layers": 10**6, "experts": 65000}, "no model has 1000000 MoE layers x 65000 experts"),
        ({"layer_names": "ab"}, "layer_names is 'ab'"),
        ({"layer_names": [1, 2]}, "layer_names is 1"),
        ({"layer_names": ["a", "b" * 5000]}, "has 5000 characters, more than 4096"),
    ],
)
def test_metadata_of_the_wrong_kind_is_named(folder: Path, facts: dict[str, Any], reason: str) -> None:
    meta = json.dumps(json.loads(GOOD.meta.encode()[KEY]) | facts).encode()
    rewrite(folder / REQUESTS, lambda t: t.replace_schema_metadata({KEY: meta}))
    refuses(folder, REQUESTS, reason)


def test_metadata_nested_too_deeply(folder: Path) -> None:
    rewrite(folder / REQUESTS, lambda t: t.replace_schema_metadata({KEY: b"[" * 100_000}))
    refuses(folder, REQUESTS, "nested too deeply")


@pytest.mark.parametrize("name", ["id", "task", "mode", "output_tokens", "eam_prefill", "eam_decode"])
def test_a_null_among_the_requests(folder: Path, name: str) -> None:
    rewrite(folder / REQUESTS, with_column(name, lambda rows: [rows[0], None, rows[2]]))
    refuses(folder, REQUESTS, f"'{name}' holds nulls")


@pytest.mark.parametrize("name", ["request", "position", "step", "phase", "experts"])
def test_a_null_in_the_routing(folder: Path, name: str) -> None:
    rewrite(folder / PART, with_column(name, lambda rows: [None, *rows[1:]]))
    refuses(folder, ROUTING, f"'{name}' holds nulls")


def test_a_null_within_a_list(folder: Path) -> None:
    rewrite(folder / PART, with_column("experts", lambda rows: [[0, None, 0, 1], *rows[1:]]))
    refuses(folder, ROUTING, "'experts' holds nulls")
    write_trace(GOOD, folder, overwrite=True)
    rewrite(folder / REQUESTS, with_column("eam_decode", lambda rows: [[None, *rows[0][1:]], *rows[1:]]))
    refuses(folder, REQUESTS, "'eam_decode' holds nulls")


def test_routing_of_another_model(folder: Path) -> None:
    other = replace(GOOD.meta, model="another")
    rewrite(folder / PART, lambda t: t.replace_schema_metadata(other.encode()))
    refuses(folder, PART, "another trace")


def test_a_column_that_is_missing_or_of_another_type(folder: Path) -> None:
    rewrite(folder / REQUESTS, lambda t: t.drop_columns(["task"]))
    refuses(folder, REQUESTS, "'task'")
    write_trace(GOOD, folder, overwrite=True)
    rewrite(folder / PART, lambda t: t.set_column(0, "request", t.column("request").cast("int64")))
    refuses(folder, PART, "'request'", "int64")


def test_no_requests_at_all(folder: Path) -> None:
    rewrite(folder / REQUESTS, lambda t: t.slice(0, 0))
    refuses(folder, "no requests")


def test_an_id_beyond_the_experts(folder: Path) -> None:
    rewrite(folder / PART, with_column("experts", lambda rows: [[0, 6, 0, 1], *rows[1:]]))
    refuses(folder, "request 0, token 0, MoE layer 0", "[0, 6]", "beyond the 6 experts")


def test_an_expert_repeated_within_a_token_and_layer(folder: Path) -> None:
    rewrite(folder / PART, with_column("experts", lambda rows: [*rows[:-1], [0, 1, 5, 5]]))
    refuses(folder, "request 2, token 6, MoE layer 1", "[5, 5]", "repeat")


def test_an_eam_unlike_the_routing(folder: Path) -> None:
    rewrite(folder / REQUESTS, with_column("eam_decode", lambda rows: [rows[0], rows[2], rows[1]]))
    refuses(folder, "EAM", "request 1")


def test_routing_of_requests_that_are_not_listed_is_left_out(folder: Path) -> None:
    rewrite(folder / REQUESTS, lambda t: t.slice(0, 2))
    trace = Trace.read(folder, ["token_id"])
    assert len(trace.requests) == 2
    assert (trace.experts == GOOD.head(2).experts).all()
    assert trace.token_id is not None
    assert len(trace.token_id) == len(trace.experts)


def test_fewer_rows_than_a_request_lists(folder: Path) -> None:
    rewrite(folder / PART, lambda t: t.slice(0, len(t) - 1))
    refuses(folder, "request 2", "output_tokens", "4 listed, 3 there")


def test_a_phase_that_there_is_not(folder: Path) -> None:
    rewrite(folder / PART, with_column("phase", lambda rows: [*rows[:-1], 2]))
    refuses(folder, "phase 2 is neither prefill (0) nor decode (1)")


def test_counts_alone_with_routing(folder: Path) -> None:
    meta = replace(GOOD.meta, mode="aggregate").encode()
    for name in (REQUESTS, PART):
        rewrite(folder / name, lambda t: t.replace_schema_metadata(meta))
    refuses(folder, "EAMs only, but has 21 rows of routing")
    rewrite(folder / PART, lambda t: t.slice(0, 0))
    rewrite(folder / REQUESTS, with_column("eam_decode", lambda rows: [rows[0], None, rows[2]]))
    refuses(folder, REQUESTS, "'eam_decode' holds nulls")


@pytest.mark.parametrize("kind", [pa.list_(pa.float16(), 0), pa.list_(pa.float16()), pa.string()], ids=str)
def test_embeddings_that_are_no_lists_of_a_fixed_size(kind: pa.DataType, folder: Path) -> None:
    none: list[object] = ["" if kind == pa.string() else []]
    empty = pa.array(none * 3, kind)
    rewrite(folder / REQUESTS, lambda t: t.append_column(pa.field("embedding", kind, nullable=False), empty))
    refuses(folder, REQUESTS, "column 'embedding' is", "not lists of a fixed size above 0")


def test_a_null_among_the_embeddings(folder: Path) -> None:
    write_trace(replace(GOOD, embedding=np.zeros((3, 2), np.float16)), folder, overwrite=True)
    rewrite(folder / REQUESTS, with_column("embedding", lambda rows: [rows[0], None, rows[2]]))
    refuses(folder, REQUESTS, "'embedding' holds nulls")


def test_a_lookahead_that_no_gate_picks(folder: Path) -> None:
    picks = GOOD.experts.copy()
    picks[9, 1] = 5
    write_trace(replace(GOOD, lookahead=picks), folder, overwrite=True)
    wanted = "lookahead of token row 9, MoE layer 1: expert ids [5, 5]"
    with pytest.raises(InputError, match=re.escape(wanted)):
        Trace.read(folder, ["lookahead"])
    with pytest.raises(InputError, match=re.escape(wanted)):
        play(folder)
    trace = Shards.open(folder, lookahead=False)
    assert [trace.steps(i).lookahead for i in range(3)] == [None] * 3


def test_what_is_wrong_is_told_in_the_same_words(folder: Path) -> None:
    """Of several faults, whether it is read whole or run."""
    rewrite(folder / PART, with_column("position", lambda rows: [*rows[:9], 0, *rows[10:-1], 0]))
    rewrite(folder / PART, with_column("experts", lambda rows: [[0, 6, 0, 1], *rows[1:]]))
    told = []
    for read in (Trace.read, play, lambda path: list(pieces(path))):
        with pytest.raises(InputError) as error:
            read(folder)
        told.append(str(error.value))
    assert told == [f"{folder}: the tokens of request 1 are out of order at position 0"] * 3


def test_a_prompt_of_another_length(folder: Path) -> None:
    rewrite(folder / REQUESTS, with_column("prompt_tokens", lambda rows: [3, 2, 3]))
    refuses(folder, "request 1", "prompt_tokens", "2 listed, 3 there")


def test_an_id_of_a_request_twice(folder: Path) -> None:
    rewrite(folder / REQUESTS, with_column("id", lambda rows: ["a", "b", "a"]))
    refuses(folder, "'a' occurs twice")


def test_tokens_out_of_order(folder: Path) -> None:
    rewrite(folder / PART, with_column("position", lambda rows: [1, 0, *rows[2:]]))
    refuses(folder, "request 0", "out of order")


def test_a_prefill_after_a_decode(folder: Path) -> None:
    rewrite(folder / PART, with_column("phase", lambda rows: [0, 0, 1, 0, *rows[4:]]))
    refuses(folder, "request 0", "out of order at position 3")


@pytest.mark.parametrize("change", [lambda steps: steps[::-1], lambda steps: [0] * len(steps)], ids=["reverse", "0"])
def test_steps_that_do_not_follow_each_other(folder: Path, change: Callable[[list], list]) -> None:
    rewrite(folder / PART, with_column("step", change))
    for read in (Trace.read, lambda path: list(pieces(path))):
        with pytest.raises(InputError, match=r"request 0, token \d: step \d+ does not follow step \d+ of"):
            read(folder)


@pytest.mark.parametrize("position", [2**32 - 1, MOST_POSITIONS])
def test_a_position_beyond_any_context(folder: Path, position: int) -> None:
    rewrite(folder / PART, with_column("position", lambda rows: [*rows[:-1], position]))
    refuses(folder, f"position {position} lies beyond any context")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["weights", "gate_probs", "embedding"])
def test_a_value_that_is_no_number(tmp_path: Path, name: str, value: float) -> None:
    shapes = {"weights": GOOD.experts.shape, "gate_probs": (len(GOOD.experts), 2, 6), "embedding": (3, 2)}
    array: Any = np.full(shapes[name], 0.5, np.float16)
    write_trace(replace(GOOD, **{name: array}), tmp_path / "t")
    file = tmp_path / "t" / (REQUESTS if name == "embedding" else PART)
    rewrite(file, with_column(name, lambda rows: [rows[0], [*rows[1][:-1], np.float16(value)], *rows[2:]]))
    for read in (Trace.read, lambda path, columns: list(pieces(path, columns))):
        with pytest.raises(InputError, match=f"row 1 of {name} holds a value that is no number"):
            read(tmp_path / "t", [name])
    array.ravel()[-1] = value
    with pytest.raises(InputError, match=f"of {name} holds a value that is no number"):
        write_trace(replace(GOOD, **{name: array}), tmp_path / "never")
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("name", ["id", "task"])
def test_a_text_that_is_not_utf8(folder: Path, name: str) -> None:
    def broken(table: pa.Table) -> pa.Table:
        at = table.schema.get_field_index(name)
        texts = pa.array([b"a", b"\xff\xfe", b"c"], pa.binary())
        return table.set_column(at, table.schema.field(at), texts.cast(pa.binary()).view(pa.string()))

    rewrite(folder / REQUESTS, broken)
    refuses(folder, REQUESTS, f"column '{name}' holds text that is not UTF-8")


@pytest.mark.parametrize("fact", ["model", "dtype", "revision"])
def test_a_name_that_nobody_could_draw(folder: Path, fact: str) -> None:
    meta = json.dumps(json.loads(GOOD.meta.encode()[KEY]) | {fact: "x" * 10**6}).encode()
    rewrite(folder / REQUESTS, lambda t: t.replace_schema_metadata({KEY: meta}))
    refuses(folder, REQUESTS, f"{fact} is 'xxx", "has 1000000 characters, more than 4096")


@pytest.mark.parametrize("name", [REQUESTS, PART])
def test_a_special_file_is_not_opened(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    refuses(folder, f"{name} is a FIFO, not a file")
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    refuses(folder, f"{name} is a device, not a file")


def test_writing_over_a_trace_needs_a_word(folder: Path) -> None:
    with pytest.raises(InputError, match="--overwrite"):
        write_trace(GOOD, folder)
    write_trace(GOOD.head(1), folder, overwrite=True)
    assert len(Trace.read(folder).requests) == 1


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


def test_an_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for target in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/trace")):
        with pytest.raises(InputError, match="choose another folder"):
            write_trace(GOOD, target)


def test_a_failed_write_leaves_what_was_there_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = TraceWriter(tmp_path / "t", GOOD.meta)
    writer.add(GOOD)
    writer.flush()
    more = replace(GOOD, requests=GOOD.requests.assign(id=["x", "y", "z"]))
    writer.add(more)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("traces.parquet.pq.ParquetWriter.write_table", full)
    with pytest.raises(InputError, match=r"No space left on device; 3 requests are readable"):
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


def test_an_interrupted_recording_is_readable(tmp_path: Path) -> None:
    def record() -> None:
        with TraceWriter(tmp_path / "t", GOOD.meta) as writer:
            writer.add(GOOD.head(2))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record()
    assert len(Trace.read(tmp_path / "t").requests) == 2


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
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("traces.parquet.pq.ParquetWriter.write_table", full)
    with pytest.raises(InputError, match="No space left on device; no new trace is there"):
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


def test_a_folder_without_routing(folder: Path) -> None:
    shutil.rmtree(folder / ROUTING)
    refuses(folder, "not a whole trace")


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


@pytest.mark.slow
def test_a_writer_killed_at_any_moment_leaves_a_readable_trace(tmp_path: Path) -> None:
    delays = random.Random(0)
    for n in range(10):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, tmp_path / str(n), "-1", "growing"])
        while not any((tmp_path / str(n)).glob("requests/part-*")):
            time.sleep(0.01)
        time.sleep(delays.random() / 2)
        writer.kill()
        writer.wait()
        assert len(Trace.read(tmp_path / str(n)).requests) % 3 == 0


COUNTED = pa.proxy_memory_pool(pa.default_memory_pool())
"""For as long as the process runs: arrays return their memory to it, also those that outlive the test."""


@pytest.mark.parametrize("column", ["id", "dataset", "task", "mode"])
def test_a_long_text_is_refused_without_a_copy_for_each_row(folder: Path, column: str) -> None:
    long = "x" * 3_000_000
    rewrite(folder / REQUESTS, lambda table: pa.concat_tables([with_column(column, lambda old: [long] * 3)(table)] * 9))
    usual = pa.default_memory_pool()
    pa.set_memory_pool(COUNTED)
    try:
        refuses(folder, f"{column!r} holds a text of 3000000 characters: shorten it to 4096")
    finally:
        pa.set_memory_pool(usual)
    assert COUNTED.max_memory() < 50_000_000


def test_a_long_id_is_not_written(tmp_path: Path) -> None:
    requests = GOOD.requests.assign(id=["a", "b", "x" * 4097])
    with pytest.raises(InputError, match="not written: column 'id' holds a text of 4097 characters"):
        write_trace(replace(GOOD, requests=requests), tmp_path / "t")
    assert not (tmp_path / "t").exists()
