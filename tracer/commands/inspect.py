"""`moe-trace info` and `validate`: look at a trace, check it."""

import json
from typing import Annotated, Any

import typer
from rich.table import Table

from tracer.commands.shared import TraceArgument, size, suggest, warn_if_unfinished
from traces import console


def info(
    trace: TraceArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a trace's model, size, sparsity, reuse between adjacent tokens, and EAM similarity.

    Example: moe-trace info traces/recorded/demo
    """
    from traces.reader import open_folder
    from traces.stats import summary
    from traces.trace import Trace

    warn_if_unfinished(open_folder(trace))
    held = Trace.read(trace)
    facts = summary(held)
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        _print_info(facts)
        if held.aggregate is None:
            suggest(f"moe-sim sweep {trace}")


def validate(trace: TraceArgument) -> None:
    """Check a trace whole: files, schema, ids, repeats, order, EAMs; status 2 and the first fault if it has one.

    Example: moe-trace validate traces/recorded/demo
    """
    from traces.reader import EXTRA, open_folder
    from traces.stream import pieces

    for _ in pieces(trace, EXTRA):
        pass
    folder = open_folder(trace)
    warn_if_unfinished(folder)
    console.out.print(f"{trace} is a valid trace: {size(folder)}", soft_wrap=True)
    suggest(f"moe-trace info {trace}")


def _print_info(facts: dict[str, Any]) -> None:
    size = facts["expert_bytes"]
    labels = ", ".join(f"{what}: {len(facts[what])}" for what in ("datasets", "tasks") if facts[what])
    lines = {
        "trace": f"{facts['name']} ({facts['mode']})",
        "model": facts["model"] + (f" at {facts['revision']}" if facts["revision"] else ""),
        "shape": f"{facts['layers']} MoE layers x {facts['experts']} experts, top-{facts['top_k']}",
        "expert": "size unknown" if size is None else f"{size:,} bytes, {facts['dtype'] or 'type unknown'}",
        "requests": f"{facts['requests']:,} ({labels or 'not labelled'})",
        "tokens": facts["phase"] if facts["tokens"] is None else f"{facts['tokens']:,} ({facts['phase']})",
    }
    for name, text in lines.items():
        console.out.print(f"{name:<10}{text}", soft_wrap=True, markup=False)
    phases = [phase for phase in ("prefill", "decode") if phase in facts]
    table = Table("", *phases, box=None, pad_edge=False)
    for label, path, shape in ROWS:
        cells = []
        for phase in phases:
            value = facts[phase]
            for key in path:
                value = value[key]
            cells.append("-" if value is None else format(value, shape))
        table.add_row(label, *cells)
    console.out.print(table)


ROWS = (
    ("requests", ("requests",), ",d"),
    ("tokens", ("tokens",), ",d"),
    ("experts that a request activates", ("activated",), ".1%"),
    ("experts that a request activates repeatedly", ("repeated",), ".1%"),
    ("a token's experts that the token before it chose", ("reuse", "share"), ".1%"),
    ("  by chance", ("reuse", "chance"), ".1%"),
    ("EAM similarity (cosine), all pairs of requests", ("similarity", "all_pairs"), ".3f"),
    ("  within a task", ("similarity", "within_task"), ".3f"),
    ("  across tasks", ("similarity", "across_tasks"), ".3f"),
    ("nearest EAM is of the same task", ("similarity", "nearest_same_task"), ".1%"),
    ("  by chance", ("similarity", "chance"), ".1%"),
)
"""Lines of `moe-trace info`: label, path in a phase of `traces.stats.summary`, format."""
