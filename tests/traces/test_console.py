"""However a command ends, it ends with one line, the right stream and the right status."""

import errno
import io
import os
import subprocess
import sys
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console

from traces import console, demo_trace
from traces.errors import InputError
from traces.synthetic import synthetic
from traces.writer import write_trace

ROOT = Path(__file__).parents[2]

EMPTY = "the value after --times is empty: give one, or leave the option out"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


@app.command()
def act(how: str, times: int = 1) -> None:
    if how == "interrupted":
        raise KeyboardInterrupt
    if how == "full":
        raise MemoryError("unable to allocate")
    if how == "told":
        console.fail("act", "interrupted after 2 of 3", 130)
    if how == "refused":
        raise InputError("no file x\nthere")
    if how == "long":
        Path("x" * 300).stat()
    if how == "locked":
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "folder/config.json")
    if how == "many":
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    if how == "unconfirmed":
        typer.confirm("Run them all?", abort=True, err=True)
    if how == "exit":
        raise typer.Exit(7)


@pytest.mark.parametrize(
    ("arguments", "status", "stderr"),
    [
        (["well"], 0, ""),
        (["interrupted"], 130, "act: error: interrupted\n"),
        (["told"], 130, "act: error: interrupted after 2 of 3\n"),
        (["full"], 1, "act: error: not enough memory: unable to allocate\n"),
        (["refused"], 2, "act: error: no file x there\n"),
        (["unconfirmed"], 1, "Run them all? [y/N]:act: error: not confirmed\n"),
        (["exit"], 7, ""),
        (["long"], 2, f"act: error: cannot open {'x' * 300}: File name too long\n"),
        (["locked"], 2, "act: error: cannot open folder/config.json: Permission denied\n"),
        (["many"], 1, "act: error: cannot open a file: Too many open files\n"),
        ([""], 2, "act: error: the value after the command is empty: give one, or leave the option out\n"),
        (["well", "--times", ""], 2, f"act: error: {EMPTY}\n"),
        (["well", "--times="], 2, f"act: error: {EMPTY}\n"),
        (["--", "--a=b="], 0, ""),
        (["--help"], 0, ""),
    ],
)
def test_an_end_has_its_status_and_its_line(
    arguments: list[str],
    status: int,
    stderr: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["act", *arguments])
    monkeypatch.setattr(sys, "stdin", io.StringIO("no\n"))
    with pytest.raises(SystemExit) as ended:
        console.main(app, "act")
    assert ended.value.code == status
    assert capsys.readouterr().err == stderr


def test_a_package_with_a_damaged_library_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / f"damaged{EXTENSION_SUFFIXES[0]}").write_bytes(b"no library")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["act"])
    broken = typer.Typer()
    broken.command()(lambda: import_module("damaged"))
    with pytest.raises(SystemExit, match="1"):
        console.main(broken, "act")
    told = capsys.readouterr().err
    assert told.startswith(f"act: error: {tmp_path}")
    assert "cannot be loaded" in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "stderr"),
    [
        (["well", "--times", "many"], "act: error: invalid value for '--times': Input should be a valid integer"),
        (["well", "--times"], "act: error: option '--times' requires an argument; see act --help\n"),
        (["well", "--time", "3"], "act: error: no such option: --time (Possible options: --times); see act --help\n"),
        ([], "act: error: missing argument 'how'; see act --help\n"),
        (["well", "ill"], "act: error: got unexpected extra argument(s) (ill); see act --help\n"),
    ],
)
def test_a_command_used_wrongly_says_so_in_one_line(
    arguments: list[str], stderr: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["act", *arguments])
    with pytest.raises(SystemExit) as ended:
        console.main(app, "act")
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith(stderr)
    assert told.count("\n") == 1


def test_a_command_without_its_words_shows_its_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from sim.cli import app as sim_app

    monkeypatch.setattr(sys, "argv", ["moe-sim"])
    with pytest.raises(SystemExit) as ended:
        console.main(sim_app, "moe-sim")
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert "Usage: moe-sim" in said.out
    assert said.err == ""


def test_names_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.table import Table

    name = "run[old]/a:b:smile: [/red] [bold]"
    table = Table(f"head {name}", box=None)
    table.add_row(name)
    console.say(name)
    console.say(table)
    console.out.print(name)
    console.note(name)
    console.warn(name)
    said = capsys.readouterr()
    assert said.out.count(name) == 4
    assert said.err == f"{name}\nwarning: {name}\n"


def test_names_in_tables_are_never_cut(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.table import Column, Table

    name, option = "a-name-that-one-has-to-type-" * 2, "an:option=of-one-word-" * 9
    for terminal in (False, True):
        monkeypatch.setattr(console, "out", Console(width=70, force_terminal=terminal, color_system=None))
        table = Table(Column("name", no_wrap=True), "what it does", "options", box=None)
        table.add_row(name, "some words that may be broken between lines", option)
        console.say(table)
        said = capsys.readouterr().out
        assert name in said
        assert "\u2026" not in said
        assert (option in said) == (not terminal)


def command(package: str, *arguments: object, shell: str = '"$@"', **env: str) -> "subprocess.CompletedProcess[str]":
    """Run `moe-sim` or `moe-trace` with these variables; `shell` says where its streams go."""
    code = f"from {package}.__main__ import main; main()"
    words = ["sh", "-c", shell, "sh", sys.executable, "-c", code, *map(str, arguments)]
    cleared = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHON"))}
    settings: dict[str, Any] = {"capture_output": True, "encoding": "utf-8", "errors": "replace", "timeout": 120}
    return subprocess.run(words, env={**cleared, "PYTHONPATH": str(ROOT), **env}, **settings)


def test_what_an_encoding_lacks_is_escaped(tmp_path: Path) -> None:
    folder = tmp_path / "caf\u00e9\u4e16"
    write_trace(synthetic(1, 2, 2, 4, 1, seed=0), folder)
    said = command("tracer", "validate", folder, PYTHONIOENCODING="latin-1")
    assert (said.returncode, said.stderr) == (0, "")
    assert "\\u4e16 is a valid trace" in said.stdout
    (folder / "requests.parquet").unlink()
    done = command("tracer", "validate", folder, PYTHONIOENCODING="ascii")
    assert done.returncode == 2
    assert done.stderr.startswith("moe-trace: error: ")
    assert "\\u4e16" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_name_beyond_the_ascii_of_a_locale_is_refused(tmp_path: Path) -> None:
    write_trace(synthetic(1, 2, 2, 4, 1, seed=0), tmp_path / "caf\u00e9")
    said = command("tracer", "validate", tmp_path / "caf\u00e9", LC_ALL="C", PYTHONUTF8="0")
    assert said.returncode == 2
    assert said.stderr.startswith("moe-trace: error: ")
    assert "this locale cannot name" in said.stderr
    assert "Traceback" not in said.stderr


@pytest.mark.parametrize("package", ["sim", "tracer"])
def test_a_full_disk_behind_standard_output_is_told(package: str) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    asked = ["policies"] if package == "sim" else ["info", demo_trace(), "--json"]
    done = command(package, *asked, shell='"$@" >/dev/full')
    assert done.returncode == 1
    assert "error: cannot write the output: No space left on device" in done.stderr
    assert done.stderr.count("\n") == 1


def test_closed_streams_are_no_matter(tmp_path: Path) -> None:
    sizes = ",".join(map(str, range(1, 10_003)))
    asked = ["sweep", demo_trace(), "--policies", "lru", "--cache-sizes", sizes, "--out", tmp_path / "o"]
    done = command("sim", *asked, shell='"$@" <&-')
    assert done.returncode == 2
    assert "this sweep has 10,002 cells: make it smaller, or use --yes" in done.stderr
    assert "Traceback" not in done.stderr
    assert command("sim", "hardware", shell='"$@" >&-').returncode == 0


def test_a_terminal_of_no_columns_is_printed_to() -> None:
    env = {**os.environ, "COLUMNS": "0"}
    code = "from traces import console; console.prepare_streams(); console.say('a'); console.fail('b', 'c', 3)"
    ended = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, text=True, capture_output=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "a\n", "b: error: c\n")


@pytest.mark.parametrize(
    ("package", "variable", "value", "usual"),
    [
        ("tracer", "NUMBA_NUM_THREADS", "0", 1),
        ("sim", "NUMBA_NUM_THREADS", "x", 1),
        ("replay", "NUMBA_NUM_THREADS", "", 1),
        ("sim", "NUMBA_OPT", "x", 3),
    ],
)
def test_what_numba_cannot_read_in_the_environment_is_refused(
    package: str, variable: str, value: str, usual: int
) -> None:
    ended = command(package, "--help", **{variable: value})
    assert (ended.returncode, ended.stdout) == (2, "")
    reason = f"error: the environment variable {variable} is {value!r}: unset it, or set it to {usual}\n"
    assert ended.stderr.partition(": ")[2] == reason


def test_a_backend_that_matplotlib_does_not_know_is_no_matter(tmp_path: Path) -> None:
    asked = ["sweep", demo_trace(), "--requests", "1", "--untimed", "--policies", "lru", "--cache-sizes", "50%"]
    asked += ["--workers", "1", "--out", tmp_path]
    done = command("sim", *asked, MPLBACKEND="unknown")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "hit_rate.png").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems may not remove the current folder")
def test_a_folder_that_is_gone_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr(sys, "argv", ["act", "well"])
    with pytest.raises(SystemExit) as ended:
        console.main(app, "act")
    assert ended.value.code == 2
    told = "act: error: the folder that this command was started in is gone: change to another one\n"
    assert capsys.readouterr().err == told


@pytest.mark.skipif(sys.platform != "linux", reason="names are bytes on Linux only")
def test_a_name_that_is_not_utf8_is_to_be_changed(tmp_path: Path) -> None:
    write_trace(synthetic(1, 2, 2, 4, 1, seed=0), tmp_path / "t")
    routing = os.fsencode(tmp_path / "t" / "routing")
    os.rename(routing + b"/part-00000.parquet", routing + b"/part-\xff.parquet")
    said = command("tracer", "validate", tmp_path / "t", PYTHONUTF8="1")
    assert said.returncode == 2
    assert "the name 'routing/part-\\udcff.parquet' is not UTF-8: rename it" in said.stderr


def test_an_argument_that_names_no_scheme_is_no_address(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    app = typer.Typer()

    @app.command()
    def act(given: str) -> None:
        raise InputError(f"{given} is no number: use 64")

    monkeypatch.setattr(sys, "argv", ["act", "://"])
    with pytest.raises(SystemExit):
        console.main(app, "act")
    assert capsys.readouterr().err == "act: error: :// is no number: use 64\n"
