"""Predictions of rows, one fitted parameter a machine, and what the errors come to.

Errors of speed, latency and bytes are predicted / measured - 1; of hit rates, predicted - measured (0.02 is 2 points).
The median and the worst are of speeds and latencies; hit rates and bytes are summed up apart. A row with fit = true
fits its machine's parameter and is in no score.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sim.backtest.file import DATA
from sim.prediction import errors as errors_of
from sim.prediction.case import Case, Outcome
from sim.prediction.described import Machine, Row
from sim.prediction.machine import FITTED
from sim.prediction.routing import PHONE
from sim.profiles.hardware_profile import Hardware
from sim.quantities import show_share
from traces.errors import InputError
from traces.steps import DECODE

SEARCH = 8.0
"""A rate is searched between its value over and times this."""
OVERHEADS_US = 1.0, 30_000.0
"""Between these an overhead is searched, whatever its value."""
STEPS = 18
"""Of a golden-section search: finds a rate to 0.1%."""
NEAR_END = 1.02
"""Times a bound of the search within which it ended there."""
GOLDEN = (math.sqrt(5) - 1) / 2
LANES = 4
"""Reads in flight at once; the device adds up the time of each."""


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
        """Predicted over measured speed."""
        if self.predicted is None or not self.row.timed:
            return None
        ratio = self.predicted / self.row.measured
        return ratio if self.row.metric == "speed" else 1 / ratio

    @property
    def scored(self) -> bool:
        """Whether it has a prediction, and fits nothing."""
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
    token_by_token: dict[str, Any] | None = None  # of the phone run, where a row times it


def figure(row: Row, outcome: Outcome) -> float:
    if not row.timed:
        return outcome.hit_rate if row.metric == "hit rate" else outcome.bytes_read
    assert outcome.seconds
    return outcome.step_tokens / outcome.seconds if row.metric == "speed" else outcome.seconds


def backtest(
    rows: Sequence[Row],
    ended: Callable[[], None] = lambda: None,
    warn: Callable[[str], None] = lambda text: None,
) -> Backtest:
    """Run all rows; `ended` is called after each, `warn` for a missed hit rate."""
    cases = {row.figure: Case(row) for row in rows if not row.unsimulated}
    outcomes, failures, warnings = dict[str, Outcome](), dict[str, InputError](), dict[str, tuple[str, ...]]()
    for name, case in list(cases.items()):
        try:
            cases[name] = case.aimed(case.hardware)
            outcomes[name] = cases[name].simulated(case.hardware)
        except InputError as error:
            failures[name] = InputError(
                str(error) if str(error).startswith(case.row.where) else f"{case.row.where}: {error}"
            )
            warn(str(failures[name]))
        else:
            warnings[name] = _warnings(cases[name], outcomes[name])
            for text in warnings[name]:
                warn(f"{case.row.where}: {text}")
        ended()
    if failures and not outcomes:
        raise next(iter(failures.values()))
    blind = {name: cases[name].hardware for name in outcomes}
    fitting: dict[tuple[str, Machine], list[Row]] = {}
    for row in rows:
        if row.fit and row.figure in outcomes:
            fitting.setdefault(_machine_key(row), []).append(row)
    fits = {machine: _fit(fitted, cases, blind) for machine, fitted in fitting.items()}
    results = []
    for row in rows:
        if row.figure not in outcomes:
            results.append(Result(row, failed=str(failures.get(row.figure, ""))))
            continue
        case, own, final = cases[row.figure], blind[row.figure], outcomes[row.figure]
        kind = errors_of.class_of(case) if own else ""
        spread = errors_of.spread_of(case) if own else errors_of.NONE
        if own and (fit := fits.get(_machine_key(row))):
            changed: dict[str, Any] = {FITTED[fit.parameter]: fit.after}
            final = case.simulated(replace(own, **changed))
            kind, spread = errors_of.CALIBRATED, errors_of.NONE
        results.append(
            Result(
                row,
                figure(row, final),
                figure(row, outcomes[row.figure]),
                final.hit_rate,
                case.stand_in,
                kind,
                spread,
                warnings[row.figure],
            )
        )
    of_phone = (row.figure for row in rows if row.setting.trace == PHONE and row.timed and row.figure in outcomes)
    phone = next(map(outcomes.__getitem__, of_phone), None)
    return Backtest(results, list(fits.values()), token_by_token(phone) if phone else None)


def _warnings(case: Case, outcome: Outcome) -> tuple[str, ...]:
    wanted, reached = case.row.setting.hit_rate, case.off(outcome) + case.row.setting.hit_rate
    if not case.is_far(outcome):
        return ()
    return (
        f"{case.policy.text} hits {show_share(reached)}, far from the hit_rate of {show_share(wanted)} that was "
        f"measured",
    )


def _machine_key(row: Row) -> tuple[str, Machine]:
    """Return the key of its machine: each file names machines of its own, and rows may state theirs."""
    assert row.machine
    return row.file, row.machine


def _fit(rows: list[Row], cases: dict[str, Case], blind: dict[str, Hardware | None]) -> FittedParameter:
    """Search the value at which the mean square of the rows' logarithmic errors is least."""
    file, machine = _machine_key(rows[0])
    parameter = machine.fit_parameter
    before = float(getattr(blind[rows[0].figure], FITTED[parameter]))
    is_overhead = "us" in parameter.split("_")
    if not before and not is_overhead:
        raise InputError(f"{rows[0].where}: its machine states nothing from which {parameter}, to be fitted, follows")

    def predicted(row: Row, value: float) -> float:
        own = blind[row.figure]
        assert own
        changed: dict[str, Any] = {FITTED[parameter]: value}
        return figure(row, cases[row.figure].simulated(replace(own, **changed)))

    def loss(log_value: float) -> float:
        value = math.exp(log_value)
        return float(np.mean([math.log(predicted(row, value) / row.measured) ** 2 for row in rows]))

    low, high = OVERHEADS_US if is_overhead else (before / SEARCH, before * SEARCH)
    if all(predicted(row, low) == predicted(row, high) for row in rows):
        names = ", ".join(row.figure for row in rows)
        raise InputError(f"{rows[0].where}: {parameter} has no effect on {names}, which cannot fit it")
    after = math.exp(least(loss, math.log(low), math.log(high)))
    at_end = not low * NEAR_END < after < high / NEAR_END
    return FittedParameter(file, machine, parameter, before, after, tuple(row.figure for row in rows), at_end)


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
    machines = [list(part) for part in grouped(known, lambda r: str(_machine_key(r.row))).values()]
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


def grouped(results: Iterable[Result], key: Callable[[Result], str]) -> dict[str, list[Result]]:
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(key(result), []).append(result)
    return groups


def token_by_token(outcome: Outcome) -> dict[str, Any]:
    """Compare the phone's run with what the device measured; totals in bytes and in seconds of the disk."""
    log = outcome.log
    decoded = log.phase == DECODE
    measured = pd.read_parquet(DATA / f"{PHONE}.tokens.parquet")
    hit_rate = float(log.hits.sum() / (log.hits + log.late + log.misses).sum())
    return {
        "tokens": len(measured),
        "hit_rate": {"predicted": hit_rate, "measured": float(measured.cache_hit_pct.iloc[-1] / 100)},
        "bytes_read": _compared(log.demand_bytes[decoded], measured.read_bytes.to_numpy()),
        "io_s": _compared(log.link_busy_ns[decoded] / 1e9, measured.io_ms.to_numpy() / 1e3 / LANES),
        "wall_s": _compared(log.step_ns[decoded] / 1e9, measured.wall_ms.to_numpy() / 1e3),
    }


def _compared(predicted: NDArray[Any], measured: NDArray[Any]) -> dict[str, float]:
    """Return totals, the correlation over tokens, and the median of the tokens' absolute errors."""
    return {
        "predicted": float(predicted.sum()),
        "measured": float(measured.sum()),
        "correlation": float(np.corrcoef(predicted, measured)[0, 1]),
        "median_abs_error": float(np.median(np.abs(predicted / measured - 1))),
    }
