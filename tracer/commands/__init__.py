"""The command `moe-trace`: record what a model routes; inspect, check, join, cut, import and export traces.

Only `record`, and `import` of a file that torch wrote, need torch.
"""

from traces.commands import program

app = program.group(
    "Record, inspect, edit and convert routing traces of mixture-of-experts models.",
    {
        "record": (
            "tracer.commands.record:record",
            "Let a model answer prompts and record which experts each token is routed to.",
        ),
        "info": (
            "tracer.commands.inspect:info",
            "Show a trace's model, size, sparsity, reuse between adjacent tokens, and EAM similarity.",
        ),
        "check": (
            "tracer.commands.inspect:check",
            "Check a trace or a dump, its files and ids, and for what recorders get wrong; status 1 for a finding.",
        ),
        "import": (
            "tracer.commands.convert:import_",
            "Turn routing that another tool dumped into a trace: any engine's rows, nested records, arrays or counts.",
        ),
        "export": (
            "tracer.commands.convert:export",
            "Write a trace for other programs: libCacheSim, data frames, engines, or arrays that `import` takes back.",
        ),
        "cat": ("tracer.commands.edit:cat", "Join traces of one model into one."),
        "slice": ("tracer.commands.edit:slice_", "Take the requests out of a trace that fit all that is asked."),
        "sample": (
            "tracer.commands.edit:sample",
            "Draw requests of a trace at random, without repeating one; they stay in their order.",
        ),
        "synth": (
            "tracer.commands.synth:synth",
            "Make a synthetic trace, fitted to a real one, for a model of which there is no trace.",
        ),
        "profile": (
            "tracer.commands.profile:profile",
            "Count a model's layers, experts and bytes, and write them as a profile for `--model-profile` and `plan`.",
        ),
        "architectures": (
            "tracer.commands.profile:architectures",
            "List the MoE architectures of the installed transformers, and how the routing of each is observed.",
        ),
    },
)


def main() -> None:
    program.main(app, "moe-trace")
