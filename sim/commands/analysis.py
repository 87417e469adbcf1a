"""The commands `moe-sim analyze` and `moe-sim compare`: what a trace allows, and whether a difference is one."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from policies.core.grammar import policy_title, split_list
from sim import defaults
from sim.analysis import recorded_hits
from sim.analysis.misses import MAKER, NAMES, Analysis, analyse, save, sentences, to_play
from sim.commands import options
from sim.loaded import Loaded, load, sample_text
from sim.results import plot
from sim.results.compare import Difference, SweptRun, choose, differences, pairs_across, pairs_within, read, split_name
from sim.results.files import write_figure
from sim.results.metrics import engine_words, size_text
from sim.sweeps import notes, verdict
from sim.sweeps.config import specs
from sim.sweeps.grid import grid_of
from terminal.console import progress, table
from traces.errors import InputError
from traces.output import claimed

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def analyze(
    trace: options.Trace = None,
    policies: options.Policies = defaults.POLICIES,
    scope: options.Scope = None,
    cache_sizes: options.CacheSizes = defaults.CACHE_SIZES,
    *,
    stated: Annotated[options.Stated, options.some("model_profile", "requests", "as_decode", "decode_only")],
    output: options.ResultOptions,
) -> None:
    """Show whether misses are due to the policy or to the cache size, untimed.

    Prints misses by cause, and the hit rates of LRU and Belady at all sizes; of a dump in which an engine said what it
    had cached, first the policy and cache size that count the same hits. Writes misses.parquet, curves.parquet
    and curves.png. Of a large trace it takes a sample of requests, which it names.

    [b]moe-sim analyze my-trace --policies lru,eamc --cache-size 25%[/b]
    """
    stated_sizes = load(options.experiment(stated, trace, untimed=True))
    alike, sizes = stated_sizes.alike(), split_list(cache_sizes)
    if alike is not stated_sizes:
        output.note("experts differ in size: the curves count experts, here of their mean size")
    loaded = alike.sampled()
    if loaded is not alike:
        output.note(f"of a sample: {sample_text(loaded, alike)}")
    grid = grid_of(loaded, specs(split_list(policies), scope), sizes)
    output.note(*stated_sizes.notes, *notes.sizes_note(loaded, grid, sizes))
    output.note(*notes.untimed_note(loaded, grid.policies))
    folder = output.folder(loaded.experiment.trace, "/analysis")
    engine = recorded_hits.of_trace(stated_sizes)
    with claimed(folder, MAKER, NAMES):
        with progress(to_play(grid) * len(loaded.trace.requests), output.quiet) as advance:
            found = analyse(loaded, grid, advance)
        files = save(found, loaded, folder)
    answer = [*([engine.sentence()] if engine else []), *sentences(found.splits)]
    output.show(
        lambda: {"answer": " ".join(answer), "misses": found.splits, "recorded_hits": engine and asdict(engine)},
        lambda: (*answer, _misses(found, loaded), options.written(files, folder)),
    )


def compare(
    a: Annotated[str, typer.Argument(help="A sweep's results folder, or one cell of it: results/x:lru@25%.")],
    b: Annotated[str | None, typer.Argument(help="What to compare it with; none with --policies.")] = None,
    policies: Annotated[str | None, typer.Option(help="Within one folder: the baseline, then others.")] = None,
    cache_size: Annotated[str | None, typer.Option(help="Only this size (25%, 64).")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the resampling.")] = 0,
    resamples: Annotated[int, typer.Option(min=1, max=10_000_000, help="Bootstrap samples.")] = 10_000,
    figure: options.Figure = None,
    overwrite: options.Overwrite = False,
    *,
    output: options.OutputOptions,
) -> None:
    """Compare results request by request, with 95% bootstrap intervals.

    [b]moe-sim compare results/my-trace --policies lru,eamc --cache-size 25%[/b]

    [b]moe-sim compare results/x:lru@25% results/y:eamc@25%[/b]
    """
    options.check_figure(figure, overwrite)
    pairs = _pairs(a, b, policies, cache_size)
    found = [(one, other, differences(one, other, seed, resamples)) for one, other in pairs]
    every = [(one, other, difference) for one, other, all_ in found for difference in all_]
    if figure:
        write_figure(_figure([difference for *_, difference in every]), figure)
    output.show(
        lambda: [_row(*each) for each in every],
        lambda: [_differences(every)] if output.form else [*verdict.of_pairs(found), "", *_sentences(every)],
    )


def _sentences(every: Sequence[tuple[SweptRun, SweptRun, Difference]]) -> Iterator[str]:
    of_size = [one.cache_experts if one.cache_experts == other.cache_experts else None for one, other, _ in every]
    several = len({*of_size} - {None}) > 1
    for size, (_, _, difference) in zip(of_size, every, strict=True):
        yield f"{f'{size} slots: ' if several and size else ''}{difference.sentence()}"
    yield ""
    yield "Differences are those of the sweep's table, of all requests together; intervals resample requests."
    if any(difference.tokens for *_, difference in every):
        yield "Of few requests they resample blocks of tokens: that is for such text, not for other requests."


def _differences(every: Sequence[tuple[SweptRun, SweptRun, Difference]]) -> Table:
    shown = table("cell", "baseline", "experts", "measure", "unit", "more", "low", "high", "requests", left=2)
    for *_, each in every:
        figures = (f"{value:.6g}" for value in (each.more, each.low, each.high))
        about = each.measure.meaning, each.measure.unit
        shown.add_row(each.cell, each.baseline, str(each.cache_experts), *about, *figures, str(each.requests))
    return shown


def _figure(found: Sequence[Difference]) -> "Figure":
    """Return the differences in time per token or, where there is none, the next measure."""
    measure = min((each.measure for each in found), key=lambda each: verdict.JUDGED.index(each.name))
    shown = [each for each in found if each.measure == measure]
    title = f"less {', '.join(dict.fromkeys(each.baseline for each in shown))}"
    ends = [end for each in shown for end in (each.low, each.high, 0.0)]
    policies = list(dict.fromkeys(each.cell for each in shown))
    return plot.ranking(title, shown, policies, f"{measure.meaning} ({measure.unit})", (min(ends), max(ends)))


def _pairs(a: str, b: str | None, policies: str | None, size: str | None) -> list[tuple[SweptRun, SweptRun]]:

    def named(text: str) -> list[SweptRun]:
        folder, policy, own_size = split_name(text)
        return choose(read(folder), policy, own_size or size)

    if b is not None:
        if policies is not None:
            raise InputError("--policies compares within one folder: leave out the second, or write FOLDER:policy@size")
        return pairs_across(named(a), named(b))
    if policies is None:
        raise InputError("`moe-sim compare` needs a second folder, or --policies lru,eamc")
    return pairs_within(named(a), list(dict.fromkeys(split_list(policies))))


def _row(baseline: SweptRun, cell: SweptRun, difference: Difference) -> dict[str, object]:
    return {
        "measure": difference.measure.name,
        "unit": difference.measure.unit,
        **{
            f"{which}_{name}": str(run.folder) if name == "folder" else run.row[name]
            for which, run in (("baseline", baseline), ("cell", cell))
            for name in ("folder", "policy", "oracle", "cache_experts")
        },
        **{name: getattr(difference, name) for name in ("more", "low", "high", "requests")},
        "sentence": difference.sentence(),
    }


def _misses(found: Analysis, loaded: Loaded) -> Table:
    sized = ["MiB"] if loaded.expert_bytes else []
    headings = ("policy", "hit rate", "misses", "compulsory", "capacity", "policy's")
    shown = table("cache", "a layer", *sized, *headings)
    shown.columns[len(sized) + 2].justify = "left"
    for split, following in zip(found.splits, [*found.splits[1:], None], strict=True):
        shares = [
            f"{split[part] / max(split['misses'], 1):.1%}" for part in ("compulsory", "capacity", "policy_misses")
        ]
        room = split["cache_experts"] * loaded.expert_bytes if loaded.expert_bytes else None
        size = [size_text(split), *engine_words({**split, "layers": loaded.trace.layers, "cache_bytes": room})]
        last = following is None or following["cache_experts"] != split["cache_experts"]
        hit_rate = f"{1 - split['misses'] / max(split['lookups'], 1):.1%}"
        policy = policy_title(split["policy"], split["oracle"])
        shown.add_row(*size, policy, hit_rate, f"{split['misses']:,}", *shares, end_section=last)
    return shown
