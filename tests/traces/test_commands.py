"""However a command ends, it ends with one line, the right stream and the right status."""

import errno
import inspect
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any

import pytest
import typer
from rich.console import Console
from rich.table import Column, Table
from typer.testing import CliRunner

from terminal import console, program
from traces import InputError

PROGRAMS = ("sim", "tracer", "replay")


@dataclass(frozen=True)
class Options:
    cache_size: Annotated[int, typer.Option(min=1, help="Slots.")] = 1


def act(how: str, options: Options, times: int = 1) -> None:
    """Do as one is told."""
    raised: dict[str, BaseException] = {
        "interrupted": KeyboardInterrupt(),
        "memory": MemoryError("unable to allocate"),
        "refused": InputError(f"no `cache_size` of {options.cache_size}\nthere"),
        "locked": PermissionError(errno.EACCES, os.strerror(errno.EACCES), "folder/config.json"),
        "full": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        "extra": ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn"),
        "exit": typer.Exit(7),
        "defect": KeyError("x"),
    }
    if how in raised:
        raise raised[how]
    if how == "unconfirmed":
        typer.confirm("Run them all?", abort=True, err=True)


app = program.group("Acts.", {"act": f"{__name__}:act"})


def run(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "argv", ["ours", *arguments])
    with pytest.raises(SystemExit) as ended:
        program.main(app, "ours")
    return ended.value.code


@pytest.mark.parametrize(
    ("arguments", "status", "stderr"),
    [
        (["well"], 0, ""),
        (["interrupted"], 130, "ours: error: interrupted\n"),
        (["memory"], 1, "ours: error: not enough memory: unable to allocate\n"),
        (["refused"], 2, "ours: error: no --cache-size of 1 there\n"),
        (["refused", "--cache-size", "3"], 2, "ours: error: no --cache-size of 3 there\n"),
        (["unconfirmed"], 1, "Run them all? [y/N]:ours: error: not confirmed\n"),
        (["exit"], 7, ""),
        (["locked"], 1, "ours: error: folder/config.json: Permission denied\n"),
        (["full"], 1, "ours: error: cannot write the output: No space left on device\n"),
        (["extra"], 2, "ours: error: this needs torch: pip install 'moe-expert-cache[record]'\n"),
        (["--help"], 0, ""),
        (["well", "--times"], 2, "ours: error: option '--times' requires an argument; see ours --help\n"),
        ([], 2, "ours: error: missing argument 'how'; see ours act --help\n"),
    ],
)
def test_an_end_has_its_status_and_its_line(
    arguments: list[str], status: int, stderr: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("no\n"))
    assert run("act", *arguments, monkeypatch=monkeypatch) == status
    assert capfd.readouterr().err == stderr


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ours", "act", "defect"])
    with pytest.raises(KeyError):
        program.main(app, "ours")


def test_a_program_without_a_command_shows_its_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch=monkeypatch) == 2
    printed = capsys.readouterr()
    assert "Do as one is told." in printed.out
    assert printed.err == ""


def commands(app: typer.Typer) -> Iterator[program.Command]:
    groups: list[Any] = [typer.main.get_command(app)]
    for each in groups:
        if isinstance(each, program.Command):
            yield each
        else:
            groups += each.commands.values()


@pytest.mark.parametrize("package", PROGRAMS)
def test_the_line_of_each_command_is_the_first_of_its_docstring(package: str) -> None:
    if package == "replay":
        pytest.importorskip("torch")
    for command in commands(import_module(f"{package}.commands").app):
        module, _, name = command.function.partition(":")
        assert command.help == (inspect.getdoc(getattr(import_module(module), name)) or "").splitlines()[0]


@pytest.mark.parametrize("package", PROGRAMS)
def test_the_help_of_a_program_imports_no_command(package: str) -> None:
    heavy = {"numpy", "pandas", "pyarrow", "simpy", "numba", "torch", "matplotlib"}
    code = f"import sys\nfrom {package}.commands import main\ntry: main()\nfinally: print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=True)
    assert "Usage: moe-" in done.stdout
    assert done.stdout.splitlines()[-1] == "set()"


def test_names_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    name = "run[old]/a:b:smile: [/red] [bold]"
    table = Table(f"head {name}", box=None)
    table.add_row(name)
    console.say(name)
    console.say(table)
    console.out.print(name)
    console.note(name)
    console.warn(name)
    printed = capsys.readouterr()
    assert printed.out.count(name) == 4
    assert printed.err == f"{name}\nwarning: {name}\n"


def test_names_in_tables_are_never_cut(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    name, option = "a-name-that-one-has-to-type-" * 2, "an:option=of-one-word-" * 9
    for terminal in (False, True):
        monkeypatch.setattr(console, "out", Console(width=70, force_terminal=terminal, color_system=None))
        table = Table(Column("name", no_wrap=True), "what it does", "options", box=None)
        table.add_row(name, "some words that may be broken between lines", option)
        console.say(table)
        printed = capsys.readouterr().out
        assert name in printed
        assert "\u2026" not in printed
        assert (option in printed) == (not terminal)


def test_a_dataclass_of_options_is_one_parameter() -> None:
    shown = CliRunner().invoke(app, ["act", "--help"], env={"COLUMNS": "80"}).output
    assert "--cache-size" in shown
    assert "Slots." in shown
    assert "[default: 1]" in shown
