"""Predictions of rows, one fitted parameter a machine, and what the errors come to.

docs/backtest.md defines errors and scores. Those of hit rates are predicted - measured (0.02 is 2 points).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from sim.prediction import errors as errors_of
from sim.prediction.case import Case, Outcome
from sim.prediction.described import Machine, Row
from sim.prediction.machine import FITTED
from traces.errors import InputError, located

T = TypeVar("T")
K = TypeVar("K")

SEARCH = 8.0
"""A rate is searched between its value over and times this."""
OVERHEADS_US = 1.0, 30_000.0
"""Between these an overhead is searched, whatever its value."""
STEPS = 18
"""Of a golden-section search: finds a rate to 0.1%."""
NEAR_END = 1.02
"""Times a bound of the search within which it ended there."""
GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Result:
    """A row and what was predicted. blind: with no parameter fitted. None where the row is not simulated."""

    row: Row
    predicted: float | None = None
    blind: float | None = None
    hit_rate: float | None = None
    stand_in: str = ""
    kind: str = ""  # of what is known, of a speed or latency: see `sim.prediction.errors`
    spread: errors_of.Spread = errors_of.NONE  # of what is assumed
    warnings: tuple[str, ...] = ()
    failed: str = ""  # why it could not be simulated

    @property
    def interval(self) -> tuple[float, float] | None:
        """The figures between which 80% of machines were measured, with a prediction like this."""
        if self.predicted is None or not self.kind:
            return None
        each = errors_of.interval(self.kind).with_spread(self.spread)
        low, high = (each.low, each.high) if self.row.metric == "speed" else (1 / each.high, 1 / each.low)
        return self.predicted * low, self.predicted * high

    @property
    def inside(self) -> bool | None:
        return None if self.interval is None else self.interval[0] <= self.row.measured <= self.interval[1]

    @property
    def faster(self) -> float | None:
        if self.predicted is None or not self.row.timed:
            return None
        ratio = self.predicted / self.row.measured
        return ratio if self.row.metric == "speed" else 1 / ratio

    @property
    def scored(self) -> bool:
        return self.predicted is not None and not self.row.fit

    @property
    def assumes(self) -> bool:
        return bool(self.row.assumed or self.stand_in)

    @property
    def error(self) -> float | None:
        return None if self.predicted is None else self._error(self.predicted)

    @property
    def blind_error(self) -> float | None:
        return None if self.blind is None else self._error(self.blind)

    def _error(self, predicted: float) -> float:
        measured = self.row.measured
        return predicted - measured if self.row.metric == "hit rate" else predicted / measured - 1


@dataclass(frozen=True)
class FittedParameter:
    """A machine's fitted parameter."""

    file: str  # that states the machine
    machine: Machine
    parameter: str
    before: float
    after: float
    figures: tuple[str, ...]  # that it was fitted on
    at_end: bool = False  # whether the search ended at a bound, so that the parameter is not what is wrong


@dataclass(frozen=True)
class Backtest:
    """All rows, in order, and what was fitted."""

    results: list[Result]
    fits: list[FittedParameter]


def figure(row: Row, outcome: Outcome) -> float:
    if not row.timed:
        return outcome.hit_rate if row.metric == "hit rate" else outcome.bytes_read
    assert outcome.seconds
    return outcome.step_tokens / outcome.seconds if row.metric == "speed" else outcome.seconds


def backtest(
    rows: Sequence[Row], ended: Callable[[], None] = lambda: None, warn: Callable[[str], None] = lambda text: None
) -> Backtest:
    """Run all rows; `ended` is called after each, `warn` for one that cannot be run and for a missed hit rate."""
    simulated, failures = dict[int, tuple[Case, Outcome]](), dict[int, InputError]()
    for place, row in enumerate(rows):
        if row.unsimulated:
            continue
        try:
            with located(row.where):
                case = Case(row)
                case = case.aimed(case.hardware)
                simulated[place] = case, case.simulated(case.hardware)
            for text in case.warnings(simulated[place][1]):
                warn(f"{row.where}: {text}")
        except InputError as error:
            failures[place] = error
            warn(str(error))
        ended()
    if failures and not simulated:
        raise next(iter(failures.values()))
    fitting = grouped((case for case, _ in simulated.values() if case.row.fit), lambda case: _machine_key(case.row))
    fits = {machine: _fit(cases) for machine, cases in fitting.items()}
    results = []
    for place, row in enumerate(rows):
        if place not in simulated:
            results.append(Result(row, failed=str(failures.get(place, ""))))
            continue
        case, blind = simulated[place]
        final, kind, spread = blind, "", errors_of.NONE
        if row.timed and (fit := fits.get(_machine_key(row))):
            final, kind = _with_parameter(case, fit.parameter, fit.after), errors_of.CALIBRATED
        elif row.timed:
            kind, spread = errors_of.class_of(case), errors_of.spread_of(case)
        predicted = figure(row, final), figure(row, blind), final.hit_rate
        results.append(Result(row, *predicted, case.stand_in, kind, spread, case.warnings(blind)))
    return Backtest(results, list(fits.values()))


def _machine_key(row: Row) -> tuple[str, Machine | None]:
    """Return the key of its machine: each file names machines of its own, and rows may state theirs."""
    return row.file, row.machine


def _with_parameter(case: Case, parameter: str, value: float) -> Outcome:
    changed: dict[str, Any] = {FITTED[parameter]: value}
    return case.simulated(case.hardware and replace(case.hardware, **changed))


def _fit(cases: list[Case]) -> FittedParameter:
    """Search the value at which the mean square of the rows' logarithmic errors is least."""
    row, figures = cases[0].row, tuple(case.row.figure for case in cases)
    assert row.machine
    parameter = row.machine.fit_parameter
    before = float(getattr(cases[0].hardware, FITTED[parameter]))
    is_overhead = "us" in parameter.split("_")
    if not before and not is_overhead:
        raise InputError(f"{row.where}: its machine states nothing from which {parameter}, to be fitted, follows")

    def predicted(case: Case, value: float) -> float:
        return figure(case.row, _with_parameter(case, parameter, value))

    def loss(log_value: float) -> float:
        value = math.exp(log_value)
        return float(np.mean([math.log(predicted(case, value) / case.row.measured) ** 2 for case in cases]))

    low, high = OVERHEADS_US if is_overhead else (before / SEARCH, before * SEARCH)
    if all(predicted(case, low) == predicted(case, high) for case in cases):
        raise InputError(f"{row.where}: {parameter} has no effect on {', '.join(figures)}, which cannot fit it")
    after = math.exp(least(loss, math.log(low), math.log(high)))
    at_end = not low * NEAR_END < after < high / NEAR_END
    return FittedParameter(row.file, row.machine, parameter, before, after, figures, at_end)


def least(f: Callable[[float], float], low: float, high: float) -> float:
    """Return where between `low` and `high` a function with one valley is least, by golden sections."""
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
    sizes = [abs(result.error) for result in results if result.error is not None]
    median = float(np.median(sizes)) if sizes else None
    return {"rows": len(sizes), "median_abs_error": median, "worst_abs_error": max(sizes, default=None)}


def inside(results: Iterable[Result]) -> dict[str, Any]:
    """Return the bias of the speeds, and the shares in their interval of rows, and of machines that count as one."""
    known = [result for result in results if result.inside is not None and result.row.machine]
    if not known:
        return {"bias": None, "rows_inside": None, "machines_inside": None}
    machines = grouped(known, lambda r: _machine_key(r.row)).values()
    return {
        "bias": float(np.exp(np.mean([math.log(result.faster or 1) for result in known])) - 1),
        "rows_inside": float(np.mean([bool(result.inside) for result in known])),
        "machines_inside": float(np.mean([np.mean([bool(result.inside) for result in part]) for part in machines])),
    }


def blind_errors(results: Iterable[Result]) -> dict[str, Any]:
    return errors(replace(result, predicted=result.blind) for result in results)


def summary(test: Backtest) -> dict[str, Any]:
    scored = [result for result in test.results if result.scored]
    timed = [result for result in scored if result.row.timed]
    fitted = {(fit.file, fit.machine) for fit in test.fits}
    simulated = [result for result in test.results if result.predicted is not None and result.row.timed]
    after = [result for result in timed if _machine_key(result.row) in fitted]
    return {
        **errors(timed),
        "unsimulated": sum(result.predicted is None for result in test.results),
        "failed": sum(bool(result.failed) for result in test.results),
        **inside(timed),
        "by_class": {name: {**errors(part), **inside(part)} for name, part in grouped(timed, lambda r: r.kind).items()},
        "fit_rows": sum(result.row.fit for result in simulated),
        "without_assumptions": errors(result for result in timed if not result.assumes),
        "with_assumptions": errors(result for result in timed if result.assumes),
        "blind": blind_errors(simulated),
        "after_fit": errors(after),
        "same_rows_blind": blind_errors(after),
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


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
