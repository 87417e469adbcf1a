"""Every broken trace ends in one line that says what and where."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from traces.errors import InputError
from traces.schema import KEY, REQUESTS, ROUTING, VERSION
from traces.synthetic import synthetic
from traces.trace import Trace
from traces.writer import TraceWriter, write_trace

GOOD = synthetic(3, 4, 2, 6, 2, seed=0, prompt_tokens=3)
PART = f"{ROUTING}/part-00000.parquet"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_trace(GOOD, tmp_path / "t")
    return tmp_path / "t"


def refuses(folder: Path, *parts: str) -> None:
    with pytest.raises(InputError) as error:
        Trace.read(folder)
    for part in parts:
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def rewrite(file: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    pq.write_table(change(pq.read_table(file, partitioning=None)), file)


def with_column(name: str, change: Callable[[list], list]) -> Callable[[pa.Table], pa.Table]:
    def apply(table: pa.Table) -> pa.Table:
        i = table.schema.get_field_index(name)
        values = pa.array(change(table.column(name).to_pylist()), table.schema.field(i).type)
        return table.set_column(i, table.schema.field(i), values)

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


@pytest.mark.parametrize("name", [REQUESTS, PART])
def test_a_foreign_parquet_file(folder: Path, name: str) -> None:
    pq.write_table(pa.table({"a": [1, 2]}), folder / name)
    refuses(folder, name, "not of a trace")


def test_another_schema_version(folder: Path) -> None:
    meta = GOOD.meta.encode()[KEY].replace(f'"schema_version": {VERSION}'.encode(), b'"schema_version": 99')
    rewrite(folder / REQUESTS, lambda t: t.replace_schema_metadata({KEY: meta}))
    refuses(folder, REQUESTS, "schema version 99")


@pytest.mark.parametrize("meta", [b"nonsense", b"[]", b'{"schema_version": 1}'])
def test_metadata_that_makes_no_sense(folder: Path, meta: bytes) -> None:
    rewrite(folder / REQUESTS, lambda t: t.replace_schema_metadata({KEY: meta}))
    refuses(folder, REQUESTS, "cannot be understood")


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


def test_more_requests_in_the_routing_than_listed(folder: Path) -> None:
    rewrite(folder / REQUESTS, lambda t: t.slice(0, 2))
    refuses(folder, "request 2", "only 2 are listed")


def test_fewer_rows_than_a_request_lists(folder: Path) -> None:
    rewrite(folder / PART, lambda t: t.slice(0, len(t) - 1))
    refuses(folder, "request 2", "output_tokens", "4 listed, 3 there")


def test_a_prompt_of_another_length(folder: Path) -> None:
    rewrite(folder / REQUESTS, with_column("prompt_tokens", lambda rows: [3, 2, 3]))
    refuses(folder, "request 1", "prompt_tokens", "2 listed, 3 there")


def test_an_id_of_a_request_twice(folder: Path) -> None:
    rewrite(folder / REQUESTS, with_column("id", lambda rows: ["a", "b", "a"]))
    refuses(folder, "'a' occurs twice")


def test_tokens_out_of_order(folder: Path) -> None:
    rewrite(folder / PART, with_column("position", lambda rows: [1, 0, *rows[2:]]))
    refuses(folder, "request 0", "out of order")


def test_writing_over_a_trace_needs_a_word(folder: Path) -> None:
    with pytest.raises(InputError, match="--overwrite"):
        write_trace(GOOD, folder)
    write_trace(GOOD.head(1), folder, overwrite=True)
    assert len(Trace.read(folder).requests) == 1


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
        with pytest.raises(InputError, match="--out"):
            write_trace(GOOD, target)


def test_a_failed_write_leaves_what_was_there_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = TraceWriter(tmp_path / "t", GOOD.meta)
    writer.add(GOOD)
    writer.flush()
    more = replace(GOOD, requests=GOOD.requests.assign(id=["x", "y", "z"]))
    writer.add(more)

    def full(table: pa.Table, path: Path, **_: object) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("traces.writer.pq.write_table", full)
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


def test_a_folder_without_routing(folder: Path) -> None:
    shutil.rmtree(folder / ROUTING)
    refuses(folder, "not a whole trace")
