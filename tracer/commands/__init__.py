"""The command `moe-trace`: record what a model routes; inspect, check, join, cut, import and export traces.

Only `record`, and `import` of a file that torch wrote, need torch.
"""

from terminal import program

app = program.group(
    "Record, inspect, edit and convert routing traces of mixture-of-experts models.",
    {
        "record": "tracer.commands.record:record",
        "info": "tracer.commands.inspect:info",
        "check": "tracer.commands.inspect:check",
        "import": "tracer.commands.convert:import_",
        "export": "tracer.commands.convert:export",
        "cat": "tracer.commands.edit:cat",
        "slice": "tracer.commands.edit:slice_",
        "sample": "tracer.commands.edit:sample",
        "profile": "tracer.commands.profile:profile",
        "architectures": "tracer.commands.profile:architectures",
    },
)


def main() -> None:
    program.main(app, "moe-trace")
