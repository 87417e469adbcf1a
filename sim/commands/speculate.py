"""The command `moe-sim speculate`: does speculation pay here, and from which acceptance on?"""

from typing import Annotated

import typer
from rich.table import Table

from policies.core.grammar import split_list
from policies.core.spec import parse
from sim import defaults
from sim.analysis import speculation
from sim.commands import options
from sim.engines import compiling
from sim.loaded import TimedRun
from sim.quantities import show_mib, show_three
from sim.sweeps import notes
from sim.sweeps.grid import grid_of
from terminal.console import progress, table
from traces.errors import InputError
from traces.output import claimed

AT = "0.5,0.7,0.9"


def speculate(
    trace: options.Trace = None,
    policies: options.Policies = defaults.POLICY,
    cache_sizes: options.CacheSizes = "25%,50%",
    at: Annotated[str, typer.Option(help="Acceptances at which speeds are printed, beside a recorded one.")] = AT,
    longest: Annotated[int, typer.Option(help="Drafted tokens a step, at most.", min=1, max=64)] = speculation.LONGEST,
    *,
    stated: Annotated[
        options.Stated, options.all_but("untimed", "draft", "acceptance", "max_batch", "arrivals", "arrival_rate")
    ],
    output: options.ResultOptions,
) -> None:
    """Report whether speculation pays where experts move, and from which acceptance on.

    Runs each policy and cache size without drafts and with 1 to 8 drafted tokens a step, of which none, half, 80% and
    all are accepted: the experts of a step, its bytes and time, and the acceptance at which a token takes as long as
    without drafts. Writes speculation.parquet (a row per cell and number of drafted tokens) and speculation.png.

    [b]moe-sim speculate my-trace --cache-sizes 25%,50% --hardware rtx4090[/b]

    [b]moe-sim speculate my-trace --policies lru,lru/split --draft-us 800 --at 0.6,0.8[/b]
    """
    shares = _shares(at)
    loaded = TimedRun.of(options.experiment(stated, trace))
    lengths = speculation.lengths_of(loaded, longest)
    if (own := speculation.recorded(loaded)) is not None:
        shares.append(round(own, 3))
    grid = grid_of(loaded, [parse(each) for each in split_list(policies)], split_list(cache_sizes))
    us = loaded.measured_us(grid.policies)
    loaded = loaded.charging(us)
    short = [f"no answer has more than {len(lengths) + 1} decoded tokens: longer drafts are left out"]
    output.note(
        *short * (len(lengths) < longest),
        *loaded.notes,
        *notes.overhead_notes(us),
        *compiling.notes(loaded.versions(grid.policies)),
    )
    folder = output.folder(loaded.experiment.trace, "/speculation")
    with claimed(folder, speculation.MAKER, speculation.NAMES):
        with progress(speculation.runs(grid, lengths) * len(loaded.trace.requests), output.quiet) as advance:
            found = speculation.speculate(loaded, grid, lengths, advance)
        files = speculation.save(found, loaded, folder)
    seed = loaded.experiment.seed
    output.show(
        lambda: {"rows": speculation.rows(found, loaded), "sentences": list(speculation.sentences(found, seed))},
        lambda: (*speculation.sentences(found, seed), _table(found, shares, seed), options.written(files, folder)),
    )


def _shares(text: str) -> list[float]:
    try:
        shares = [float(each) for each in split_list(text)]
    except ValueError:
        shares = []
    if not shares or not all(0 <= share <= 1 for share in shares):
        raise InputError(f"--at {text}: acceptances are shares from 0 to 1, as in {AT}")
    return shares


def _table(found: list[speculation.Speculation], shares: list[float], seed: int) -> Table:
    headings = "policy", "cache", "draft", "experts", "MiB", "ms", "break-even", *(f"t/s {share:g}" for share in shares)
    shown = table(*headings, left=2)
    before = None
    for each in found:
        cell = each.policy, each.size
        if cell != before:
            plain = each.plain
            mib, ms = show_mib(plain.bytes.sum() / plain.steps.sum()), f"{plain.ns.sum() / plain.steps.sum() / 1e6:.2f}"
            speed = show_three(each.tokens_per_s)
            shown.add_row(*cell, "0", "", mib, ms, "", *[speed] * len(shares))
            before = cell
        low, high = each.interval(seed)
        value = "never" if each.break_even is None else f"{each.break_even:.2f}"
        bounds = "-".join(f"{bound:.2f}" if bound <= 1 else "1+" for bound in (low, high))
        shown.add_row(
            "",
            "",
            str(each.length),
            f"{each.union.mean():.1f}",
            show_mib(each.step_bytes),
            f"{each.step_ms:.2f}",
            f"{value} ({bounds})",
            *(show_three(each.tokens_per_s * each.speedup(share)) for share in shares),
        )
    return shown
