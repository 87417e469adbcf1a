"""What the three commands share: how an application runs, ends on bad input, and talks to the terminal.

Results go to standard output, everything else (progress, warnings, errors) to standard error.
"""

import os
import sys
from typing import NoReturn

import typer
from rich.console import Console, RenderableType
from rich.markup import escape

from traces.errors import InputError

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def say(part: RenderableType) -> None:
    """Print a line as it is, or a table, on standard output."""
    out.print(part, markup=False, soft_wrap=isinstance(part, str))


def note(text: str) -> None:
    """Print one line on standard error, such as which default was taken."""
    err.print(text, soft_wrap=True, markup=False)


def warn(text: str) -> None:
    """Print one warning line on standard error."""
    err.print(f"[yellow]warning:[/yellow] {escape(text)}", soft_wrap=True)


def main(app: typer.Typer, name: str) -> NoReturn:
    """Run `app` as command `name`: one line and status 2 for bad input, 130 when interrupted."""
    try:
        app(prog_name=name)
    except InputError as error:
        fail(name, str(error), 2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        fail(name, "interrupted", 130)
    except SystemExit as end:
        if isinstance(end.__context__, typer.Exit) and end.code == 130:  # typer's end, wordless, of an interrupt
            fail(name, "interrupted", 130)
        raise
    sys.exit(0)


def fail(name: str, text: str, status: int) -> NoReturn:
    """Print `NAME: error: TEXT` on one line of standard error and exit with `status`."""
    err.print(f"{name}: error: {' '.join(text.split())}", style=None, markup=False, soft_wrap=True)
    sys.exit(status)
