"""`moe-trace record`: let a model answer prompts and record its routing."""

import signal
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tracer import demo
from tracer.commands.shared import RECORDED, Out, Overwrite, Quiet, tell
from traces import console


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
    out: Out = None,
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
    tell(folder, Trace.read(folder), quiet)


def _labels(dataset: str | None, task: str | None, shipped: bool) -> dict[str, str]:
    """Labels for all prompts alike."""
    named = {"dataset": dataset or ("demo" if shipped else None), "task": task}
    return {what: label for what, label in named.items() if label is not None}


def _name(model: str | None, prompts: Path | None) -> str:
    """The name of a recording that was not given one: its model and its prompts."""
    if model is None and prompts is None:
        return "demo"
    return "-".join((Path(model or demo.NAME).name, (prompts or demo.PROMPTS).name.split(".")[0]))
