"""The command `moe-replay`: run a trace with real transfers and real compute, predicted beside measured.

`moe-replay --policy eamc` is `moe-replay run --policy eamc`. Bad input is told in one line before anything is written.
"""

from typing import Any

import typer
from typer.core import TyperGroup

from replay.commands.calibrate import calibrate
from replay.commands.compare import compare
from replay.commands.generate import generate
from replay.commands.run import run
from replay.commands.serve import serve
from replay.commands.store import store
from traces import console


class RunByDefault(TyperGroup):
    """Options without a command belong to `run`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # ctx: click's, or typer's own copy of it
        """Put `run` in front, unless help is asked for."""
        if not args or (args[0].startswith("-") and args[0] != "--help"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=RunByDefault,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.callback()
def replay() -> None:
    """Replay a trace on a device: real transfers, real compute, and the simulator's prediction next to it.

    [b]moe-replay --policy eamc[/b] is short for [b]moe-replay run --policy eamc[/b]. [b]moe-replay run --help[/b] lists
    its options.
    """


app.command()(run)
app.command()(calibrate)
app.command()(compare)
app.command()(store)
app.command()(generate)
app.command()(serve)


def main() -> None:
    """The console script."""
    console.main(app, "moe-replay")
