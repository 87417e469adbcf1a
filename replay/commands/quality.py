"""The command `moe-replay quality`: what bent routing costs and saves, measured on a text."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from policies.core.grammar import split_list
from replay.commands.device_options import Live
from replay.commands.live_options import LiveOptions
from replay.live.quality import Price, figure, sentence, split, tell
from sim.commands import options, printed
from sim.commands.printed import progress
from sim.results.files import write_figure
from sim.sweeps.config import seeded
from tracer import demo
from tracer.prompts import Columns, read_prompts
from traces.errors import refuse

SHOWN = {
    "fetches": ("fetches", "{:.1f}"),
    "ms": ("ms", "{:.2f}"),
    "lost": ("lost_weight", "{:.1%}"),
    "changed": ("changed_choices", "{:.1%}"),
    "perplexity": ("perplexity", "{:.2f}"),
    "more": ("perplexity_more", "{:+.1%}"),
    "same\\ngreedy": ("agreement", "{:.1%}"),
    "KL": ("kl", "{:.4f}"),
}


def quality(
    model: Annotated[str | None, typer.Option(help="Folder or hub id of a model. Default: the shipped one.")] = None,
    opened: LiveOptions = LiveOptions(),  # noqa: B008  its fields are the options
    *,
    on: Live,
    text: Annotated[
        Path | None,
        typer.Option(help="File of texts, as moe-trace record reads prompts. Default: the shipped prompts."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of the text that are read, at most.")] = 512,
    figure_file: Annotated[Path | None, typer.Option("--figure", help="File for a figure of fetches and loss.")] = None,
    overwrite: options.Overwrite = False,
    output: options.OutputOptions,
) -> None:
    """Measure what a rule that bends the routing costs and saves, on a text that is read token by token.

    --routing, --policy and --cache-size may be lists with commas; each model runs under each rule, and without.

    [b]moe-replay quality --routing substitute:bonus=0.15,drop:below=0.75/k[/b]
    """
    rules = split_list(opened.routing)
    refuse((not rules, "name the rules whose price is measured: --routing drop:below=0.75/k"))
    options.check_figure(figure_file, overwrite)
    asked, rows = read_prompts(text or demo.PROMPTS, Columns()), []
    for policy in split_list(opened.policy):
        for size in split_list(opened.cache_size):
            told = {}
            for rule in (None, *rules):
                here = replace(opened, cache_size=size, routing=rule)
                with here.live(
                    model, on, seeded(policy, 0), partial(progress, quiet=output.quiet, what="experts")
                ) as live:
                    ids = [live.loaded.prompt_tokens(each.turns, template=False) for each in asked]
                    requests = split(ids, tokens)
                    told[rule] = tell(live, requests)
            rows += [Price(rule, told[None], told[rule], requests).row for rule in rules]
    if figure_file:
        write_figure(figure(rows), figure_file)
    table = printed.table("rule", "policy", "cache", *SHOWN, left=2)
    for row in rows:
        share = f"{row['cache_fraction']:.1%}"
        table.add_row(row["routing"], row["policy"], share, *(form.format(row[name]) for name, form in SHOWN.values()))
    output.show(lambda: rows, lambda: (*map(sentence, rows), "", table))
