"""What is not ours is left alone, and two never write to one folder at once."""

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from traces import InputError, Trace
from traces.output import LOCK, MARKER, check_file, claim, claimed, marked, only_writer, replacing
from traces.schema import REQUESTS, ROUTING
from traces.synthetic import synthetic
from traces.writer import TraceWriter, write_trace

MADE = synthetic(3, 4, 2, 6, 2, seed=0, prompt_tokens=3)
BY = "a test"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    write_trace(MADE, tmp_path / "trace")
    return tmp_path / "trace"


def refuses(folder: Path, name: str, match: str) -> None:
    for guard in (lambda: claim(folder, BY, [name]), lambda: claimed(folder, BY, [name]).__enter__()):
        with pytest.raises(InputError, match=match):
            guard()


def test_a_file_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "table").write_text("mine")
    refuses(tmp_path / "out", "table", "out/table was not written by a test")
    with claimed(tmp_path / "out", "another command", ["other"]):
        (tmp_path / "out" / "other").touch()
    refuses(tmp_path / "out", "other", "out/other was written by another command")
    with pytest.raises(InputError):
        check_file(tmp_path / "out" / "other", overwrite=True)
    claim(tmp_path / "out", BY, ["new"])
    assert (tmp_path / "out" / "table").read_text() == "mine"


def test_what_the_same_command_wrote_may_be_replaced(tmp_path: Path) -> None:
    for text in ("first", "second"):
        with claimed(tmp_path / "out", BY, ["table", "never written", "folder"]):
            (tmp_path / "out" / "folder").mkdir(exist_ok=True)
            for name in ("table", "folder/table"):
                (tmp_path / "out" / name).write_text(text)
    assert marked(tmp_path / "out") == dict.fromkeys(("table", "folder"), BY)
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"table", "folder", MARKER}


def test_a_file_is_replaced_only_where_the_user_says_so(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(InputError, match="notes exists: replace it with --overwrite"):
        check_file(tmp_path / "notes")
    for path in (Path("/dev/null"), tmp_path, tmp_path / "absent" / "file", Path("s3:/bucket/file")):
        with pytest.raises(InputError, match=r"cannot write|is an address"):
            check_file(path, overwrite=True)
    check_file(tmp_path / "new")
    check_file(tmp_path / "notes", overwrite=True)
    assert [file.name for file in tmp_path.iterdir()] == ["notes"]


def test_a_second_writer_of_a_trace_is_refused(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t", MADE.meta) as first:
        first.add(MADE.head(2))
        for options in ({}, {"overwrite": True}, {"resume": True}):
            with pytest.raises(InputError, match="another command is writing to"):
                TraceWriter(tmp_path / "t", MADE.meta, **options)
        first.add(MADE.select(np.array([2])))
    assert len(Trace.read(tmp_path / "t").requests) == 3
    with pytest.raises(InputError, match="--overwrite"):
        TraceWriter(tmp_path / "t", MADE.meta)
    assert not (tmp_path / "t" / LOCK).exists()


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    code = "import sys, time, pathlib, traces.output as output\n"
    code += "with output.only_writer(pathlib.Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", code, tmp_path / "t"], stdout=subprocess.PIPE, text=True)
    assert holder.stdout
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(InputError, match="another command is writing to"), only_writer(tmp_path / "t"):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / "t" / LOCK).exists(), "it was not killed while it held the lock"
    write_trace(MADE, tmp_path / "t")
    assert {file.name for file in (tmp_path / "t").iterdir()} == {REQUESTS, ROUTING}


def test_a_file_that_another_command_wrote_meanwhile_is_not_replaced_unasked(tmp_path: Path) -> None:
    file = tmp_path / "x.txt"
    writer = replacing(file, overwrite=False)
    writer.__enter__().write_text("mine")
    file.write_text("theirs")
    with pytest.raises(InputError, match="another command wrote"):
        writer.__exit__(None, None, None)
    assert file.read_text() == "theirs"
    assert [path.name for path in tmp_path.iterdir()] == ["x.txt"]
    with replacing(file) as part:
        part.write_text("mine")
    assert file.read_text() == "mine"
