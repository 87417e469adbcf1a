"""What the three commands share: how an application runs, ends on bad input, and talks to the terminal.

Results go to standard output, everything else (progress, warnings, errors) to standard error. Names and paths are
printed as they are: the consoles know no markup and no emoji, and what the terminal's encoding lacks is escaped.
"""

import errno
import inspect
import io
import json
import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from traces import facts
from traces.errors import InputError
from traces.extras import missing

AS_THEY_ARE: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}

out = Console(**AS_THEY_ARE)
err = Console(**AS_THEY_ARE, stderr=True)


INTERRUPTED = 130
"""The status of what Ctrl-C has ended."""

WIDEST = 100_000
"""Columns of a table, at most."""


def say(part: RenderableType) -> None:
    """Print a line as it is, or a table, on standard output.

    A table is never narrower than its names, which are not cut: a terminal wraps its lines then. In a pipe or a file
    each row is one line.
    """
    _print(part, out, stderr=False)


def say_json(value: object) -> None:
    """Print a value as JSON on standard output."""
    print(json.dumps(facts.finite(value), indent=1, allow_nan=False), file=out.file)


def tell(part: RenderableType) -> None:
    """Print the same on standard error, where standard output is a result of its own."""
    _print(part, err, stderr=True)


def _print(part: RenderableType, to: Console, stderr: bool) -> None:
    if isinstance(part, str):
        to.print(part, soft_wrap=True)
        return
    wide = to.options.update(max_width=WIDEST)
    for column in part.columns if isinstance(part, Table) else ():
        column.overflow = "fold"
        if column.no_wrap:
            cells = (Measurement.get(to, wide, cell).maximum for cell in (column.header, *column.cells))
            column.min_width = max(cells)
    room = Measurement.get(to, wide, part)
    width = max(to.width, room.minimum) if to.is_terminal else room.maximum
    Console(**AS_THEY_ARE, width=width, stderr=stderr).print(part)


def note(text: str) -> None:
    """Print one line on standard error, such as which default was taken."""
    err.print(text, soft_wrap=True)


def warn(text: str) -> None:
    """Print one warning line on standard error."""
    err.print(Text.assemble(("warning:", "yellow"), f" {text}"), soft_wrap=True)


def is_unwatched(quiet: bool) -> bool:
    """Whether no bar is drawn: a file or a pipe would have an empty line of it."""
    return quiet or not (err.is_interactive or err.is_jupyter)


def main(app: typer.Typer, name: str) -> NoReturn:
    """Run `app` as command `name`: one line, status 2 for bad input, 130 if interrupted, 1 if disk or memory is full"""
    prepare_streams()
    os.environ.pop("MPLBACKEND", None)  # of a notebook: figures go into files only, and matplotlib may not know it
    _join_lines_of_help(app)
    try:
        try:
            _require_folder()
            _refuse_empty(sys.argv[1:])
            status = app(prog_name=name, standalone_mode=False)
        finally:
            sys.stdout.flush()
    except typer.TyperException as error:
        _refuse_use(name, error)
    except InputError as error:
        fail(name, _with_addresses(str(error)), 2)
    except ModuleNotFoundError as error:
        absent = missing(error.name or "", name)
        if absent is None:
            raise
        fail(name, str(absent), 2)
    except ImportError as error:
        if not (error.path or "").endswith((".so", ".pyd")):
            raise
        fail(name, f"{error.path} cannot be loaded: {error}: install its package again, or allow more memory", 1)
    except UnicodeEncodeError as error:
        fail(name, _unwritable(error), 2)
    except OSError as error:
        if error.errno in UNUSABLE:
            fail(name, f"cannot open {error.filename or 'a file'}: {error.strerror}", UNUSABLE[error.errno])
        if error.errno not in (*FULL, errno.EPIPE):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left has nowhere to go
        if error.errno == errno.EPIPE:
            sys.exit(1)
        fail(name, f"cannot write {error.filename or 'the output'}: {error.strerror}", 1)
    except MemoryError as error:
        fail(name, f"not enough memory: {error}" if str(error) else "not enough memory", 1)
    except typer.Abort:  # of a question that was not answered with yes
        fail(name, "not confirmed", 1)
    except KeyboardInterrupt:
        fail(name, "interrupted", INTERRUPTED)
    if status == INTERRUPTED:  # of typer, which has no words for it
        fail(name, "interrupted", INTERRUPTED)
    sys.exit(status or 0)


def _refuse_use(name: str, error: Any) -> NoReturn:
    """Fail for options and arguments that the command does not have; where there are none, its help was printed."""
    reason = error.format_message().removesuffix(".")
    if not reason:
        sys.exit(error.exit_code)
    command = error.ctx.command_path if error.ctx else name
    fail(name, f"{reason[0].lower()}{reason[1:]}; see {command} --help", error.exit_code)


def _with_addresses(text: str) -> str:
    """Return a message with each address as it was typed: a path has made `s3:/bucket` of `s3://bucket`."""
    for argument in sys.argv[1:]:
        address = argument.partition("=")[2] if argument.startswith("--") else argument
        scheme, url, _ = address.partition("://")
        if scheme and url:
            text = text.replace(str(Path(address)), address.rstrip("/"))
    return text


def _unwritable(error: UnicodeEncodeError) -> str:
    """Say why a name cannot be written: its bytes are no text, or the locale, by which they were read, is another."""
    if error.encoding == sys.getfilesystemencoding() == "utf-8":
        return f"the name {error.object!r} is not UTF-8: rename it"
    return f"this locale cannot name {error.object!r}: set LC_ALL=C.UTF-8 or PYTHONUTF8=1"


def _join_lines_of_help(app: typer.Typer) -> None:
    """Have each paragraph of a command's help fill the terminal's width, wherever its docstring has line ends."""
    groups = (group.typer_instance for group in app.registered_groups)
    for each in (app, *(group for group in groups if group)):
        for command in each.registered_commands:
            paragraphs = (inspect.getdoc(command.callback) or "").split("\n\n")
            command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""How writing fails where there is no room, on standard output too."""


UNUSABLE = {
    **dict.fromkeys((errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENOTDIR), 2),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), 1),
}
"""How opening fails by no fault of ours, and the status: a name that is too long, or that may not be looked at, a file
for a folder, too many open files (`ulimit -n`)."""


def _require_folder() -> None:
    """Raise InputError where the folder that one stands in was removed: no relative path means anything there."""
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise InputError("the folder that this command was started in is gone: change to another one") from error


def _refuse_empty(arguments: Sequence[str]) -> None:
    """Raise InputError for an empty argument, and for an option with nothing behind its `=`: neither is a value."""
    for before, argument in pairwise(["", *arguments]):
        option, equals, value = argument.partition("=")
        if not argument or (option.startswith("--") and equals and not value):
            where = option or before or "the command"
            raise InputError(f"the value after {where} is empty: give one, or leave the option out")


def prepare_streams() -> None:
    """Escape what the encoding of the terminal or pipe lacks; where a stream is closed, read and write nothing."""
    for stream, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, stream) is None:
            setattr(sys, stream, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  # for as long as we run
    for written in (sys.stdout, sys.stderr):
        if isinstance(written, io.TextIOWrapper):
            written.reconfigure(errors="backslashreplace")
    for console in (out, err):
        if not console.width:  # COLUMNS=0, for which rich prints nothing
            console.width = 80


def fail(name: str, text: str, status: int) -> NoReturn:
    """Print `NAME: error: TEXT` on one line of standard error and exit with `status`."""
    err.print(f"{name}: error: {' '.join(text.split())}", style=None, soft_wrap=True)
    sys.exit(status)
