"""The page: what results say, as sections of sentences, figures (SVG) and tables, in one HTML file without network.

Whatever comes from data is escaped: by jinja2 in the page, by matplotlib in the figures.
"""

import io
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pandas as pd
from markupsafe import Markup

from sim.loop.log import STALLS
from sim.quantities import show_bytes
from sim.report import bounds
from sim.report.inputs import DEVICE, Results
from sim.results import compare, diagnosis, plot
from sim.results.compare import Difference, SweptRun
from sim.results.metrics import RESULTS, Row, size_text
from sim.results.provenance import commit
from sim.sweeps import config
from traces.errors import InputError
from traces.steps import DECODE, PREFILL

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEMPLATE = "page.html"

MAPPED = 5
"""Requests whose EAMs are drawn, beside that of all."""

COMPARED = 200
"""Requests in the map of similarities at most; more are thinned out evenly."""

BARS = 24
"""Cells in a figure of bars at most: those of the largest sizes."""

COLUMNS = {
    "policy": "policy",
    "cache": "cache",
    "cache_experts": "experts",
    "hit_rate": "hit rate",
    "tpot_mean_ms": "TPOT mean, ms",
    "tpot_p50_ms": "p50",
    "tpot_p95_ms": "p95",
    "tpot_p99_ms": "p99",
    "ttft_mean_ms": "TTFT mean, ms",
    "tokens_per_s": "tokens/s",
    "misses": "misses",
    "late": "late",
    "mb_demand": "demand MB/token",
    "mb_prefetch": "prefetch MB/token",
    "mb_wasted": "wasted MB/token",
    "idle": "GPU idle",
}
"""Columns of the table of cells."""


Shown = tuple[str, float | None]
"""A cell of a table: what is shown, and what it sorts by."""

T = TypeVar("T")


@dataclass(frozen=True)
class Item:
    """Something on the page: a text, a figure with its caption, a table or a list of commands."""

    kind: str
    text: str = ""
    svg: Markup | None = None
    head: tuple[str, ...] = ()
    rows: tuple[tuple[Shown, ...], ...] = ()


@dataclass(frozen=True)
class Section:
    """A heading and what stands below it."""

    title: str
    content: tuple[Item, ...]


def written(results: Sequence[Results], command: str) -> tuple[str, list[str]]:
    """Return the page, and what is missing, as sentences. command: the one that makes it again."""
    from jinja2 import Environment, FileSystemLoader

    sweeps = [each for each in results if not each.replayed]
    replays = [each for each in results if each.replayed]
    sections: list[Section] = []
    for sweep in sweeps:
        sections += _sweep(sweep, several=len(sweeps) > 1)
    sections.append(_measured(replays))
    sections.append(_commands(results, command))
    problems = [problem for each in results for problem in each.problems]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.get_template(TEMPLATE).render(
        title=_title(results), summary=_summary(sweeps), problems=problems, sections=sections, commit=commit()
    )
    return page, problems


def _title(results: Sequence[Results]) -> str:
    models = dict.fromkeys(str(row["model"]) for each in results for row in each.rows if row.get("model"))
    return f"Expert caching of {', '.join(models)}" if models else "Expert caching: no results"


def _summary(sweeps: Sequence[Results]) -> list[str]:
    """Return the recommendation of each sweep, in a sentence or two."""
    found = [_made(sweep, partial(_recommended, sweep)) for sweep in sweeps if sweep.rows]
    return [item.text for items in found for item in items] or ["There is no result to recommend anything by."]


def _recommended(sweep: Results) -> list[Item]:
    return [Item("text", recommendation(sweep))]


def _cells(sweep: Results) -> list[SweptRun]:
    """Return the cells with their requests, to pair; none, with the reason among the problems, where they cannot be."""
    try:
        return compare.read(sweep.folder)
    except InputError as error:
        _note(sweep, f"no intervals: {error}")
        return []


def _note(sweep: Results, problem: str) -> None:
    if problem not in sweep.problems:
        sweep.problems.append(problem)


def judged_by(rows: Sequence[Row]) -> str:
    """Return the column that ranks policies: TPOT, else TTFT, else misses."""
    timed = ("tpot_mean_ms", "ttft_mean_ms")
    return next((name for name in timed if any(row[name] is not None for row in rows)), "misses")


def recommendation(sweep: Results) -> str:
    """Return what to do, by how much it is better, and how sure that is."""
    causal = [row for row in sweep.rows if not row["oracle"] and row[judged_by(sweep.rows)] is not None]
    if not causal:
        return f"{sweep.folder}: only oracles were run, which know the future."
    by = judged_by(sweep.rows)
    best = min(causal, key=lambda row: (row[by], row["cache_experts"]))
    unit = {"misses": "misses"}.get(by, "ms a token" if by.startswith("tpot") else "ms to the first token")
    machine = f" on {best['hardware']}" if best["hardware"] else ""
    users = f" with {best['max_batch']} requests at a time" if best["max_batch"] else ""
    room = f", {show_bytes(best['cache_bytes'])}" if best["cache_bytes"] else ""
    share = f"{size_text(best)} of the experts in the cache{room}"
    said = (
        f"For {best['model']}{machine}{users}, run {best['policy']} with {share}: {best[by]:,.4g} {unit}, "
        f"hit rate {_percent(best['hit_rate'])}."
    )
    return " ".join([said, *_against_lru(sweep, best, by), *_smaller(causal, best, by, unit)])


def _against_lru(sweep: Results, best: Row, by: str) -> Iterator[str]:
    """Yield what the best policy gains over LRU at its size, with its interval."""
    if best["policy"] == "lru":
        others = [row for row in sweep.rows if row["cache_experts"] == best["cache_experts"] and row is not best]
        if any(not row["oracle"] for row in others):
            yield "No other policy that was run is faster there: cleverness does not help."
        return
    cells = {(cell.policy, cell.cache_experts): cell for cell in _cells(sweep)}
    pair = [cells.get((policy, best["cache_experts"])) for policy in ("lru", best["policy"])]
    if pair[0] is None or pair[1] is None:
        return
    found = _difference(sweep, pair[0], pair[1], by)
    if found:
        yield f"There, {found.sentence()}."


def _difference(sweep: Results, baseline: SweptRun, cell: SweptRun, by: str) -> Difference | None:
    """Return the paired difference in the judging measure; None, with the reason among the problems, without one."""
    measure = {"misses": "hit_rate", "ttft_mean_ms": "ttft_ms"}.get(by, by)
    try:
        every = compare.differences(baseline, cell, resamples=compare.RESAMPLES_OF_A_TABLE)
    except InputError as error:
        _note(sweep, f"no intervals in {sweep.folder}: {error}")
        return None
    return next((each for each in every if each.measure.name == measure), None)


def _smaller(causal: Sequence[Row], best: Row, by: str, unit: str) -> Iterator[str]:
    """Yield what the smaller sizes cost."""
    sizes = sorted(
        {row["cache_experts"] for row in causal if row["cache_experts"] < best["cache_experts"]}, reverse=True
    )
    texts = []
    for slots in sizes[:3]:
        row = min((row for row in causal if row["cache_experts"] == slots), key=lambda row: row[by])
        texts.append(f"{row[by]:,.4g} {unit} at {size_text(row)} ({row['policy']})")
    if texts:
        yield f"Smaller caches: {', '.join(texts)}."


def _sweep(sweep: Results, several: bool) -> Iterator[Section]:
    """Yield the sections of one sweep."""
    rows, of = sweep.rows, f" ({sweep.folder.name})" if several else ""
    if not rows:
        yield Section(f"What was run{of}", (Item("text", f"{sweep.folder} holds no cells to show."),))
        return
    makers: dict[str, Callable[[], Iterable[Item]]] = {
        "What was run": lambda: (Item("text", _run(sweep)), _table(rows)),
        "Hit rate and time against cache size": lambda: _against_size(sweep),
        "Which policy": lambda: _ranking(sweep),
        "Latencies": lambda: _latencies(sweep),
        "Where the time goes": lambda: _time(rows),
        "The routing": lambda: _routing(sweep),
    }
    for title, make in makers.items():
        yield Section(f"{title}{of}", _made(sweep, make))


def _made(sweep: Results, make: Callable[[], Iterable[Item]]) -> tuple[Item, ...]:
    """Return what is made, or that it needs columns or values that are not there."""
    found = _attempted(sweep, make)
    if found is None:
        lacking = f"columns that are not there: {', '.join(sweep.missing)}" if sweep.missing else "other values"
        return (Item("text", f"This needs {lacking}."),)
    return found


def _attempted(of: Results, make: Callable[[], Iterable[T]]) -> tuple[T, ...] | None:
    """Return what is made of a folder's tables; None, with the reason among the problems, where that fails."""
    try:
        return tuple(make())
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:
        if not of.missing:
            why = f"{type(error).__name__}: {str(error).splitlines()[0]}" if str(error) else type(error).__name__
            _note(of, f"{of.folder}: its tables hold values that no run writes ({why}): run it again with --overwrite")
        return None


def _run(sweep: Results) -> str:
    first = sweep.rows[0]
    users = f", {first['max_batch']} requests at a time" if first["max_batch"] else ""
    where = f" on {first['hardware']}" if first["hardware"] else ", counted without a clock"
    policies = ", ".join(dict.fromkeys(row["policy"] for row in sweep.rows))
    sizes = ", ".join(dict.fromkeys(size_text(row) for row in sweep.rows))
    code = dict.fromkeys(str(row["commit"]) for row in sweep.rows if row["commit"])
    return (
        f"{first['model']}{where}: {first['requests'] or 0:,} requests and {first['tokens'] or 0:,} tokens of "
        f"{first['trace']}{users}; policies {policies}; caches of {sizes} of {first['all_experts'] or 0:,} experts; "
        f"{'cold' if first['cold'] else 'warm'} between requests, {first['warmup_requests'] or 0} requests to warm up. "
        f"Made by {', '.join(code) or 'an unknown version'}."
    )


def _against_size(sweep: Results) -> Iterator[Item]:
    rows, sizes = sweep.rows, list({row["cache_experts"]: row for row in sweep.rows}.values())
    bound, lowest, demand = [row for row in rows if row["policy"] == "belady"], [], 0.0
    loaded = sweep.loaded
    if loaded:
        demand = loaded.token_experts / loaded.all_experts
        if loaded.setup.max_batch is None and loaded.setup.host_memory is None and not loaded.setup.cold:
            bound = bound or (bounds.belady(loaded, sizes) if loaded.sizes is None else [])
            lowest = bounds.floor(loaded, sizes, any(row["on_host"] for row in rows))
    elif not bound:
        _note(sweep, f"{sweep.folder}: without its trace, Belady's bound and the physical floor cannot be computed")
    for column in plot.DRAWN:
        drawn = [row for row in rows if row[column] is not None]
        if not drawn:
            continue
        known = [row for row in bound if row.get(column) is not None]
        figure = plot.figure(drawn, known, demand, column, lowest if column == "tpot_mean_ms" else ())
        yield _figure(figure, _CAPTIONS[column])
    if lowest:
        best = min((row for row in rows if row["tpot_mean_ms"] is not None), key=lambda row: row["tpot_mean_ms"])
        least = next(row for row in lowest if row["cache_experts"] == best["cache_experts"])
        ratio = best["tpot_mean_ms"] / least["tpot_mean_ms"]
        yield Item("text", f"The fastest cell takes {ratio:.2f} times the physical floor of its size.")
    for line in diagnosis.lines(rows, bound, demand) if all(name in rows[0] for name in RESULTS.names) else ():
        yield Item("text", f"{line}.")


_CAPTIONS = {
    "hit_rate": "Share of expert uses found in the cache. Belady knows the future: no policy that fetches on demand "
    "hits more. Left of the dotted line the cache is smaller than one token's experts.",
    "tpot_mean_ms": "Mean time per output token. The physical floor is the longer of computing with every expert at "
    "hand, and moving what Belady would miss, whatever was loaded in prefills.",
    "ttft_mean_ms": "Mean time to the first token.",
}


def _ranking(sweep: Results) -> Iterator[Item]:
    """Yield each policy's difference to the best one, with paired bootstrap intervals over requests."""
    by, cells, found = judged_by(sweep.rows), _cells(sweep), {}
    oracles = {row["policy"] for row in sweep.rows if row["oracle"]}
    rows = {(row["policy"], row["cache_experts"]): row for row in sweep.rows}
    texts = []
    for slots in dict.fromkeys(cell.cache_experts for cell in cells):
        here = [cell for cell in cells if cell.cache_experts == slots and cell.policy not in oracles]
        here = [cell for cell in here if rows[cell.policy, slots][by] is not None]
        if len(here) < 2:
            continue
        here.sort(key=lambda cell: rows[cell.policy, slots][by])
        differences = [_difference(sweep, here[0], cell, by) for cell in here[1:]]
        kept = [each for each in differences if each]
        if kept:
            size = size_text(rows[here[0].policy, slots])
            found[f"{size}: best is {here[0].policy}"] = kept
            texts += [f"{size}: {each.sentence()}." for each in kept]
    if not found:
        yield Item("text", "There are fewer than two policies, or fewer than two requests, to compare at one size.")
        return
    measure = next(iter(found.values()))[0].measure
    policies = list(dict.fromkeys(row["policy"] for row in sweep.rows))
    figure = plot.ranking(found, policies, f"{measure.meaning} ({measure.unit}), less the best policy's")
    caption = (
        "Paired differences over requests, with 95% bootstrap intervals. An interval that reaches the dashed line may "
        "be chance. The intervals take requests as independent, which a warm cache makes them a little less."
    )
    yield _figure(figure, caption)
    yield Item("list", "\n".join(texts))


def _latencies(sweep: Results) -> Iterator[Item]:
    requests = sweep.requests
    if requests is None or not len(requests):
        yield Item("text", "There are no rows of requests.")
        return
    for column, unit in (("tpot_mean_ms", "mean time per output token of a request (ms)"), ("ttft_ms", "TTFT (ms)")):
        timed = requests.dropna(subset=[column])
        panels: dict[str, dict[str, plot.Float]] = {}
        for (_, policy), part in timed.groupby(["cache_experts", "policy"], sort=False):
            title = f"{size_text(part.iloc[0])} of the experts"
            panels.setdefault(title, {})[str(policy)] = part[column].to_numpy(np.float64)
        if panels:
            yield _figure(plot.distributions(panels, unit), "Share of the requests that take at most so long.")
    if timed.empty and requests["tpot_mean_ms"].isna().all():
        yield Item("text", "Nothing was timed.")


def _time(rows: Sequence[Row]) -> Iterator[Item]:
    timed = [row for row in rows if row["compute_busy_ms"] is not None and row["tokens"]]
    shown = sorted(timed, key=lambda row: -row["cache_experts"])[:BARS]
    if not shown:
        yield Item("text", "Nothing was timed.")
        return
    stalls = {
        _cell(row): {
            "compute": row["compute_busy_ms"] / row["tokens"],
            **{
                _STALLS.get(cause, cause): row[f"stall_{cause}_ms"] / row["tokens"]
                for cause in STALLS
                if any(each.get(f"stall_{cause}_ms") for each in shown)
            },
        }
        for row in shown
    }
    caption = "Of all steps, prefills included, over all tokens: computing, and what it waited for."
    yield _figure(plot.stacked(stalls, "ms of a token", "compute and stalls"), caption)
    moved = {
        _cell(row): {
            "demand": row["bytes_demand"] / row["tokens"] / 1e6,
            "prefetched, not wasted": max(row["bytes_prefetch"] - row["bytes_wasted"], 0) / row["tokens"] / 1e6,
            "prefetched, wasted": min(row["bytes_wasted"], row["bytes_prefetch"]) / row["tokens"] / 1e6,
        }
        for row in shown
        if row["bytes_demand"] is not None
    }
    if moved:
        caption = (
            "Bytes over the link, by kind. What is not wasted was used, or is still in the cache. What requests that "
            "warm up have prefetched may be wasted later: no more is drawn than was prefetched."
        )
        yield _figure(plot.stacked(moved, "MB of a token", "bytes over the link"), caption)


_STALLS = {
    "demand": "wait for a miss",
    "late": "wait for a late prefetch",
    "behind_prefetch": "wait behind another prefetch",
    "predictor": "policy overhead",
    "host": "wait for the CPU",
    "disk": "wait for the disk",
}


def _cell(row: Row) -> str:
    return f"{row['policy']}, {size_text(row)}"


def _routing(sweep: Results) -> Iterator[Item]:
    """Yield the EAMs, and how alike they are."""
    trace = sweep.trace
    if trace is None:
        yield Item("text", "The trace is not there, so its routing is not drawn.")
        return
    eams = trace.eams(DECODE)
    phase = "decoded tokens"
    if not eams.sum():
        eams, phase = trace.eams(PREFILL), "prompts"
    routed = np.flatnonzero(eams.any(axis=(1, 2)))
    if not len(routed):
        yield Item("text", "Nothing was routed.")
        return
    eams, requests = eams[routed], trace.requests.iloc[routed]
    names = requests["id"].astype(str).tolist()
    whole = eams.sum(axis=0)
    places = np.linspace(0, len(names) - 1, min(MAPPED, len(names))).round().astype(int)
    maps = {"all requests": plot.shares(whole)} | {
        _short(names[i]): plot.shares(eams[i]) for i in dict.fromkeys(places.tolist())
    }
    caption = (
        f"Expert activation matrices of {phase}: how much of a layer's routing each expert has. The mean request uses "
        f"{_percent(float((eams > 0).mean()))} of all experts, all requests together use "
        f"{_percent(float((whole > 0).mean()))}."
    )
    yield _figure(plot.heat_maps(maps, "share of the layer's tokens"), caption)
    if len(names) < 2:
        yield Item("text", "There is one request only: nothing to compare it with.")
        return
    yield from _similarity(requests, eams)


def _similarity(requests: pd.DataFrame, eams: Any) -> Iterator[Item]:
    labels = (requests["dataset"].astype(str) + " / " + requests["task"].astype(str)).to_numpy()
    kept = np.unique(np.linspace(0, len(labels) - 1, min(COMPARED, len(labels))).round().astype(int))
    order = kept[np.argsort(labels[kept], kind="stable")]
    flat = eams[order].reshape(len(order), -1).astype(np.float64)
    flat /= np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-12)
    cosines = flat @ flat.T
    title = f"{len(order)} requests, ordered by task ({len(set(labels[order]))})"
    caption = "How alike requests are: bright blocks along the diagonal are tasks whose requests use the same experts."
    yield _figure(plot.similarity_map(cosines, title), caption)


def _short(name: str) -> str:
    return name if len(name) <= 24 else f"{name[:21]}..."


def _measured(replays: Sequence[Results]) -> Section:
    """Return predicted beside measured."""
    title, pairs, rows = "Predicted against measured", {}, []
    for replay in replays:
        of = f" ({replay.folder})" if len(replays) > 1 else ""
        for name, pair, row in _attempted(replay, partial(_predicted, replay, of)) or ():
            pairs[name] = pair
            rows.append(row)
    if not pairs:
        missing = "No replay was given. moe-replay --from FOLDER measures a sweep's winner; name its folder too."
        return Section(title, (Item("text", missing),))
    figure = plot.predicted_and_measured(pairs, "mean time per output token (ms)")
    head = ("run", "predicted TPOT, ms", "measured", "error", "predicted hit rate", "measured")
    caption = "Bars are the prediction as the machine's pace varied, where that was measured."
    return Section(title, (_figure(figure, caption), Item("table", head=head, rows=tuple(rows))))


def _predicted(replay: Results, of: str) -> Iterator[tuple[str, tuple[float, float, float, float], tuple[Shown, ...]]]:
    """Yield of each row its name, which ends in `of`, predicted, low, high and measured TPOT, and its table's row."""
    for row in replay.rows:
        predicted, measured = row.get("predicted_tpot_mean_ms"), row["tpot_mean_ms"]
        if predicted is None or measured is None:
            _note(replay, f"{replay.folder}: nothing was predicted, or nothing decoded, to compare")
            continue
        low, high = (row.get(f"predicted_tpot_{end}_ms") or predicted for end in ("low", "high"))
        name = f"{row['device']}: {_cell(row)}{of}"
        error = predicted / measured - 1
        hits = row.get("predicted_hit_rate")
        shown = (
            (name, None),
            (f"{predicted:,.3f}", predicted),
            (f"{measured:,.3f}", measured),
            (f"{error:+.1%}", error),
            (_percent(hits), hits),
            (_percent(row["hit_rate"]), row["hit_rate"]),
        )
        yield name, (predicted, low, high, measured), shown


def _commands(results: Sequence[Results], command: str) -> Section:
    lines = []
    sweeps = [shlex.quote(str(each.folder)) for each in results if each.setup]
    source = sweeps[0] if len(sweeps) == 1 else "SWEEP"
    for each in results:
        folder = shlex.quote(str(each.folder))
        if each.replayed:
            device = each.rows[0].get(DEVICE)
            lines.append(f"moe-replay --from {source} --device {device} --out {folder}")
        elif each.configured:
            lines.append(
                f"moe-sim sweep --config {shlex.quote(str(each.folder / config.NAME))} --out {folder} --resume"
            )
        elif (each.folder.parent / config.NAME).exists():
            file = shlex.quote(str(each.folder.parent / config.NAME))
            lines.append(f"moe-sim sweep --config {file} --out {shlex.quote(str(each.folder.parent))} --resume")
        elif each.rows:
            lines.append(f"# {folder} has no {config.NAME}: what was typed is not known")
    return Section("How to make it again", (Item("code", "\n".join([*dict.fromkeys(lines), command])),))


def _table(rows: Sequence[Row]) -> Item:
    shown = [[_shown(name, row) for name in COLUMNS] for row in rows]
    return Item("table", head=tuple(COLUMNS.values()), rows=tuple(map(tuple, shown)))


def _shown(name: str, row: Row) -> Shown:
    """Return a cell of the table, and what it sorts by: None for text."""
    if name == "policy":
        return (f"{row['policy']}{' (oracle)' if row['oracle'] else ''}", None)
    if name == "cache":
        return (size_text(row), row["cache_fraction"])
    if name.startswith("mb_"):
        value = row[f"bytes_{name[3:]}"]
        each = None if value is None or not row["tokens"] else value / row["tokens"] / 1e6
        return ("-" if each is None else f"{each:,.2f}", -1.0 if each is None else each)
    if name == "idle":
        idle, busy = row["gpu_idle_ms"], row["compute_busy_ms"]
        share = None if idle is None or busy is None or not idle + busy else idle / (idle + busy)
        return (_percent(share), -1.0 if share is None else share)
    value = row[name]
    if value is None:
        return ("-", -1.0)
    if name == "hit_rate":
        return (_percent(value), value)
    return (f"{value:,.0f}" if isinstance(value, int) or value > 1e5 else f"{value:,.4g}", float(value))


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _figure(figure: "Figure", caption: str) -> Item:
    return Item("figure", caption, svg_of(figure))


def svg_of(figure: "Figure") -> Markup:
    """Return a figure as SVG for a page, its text as text; matplotlib escapes what stands in it."""
    import matplotlib as mpl
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)
    held = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "moe"}):
        figure.savefig(held, format="svg", metadata={"Date": None, "Creator": None})
    whole = held.getvalue()
    return Markup(whole[whole.index("<svg") :])
