"""Is one cell of a sweep better than another? Differences of totals, with intervals over paired requests.

Intervals are the percentile bootstrap's over requests (Efron 1979), 95%. Of fewer than FEWEST requests with
LEAST_TOKENS decoded tokens blocks of about sqrt(n) of their n tokens are drawn (the stationary bootstrap of Politis and
Romano 1994), prompts stay as they are. sim/README.md says how far to trust both.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from policies.core.grammar import policy_title, split_size
from policies.core.scope import SCOPES
from policies.core.spec import PolicyLike, text_of
from sim.quantities import parse_cache_size, stated_bytes
from sim.results import files
from sim.results.metrics import FEWEST as FEWEST
from sim.results.metrics import REQUESTS, RESULTS, STEP, Row
from traces.errors import InputError, unknown

CONFIDENCE = 0.95
RESAMPLES = 10_000
RESAMPLES_OF_A_TABLE = 2_000
DRAWN_AT_ONCE = 2**22

LEAST_TOKENS = FEWEST**2
"""Of which blocks are drawn: FEWEST blocks."""
FEW = f", which may be chance: there are fewer than {FEWEST} requests"

Float = NDArray[np.float64]


@dataclass(frozen=True)
class Measure:
    """A column of requests.parquet to compare, what it is the mean over, and its words."""

    name: str
    over: str  # column of what a request has of it; empty: one
    meaning: str
    scale: float  # from the column to the unit
    unit: str
    more: str  # what a positive difference is called
    less: str


MEASURES = (
    Measure("hit_rate", "lookups", "hit rate", 100, "points", "higher in hit rate", "lower in hit rate"),
    Measure("tpot_mean_ms", "decoded", "time per token", 1, "ms", "slower per token", "faster per token"),
    Measure(
        *("ttft_ms", "", "time to the first token", 1, "ms"), "slower to the first token", "faster to the first token"
    ),
)

OF_A_STEP = {"hit_rate": ("hits", "lookups", 1.0), "tpot_mean_ms": ("decode_ns", "decoded", 1e-6)}
"""Of measures that have it by step: what is counted, over what, and its unit."""

OF_A_REQUEST = {"tpot_mean_ms": "tpot_mean_ms", "ttft_mean_ms": "ttft_ms", "misses": "hit_rate"}
"""Of each column of results that judges policies, the measure that pairs their requests."""


@dataclass(frozen=True)
class SweptRun:
    """One cell of a sweep: its row, and its requests in the order of the run."""

    folder: Path
    row: Row  # columns of results.parquet
    requests: pd.DataFrame  # request, lookups, decoded, hit_rate, tpot_mean_ms, ttft_ms

    @property
    def policy(self) -> str:
        return str(self.row["policy"])

    @property
    def oracle(self) -> bool:
        return bool(self.row["oracle"])

    @property
    def cache_experts(self) -> int:
        return int(self.row["cache_experts"])

    @property
    def where(self) -> str:
        """Return its folder, or of a run in Python its policy and cache size."""
        return str(self.folder) if self.folder != Path() else f"{self.policy}@{self.cache_experts}"

    def fills(self, size: int) -> bool:
        """Return whether its cache fits into `size` bytes, and has all experts or leaves less than an expert."""
        room, expert = self.row["cache_bytes"], self.row["expert_bytes"]
        if room is None or expert is None or room > size:
            return False
        return bool(self.cache_experts == self.row["all_experts"] or size - room < expert)


@dataclass(frozen=True)
class Difference:
    """What a cell has more than the baseline in one measure, as their rows have it, in the measure's unit."""

    measure: Measure
    cell: str
    baseline: str
    more: float
    low: float
    high: float
    requests: int
    tokens: int  # of which blocks were drawn; 0: requests were
    cache_experts: int  # of the cell
    cell_oracle: bool = False  # whether it sees the future
    baseline_oracle: bool = False

    @property
    def sample(self) -> str:
        """Return `40 requests`, or `blocks of 300 tokens of one request`."""
        requests = "one request" if self.requests == 1 else f"{self.requests} requests"
        return f"blocks of {self.tokens:,} tokens of {requests}" if self.tokens else requests

    @property
    def is_enough(self) -> bool:
        return self.tokens > 0 or self.requests >= FEWEST

    @property
    def is_worse(self) -> bool:
        """Return whether it is worse beyond the noise: by enough, in an interval that does not reach 0."""
        worse = (self.more < 0) == (self.measure.name == "hit_rate")
        return worse and self.is_enough and not self.low <= 0 <= self.high

    def sentence(self) -> str:
        """`eamc is 3.2 ms (95%: 2.1 to 4.4) slower per token than lru over 40 requests`."""
        over = f"over {self.sample}"
        cell = policy_title(self.cell, self.cell_oracle)
        baseline = policy_title(self.baseline, self.baseline_oracle)
        if self.more == self.low == self.high == 0:
            return f"{cell} and {baseline} do not differ in {self.measure.meaning} {over}"
        sign = -1 if self.more < 0 else 1
        low, high = sorted((sign * self.low, sign * self.high))
        size, low_text, high_text = _figures(abs(self.more), low, high)
        direction = self.measure.less if sign < 0 else self.measure.more
        chance = ", which may be chance" if low <= 0 <= high else "" if self.is_enough else FEW
        return (
            f"{cell} is {size} {self.measure.unit} ({CONFIDENCE:.0%}: {low_text} to {high_text}) {direction} than "
            f"{baseline} {over}{chance}"
        )


def read(folder: Path) -> list[SweptRun]:
    """Return the cells of a sweep's results folder, in the order of its rows. Raise InputError if it is not one."""
    rows = files.read(folder / files.RESULTS_FILE, RESULTS).to_pylist()
    return swept_runs(rows, files.read(folder / files.REQUESTS_FILE, REQUESTS).to_pandas(), folder)


def swept_runs(rows: Sequence[Row], requests: pd.DataFrame, folder: Path = Path()) -> list[SweptRun]:
    by_cell = dict(iter(requests.groupby(["policy", "cache_experts"], sort=False)))
    return [swept_run(row, by_cell[row["policy"], row["cache_experts"]], folder) for row in rows]


def swept_run(row: Row, requests: pd.DataFrame, folder: Path = Path()) -> SweptRun:
    requests = requests.assign(hit_rate=requests["hits"] / requests["lookups"].where(requests["lookups"] > 0))
    return SweptRun(folder, row, requests.reset_index(drop=True))


def split_name(text: str) -> tuple[Path, str | None, str | None]:
    """Return folder, policy and size of `results/x:policy@size`, as far as they are named. Raise InputError."""
    if Path(text).is_dir():
        return Path(text), None, None
    for i, letter in enumerate(text):
        if letter == ":" and Path(text[:i]).is_dir():
            policy, size = split_size(text[i + 1 :], SCOPES)
            return Path(text[:i]), policy or None, size or None
    raise InputError(f"no results folder {text}: write results/x, or results/x:policy@size for one of its cells")


def choose(cells: Sequence[SweptRun], policy: PolicyLike | None, size: str | None) -> list[SweptRun]:
    """Return the cells of this policy and cache size, of any if None. Raise InputError if there are none."""
    policy = None if policy is None else text_of(policy)
    slots = None if size is None else _slots(cells, size)
    matches = [cell for cell in cells if policy in (None, cell.policy) and slots in (None, cell.cache_experts)]
    if not matches:
        known = [f"{cell.policy}@{cell.cache_experts}" for cell in cells]
        raise unknown("cell", f"{policy or ''}@{size or ''}", known, cells[0].folder)
    return matches


def _slots(cells: Sequence[SweptRun], size: str) -> int:
    """Return how many experts a cache of this size holds; of a size in bytes, those of the largest cell's that fits."""
    first, in_bytes = cells[0], stated_bytes(size)
    slots = parse_cache_size(size, *(first.row[name] for name in ("all_experts", "expert_bytes", "layers")))
    if in_bytes is None:
        return slots
    return max((cell.cache_experts for cell in cells if cell.fills(in_bytes)), default=slots)


def pairs_within(cells: Sequence[SweptRun], policies: Sequence[PolicyLike]) -> list[tuple[SweptRun, SweptRun]]:
    """Return (baseline, cell) at each size: the first policy is the baseline. Raise InputError if one is missing."""
    if len(policies) < 2:
        raise InputError("`policies` needs two or more to compare: the baseline first, as in lru,eamc")
    names, pairs = list(map(text_of, policies)), []
    for slots in dict.fromkeys(cell.cache_experts for cell in cells):
        here = {cell.policy: cell for cell in cells if cell.cache_experts == slots}
        for name in names:
            if name not in here:
                raise unknown("policy", name, here, "" if cells[0].folder == Path() else cells[0].folder)
        pairs += [(here[names[0]], here[name]) for name in names[1:]]
    return pairs


def pairs_across(first: Sequence[SweptRun], second: Sequence[SweptRun]) -> list[tuple[SweptRun, SweptRun]]:
    """Return (baseline, cell): of two folders the cells of one policy and size; where each has one cell, those two."""
    if len(first) == len(second) == 1:
        return [(first[0], second[0])]
    other = {(cell.policy, cell.cache_experts): cell for cell in second}
    pairs = [(cell, other[key]) for cell in first if (key := (cell.policy, cell.cache_experts)) in other]
    if not pairs:
        raise InputError(
            f"{first[0].folder} and {second[0].folder} have no policy and size in common: name one cell of each, "
            f"as in {first[0].folder}:{first[0].policy}@{first[0].cache_experts}"
        )
    return pairs


def differences(baseline: SweptRun, cell: SweptRun, seed: int = 0, resamples: int = RESAMPLES) -> list[Difference]:
    """Return what `cell` has more than `baseline`, by measure. Raise InputError if they cannot be paired."""
    for reason in _unpaired(baseline, cell):
        raise InputError(f"cannot pair {reason}")
    found = [difference(baseline, cell, each, seed, resamples) for each in MEASURES]
    if not any(found):
        one, other = _names(baseline, cell)
        raise InputError(
            f"{one} and {other} have fewer than two requests with a measure in common, and fewer than "
            f"{LEAST_TOKENS} decoded tokens"
        )
    return list(filter(None, found))


def difference(
    baseline: SweptRun, cell: SweptRun, measure: Measure, seed: int = 0, resamples: int = RESAMPLES_OF_A_TABLE
) -> Difference | None:
    """Return the difference in a measure; None where there is one request or token, which has no interval, or none."""
    totals, drawn = paired(baseline, cell, measure), sample(baseline, cell, measure)
    if drawn.totals.shape[1] < 2:
        return None
    one, other = _names(baseline, cell)
    low, high = interval(drawn, seed, resamples)
    about = totals.shape[1], drawn.tokens, cell.cache_experts, cell.oracle, baseline.oracle
    return Difference(measure, other, one, float(_more(totals.sum(axis=1))), low, high, *about)


def gain(baseline: SweptRun, cell: SweptRun, judged_by: str) -> Difference | None:
    """Return what `cell` has less than the baseline, by a column of results: of times in %, of hits in points.

    None where they have no two requests to pair.
    """
    one = None if any(_unpaired(baseline, cell)) else difference(baseline, cell, measure_of(judged_by))
    if one is None:
        return None
    _, _, total, count = paired(baseline, cell, one.measure).sum(axis=1)
    scale = 1.0 if judged_by == "misses" else -100 * count / total
    low, high = sorted((scale * one.low, scale * one.high))
    return replace(one, more=scale * one.more, low=low, high=high)


def measure_of(judged_by: str) -> Measure:
    """Return the measure that pairs the requests of runs judged by a column of results."""
    return next(each for each in MEASURES if each.name == OF_A_REQUEST[judged_by])


def indistinct(best: SweptRun, others: Sequence[SweptRun], measure: Measure) -> list[SweptRun]:
    """Return those not worse than `best` beyond the noise: their interval reaches 0, or there is too little for one."""
    found = [(other, difference(best, other, measure)) for other in others]
    return [other for other, each in found if each is None or not each.is_worse]


def paired(baseline: SweptRun, cell: SweptRun, measure: Measure) -> Float:
    """Return total and count of the cell, then of the baseline: [4, requests], of requests where both have any."""
    rows = []
    for requests in (cell.requests, baseline.requests):
        count = requests[measure.over] if measure.over else requests[measure.name].notna()
        rows += [measure.scale * requests[measure.name] * count, count]
    totals = np.array(rows, np.float64)
    return totals[:, ~np.isnan(totals).any(axis=0) & (totals[1::2] > 0).all(axis=0)]


class Sample(NamedTuple):
    """What is drawn from: requests, or blocks of tokens."""

    totals: Float  # as of `paired`
    tokens: int  # of which blocks are drawn; 0: requests are
    fixed: Float | int = 0  # [4, 1] totals that are always there: of prompts

    @property
    def is_enough(self) -> bool:
        return self.tokens > 0 or self.totals.shape[1] >= FEWEST


def sample(baseline: SweptRun, cell: SweptRun, measure: Measure) -> Sample:
    """Return what intervals of both are drawn from: totals of requests, or of tokens where these are few."""
    totals = paired(baseline, cell, measure)
    runs = cell.requests["steps"], baseline.requests["steps"]
    if not 0 < totals.shape[1] < FEWEST or measure.name not in OF_A_STEP or any(each.isna().any() for each in runs):
        return Sample(totals, 0)
    total, count, unit = OF_A_STEP[measure.name]
    steps = [np.array([step for request in run for step in request]).reshape(-1, len(STEP)).T for run in runs]
    decoded = steps[0][STEP.index("decoded")] > 0
    scale = measure.scale * unit
    of_steps = np.concatenate([[scale * each[STEP.index(total)], each[STEP.index(count)]] for each in steps])
    if decoded.sum() < LEAST_TOKENS:
        return Sample(totals, 0)
    return Sample(of_steps[:, decoded], int(decoded.sum()), of_steps[:, ~decoded].sum(axis=1, keepdims=True))


def total(run: SweptRun, measure: Measure) -> float:
    of_it, count, *_ = paired(run, run, measure).sum(axis=1)
    return float(of_it / count)


def spans(runs: Sequence[SweptRun], column: str) -> dict[tuple[str, int], tuple[float, float]]:
    """Return by policy and size the interval of a column of results, of runs with requests or tokens enough."""
    measure = replace(next(each for each in MEASURES if each.name == OF_A_REQUEST.get(column, column)), scale=1)
    found = {}
    for run in runs:
        drawn = sample(run, run, measure)
        if drawn.is_enough:
            alone = np.array([[1], [1], [0], [1]])  # beside nothing
            drawn = drawn._replace(totals=alone * drawn.totals, fixed=alone * drawn.fixed)
            found[run.policy, run.cache_experts] = interval(drawn, resamples=RESAMPLES_OF_A_TABLE)
    return found


def _more(totals: Float) -> Float:
    """Return the cell's ratio less the baseline's, of totals [4, ...]."""
    difference: Float = totals[0] / totals[1] - totals[2] / totals[3]
    return difference


def interval(drawn: Sample, seed: int = 0, resamples: int = RESAMPLES) -> tuple[float, float]:
    """Return the percentile bootstrap interval of `_more` of totals [4, n], n at least 1; equal for equal seeds."""
    rng = np.random.default_rng(seed)
    count, found = drawn.totals.shape[1], np.empty(resamples)
    at_once = max(1, DRAWN_AT_ONCE // count)
    for start in range(0, resamples, at_once):
        part = found[start : start + at_once]
        places = rng.integers(count, size=(len(part), count))
        if drawn.tokens:  # the token behind the one before, or now and then another
            follows = rng.random(places.shape) >= 1 / math.sqrt(count)
            for i in range(1, count):
                places[:, i] = np.where(follows[:, i], (places[:, i - 1] + 1) % count, places[:, i])
        part[:] = _more(drawn.totals[:, places].sum(axis=2) + drawn.fixed)
    low, high = np.quantile(found, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def _unpaired(baseline: SweptRun, cell: SweptRun) -> Iterator[str]:
    """Yield what of both runs differs, so that their requests cannot be compared."""
    names = {"trace": "traces", "phase": "phases", "warmup_requests": "numbers of warm-up requests"}
    for name, what in {**names, "routing": "rules of lossy routing"}.items():
        if (one := baseline.row[name]) != (other := cell.row[name]):
            yield f"different {what}: {baseline.where} has {one}, {cell.where} has {other}"
    if baseline.requests["request"].tolist() != cell.requests["request"].tolist():
        sizes = f"{len(baseline.requests)} against {len(cell.requests)}"
        yield f"different requests: {baseline.where} and {cell.where}, {sizes} of them"
    first, second = baseline.requests["lookups"], cell.requests["lookups"]
    known = first.notna() & second.notna()  # not of requests that shared steps
    for name in () if cell.row["routing"] else baseline.requests["request"][((first != second) & known).to_numpy()]:
        yield f"{baseline.where} and {cell.where}: request {name} looks up another number of experts"


def _names(baseline: SweptRun, cell: SweptRun) -> tuple[str, str]:
    sizes = baseline.cache_experts != cell.cache_experts
    folders = baseline.folder.resolve() != cell.folder.resolve()

    def name(one: SweptRun) -> str:
        return f"{f'{one.folder}:' if folders else ''}{one.policy}{f'@{one.cache_experts}' if sizes else ''}"

    return name(baseline), name(cell)


def _figures(more: float, low: float, high: float) -> tuple[str, str, str]:
    """Return all three with the decimals that show two digits of the interval's width."""
    width = max(high - low, abs(more) / 100)
    decimals = min(6, max(1, 1 - math.floor(math.log10(width)))) if width > 0 else 1
    return f"{more:.{decimals}f}", f"{low:.{decimals}f}", f"{high:.{decimals}f}"
