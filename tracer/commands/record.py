"""`moe-trace record`: let a model answer prompts and record its routing."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from terminal import console
from tracer import demo
from tracer.commands.shared import RECORDED, Out, Overwrite, Quiet, report
from tracer.loading import Loading
from tracer.prompts import Columns, read_prompts
from tracer.record import GENERATE, Options
from tracer.record import record as record_routing
from traces.errors import refuse
from traces.writer import check_target


class Meter:
    """A bar of requests; an interruption takes effect at the end of a forward pass, never in the writing of a file."""

    def __init__(self, advance: console.Advance) -> None:
        self.done = 0
        self.interrupted = False
        self._tokens = 0
        self._advance = advance

    def interrupt(self, *_: object) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True

    def stepped(self, rows: int) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self._tokens += rows
        self._advance(0, f"requests recorded, {self._tokens} tokens generated")

    def finished(self, requests: int) -> None:
        self.done += requests
        self._advance(requests)

    @contextmanager
    def handling(self) -> Iterator[None]:
        handlers = {number: signal.signal(number, self.interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def record(
    model: Annotated[str | None, typer.Option(help="Hub id or folder of a model.", show_default="shipped")] = None,
    gguf: Annotated[Path | None, typer.Option(help="A model's GGUF file, for llama.cpp, instead of --model.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Prompts: a dataset, a table, text (a prompt a line), or a folder.", show_default="shipped"),
    ] = None,
    *,
    columns: Columns,
    options: Options,
    loading: Loading,
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

      moe-trace record --gguf OLMoE-1B-7B-0924-Q4_K_M.gguf --prompts gsm8k_test.jsonl --weights

      moe-trace record --model ./my-model --prompts mmlu/ --mode teacher-forced --offload disk --max-memory 8GiB
    """
    unforced = columns.response_column is not None and options.mode == GENERATE
    refuse(
        (overwrite and resume, "--overwrite starts again and --resume continues: give one of them"),
        (unforced, "--response-column is for --mode teacher-forced: name that mode, or leave the option out"),
        (gguf and model, "--model is run by transformers and --gguf by llama.cpp: give one of them"),
        ((model or "").endswith(".gguf"), f"{model} is a GGUF file: give it with --gguf"),
        (gguf and options.batch_size > 1, "--batch-size is for --model: llama.cpp is given one prompt at a time"),
    )
    if prompts is None:
        columns = replace(columns, dataset=columns.dataset or "demo")
    chosen = read_prompts(prompts or demo.PROMPTS, columns)
    folder = out or RECORDED / _name(gguf.stem if gguf else model, prompts, options.part)
    check_target(folder, overwrite, resume)
    for option, value, default in (("--model", gguf or model, demo.MODEL), ("--prompts", prompts, demo.PROMPTS)):
        if value is None and not quiet:
            console.note(f"no {option} given: taking what ships with the project, {default}")
    if gguf:  # each engine needs an extra of its own
        from tracer.llama import GgufModel

        loaded: Any = GgufModel(gguf, loading)
    else:
        from tracer.models import load_model

        loaded = load_model(model or str(demo.MODEL), loading)
        loaded = loaded if model else replace(loaded, name=demo.NAME)
    requests = sum(len(prompt.turns) for prompt in chosen)
    with console.progress(requests, quiet, "requests recorded") as advance:
        meter = Meter(advance)
        try:
            with meter.handling():
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


def _name(model: str | None, prompts: Path | None, shard: tuple[int, int]) -> str:
    """Return the name of a recording without --out: its model, its prompts, and which part of them."""
    part = [] if shard == (1, 1) else ["{}-of-{}".format(*shard)]
    if model is None and prompts is None:
        return "-".join(["demo", *part])
    return "-".join([Path(model or demo.NAME).name, (prompts or demo.PROMPTS).name.split(".")[0], *part])
