"""`moe-trace`: record what a model routes; look at traces, check, join and cut them; import and export them.

Heavy libraries are imported by the commands that need them, when they run; only `record`, and `import` of a file
that torch wrote, need torch.
"""

import typer

from tracer.commands import architectures, convert, edit, inspect, record, synth
from traces import console

app = typer.Typer(
    help="Record, inspect, edit and convert routing traces of mixture-of-experts models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command()(record.record)
app.command()(inspect.info)
app.command()(inspect.validate)
app.command(name="import")(convert.import_)
app.command()(convert.export)
app.command()(edit.cat)
app.command(name="slice")(edit.slice_)
app.command()(edit.sample)
app.command()(synth.synth)
app.command()(architectures.architectures)


def main() -> None:
    """Run `moe-trace`."""
    console.main(app, "moe-trace")
