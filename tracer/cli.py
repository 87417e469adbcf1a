"""`moe-trace`: record what a model routes, look at a trace, check it, import another tool's dump.

Heavy libraries are imported by the commands that need them, when they run; only `record` needs torch.
"""

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tracer import demo
from traces import console

if TYPE_CHECKING:
    from traces.trace import Trace

app = typer.Typer(
    help="Record, inspect and import routing traces of mixture-of-experts models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

RECORDED = Path("traces/recorded")

TraceArgument = Annotated[Path, typer.Argument(help="A trace: a folder with requests.parquet and routing/.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a trace that is already there.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes, only errors.")]


class Meter:
    """A progress bar on standard error, and the place where an interruption takes effect.

    While it is entered, Ctrl-C and SIGTERM wait for the end of the forward pass, so that they never fall into the
    writing of a file; a second one does not wait.
    """

    def __init__(self, requests: int, quiet: bool):
        self.done = 0
        self._tokens = 0
        self._interrupted = False
        self._handlers: dict[signal.Signals, Any] = {}
        self._bar = Progress(
            TextColumn("recording"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("requests, {task.fields[tokens]} tokens generated"),
            TimeRemainingColumn(),
            console=console.err,
            disable=quiet,
        )
        self._task = self._bar.add_task("", total=requests, tokens=0)

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._handlers[number] = signal.signal(number, self._interrupt)
        self._bar.start()

    def __exit__(self, *error: object) -> None:
        self._bar.stop()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _interrupt(self, *_: object) -> None:
        if self._interrupted:
            raise KeyboardInterrupt
        self._interrupted = True

    def stepped(self, rows: int) -> None:
        """A forward pass gave `rows` tokens."""
        if self._interrupted:
            raise KeyboardInterrupt
        self._tokens += rows
        self._bar.update(self._task, tokens=self._tokens)

    def finished(self, requests: int) -> None:
        """So many more requests have finished."""
        self.done += requests
        self._bar.update(self._task, completed=self.done)


def main() -> None:
    """Run `moe-trace`."""
    console.main(app, "moe-trace")


@app.command()
def record(
    model: Annotated[str | None, typer.Option(help="Hub id or folder of a model.", show_default="shipped")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help=".jsonl, .json, .csv, .parquet or .txt (a prompt a line), also .gz.", show_default="shipped"),
    ] = None,
    prompt_column: Annotated[str | None, typer.Option(help="Column with the prompt; a number: no header.")] = None,
    task_column: Annotated[str | None, typer.Option(help="Column with the task's name.")] = None,
    id_column: Annotated[str | None, typer.Option(help="Column with the request's id.")] = None,
    dataset: Annotated[str | None, typer.Option(help="Dataset of all prompts.", show_default="the file's name")] = None,
    task: Annotated[str | None, typer.Option(help="Task of all prompts, instead of a column.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first prompts.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate for each prompt, at most.")] = 32,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts that run together.")] = 1,
    weights: Annotated[bool, typer.Option("--weights", help="Record the router's weights too.")] = False,
    no_tokens: Annotated[
        bool, typer.Option("--no-tokens", help="Leave token ids out: prompts may be private.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    seed: Annotated[int, typer.Option(help="For models that draw random numbers; generation itself is greedy.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder of the trace.", show_default="traces/recorded/NAME")] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Let a model answer prompts and record which experts each token is routed to.

    Only routing is stored (and token ids, unless --no-tokens); never text. Ctrl-C keeps the requests that finished.

    Examples:

      moe-trace record

      moe-trace record --model allenai/OLMoE-1B-7B-0924 --prompts gsm8k.jsonl --dtype bfloat16

      moe-trace record --model ./my-model --prompts mmlu.csv --prompt-column 0 --batch-size 8 --task anatomy
    """
    from tracer.prompts import Columns, read_prompts
    from traces.trace import Trace
    from traces.writer import check_target

    columns = Columns(prompt_column, task_column, id_column, _labels(dataset, task, shipped=prompts is None))
    chosen = read_prompts(prompts or demo.PROMPTS, columns, limit)
    folder = out or RECORDED / _name(model, prompts)
    check_target(folder, overwrite)
    if not quiet:
        for option, given, default in (("--model", model, demo.MODEL), ("--prompts", prompts, demo.PROMPTS)):
            if given is None:
                console.note(f"no {option} given: taking what ships with the project, {default}")

    import torch

    from tracer.models import load_model
    from tracer.record import Options
    from tracer.record import record as record_routing

    torch.manual_seed(seed)
    loaded = load_model(model or str(demo.MODEL), dtype, device)
    if model is None:
        loaded = replace(loaded, name=demo.NAME)
    options = Options(max_new_tokens, batch_size, weights, not no_tokens)
    meter = Meter(len(chosen), quiet)
    try:
        with meter:
            record_routing(loaded, chosen, folder, options, overwrite, meter.stepped, meter.finished)
    except KeyboardInterrupt:
        kept = f"the {meter.done} that finished are readable in {folder}" if meter.done else "nothing was written"
        console.fail("moe-trace", f"interrupted after {meter.done} of {len(chosen)} requests: {kept}", 130)
    _tell(folder, Trace.read(folder), quiet)


@app.command()
def info(
    trace: TraceArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a trace's model, size, sparsity, reuse between adjacent tokens, and EAM similarity.

    Example: moe-trace info traces/recorded/demo
    """
    from traces.stats import summary
    from traces.trace import Trace

    held = Trace.read(trace)
    facts = summary(held)
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        _print_info(facts)
        _next(f"moe-sim sweep {trace}")


@app.command()
def validate(trace: TraceArgument) -> None:
    """Check a trace whole: files, schema, ids, repeats, order, EAMs; status 2 and the first fault if it has one.

    Example: moe-trace validate traces/recorded/demo
    """
    from traces.reader import OPTIONAL
    from traces.trace import Trace

    held = Trace.read(trace, OPTIONAL)
    console.out.print(f"{trace} is a valid trace: {_size(held)}", soft_wrap=True)
    _next(f"moe-trace info {trace}")


@app.command(name="import")
def import_(
    file: Annotated[Path, typer.Argument(help="A .npz with experts[tokens, layers, k] and offsets[requests + 1].")],
    meta: Annotated[
        Path | None,
        typer.Option(help="JSON with model, experts, phase, requests, ...", show_default="X.json if there"),
    ] = None,
    phase: Annotated[
        str | None, typer.Option(help="decode or prefill.", show_default="first word of the JSON's phase")
    ] = None,
    experts: Annotated[int | None, typer.Option(min=1, help="Experts of a layer, where no JSON says it.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the trace.", show_default="traces/recorded/NAME")] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Turn routing that another tool dumped as arrays into a trace.

    Example: moe-trace import dump.npz --meta dump.json --out traces/recorded/dump
    """
    from traces.importer import import_npz
    from traces.trace import Trace
    from traces.writer import check_target, write_trace

    beside = file.with_suffix(".json")
    found = meta is None and beside.is_file()
    folder = out or RECORDED / file.stem
    check_target(folder, overwrite)
    made, assumed = import_npz(file, beside if found else meta, phase, experts)
    if found and not quiet:
        console.note(f"no --meta given: taking {beside}")
    for text in assumed:
        console.warn(text)
    write_trace(made, folder, overwrite)
    _tell(folder, Trace.read(folder), quiet)


def _labels(dataset: str | None, task: str | None, shipped: bool) -> dict[str, str]:
    """Labels for all prompts alike."""
    named = {"dataset": dataset or ("demo" if shipped else None), "task": task}
    return {what: label for what, label in named.items() if label is not None}


def _name(model: str | None, prompts: Path | None) -> str:
    """The name of a recording that was not given one: its model and its prompts."""
    if model is None and prompts is None:
        return "demo"
    return "-".join((Path(model or demo.NAME).name, (prompts or demo.PROMPTS).name.split(".")[0]))


def _size(trace: "Trace") -> str:
    return (
        f"{len(trace.requests)} requests, {len(trace.experts)} tokens ({trace.phases}) of {trace.meta.model}, "
        f"{trace.layers} MoE layers x {trace.num_experts} experts, top-{trace.top_k}"
    )


def _tell(folder: Path, trace: "Trace", quiet: bool) -> None:
    """Say where the result lies and what to do with it."""
    if not quiet:
        console.out.print(f"{folder}: {_size(trace)}", soft_wrap=True, markup=False)
        _next(f"moe-trace info {folder}")


def _next(command: str) -> None:
    console.out.print(f"next: {command}", soft_wrap=True, markup=False)


def _print_info(facts: dict[str, Any]) -> None:
    size = facts["expert_bytes"]
    labels = ", ".join(f"{what}: {len(facts[what])}" for what in ("datasets", "tasks") if facts[what])
    lines = {
        "trace": f"{facts['name']} ({facts['mode']})",
        "model": facts["model"] + (f" at {facts['revision']}" if facts["revision"] else ""),
        "shape": f"{facts['layers']} MoE layers x {facts['experts']} experts, top-{facts['top_k']}",
        "expert": "size unknown" if size is None else f"{size:,} bytes, {facts['dtype'] or 'type unknown'}",
        "requests": f"{facts['requests']:,} ({labels or 'not labelled'})",
        "tokens": f"{facts['tokens']:,} ({facts['phase']})",
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
