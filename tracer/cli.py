"""`moe-trace`: record what a model routes, look at a trace, check it, import another tool's dump.

Heavy libraries are imported by the commands that need them, when they run; only `record` needs torch.
"""

import typer

from tracer.commands import convert, inspect, record
from traces import console

app = typer.Typer(
    help="Record, inspect and import routing traces of mixture-of-experts models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command()(record.record)
app.command()(inspect.info)
app.command()(inspect.validate)
app.command(name="import")(convert.import_)


def main() -> None:
    """Run `moe-trace`."""
    console.main(app, "moe-trace")
