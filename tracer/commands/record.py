"""`moe-trace record`: let a model answer prompts and record its routing."""

import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tracer import demo
from tracer.answers import Sampling
from tracer.commands.shared import RECORDED, Out, Overwrite, Quiet, report
from tracer.models import Loading, load_model
from tracer.prompts import Columns, read_prompts
from tracer.record import FORCED, GENERATE, MODES, Options
from tracer.record import record as record_routing
from traces.commands import console
from traces.errors import InputError, unknown
from traces.writer import check_target

PROMPTS, RUN, KEEP = "Prompts", "Running the model", "What to record"
"""Headings of the help."""


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
            disable=console.is_unwatched(quiet),
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
        typer.Option(help="Prompts: a dataset, a table, text (a prompt a line), or a folder.", show_default="shipped"),
    ] = None,
    prompt_column: Annotated[
        str | None, typer.Option(help="Column with the prompt; a number: no header.", rich_help_panel=PROMPTS)
    ] = None,
    response_column: Annotated[
        str | None, typer.Option(help="Column with the response to force.", rich_help_panel=PROMPTS)
    ] = None,
    task_column: Annotated[
        str | None, typer.Option(help="Column with the task's name.", rich_help_panel=PROMPTS)
    ] = None,
    id_column: Annotated[
        str | None, typer.Option(help="Column with the request's id.", rich_help_panel=PROMPTS)
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(help="Dataset of all prompts.", show_default="its own, or the file's", rich_help_panel=PROMPTS),
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="Task of all prompts, instead of their own.", rich_help_panel=PROMPTS)
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Only the first prompts; of a folder, of its first files.", rich_help_panel=PROMPTS),
    ] = None,
    shard: Annotated[
        str | None, typer.Option(help="I/N: only the I-th of N parts; join them with `cat`.", rich_help_panel=PROMPTS)
    ] = None,
    no_chat_template: Annotated[
        bool,
        typer.Option("--no-chat-template", help="Do not apply the tokenizer's chat template.", rich_help_panel=PROMPTS),
    ] = False,
    mode: Annotated[
        str,
        typer.Option(
            help="generate, or teacher-forced: one forward pass over prompt and given response.", rich_help_panel=RUN
        ),
    ] = "generate",
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1_000_000,
            help="Tokens of a response, at most.",
            show_default="32; all of a forced one",
            rich_help_panel=RUN,
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts that run together.", rich_help_panel=RUN)] = 1,
    temperature: Annotated[float, typer.Option(help="0: greedy; else sampled.", rich_help_panel=RUN)] = 0.0,
    top_p: Annotated[
        float, typer.Option(help="Sample from the likeliest tokens of so much.", rich_help_panel=RUN)
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all random numbers.", rich_help_panel=RUN)] = 0,
    dtype: Annotated[
        str, typer.Option(help="auto (the checkpoint's), float32, bfloat16 or float16.", rich_help_panel=RUN)
    ] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...", rich_help_panel=RUN)] = "auto",
    offload: Annotated[
        str | None,
        typer.Option(help="cpu or disk: where weights go that the device cannot hold.", rich_help_panel=RUN),
    ] = None,
    max_memory: Annotated[
        str | None,
        typer.Option(help="Of the device for weights, such as 8GiB, with --offload.", rich_help_panel=RUN),
    ] = None,
    offload_folder: Annotated[
        Path | None,
        typer.Option(help="For weights on disk.", show_default="a temporary one", rich_help_panel=RUN),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.", rich_help_panel=RUN)
    ] = False,
    weights: Annotated[
        bool, typer.Option("--weights", help="Record the router's weights.", rich_help_panel=KEEP)
    ] = False,
    gate_probs: Annotated[
        bool,
        typer.Option("--gate-probs", help="Record the router's probabilities of all experts.", rich_help_panel=KEEP),
    ] = False,
    lookahead: Annotated[
        bool,
        typer.Option(
            "--lookahead", help="Record what each router picks for the layer before's input.", rich_help_panel=KEEP
        ),
    ] = False,
    embedding: Annotated[
        bool, typer.Option("--embedding", help="Record a mean embedding of each prompt.", rich_help_panel=KEEP)
    ] = False,
    no_tokens: Annotated[
        bool,
        typer.Option("--no-tokens", help="Leave token ids out: prompts may be private.", rich_help_panel=KEEP),
    ] = False,
    out: Out = None,
    overwrite: Overwrite = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue with a recording that was interrupted.")] = False,
    quiet: Quiet = False,
) -> None:
    """Let a model answer prompts and record which experts each token is routed to.

    Only routing is stored (and token ids, unless --no-tokens); never text. Ctrl-C keeps the batches that finished;
    the same command with --resume continues.

    Examples:

      moe-trace record

      moe-trace record --model allenai/OLMoE-1B-7B-0924 --prompts gsm8k_test.jsonl --dtype bfloat16 --batch-size 8

      moe-trace record --model ./my-model --prompts mmlu/ --mode teacher-forced --offload disk --max-memory 8GiB
    """
    part = _shard(shard)
    if overwrite and resume:
        raise InputError("--overwrite starts again and --resume continues: give one of them")
    labels = _labels(dataset, task, shipped=prompts is None)
    columns = Columns(prompt_column, task_column, id_column, labels, response_column)
    chosen = read_prompts(prompts or demo.PROMPTS, columns, limit)
    folder = out or RECORDED / _name(model, prompts, part)
    check_target(folder, overwrite, resume)
    if not quiet:
        for option, given, default in (("--model", model, demo.MODEL), ("--prompts", prompts, demo.PROMPTS)):
            if given is None:
                console.note(f"no {option} given: taking what ships with the project, {default}")

    if mode not in MODES:
        raise unknown("mode", mode, MODES)
    if temperature and mode == FORCED:
        raise InputError("--temperature is for --mode generate: a response that is forced is not sampled")
    if response_column is not None and mode == GENERATE:
        raise InputError("--response-column is for --mode teacher-forced: name that mode, or leave the option out")
    sampling = Sampling.typed(temperature, top_p)
    how = Loading(dtype, device, offload, max_memory, offload_folder, trust_remote_code)
    loaded = load_model(model or str(demo.MODEL), how)
    if model is None:
        loaded = replace(loaded, name=demo.NAME)
    options = Options(
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        mode=mode,
        sampling=sampling,
        seed=seed,
        weights=weights,
        gate_probs=gate_probs,
        lookahead=lookahead,
        embedding=embedding,
        token_ids=not no_tokens,
        chat_template=not no_chat_template,
        shard=part,
    )
    requests = sum(len(prompt.turns) for prompt in chosen)
    meter = Meter(requests, quiet)
    try:
        with meter:
            record_routing(
                *(loaded, chosen, folder, options, overwrite, resume),
                on_step=meter.stepped,
                on_done=meter.finished,
                on_note=console.warn,
            )
    except KeyboardInterrupt:
        kept = f"the {meter.done} that finished are readable in {folder}, and --resume continues with them"
        kept = kept if meter.done else "nothing was written"
        console.fail("moe-trace", f"interrupted after {meter.done} of {requests} requests: {kept}", 130)
    report(folder, quiet)


def _shard(text: str | None) -> tuple[int, int]:
    """I/N as two numbers; all, if none is given."""
    if text is None:
        return 1, 1
    found = re.fullmatch(r"(\d{1,18})/(\d{1,18})", text)
    number, of = map(int, found.groups()) if found else (0, 0)
    if not 1 <= number <= of:
        raise InputError(f"--shard {text!r}: give I/N, such as 2/8 for the second of eight parts")
    return number, of


def _labels(dataset: str | None, task: str | None, shipped: bool) -> dict[str, str]:
    """Labels for all prompts alike."""
    named = {"dataset": dataset or ("demo" if shipped else None), "task": task}
    return {what: label for what, label in named.items() if label is not None}


def _name(model: str | None, prompts: Path | None, shard: tuple[int, int]) -> str:
    """The name of a recording that was not given one: its model, its prompts, and which part of them."""
    part = [] if shard == (1, 1) else ["{}-of-{}".format(*shard)]
    if model is None and prompts is None:
        return "-".join(["demo", *part])
    return "-".join([Path(model or demo.NAME).name, (prompts or demo.PROMPTS).name.split(".")[0], *part])
