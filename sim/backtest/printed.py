"""The back-test as people read it: tables of text, the same as Markdown for docs/backtest.md, and rows for JSON."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sim.backtest.score import Backtest, Result, blind_errors, errors, grouped, inside, summary
from sim.prediction.described import UNITS
from sim.prediction.errors import NARROWER
from sim.quantities import show_share

Cells = list[str]


def row_of(result: Result) -> dict[str, Any]:
    row = result.row
    unit = UNITS[row.metric][row.unit]
    in_unit = {
        key: None if value is None else value / unit
        for key, value in (("predicted", result.predicted), ("blind", result.blind))
    }
    return {
        "figure": row.figure,
        "group": row.group,
        "system": row.system,
        "model": row.model.name if row.model else None,
        "machine": row.machine.name if row.machine else None,
        "metric": row.metric,
        "unit": row.unit,
        "measured": row.value,
        **in_unit,
        "error": result.error,
        "blind_error": result.blind_error,
        "interval": [value / unit for value in result.interval] if result.interval else None,
        "inside": result.inside,
        "class": result.kind or None,
        "hit_rate": result.hit_rate,
        "fit": row.fit,
        "scored": result.scored,
        "quality": row.quality,
        "assumed": list(row.assumed),
        "stand_in": result.stand_in or None,
        "warnings": list(result.warnings),
        "unsimulated": row.unsimulated or result.failed or None,
        "source": row.source,
    }


def tables(test: Backtest) -> list[tuple[str, list[Cells]]]:
    """Return the tables of the report: a heading, and rows of cells of which the first holds the columns' names."""
    timed = [result for result in test.results if result.scored and result.row.timed]
    found = [
        ("By source", _grouped(timed, lambda result: result.row.group)),
        ("By what is known", _classes(timed)),
        ("By system", _grouped(timed, lambda result: result.row.system)),
    ]
    if test.fits:
        fits: list[Cells] = [["machine", "fitted", "general", "fitted to", "on"]]
        for fit in test.fits:
            after = f"{fit.after:.4g}" + (" (the search ended there)" if fit.at_end else "")
            fits.append([fit.machine.name, fit.parameter, f"{fit.before:.4g}", after, ", ".join(fit.figures)])
        found.append(("One fitted parameter a machine", fits))
    others = [result for result in test.results if result.scored and not result.row.timed]
    if others:
        found.append(("Hit rates and bytes, without a clock", [_FIGURES, *map(_figures, others)]))
    if unsimulated := [result for result in test.results if result.predicted is None]:
        reasons = [[result.row.figure, result.row.unsimulated or result.failed] for result in unsimulated]
        found.append(("Not simulated", [["figure", "reason"], *reasons]))
    return found


REACHED = 0.01
"""Off what was measured, a fitted row is reached by its parameter."""

_FIGURES = ["figure", "measured", "predicted", "interval", "error", "blind", "assumed"]


def every_row(test: Backtest) -> list[tuple[str, list[Cells]]]:
    """Return a table for each source: every simulated speed and latency, those that fit included."""
    timed = [result for result in test.results if result.row.timed and result.predicted is not None]
    return [(name, [_FIGURES, *map(_figures, part)]) for name, part in grouped(timed, lambda r: r.row.group).items()]


def _figures(result: Result) -> Cells:
    row, unit = result.row, UNITS[result.row.metric][result.row.unit]
    assert result.predicted is not None
    assumed = [*row.assumed, *([f"routing like {result.stand_in}"] if result.stand_in else [])]
    return [
        row.figure,
        f"{row.value:.4g} {row.unit}",
        f"{result.predicted / unit:.4g}",
        _interval(result, unit),
        _fitted(result) if row.fit else _error(result, result.error),
        _error(result, result.blind_error),
        "; ".join(assumed) or "-",
    ]


def _interval(result: Result, unit: float) -> str:
    if result.interval is None:
        return "-"
    low, high = (value / unit for value in result.interval)
    return f"{low:.3g} to {high:.3g}" + ("" if result.inside else ", outside")


def _classes(results: Sequence[Result]) -> list[Cells]:
    lines: list[Cells] = [["", "rows", "median", "worst", "bias", "rows inside", "machines inside", "narrower by"]]
    for name, part in [*grouped(results, lambda result: result.kind).items(), ("all", list(results))]:
        shares = inside(part)
        held = [show_share(shares[key]) for key in ("rows_inside", "machines_inside")]
        bias = f"{shares['bias']:+.1%}" if shares["bias"] is not None else "-"
        lines.append([name, *_rows_and_errors(part), bias, *held, NARROWER.get(name, "-")])
    return lines


def _fitted(result: Result) -> str:
    """Return that a row fits its machine, and how far it is off where no value of the parameter reaches it."""
    reached = result.error is not None and abs(result.error) < REACHED
    return "fits" if reached else f"fits, {_error(result, result.error)}"


def _error(result: Result, error: float | None) -> str:
    if error is None:
        return "-"
    return f"{100 * error:+.1f} points" if result.row.metric == "hit rate" else f"{error:+.1%}"


def headline(test: Backtest) -> str:
    scores = summary(test)
    blind, after, before = scores["blind"], scores["after_fit"], scores["same_rows_blind"]
    lines = f"{_errors(scores)} over {scores['rows']} speeds and latencies, {scores['fit_rows']} fit, "
    lines += f"{scores['unsimulated']} not simulated; "
    if scores["bias"] is not None:
        lines += f"bias {scores['bias']:+.1%}, {show_share(scores['machines_inside'])} of machines in their interval; "
    lines += f"blind {_errors(blind)} over {blind['rows']}"
    if after["rows"]:
        lines += f"; of {after['rows']} rows on fitted machines {_errors(after)}, blind {_errors(before)}"
    return lines


def _errors(scores: dict[str, Any]) -> str:
    return f"median {show_share(scores['median_abs_error'])}, worst {show_share(scores['worst_abs_error'])}"


def _grouped(results: Sequence[Result], key: Callable[[Result], str]) -> list[Cells]:
    lines: list[Cells] = [["", "rows", "median", "worst", "median, nothing assumed", "blind median"]]
    for name, part in [*grouped(results, key).items(), ("all", list(results))]:
        scores = errors(result for result in part if not result.assumes), blind_errors(part)
        lines.append([name, *_rows_and_errors(part), *(show_share(each["median_abs_error"]) for each in scores)])
    return lines


def _rows_and_errors(results: Iterable[Result]) -> Cells:
    scores = errors(results)
    return [str(scores["rows"]), show_share(scores["median_abs_error"]), show_share(scores["worst_abs_error"])]


def text(test: Backtest, every: bool = False) -> str:
    parts = [headline(test)]
    for heading, rows in [*tables(test), *(every_row(test) if every else [])]:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in columns).rstrip()
            for columns in (list(enumerate(zip(row[:-1], widths, strict=False))) for row in rows)
        ]
        parts.append("\n".join([heading, *(f"  {line}  {row[-1]}" for line, row in zip(lines, rows, strict=True))]))
    return "\n\n".join(parts)
