"""Search a policy's options: the first half of the requests finds them, the other half says what they are worth.

A trial runs one set of options over the first half, from an empty cache; less of the metric is better (mean TPOT, TTFT
where nothing is decoded, misses where nothing is timed). What a policy refuses is pruned. Options come from optuna's
TPE sampler, `workers` at a time, reported to it as a batch. The seed and the trials before it seed the draws of each
batch. So seed and number of workers determine the search, and one that continues from its journal
(`sim.tuning.journal`) ends as one that was never interrupted. The second half runs after the first and is counted
alone; the gain there is what to expect, that on the first half is not.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from policies.core.spec import PolicySpec
from sim.experiment import Experiment
from sim.loaded import Loaded, TimedRun, load
from sim.loop.requests import Requests
from sim.results.compare import FEWEST
from sim.results.files import write_table
from sim.results.metrics import SHARE, TEXT
from sim.sweeps import winner
from sim.sweeps.grid import key, rows
from sim.sweeps.workers import Advance, Local
from sim.tuning.journal import WORKERS, Journal, optuna
from sim.tuning.search_space import Space
from traces.errors import InputError
from traces.steps import DECODE, PREFILL

TRIALS, BEST = "trials.parquet", "best.toml"
MAKER = "moe-sim tune"

OVERHEAD = "--predictor-us"
"""The word for what an event of the policy costs, of which a search depends."""

OWN = ("trial", "policy", "state", "value", "refusal")
"""Columns of trials.parquet beside the options."""


@dataclass(frozen=True)
class Halves:
    """The same requests twice: the first half of them, and all with that half not counted."""

    first: Loaded
    second: Loaded

    @classmethod
    def of(cls, experiment: Experiment) -> "Halves":
        """Raise InputError for whatever cannot be used, and for fewer than two requests."""
        requests = len(load(experiment).trace.requests)
        if requests < 2:
            raise InputError(
                f"{experiment.trace} has {requests} request: half of them tune, half judge, so it takes two"
            )
        half = requests // 2
        second = replace(experiment, requests=requests, warmup_requests=half)
        return cls(load(replace(experiment, requests=half)), load(second))

    def few(self, metric: str) -> bool:
        """Whether fewer requests of the second half have this column of results than can show a difference."""
        phase = {"tpot_mean_ms": DECODE, "ttft_mean_ms": PREFILL}.get(metric)
        judging = islice(Requests(self.second.trace), len(self.first.trace.requests), None)
        having = (steps for steps in judging if phase is None or (steps.phase == phase).any())
        return sum(1 for _ in islice(having, FEWEST)) < FEWEST


@dataclass(frozen=True)
class Search:
    """What is searched, and by how many trials, drawn how."""

    halves: Halves
    policy: PolicySpec
    slots: int
    space: Space
    trials: int
    seed: int
    workers: int

    @property
    def words(self) -> str:
        return ":".join(dimension.text for dimension in self.space)

    def searched(self) -> dict[str, str]:
        """Return all that the trials depend on, by the words for it; how many there are is not of it."""
        first = self.halves.first
        return {
            "trace": f"{first.trace.name} {first.fingerprint}",
            "--policy": self.policy.text,
            "--search": self.words,
            "--cache-size": f"{self.slots}",
            "--hardware": first.hardware.name if isinstance(first, TimedRun) else "",
            OVERHEAD: f"{first.predictor_us(self.policy) or 0:g}" if isinstance(first, TimedRun) else "",
            "--seed": f"{self.seed}",
            WORKERS: f"{self.workers}",
            "setup, file or version": key(first, self.policy, self.slots),
        }

    def requests(self, kept: int) -> int:
        """Return the most requests to be run: trials beside the whole batches of `kept` ones, and to judge."""
        first, second = (len(half.trace.requests) for half in (self.halves.first, self.halves.second))
        return (max(0, self.trials - kept // self.workers * self.workers) + 1) * first + 2 * second


@dataclass(frozen=True)
class Trial:
    """A set of options that was tried."""

    options: dict[str, Any]  # by name
    policy: str  # as it would be typed; empty: refused
    value: float | None  # of the metric; None: refused
    refusal: str = ""  # in the policy's words


@dataclass(frozen=True)
class Judged:
    """A policy, and the metric on both halves."""

    policy: str
    first: float
    second: float


@dataclass(frozen=True)
class Result:
    """What came of a search."""

    metric: str  # column of results
    trials: list[Trial]
    typed: Judged
    best: Judged  # the policy as stated where no trial is better on the first half

    @property
    def gains(self) -> tuple[float, float]:
        """By how much the best is below the policy as stated, as shares, on either half."""
        halves = (self.typed.first, self.best.first), (self.typed.second, self.best.second)
        first, second = (1 - best / typed if typed else 0.0 for typed, best in halves)
        return first, second

    @property
    def improved(self) -> bool:
        """Whether any trial is better than the policy as stated on the half that it was tried on."""
        return self.best.policy != self.typed.policy

    @property
    def overfit(self) -> bool:
        return self.improved and self.best.second >= self.typed.second

    def leaders(self, n: int) -> list[Trial]:
        return [trial for _, trial in _ranked(self.trials)[:n]]


def tune(search: Search, journal: Journal, advance: Advance) -> Result:
    """Search, then judge; what `journal` holds is not run again. `advance` gets the number of requests run.

    Raise InputError where the policy refuses all that was tried.
    """
    journal.begin(search.searched())
    halves, workers = search.halves, Local(search.workers)
    first, second = rows(
        [(half, search.policy, search.slots) for half in (halves.first, halves.second)], workers, advance
    )
    metric = winner.metric([first, second])
    trials = _search(search, journal, metric, workers, advance)
    ranked = _ranked(trials)
    if not ranked:
        journal.discard()
        raise InputError(f"{search.policy.text} refuses all {len(trials)} trials, the last so: {trials[-1].refusal}")
    typed = best = Judged(search.policy.text, first[metric], second[metric])
    value, leader = ranked[0]
    if value < typed.first:
        (row,) = rows([(halves.second, search.policy.with_options(leader.options), search.slots)], workers, advance)
        best = Judged(leader.policy, value, row[metric])
    return Result(metric, trials, typed, best)


def save(result: Result, search: Search, folder: Path) -> Path:
    trials, names = result.trials, [dimension.option.name for dimension in search.space]
    columns: dict[str, pa.Array] = {
        "trial": pa.array(range(len(trials)), pa.int64()),
        **{
            f"option.{name}" if name in OWN else name: pa.array([each.options[name] for each in trials])
            for name in names
        },
        "policy": pa.array([each.policy or None for each in trials], TEXT),
        "state": pa.array(["pruned" if each.value is None else "complete" for each in trials], TEXT),
        "value": pa.array([each.value for each in trials], SHARE),
        "refusal": pa.array([each.refusal or None for each in trials], TEXT),
    }
    write_table(pa.table(columns), folder / TRIALS)
    return folder / TRIALS


def _search(search: Search, journal: Journal, metric: str, workers: Local, advance: Advance) -> list[Trial]:
    """Return all trials in their order; each batch is in the journal before the next is drawn."""
    package, first = optuna(), search.halves.first
    distributions = {each.option.name: each.distribution for each in search.space}
    kept = len(journal.trials)
    records = journal.trials[: kept // search.workers * search.workers]
    known: dict[str, float] = {one["policy"]: one["value"] for one in journal.trials if one["policy"]}
    study = package.create_study(direction="minimize")
    states = package.trial.TrialState
    for one in records:
        state = states.COMPLETE if one["policy"] else states.PRUNED
        drawn = {"params": one["drawn"], "distributions": distributions}
        study.add_trial(package.trial.create_trial(state=state, value=one["value"], **drawn))
    total = max(search.trials, kept)
    while (begun := len(records)) < total:
        study.sampler = package.samplers.TPESampler(
            seed=int(np.random.SeedSequence([search.seed, begun]).generate_state(1)[0])
        )
        batch = [study.ask(distributions) for _ in range(min(search.workers, total - begun))]
        tried = [_tried(search, trial.params) for trial in batch]
        fresh = {policy.text: policy for policy in tried if isinstance(policy, PolicySpec) and policy.text not in known}
        results = rows([(first, policy, search.slots) for policy in fresh.values()], workers, advance)
        known |= {text: row[metric] for text, row in zip(fresh, results, strict=True)}
        advance((len(batch) - len(fresh)) * len(first.trace.requests))
        for trial, policy in zip(batch, tried, strict=True):
            if isinstance(policy, str):
                study.tell(trial, state=states.PRUNED)
                record = {"drawn": trial.params, "policy": "", "value": None, "refusal": policy}
            else:
                study.tell(trial, known[policy.text])
                record = {"drawn": trial.params, "policy": policy.text, "value": known[policy.text], "refusal": ""}
            records.append(record)
            if len(records) > kept:
                journal.add(record)
    return [Trial(_options(search, one["drawn"]), one["policy"], one["value"], one["refusal"]) for one in records]


def _options(search: Search, drawn: dict[str, Any]) -> dict[str, Any]:
    return {each.option.name: each.value(drawn[each.option.name]) for each in search.space}


def _tried(search: Search, drawn: dict[str, Any]) -> PolicySpec | str:
    """Return the policy with the options drawn, or the words in which it refuses them."""
    try:
        policy = search.policy.with_options(_options(search, drawn))
        search.halves.first.require(policy, search.slots)
    except InputError as error:
        return str(error)
    return policy


def _ranked(trials: Sequence[Trial]) -> list[tuple[float, Trial]]:
    """Return those that were run, the best first, of equal ones the earliest; each policy once."""
    once: dict[str, tuple[float, Trial]] = {}
    for trial in trials:
        if trial.value is not None:
            once.setdefault(trial.policy, (trial.value, trial))
    return sorted(once.values(), key=lambda one: one[0])
