"""What is not ours is left alone, and two never write to one folder at once."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import sim.commands
import tracer.commands
from traces import output
from traces.errors import InputError
from traces.output import LOCK, MARKER, check_file, claim, claimed, marked, only_writer, replacing
from traces.reader import open_folder
from traces.schema import REQUESTS, ROUTING
from traces.synthetic import synthetic
from traces.trace import Trace
from traces.writer import TraceWriter, write_trace

MADE = synthetic(3, 4, 2, 6, 2, seed=0, prompt_tokens=3)
BY = "a test"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    write_trace(MADE, tmp_path / "trace")
    return tmp_path / "trace"


def refuses(folder: Path, names: list[str], *parts: str) -> None:
    for guard in (lambda: claim(folder, BY, names), lambda: claimed(folder, BY, names).__enter__()):
        with pytest.raises(InputError) as error:
            guard()
        for part in parts:
            assert part in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("kept", [REQUESTS, f"{ROUTING}/part-00000.parquet"])
def test_results_are_never_written_to_a_trace_or_into_one(trace: Path, kept: str) -> None:
    for file in [file for file in trace.rglob("*.parquet") if file != trace / kept]:
        file.unlink()  # half a trace is one too
    refuses(trace, ["results.parquet"], f"{trace} is a trace")
    refuses(trace / "deep" / "er", ["results.parquet"], f"lies in the trace {trace}")
    (trace.parent / "link").symlink_to(trace)
    refuses(trace.parent / "link", ["results.parquet"], "is a trace")
    assert not (trace / "deep").exists()
    assert not (trace / MARKER).exists()


def test_a_file_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "table").write_text("mine")
    refuses(tmp_path / "out", ["table"], "out/table was not written by a test", "choose another folder")
    with claimed(tmp_path / "out", "another command", ["other"]):
        (tmp_path / "out" / "other").touch()
    refuses(tmp_path / "out", ["other"], "out/other was written by another command")
    claim(tmp_path / "out", BY, ["new"])
    assert (tmp_path / "out" / "table").read_text() == "mine"


def test_what_the_same_command_wrote_may_be_replaced(tmp_path: Path) -> None:
    for text in ("first", "second"):
        with claimed(tmp_path / "out", BY, ["table", "never written", "folder", "folder/table"]):
            (tmp_path / "out" / "folder").mkdir(exist_ok=True)
            for name in ("table", "folder/table"):
                (tmp_path / "out" / name).write_text(text)
    assert marked(tmp_path / "out") == dict.fromkeys(("table", "folder", "folder/table"), BY)
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"table", "folder", MARKER}


@pytest.mark.parametrize("marker", ["", "[]", "{", '{"table": 5}', "[" * 10_000])
def test_a_marker_that_is_damaged_makes_nothing_ours(tmp_path: Path, marker: str) -> None:
    (tmp_path / "table").touch()
    (tmp_path / MARKER).write_text(marker)
    refuses(tmp_path, ["table"], "table was not written by a test")


def test_a_marker_names_nothing_outside_of_its_folder(tmp_path: Path) -> None:
    names = ["/etc/passwd", "../victim", "sub/../../victim", "", "."]
    (tmp_path / MARKER).write_text(json.dumps(dict.fromkeys([*names, "table", "sub/table"], BY)))
    assert marked(tmp_path) == dict.fromkeys(["table", "sub/table"], BY)


@pytest.mark.parametrize("place", ["folder", "folder/table", LOCK])
def test_nothing_is_written_through_a_symbolic_link(tmp_path: Path, place: str) -> None:
    out, victim = tmp_path / "out", tmp_path / "victim"
    victim.mkdir()
    claim(out, BY, ["folder", "folder/table"])  # so that all of it is ours
    (out / place).parent.mkdir(exist_ok=True)
    (out / place).symlink_to(victim)
    with (
        pytest.raises(InputError, match="is a symbolic link"),
        claimed(out, BY, ["folder", "folder/table"]),
    ):
        pass
    assert not any(victim.iterdir())


def test_a_fifo_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    claim(tmp_path, BY, ["trials.log"])
    os.mkfifo(tmp_path / "trials.log")
    refuses(tmp_path, ["trials.log"], "trials.log is a FIFO")


@pytest.mark.parametrize("name", ["x" * 256, "file/below", "file"])
def test_a_folder_that_cannot_be_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    refuses(tmp_path / name, ["table"], "cannot write to")
    with pytest.raises(InputError):
        TraceWriter(tmp_path / name, MADE.meta)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_is_replaced_only_where_the_user_says_so(tmp_path: Path, trace: Path, overwrite: bool) -> None:
    (tmp_path / "notes").write_text("mine")
    if not overwrite:
        with pytest.raises(InputError, match="notes exists: replace it with --overwrite"):
            check_file(tmp_path / "notes")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("notes")
    (tmp_path / "dangling").symlink_to("nothing")
    for path, complaint in (
        (tmp_path / "fifo", "it is a FIFO"),
        (tmp_path / "link", "it is a symbolic link"),
        (tmp_path / "dangling", "it is a symbolic link"),
        (Path("/dev/null"), "it is a device"),
        (tmp_path, "it is a folder"),
        (tmp_path / ("x" * 256), "cannot write"),
        (tmp_path / "absent" / "file", "cannot write"),
        (trace / REQUESTS, "is a trace"),
        (trace / ROUTING / "part-00000.parquet", "lies in the trace"),
        (trace / "timeline.json", "is a trace"),
    ):
        with pytest.raises(InputError, match=complaint) as error:
            check_file(path, overwrite)
        assert "\n" not in str(error.value)
    check_file(tmp_path / "new", overwrite)
    if overwrite:
        check_file(tmp_path / "notes", overwrite)
    assert (tmp_path / "notes").read_text() == "mine"
    assert not (tmp_path / "new").exists()


def test_no_file_takes_the_place_of_results(tmp_path: Path) -> None:
    with claimed(tmp_path, "moe-sim sweep", ["results.parquet"]):
        (tmp_path / "results.parquet").write_text("a night's work")
    with pytest.raises(InputError, match=r"results\.parquet was written by moe-sim sweep: it is left alone"):
        check_file(tmp_path / "results.parquet", overwrite=True)
    check_file(tmp_path / "timeline.json")


def test_a_folder_whose_name_is_not_utf8_is_refused_before_anything_runs(tmp_path: Path) -> None:
    folder = tmp_path / "\udcff"
    with pytest.raises(UnicodeEncodeError), claimed(folder, "moe-sim sweep", ["results.parquet"]):
        pass
    assert not list(tmp_path.iterdir())


def test_a_link_in_place_of_a_part_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / ".file.part").symlink_to("victim")
    with replacing(tmp_path / "file") as part:
        part.write_text("new")
    assert (tmp_path / "victim").read_text() == "mine"
    assert (tmp_path / "file").read_text() == "new"


def test_a_second_writer_of_a_trace_is_refused(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t", MADE.meta) as first:
        first.add(MADE.head(2))
        for overwrite in (False, True):
            with pytest.raises(InputError, match="another command is writing to"):
                TraceWriter(tmp_path / "t", MADE.meta, overwrite)
        with pytest.raises(InputError, match="another command is writing to"):
            TraceWriter(tmp_path / "t", MADE.meta, resume=True)
        first.add(MADE.select(np.array([2])))
    assert len(Trace.read(tmp_path / "t").requests) == 3
    with pytest.raises(InputError, match="already holds a trace"):
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


@pytest.mark.parametrize("name", [ROUTING, REQUESTS, "requests"])
def test_a_trace_behind_a_symbolic_link_is_not_overwritten(trace: Path, name: str) -> None:
    before = open_folder(trace).fingerprint
    other = trace.parent / "other"
    write_trace(MADE.head(1), other)
    if (other / name).is_dir():
        (other / name).rename(trace.parent / "aside")
    else:
        (other / name).unlink(missing_ok=True)
    (other / name).symlink_to(trace / (ROUTING if name == "requests" else name))
    for how in ({"overwrite": True}, {"resume": True}):
        with pytest.raises(InputError, match=f"{name} is a symbolic link"):
            TraceWriter(other, MADE.meta, **how)
    assert open_folder(trace).fingerprint == before


def test_a_trace_is_not_written_into_a_trace(trace: Path) -> None:
    with pytest.raises(InputError, match="is a trace: nothing else is written there"):
        write_trace(MADE, trace / "inner", overwrite=True)
    assert not (trace / "inner").exists()


def test_who_begins_to_write_a_file_while_another_command_does_is_refused_at_once(tmp_path: Path) -> None:
    file = tmp_path / "x.txt"
    with replacing(file) as part:
        part.write_text("first")
        for second in (lambda: check_file(file, overwrite=True), lambda: replacing(file).__enter__()):
            with pytest.raises(InputError, match=r"another command is writing .*x\.txt: wait for it"):
                second()
    assert file.read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["x.txt"]
    with replacing(file) as part:
        part.write_text("second")
    assert file.read_text() == "second"


@pytest.mark.parametrize("lock", [LOCK, ".x.txt.lock"])
def test_what_lies_in_place_of_a_lock_is_named(lock: str, tmp_path: Path) -> None:
    (tmp_path / lock).mkdir()
    write = only_writer(tmp_path) if lock == LOCK else replacing(tmp_path / "x.txt")
    with pytest.raises(InputError, match=rf"\{lock} is a folder: remove it"):
        write.__enter__()
    assert [path.name for path in tmp_path.iterdir()] == [lock]


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs Linux's /proc, where no file can be made")
def test_a_folder_in_which_no_file_can_be_made_is_not_taken_for_one_that_another_command_writes_to() -> None:
    for write in (only_writer(Path("/proc")), replacing(Path("/proc/x.txt"))):
        with pytest.raises(InputError, match="cannot write"):
            write.__enter__()


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


@pytest.mark.parametrize(
    "command",
    [
        "trace export TRACE --out FILE.csv",
        "trace export TRACE --to npz --out FILE.npz",
        "trace export TRACE --to oracleGeneral --out FILE.bin",
        "sim eamc build TRACE --out FILE.npz",
        "sim profile build TRACE --out FILE.npz",
        "sim train-stride TRACE --epochs 1 --out FILE.npz",
    ],
)
def test_of_two_commands_that_find_no_file_one_writes_it(
    tmp_path: Path, trace: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, *words = command.split()
    words = [word.replace("TRACE", str(trace)).replace("FILE", str(tmp_path / "x")) for word in words]
    found = output.check_file

    def check(path: Path, *rest: Any, **options: Any) -> None:
        found(path, *rest, **options)
        path.write_text("theirs")

    for module in [module for name, module in sys.modules.items() if name.startswith(("sim", "traces", "tracer"))]:
        if getattr(module, "check_file", None) is found:
            monkeypatch.setattr(module, "check_file", check)
    app = {"trace": tracer.commands.app, "sim": sim.commands.app}[package]
    ended = CliRunner().invoke(app, words)
    assert isinstance(ended.exception, InputError), ended.output
    assert "meanwhile" in str(ended.exception)
    assert Path(words[-1]).read_text() == "theirs"


def test_a_folder_whose_name_begins_with_a_tilde_is_no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(home))
    write_trace(MADE, Path("~"))
    write_trace(MADE, Path("~"), overwrite=True)
    with replacing(Path("~") / "table.parquet") as part:
        pq.write_table(pa.table({"a": [1]}), part)
    assert np.array_equal(Trace.read(Path("~")).experts, MADE.experts)
    assert sorted(path.name for path in (tmp_path / "~").iterdir()) == [REQUESTS, ROUTING, "table.parquet"]
    assert not list(home.iterdir())
    refuses(Path("~"), ["results.parquet"], "~ is a trace")
