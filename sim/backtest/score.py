"""Predictions of rows, one fitted parameter a machine, and what the errors come to.

Errors of speed, latency and bytes are predicted / measured - 1; of hit rates, predicted - measured (0.02 is 2 points).
The median and the worst are of speeds and latencies; hit rates and bytes are summed up apart. A row with fit = true
fits its machine's parameter and is in no score.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sim.backtest import phone
from sim.backtest.file import Machine, Row
from sim.backtest.machine import Rates, rates
from sim.backtest.play import Case, Played, parsed
from sim.backtest.routing import PHONE
from sim.quantities import show_share
from traces.errors import InputError, located

TIMED = ("speed", "latency")
SEARCH = 8.0
"""A rate is searched between its value over and times this."""
OVERHEADS_US = 1.0, 30_000.0
"""Between these an overhead is searched, whatever its value."""
STEPS = 18
"""Of a golden-section search: finds a rate to 0.1%."""
GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Result:
    """A row and what was predicted. blind: with no parameter fitted. None where the row is not simulated."""

    row: Row
    predicted: float | None = None
    blind: float | None = None
    hit_rate: float | None = None
    stand_in: str = ""

    @property
    def timed(self) -> bool:
        """Whether it is a speed or a latency."""
        return self.row.metric in TIMED

    @property
    def scored(self) -> bool:
        """Whether it has a prediction, and fits nothing."""
        return self.predicted is not None and not self.row.fit

    @property
    def assumes(self) -> bool:
        """Whether anything had to be assumed."""
        return bool(self.row.assumed or self.stand_in)

    @property
    def error(self) -> float | None:
        """Of the prediction."""
        return None if self.predicted is None else self._error(self.predicted)

    @property
    def blind_error(self) -> float | None:
        """Of the blind prediction."""
        return None if self.blind is None else self._error(self.blind)

    def _error(self, predicted: float) -> float:
        measured = self.row.measured
        if self.row.metric == "hit rate":
            return predicted - measured
        return predicted / measured - 1


@dataclass(frozen=True)
class Fit:
    """A machine's fitted parameter."""

    file: str  # that states the machine
    machine: Machine
    parameter: str
    before: float
    after: float
    figures: tuple[str, ...]  # that it was fitted on


@dataclass(frozen=True)
class Backtest:
    """All rows, in order, and what was fitted."""

    results: list[Result]
    fits: list[Fit]
    token_by_token: dict[str, Any] | None = None  # of the phone run, where a row times it


def figure(row: Row, played: Played) -> float:
    """Return what the row measures, in its metric's own unit."""
    if row.metric == "hit rate":
        return played.hit_rate
    if row.metric == "bytes read":
        return played.bytes_read
    assert played.seconds
    return played.step_tokens / played.seconds if row.metric == "speed" else played.seconds


def backtest(
    rows: Sequence[Row],
    engine: str,
    factors: Mapping[str, Any] | None = None,
    ended: Callable[[], None] = lambda: None,
    warn: Callable[[str], None] = lambda text: None,
) -> Backtest:
    """Run all rows; `ended` is called after each, `warn` for numbers that are cut and a missed hit rate."""
    cases = {row.figure: Case(row) for row in rows if not row.unsimulated}
    for case in cases.values():
        parsed(case)
    blind = {name: rates_of(case.row, factors) for name, case in cases.items()}
    played = {}
    for name, case in cases.items():
        cases[name] = case.aimed(blind[name], engine)
        played[name] = cases[name].played(blind[name], engine)
        for text in case.cut():
            warn(f"{case.row.where}: setting: {text}")
        if cases[name].is_far(played[name]):
            reached, wanted = show_share(played[name].hit_rate), show_share(case.row.setting.hit_rate)
            warn(f"{case.row.where}: {case.policy} hits {reached}, far from the hit_rate of {wanted} that was measured")
        ended()
    fits = [_fit(fitted, cases, blind, engine) for fitted in _fitted(rows).values()]
    values = {(fit.file, fit.machine): fit for fit in fits}
    results = []
    for row in rows:
        if row.unsimulated:
            results.append(Result(row))
            continue
        final, own = played[row.figure], blind[row.figure]
        if own and (fit := values.get(_machine_key(row))):
            final = cases[row.figure].played(replace(own, **{fit.parameter: fit.after}), engine)
        results.append(
            Result(
                row,
                figure(row, final),
                figure(row, played[row.figure]),
                final.hit_rate,
                cases[row.figure].stand_in,
            )
        )
    of_phone = next((played[row.figure] for row in rows if row.setting.trace == PHONE and row.metric in TIMED), None)
    return Backtest(
        results,
        fits,
        phone.token_by_token(of_phone) if of_phone else None,
    )


def rates_of(row: Row, factors: Mapping[str, Any] | None = None) -> Rates | None:
    """Return the rates of a row's machine; None where it is counted without a clock."""
    if row.machine is None or row.metric not in TIMED:
        return None
    with located(row.where):
        return rates(row.machine, row.system, factors)


def _machine_key(row: Row) -> tuple[str, Machine]:
    """Return what its machine is known by: each file names machines of its own, and rows may state theirs."""
    assert row.machine
    return row.file, row.machine


def _fitted(rows: Iterable[Row]) -> dict[tuple[str, Machine], list[Row]]:
    """The rows that fit, by machine."""
    found: dict[tuple[str, Machine], list[Row]] = {}
    for row in rows:
        if row.fit and not row.unsimulated and row.metric in TIMED:
            found.setdefault(_machine_key(row), []).append(row)
    return found


def _fit(rows: list[Row], cases: dict[str, Case], blind: dict[str, Rates | None], engine: str) -> Fit:
    """Search the value at which the mean square of the rows' logarithmic errors is least."""
    file, machine = _machine_key(rows[0])
    parameter = machine.fit_parameter
    own = {row.figure: blind[row.figure] for row in rows}
    before = float(getattr(next(iter(own.values())), parameter))
    if not before and not _is_overhead(parameter):
        raise InputError(
            f"{rows[0].where}: its machine states nothing from which {parameter} follows, which is to be fitted"
        )

    def predicted(row: Row, value: float) -> float:
        rates_ = own[row.figure]
        assert rates_
        return figure(row, cases[row.figure].played(replace(rates_, **{parameter: value}), engine))

    def loss(log_value: float) -> float:
        value = math.exp(log_value)
        return float(np.mean([math.log(predicted(row, value) / row.measured) ** 2 for row in rows]))

    low, high = OVERHEADS_US if _is_overhead(parameter) else (before / SEARCH, before * SEARCH)
    if all(predicted(row, low) == predicted(row, high) for row in rows):
        names = ", ".join(row.figure for row in rows)
        raise InputError(f"{rows[0].where}: {parameter} has no effect on {names}, which cannot fit it")
    return Fit(
        file,
        machine,
        parameter,
        before,
        math.exp(least(loss, math.log(low), math.log(high))),
        tuple(row.figure for row in rows),
    )


def _is_overhead(parameter: str) -> bool:
    return "us" in parameter.split("_")


def least(f: Callable[[float], float], low: float, high: float) -> float:
    """Return where a function with one valley between these is least, by golden sections."""
    a, b = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    fa, fb = f(a), f(b)
    for _ in range(STEPS):
        if fa <= fb:
            high, b, fb = b, a, fa
            a = high - GOLDEN * (high - low)
            fa = f(a)
        else:
            low, a, fa = a, b, fb
            b = low + GOLDEN * (high - low)
            fb = f(b)
    return (low + high) / 2


def errors(results: Iterable[Result]) -> dict[str, Any]:
    """Return how many rows there are, and the median and the worst of their absolute errors; null where none is."""
    found = [abs(result.error) for result in results if result.error is not None]
    return {
        "rows": len(found),
        "median_abs_error": float(np.median(found)) if found else None,
        "worst_abs_error": max(found) if found else None,
    }


def summary(test: Backtest) -> dict[str, Any]:
    """Return what it comes to: see the head of this file."""
    scored = [result for result in test.results if result.scored]
    timed = [result for result in scored if result.timed]
    fitted = {(fit.file, fit.machine) for fit in test.fits}
    simulated = [result for result in test.results if result.predicted is not None and result.timed]
    blind = [replace(result, predicted=result.blind) for result in simulated]
    after = [result for result in timed if _machine_key(result.row) in fitted]
    return {
        **errors(timed),
        "unsimulated": sum(result.predicted is None for result in test.results),
        "fit_rows": sum(result.row.fit for result in simulated),
        "without_assumptions": errors(result for result in timed if not result.assumes),
        "with_assumptions": errors(result for result in timed if result.assumes),
        "blind": errors(blind),
        "after_fit": errors(after),
        "same_rows_blind": errors(replace(result, predicted=result.blind) for result in after),
        "hit_rates": errors(result for result in scored if result.row.metric == "hit rate"),
        "bytes_read": errors(result for result in scored if result.row.metric == "bytes read"),
        "by_system": {name: errors(part) for name, part in grouped(timed, lambda r: r.row.system).items()},
        "by_source": {name: errors(part) for name, part in grouped(timed, lambda r: r.row.group).items()},
        "fitted": [
            {
                "machine": fit.machine.name,
                "parameter": fit.parameter,
                "before": fit.before,
                "after": fit.after,
                "rows": list(fit.figures),
            }
            for fit in test.fits
        ],
    }


def grouped(results: Iterable[Result], key: Callable[[Result], str]) -> dict[str, list[Result]]:
    """Return the results by a key, in the order of their first one."""
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(key(result), []).append(result)
    return found
