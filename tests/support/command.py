"""Run a command of this project in this process, as it is typed in a folder."""

import contextlib
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import sim.commands


class Ended(NamedTuple):
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


class _Stream(io.StringIO):
    """What a command writes, also where a policy closes it."""

    text = ""

    def close(self) -> None:
        self.text = self.read_whole()
        super().close()

    def read_whole(self) -> str:
        return self.text if self.closed else self.getvalue()


Run = Callable[..., Ended]


def run(main: Callable[[], None], *arguments: object, cwd: Path | None = None) -> Ended:
    """Run `main` with these arguments in that folder, on a terminal of 200 columns."""
    out, err = _Stream(), _Stream()
    with (
        patch.object(sys, "argv", [main.__module__, *map(str, arguments)]),
        patch.dict("os.environ", COLUMNS="200"),
        contextlib.chdir(cwd or Path.cwd()),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            return Ended(int(end.code or 0), out.read_whole(), err.read_whole())
    raise AssertionError("a command ends with SystemExit")


def moe_sim(*arguments: object, cwd: Path) -> Ended:
    """Run `moe-sim` in a folder."""
    return run(sim.commands.main, *arguments, cwd=cwd)
