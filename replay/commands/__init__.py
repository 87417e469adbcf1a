"""The command `moe-replay`: run a trace with real transfers and real compute, predicted beside measured."""

from typing import Any

from typer.core import TyperGroup

from terminal import program


class RunByDefault(TyperGroup):
    """Options without a command belong to `run`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # ctx: click's, or typer's own copy of it
        if not args or (args[0].startswith("-") and args[0] != "--help"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = program.group(
    "Replay a trace on a device: real transfers, real compute, and the simulator's prediction next to it.\n\n"
    "[b]moe-replay --policy eamc[/b] is short for [b]moe-replay run --policy eamc[/b]. [b]moe-replay run --help[/b] "
    "lists\nits options.",
    {
        "run": "replay.commands.run:run",
        "calibrate": "replay.commands.calibrate:calibrate",
        "compare": "replay.commands.compare:compare",
        "store": "replay.commands.store:store",
        "generate": "replay.commands.generate:generate",
        "quality": "replay.commands.quality:quality",
        "serve": "replay.commands.serve:serve",
    },
    RunByDefault,
    bare_is_help=False,
)


def main() -> None:
    program.main(app, "moe-replay")
