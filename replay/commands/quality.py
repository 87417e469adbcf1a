"""The command `moe-replay quality`: what bent routing costs and saves, measured on a text."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from policies.core.grammar import split_list
from replay.commands.device_options import Live
from replay.commands.live_options import LiveOptions
from replay.live.model import LiveModel
from replay.live.quality import prices, sentence
from sim.commands import options
from terminal import console
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
    "same\ngreedy": ("agreement", "{:.1%}"),
    "KL": ("kl", "{:.4f}"),
}


def quality(
    *,
    opened: LiveOptions,
    on: Live,
    text: Annotated[
        Path | None,
        typer.Option(
            help="File of texts, prompts with answers as moe-trace record reads them. Default: the shipped prompts."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of the text that are read, at most.")] = 512,
    output: options.OutputOptions,
) -> None:
    """Measure what a rule that bends the routing costs and saves, on a text that is read token by token.

    --routing, --policy and --cache-size may be lists with commas; each model runs under each rule, and without.

    [b]moe-replay quality --routing substitute:bonus=0.15,drop:below=0.75/k[/b]
    """
    rules = split_list(opened.routing)
    refuse((not rules, "name the rules whose price is measured: --routing drop:below=0.75/k"))

    def opening(policy: str, size: str, rule: str | None) -> LiveModel:
        return replace(opened, policy=policy, cache_size=size, routing=rule).live(on, output.quiet)

    asked = read_prompts(text or demo.PROMPTS, Columns())
    rows = prices(opening, asked, split_list(opened.policy), split_list(opened.cache_size), rules, tokens)
    table = console.table("rule", "policy", "cache", *SHOWN, left=2)
    for row in rows:
        share = f"{row['cache_fraction']:.1%}"
        table.add_row(row["routing"], row["policy"], share, *(form.format(row[name]) for name, form in SHOWN.values()))
    output.show(lambda: rows, lambda: (*map(sentence, rows), "", table))
