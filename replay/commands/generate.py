"""The command `moe-replay generate`: a model continues with prompts, its experts behind a cache."""

from pathlib import Path
from typing import Annotated

import typer

from replay.commands import shown
from replay.commands.device_options import Live
from replay.commands.live_options import LiveOptions
from replay.live.answering import OfTokenIds, TextStream, answer, outcome, prompts_of
from replay.warmup import undisturbed
from sim.commands import options
from sim.sweeps.verdict import lossy
from terminal import console
from tracer.observed import Answers
from tracer.record import Options
from traces.errors import InputError
from traces.writer import check_target


def generate(
    *,
    opened: LiveOptions,
    on: Live,
    prompt: Annotated[list[str] | None, typer.Option(help="Text to continue with; may be given several times.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="File of prompts, as moe-trace record reads them.")] = None,
    token_ids: Annotated[
        str | None, typer.Option(help="Token ids to continue with (5,6,7); needs no tokenizer.")
    ] = None,
    print_token_ids: Annotated[
        bool, typer.Option("--print-token-ids", help="End with a line of the last answer's token ids.")
    ] = False,
    answers: Answers,
    record: Annotated[Path | None, typer.Option(help="Folder for a trace, as moe-trace record writes it.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the trace that --record names.")] = False,
    quiet: options.Quiet = False,
) -> None:
    """Let a model generate with its experts on disk, or in host memory beside a GPU, and a cache of them.

    Answers are those of the whole model, bit for bit, unless --routing changes them. They go to standard output, the
    report to standard error.
    With --draft a pass takes in several tokens, whose logits may differ in the last bits from those of one at a time;
    greedy answers are the same wherever the two likeliest tokens differ by more, sampled ones are as likely.

    [b]moe-replay generate --prompt "Once upon a time"[/b]

    [b]moe-replay generate --model ~/models/OLMoE-1B-7B --cache-size 8GiB --prompt "The capital of France is"[/b]

    [b]moe-replay generate --model ./tiny --token-ids 5,6,7 --print-token-ids --max-new-tokens 16[/b]
    """
    texts = prompts_of(prompt or [], prompts, token_ids)
    if record:
        check_target(record, overwrite)
    settings = Options(**vars(answers))

    def show(text: str) -> None:
        console.out.file.write(text)
        console.out.file.flush()

    with opened.live(on, quiet, settings.seed) as live:
        loaded = OfTokenIds(**vars(live.loaded)) if token_ids else live.loaded
        if loaded.tokenizer is None and not token_ids:
            raise InputError(f"{loaded.name} has no tokenizer: ask it with --token-ids 5,6,7")
        stream, last = TextStream(loaded), list[int]()

        def ended() -> None:
            nonlocal stream, last
            show(stream.end() + "\n")
            stream, last = TextStream(loaded), stream.tokens

        with undisturbed():
            answered = answer(
                *(live, loaded, texts, settings, lambda token: show(stream.add(token)), ended),
                *(record, overwrite, console.warn),
            )
        if print_token_ids:
            console.say(" ".join(map(str, last)))
        if not quiet:
            measured = outcome(live, answered)
            for line in (*lossy([measured.row]), shown.verdict(measured)):
                console.say_on_stderr(line)
            if opened.draft:
                console.say_on_stderr(shown.drafts(answered.log))
            for part in (shown.title(measured), shown.table(measured)):
                console.say_on_stderr(part)
            console.say_on_stderr(
                live.memory.sentence(int(answered.trace.position.max()) + 2, live.device.peak_bytes())
            )
