"""The public functions of sim: `simulate` runs a policy over a trace, `sweep` runs many at several cache sizes.

Parameters have the names of the commands' options, and the same defaults. What is wrong with one is an InputError, a
ValueError whose text names the parameter; what a command would warn of is a warning.
"""

import dataclasses
import inspect
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack, get_type_hints

import pandas as pd

from policies.core.grammar import policy_title, split_list
from policies.core.spec import PolicyLike, text_of
from sim import defaults
from sim.engines import compiling
from sim.experiment import OPTIONS, Experiment
from sim.keywords import RunKeywords
from sim.loaded import CountedRun, Loaded, TimedRun, timed
from sim.loaded import load as read_files
from sim.loop.log import RunLog, joined
from sim.quantities import CacheSize, cache_text
from sim.results import compare, plot, steps
from sim.results.compare import Difference, differences, pairs_within, swept_run, swept_runs
from sim.results.metrics import Row, cell_text
from sim.sweeps import grid, notes, verdict
from sim.sweeps.config import seeded, specs
from sim.systems.predict import Setting, chosen
from traces.trace import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

P = ParamSpec("P")
T = TypeVar("T")
Run = TypeVar("Run", bound=Loaded)

TraceLike = Trace | Path | str

FIGURES = ("hit_rate", "tpot_mean_ms", "ttft_mean_ms", "tokens_per_s")
"""Columns of results that a short description shows."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class RunResult:
    """One simulated run: its totals, and a table of its steps and of its requests.

    row: the columns of results.parquet, described in docs/glossary.md and sim/results/metrics.py; `run["tpot_p99_ms"]`
    is one of them. steps: a row for each forward pass. requests: a row for each request.
    """

    row: Row
    steps: pd.DataFrame
    requests: pd.DataFrame

    def __getitem__(self, column: str) -> Any:
        return self.row[column]

    def __repr__(self) -> str:
        return f"<Run of {_title(self.row)}: {_figures(self.row)}>"

    def _repr_html_(self) -> str:
        shown = {name: self.row[name] for name in FIGURES if self.row[name] is not None}
        return _html([_title(self.row)], pd.DataFrame([shown]))

    @property
    def policy(self) -> str:
        return str(self.row["policy"])

    @property
    def hit_rate(self) -> float:
        """Return hits over lookups."""
        return float(self.row["hit_rate"])

    @property
    def tpot_mean_ms(self) -> float | None:
        """Return the mean time per output token; None if the run is untimed or decodes nothing."""
        return self.row["tpot_mean_ms"]  # type: ignore[no-any-return]

    @property
    def ttft_mean_ms(self) -> float | None:
        """Return the mean time to the first token; None if the run is untimed or has no prefill."""
        return self.row["ttft_mean_ms"]  # type: ignore[no-any-return]

    def compare(self, baseline: "RunResult", seed: int = 0) -> "Comparison":
        """Return the differences from a baseline, with intervals over the requests that both ran.

        seed: of the bootstrap. Raises InputError if the two did not run the same requests.
        """
        one, other = (swept_run(each.row, each.requests) for each in (baseline, self))
        return Comparison(differences(one, other, seed=seed))

    def plot(self) -> "Figure":
        """Return a figure of where the time of each step went; untimed, of its hit rate. Needs matplotlib."""
        return plot.steps(self.steps, _title(self.row))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class SweepResult:
    """The runs of a sweep: one for each policy and cache size.

    rows: the columns of results.parquet for each run. bound: the same of Belady, for plots. requests: a row for each
    run and request. Shows itself in notebooks: `verdict` above the main columns of `frame`.
    """

    rows: list[Row]
    bound: list[Row]
    requests: pd.DataFrame
    token_share: float  # experts that one token needs, as a share of all experts

    @cached_property
    def frame(self) -> pd.DataFrame:
        """Return a row for each run, with the columns of results.parquet."""
        return pd.DataFrame(self.rows)

    @property
    def policies(self) -> list[str]:
        """Return the policies in the order in which they were given."""
        return list(dict.fromkeys(row["policy"] for row in self.rows))

    def __repr__(self) -> str:
        shown = [column for column in FIGURES if any(row[column] is not None for row in self.rows)]
        titles = [policy_title(row["policy"], row["oracle"]) for row in self.rows]
        table = self.frame[["policy", "cache_experts", "cache_fraction", *shown]].assign(policy=titles)
        first = self.rows[0]
        where = f" on {first['hardware']}" if first["hardware"] else ", untimed"
        whole = f"Sweep of {first['trace']} ({first['model']}{where}):\n{table.to_string(index=False)}"
        return "\n".join([*verdict.lossy(self.rows), whole])

    def _repr_html_(self) -> str:
        shown = ["policy", "cache_experts", "cache_fraction", *FIGURES, "gap_hits", "gap_latency"]
        return _html(self.verdict, self.frame[shown].dropna(axis=1, how="all"))

    @property
    def verdict(self) -> list[str]:
        """Return what the sweep means: what to run, what it gains over LRU, how sure that is, what memory buys."""
        return verdict.sentences(self.rows, swept_runs(self.rows, self.requests))

    def compare(self, baseline: PolicyLike, seed: int = 0) -> "Comparison":
        """Return the differences of all policies from the baseline policy at the same cache size, paired over requests.

        seed: of the bootstrap. Raises InputError if the sweep did not run the baseline.
        """
        runs = swept_runs(self.rows, self.requests)
        first = text_of(baseline)
        pairs = pairs_within(runs, [first, *(text for text in self.policies if text != first)])
        return Comparison([found for pair in pairs for found in differences(*pair, seed=seed)])

    def plot(self, column: str = "") -> "Figure":
        """Return a figure of a column of results against the cache size. Needs matplotlib.

        column: hit_rate, tpot_mean_ms or ttft_mean_ms. Default: the mean TPOT, or the hit rate of untimed runs.
        """
        chosen = column or ("hit_rate" if self.rows[0]["tpot_mean_ms"] is None else "tpot_mean_ms")
        spans = compare.spans(swept_runs(self.rows, self.requests), chosen)
        return plot.figure(self.rows, self.bound, self.token_share, chosen, spans=spans)


class Comparison(list[Difference]):
    """Paired differences between runs, each with a 95% bootstrap interval."""

    def __repr__(self) -> str:
        several = len({difference.cache_experts for difference in self}) > 1
        size = "{:,} experts: " if several else ""
        return "\n".join(size.format(difference.cache_experts) + difference.sentence() for difference in self)

    def _repr_html_(self) -> str:
        return _html([], self.frame)

    @property
    def frame(self) -> pd.DataFrame:
        """Return a row for each difference: cache, measure, run, baseline, more, low, high, unit and requests."""
        columns = ["cache_experts", "measure", "run", "baseline", "more", "low", "high", "unit", "requests"]
        named = ({"run": each.cell, "measure": each.measure.name, "unit": each.measure.unit} for each in self)
        return pd.DataFrame([{**vars(each), **own} for each, own in zip(self, named, strict=True)], columns=columns)


def with_options(function: Callable[P, T]) -> Callable[P, T]:
    """Show the fields of an experiment as keywords in a function's signature, and what they are in its docstring."""
    own = list(inspect.signature(function).parameters.values())[:-1]
    more = list(inspect.signature(Experiment).parameters.values())[1:]
    types = get_type_hints(Experiment)  # without limits and help
    keywords = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=types[each.name]) for each in more]
    helps = (f"{each.name}: {OPTIONS[each.name].help or 'Of what is drawn, such as arrivals.'}" for each in more)
    texts = (re.sub(r"--([a-z-]+)", lambda flag: flag[1].replace("-", "_"), text) for text in helps)
    listed = [textwrap.fill(text, 110, subsequent_indent="    ") for text in texts]
    function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), "", "Options:", *listed])
    function.__dict__["__signature__"] = inspect.signature(function).replace(parameters=[*own, *keywords])
    return function


@with_options
def simulate(
    trace: TraceLike,
    policy: PolicyLike = defaults.POLICY,
    cache_size: CacheSize = defaults.CACHE_SIZE,
    **options: Unpack[RunKeywords],
) -> RunResult:
    """Return what one policy does with one cache over a trace, on a simulated machine.

    trace: a `Trace`, or the folder or URL of one. policy: a name, a class, or what `make_policy` returns.
    cache_size: "25%", 0.25, 64 (experts), "12/layer" or "8GiB". options: the fields of `sim.experiment.Experiment`;
    hardware="a5000" is the default machine.

    Raises InputError for whatever cannot be run, and for a fault of the policy; TypeError for an unknown option.
    """
    loaded = load(trace, options)
    spec = seeded(policy, loaded.experiment.seed)
    requested = grid.grid_of(loaded, [spec], [cache_text(cache_size)])
    loaded = _prepared(loaded, requested)
    (slots,) = requested.sizes.values()
    parts: list[RunLog] = []
    (summary,) = grid.summed(loaded, spec, [slots], lambda requests: None, parts.append)
    row = {**summary.row(), **summary.latencies()} if isinstance(loaded, TimedRun) else summary.row()
    return result_of(row, joined(parts), summary.requests().to_pandas(), loaded)


def result_of(row: Row, log: RunLog, requests: pd.DataFrame, loaded: Loaded) -> RunResult:
    return RunResult(row, steps.frame(log, loaded.trace.requests["id"], loaded.experiment.warmup_requests), requests)


@with_options
def sweep(
    trace: TraceLike,
    policies: Sequence[PolicyLike] = defaults.POLICIES,
    cache_sizes: Sequence[CacheSize] = defaults.CACHE_SIZES,
    *,
    seeds: Sequence[int] | None = None,
    workers: int = 1,
    **options: Unpack[RunKeywords],
) -> SweepResult:
    """Return what each policy does at each cache size over a trace.

    policies, cache_sizes: lists, or texts with commas, as commands take them. Other arguments are those of `simulate`.
    seeds: policies that draw are run once with each. Default: `seed`.
    workers: how many runs at a time. With several, some policies run in processes: a script then needs
    `if __name__ == "__main__":`, as for any use of multiprocessing. Neither number nor order changes a result.

    Raises InputError for whatever cannot be run, and for a fault of a policy; TypeError for an unknown option.
    """
    loaded = load(trace, options)
    drawn = specs(_listed(policies), None, (loaded.experiment.seed,) if seeds is None else seeds)
    requested = grid.grid_of(loaded, drawn, [cache_text(size) for size in _listed(cache_sizes)])
    loaded = _prepared(loaded, requested)
    found, requests = grid.run_grid(loaded, requested, workers)
    return SweepResult(found.rows, found.bound, requests, loaded.token_experts / loaded.all_experts)


def predict_systems(
    trace: TraceLike, systems: Sequence[str] = (), cache_size: str | None = None, **options: Unpack[RunKeywords]
) -> pd.DataFrame:
    """Return what other systems would take for a trace's decoded tokens on one machine, a row each.

    systems: names of `moe-sim systems`, all by default. cache_size: GPU memory for experts, the same for all; by
    default what the dense part and its KV cache leave. Columns are those of `sim.systems.predict.Prediction`, in ms;
    `reason` says why a system cannot run this. Raises InputError and TypeError as `simulate` does.
    """
    loaded = timed(load(trace, options))
    setting = Setting(loaded, cache_size)
    rows = [vars(setting.predicted(system)) for system in chosen(systems)]
    return pd.DataFrame([{**row, "system": row["system"].name} for row in rows])


def load(trace: TraceLike, options: Mapping[str, Any]) -> CountedRun | TimedRun:
    """Return a trace with the options of a run. Raise InputError for what cannot be, TypeError for a wrong name."""
    known = [name for name in OPTIONS if name != "trace"]
    if unknown := set(options) - set(known):
        raise TypeError(f"unknown option {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    if isinstance(trace, Trace):
        return read_files(Experiment.of({"trace": trace.name, **options}), trace)
    return read_files(Experiment.of({"trace": trace, **options}))


def _listed(given: Sequence[Any]) -> Sequence[Any]:
    return split_list(given) if isinstance(given, str) else given


def _prepared(loaded: Run, requested: grid.Grid) -> Run:
    """Return the run with what policies cost; warn of what commands warn of, and print what they note."""
    us = loaded.measured_us(requested.policies)
    versions = loaded.versions(policy for policy, _ in requested.cells())
    for text in (*loaded.notes, *compiling.notes(versions), *notes.overhead_notes(us)):
        print(text, file=sys.stderr)
    for text in notes.warnings(loaded, requested):
        warnings.warn(text, stacklevel=3)
    return loaded.charging(us)


def _title(row: Row) -> str:
    where = f" on {row['hardware']}" if row["hardware"] else ", untimed"
    return f"{cell_text(row)} of the experts, {row['model']}{where}"


def _html(sentences: Sequence[str], table: pd.DataFrame) -> str:
    said = "".join(f"<p>{escape(each)}</p>" for each in sentences)
    return said + table.to_html(index=False, float_format="{:.4g}".format, border=0)


def _figures(row: Row) -> str:
    return ", ".join(f"{column} {row[column]:.4g}" for column in FIGURES if row[column] is not None)
