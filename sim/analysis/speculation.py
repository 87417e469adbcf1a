"""Does speculation pay where experts move, and from which acceptance on (rule 20 of the contract)?

A cell is run without drafts and, by number of drafted tokens, with a few acceptances; between these a step's time lies
on the line between two runs. Its kept tokens are 1 + p + ... + p^L in the mean, times counted over expected at runs.
Break-even is the first acceptance that pays. Intervals: 95% percentile bootstrap over requests, same draws for all.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from policies.core.policy import Float, Int
from policies.core.spec import PolicySpec
from sim.loaded import TimedRun
from sim.loop.log import RunLog
from sim.loop.requests import Requests
from sim.results import files, plot
from sim.results.compare import CONFIDENCE
from sim.results.metrics import COUNT, SHARE, TEXT
from sim.sweeps.grid import Grid
from traces.drafts import Drafts
from traces.errors import InputError
from traces.steps import DECODE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAKER = "moe-sim speculate"
NAMES = ("speculation.parquet", "speculation.png")

LONGEST = 8
RUN = (0.0, 0.5, 0.8, 1.0)

MIDDLE = 1
"""Of these the one whose steps are printed."""

POINTS = np.linspace(0, 1, 1001)
RESAMPLES = 1_000

ROWS = pa.schema(
    [
        *[(name, TEXT) for name in ("policy", "trace", "model", "hardware")],
        *[(name, COUNT) for name in ("cache_experts", "requests", "draft")],
        ("cache_fraction", SHARE),
        ("union", SHARE),  # mean experts a layer of 1 + draft tokens in turn
        ("union_by_layer", pa.list_(SHARE)),
        *[(name, SHARE) for name in ("step_bytes", "step_ms")],  # of a step of which half is accepted
        ("tokens_per_s", SHARE),  # without drafts
        *[(name, SHARE) for name in ("break_even", "low", "high")],  # null: beyond 1
        ("speedups", pa.list_(SHARE)),  # over no draft, at acceptances of 0, 0.1, ..., 1
    ]
)
"""Columns of speculation.parquet, a row per policy, cache size and number of drafted tokens."""


@dataclass(frozen=True)
class Tally:
    """What the decode steps of each request took: int64[R] each."""

    ns: Int
    kept: Int  # tokens
    steps: Int
    bytes: Int


@dataclass(frozen=True)
class Speculation:
    """One cell with one number of drafted tokens. An acceptance is that of a draft behind accepted ones."""

    policy: str
    size: str
    slots: int
    length: int
    union: Float  # [layers] mean experts of 1 + length tokens in turn
    plain: Tally
    drafted: tuple[Tally, ...]  # by RUN

    def speedup(self, acceptance: float) -> float:
        return float(self._speedups(np.ones((1, len(self.plain.ns))))[0, round(acceptance * (len(POINTS) - 1))])

    @property
    def break_even(self) -> float | None:
        """The acceptance from which on it pays; None: not even if all are accepted."""
        found = _first(self._speedups(np.ones((1, len(self.plain.ns)))))[0]
        return float(found) if np.isfinite(found) else None

    def interval(self, seed: int = 0) -> tuple[float, float]:
        """Return bounds of the break-even; infinite where it is not below 1."""
        R, rng = len(self.plain.ns), np.random.default_rng(seed)
        drawn = np.array([np.bincount(rng.integers(R, size=R), minlength=R) for _ in range(RESAMPLES)], np.float64)
        found = np.concatenate([_first(self._speedups(part)) for part in np.array_split(drawn, 20)])
        low, high = np.quantile(found, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], method="nearest")
        return float(low), float(high)

    @property
    def step_bytes(self) -> float:
        """Bytes that the link moves in a step of which half is accepted."""
        return float(self.drafted[MIDDLE].bytes.sum() / self.drafted[MIDDLE].steps.sum())

    @property
    def step_ms(self) -> float:
        return float(self.drafted[MIDDLE].ns.sum() / self.drafted[MIDDLE].steps.sum() / 1e6)

    @property
    def tokens_per_s(self) -> float:
        return float(1e9 * self.plain.kept.sum() / self.plain.ns.sum())

    def _speedups(self, weights: Float) -> Float:
        """Return them at POINTS, [B, points]; weights: [B, R] of the requests."""
        plain_ns = (weights @ self.plain.ns) / (weights @ self.plain.kept)
        steps = np.stack([weights @ each.steps for each in self.drafted])
        step_ns = np.stack([weights @ each.ns for each in self.drafted]) / steps
        kept = np.stack([weights @ each.kept for each in self.drafted]) / steps
        beside = kept / _expected(np.array(RUN), self.length)[:, None]
        between = np.array([np.interp(POINTS, RUN, row) for row in np.eye(len(RUN))])
        token_ns = (step_ns.T @ between) / (beside.T @ between) / _expected(POINTS, self.length)
        return np.asarray(plain_ns[:, None] / token_ns)


def _expected(acceptance: Float, length: int) -> Float:
    return np.asarray(sum(acceptance**n for n in range(length + 1)))


def _first(speedups: Float) -> Float:
    """Return the first acceptance of each row at which it is at least 1, or infinity."""
    pays = speedups >= 1
    return np.where(pays.any(axis=1), POINTS[pays.argmax(axis=1)], np.inf)


def speculate(
    loaded: TimedRun, grid: Grid, lengths: Sequence[int], advance: Callable[[int], None] = lambda requests: None
) -> list[Speculation]:
    """Return what each number of drafted tokens does to each cell of a grid, cells outermost.

    advance: gets the number of requests run. Raise InputError where no answer has as many tokens as a step.
    """
    if not lengths_of(loaded, 1):
        raise InputError(
            f"{loaded.trace.name} decodes no token behind another: use `as_decode` to run prompts token by token"
        )
    whole, chunk, seed = loaded.whole, loaded.experiment.prefill_chunk, loaded.experiment.seed
    unions = {
        length: union(replace(loaded, trace=whole.in_steps(chunk, Drafts(length, 1.0))), length) for length in lengths
    }
    slots, found = list(grid.sizes.values()), []
    for policy in grid.policies:

        def tallies(drafts: Drafts | None, policy: PolicySpec = policy) -> list[Tally]:
            advance(len(whole.requests))
            return _tallies(replace(loaded, trace=whole.in_steps(chunk, drafts)), policy, slots)

        plain = tallies(None)
        drafted = {length: [tallies(Drafts(length, each, seed)) for each in RUN] for length in lengths}
        for place, (size, room) in enumerate(grid.sizes.items()):
            for length, of_runs in drafted.items():
                tallied = tuple(of_run[place] for of_run in of_runs)
                about = policy.text, size, room, length, unions[length]
                found.append(Speculation(*about, plain[place], tallied))
    return found


def recorded(loaded: TimedRun) -> float | None:
    """Return the acceptance of a drafted token behind accepted ones when the trace was recorded; None: not stated."""
    trace = loaded.whole
    if trace.drafted is None:
        return None
    accepted = tried = 0
    for steps in Requests(trace.in_steps(None, Drafts(int(np.max(trace.drafted, initial=0)), None))):
        assert steps.drafted is not None
        assert steps.rejected is not None
        accepted += int((steps.drafted - steps.rejected).sum())
        tried += int((steps.drafted - steps.rejected + (steps.rejected > 0)).sum())
    return accepted / tried if tried else None


def lengths_of(loaded: TimedRun, longest: int) -> list[int]:
    """Return the numbers of drafted tokens, up to `longest`, with which some answer has a whole step."""
    trace = loaded.whole
    decoded = int((np.diff(trace.offsets) - trace.prompts).max(initial=0))
    return list(range(1, min(longest, decoded - 1) + 1))


def runs(grid: Grid, lengths: Sequence[int]) -> int:
    return len(grid.policies) * (1 + len(RUN) * len(lengths))


def union(loaded: TimedRun, length: int) -> Float:
    """Return the mean number of experts by layer of the steps of a run with drafts that have 1 + `length` tokens."""
    layers, total, count = loaded.trace.layers, np.zeros(loaded.trace.layers), 0
    for steps in loaded.requests:
        whole = (steps.phase == DECODE) & (steps.tokens == 1 + length)
        total += np.diff(steps.offsets).reshape(-1, layers)[whole].sum(axis=0)
        count += int(whole.sum())
    return total / count


def _tallies(loaded: TimedRun, policy: PolicySpec, slots: Sequence[int]) -> list[Tally]:
    """Run all requests with each cache; leave out warm-up and requests that decode nothing."""
    R = len(loaded.trace.requests)
    found: list[NDArray[np.int64]] = [np.zeros((4, R), np.int64) for _ in slots]

    def taker(sums: NDArray[np.int64]) -> Callable[[RunLog], None]:
        def take(log: RunLog) -> None:
            rows = log.by_request
            decoded = (log.phase[rows.step] == DECODE) & (rows.prefills == 0)
            moved = (log.demand_bytes + log.prefetch_bytes)[rows.step]
            values = rows.latency_ns, rows.tokens - rows.rejected, np.ones_like(rows.step), moved
            for total, value in zip(sums, values, strict=True):
                np.add.at(total, rows.request[decoded], value[decoded])

        return take

    loaded.play_cells(policy, slots, [taker(sums) for sums in found])
    counted = (found[0][2] > 0) & (np.arange(R) >= loaded.experiment.warmup_requests)
    return [Tally(*sums[:, counted]) for sums in found]


def sentences(found: Sequence[Speculation], seed: int = 0) -> Iterator[str]:
    """Yield one for each cell: does it pay here, and from which acceptance on?"""
    for cell in dict.fromkeys((each.policy, each.size) for each in found):
        own = [each for each in found if (each.policy, each.size) == cell]
        where = f"here ({cell[0]}, {cell[1]})"
        best = min(own, key=lambda each: (1.0 if each.break_even is None else each.break_even, each.length))
        if best.break_even is None:
            fastest = max(own, key=lambda each: each.speedup(1.0))
            yield (
                f"Speculation does not pay {where}: even if every drafted token is accepted, it reaches "
                f"{fastest.speedup(1.0):.2f} times the speed without"
            )
            continue
        low, high = (f"{bound:.2f}" if np.isfinite(bound) else "never" for bound in best.interval(seed))
        yield (
            f"Speculation pays {where} from an acceptance of {best.break_even:.2f} (95%: {low} to {high}) on, with "
            f"{best.length} drafted token{'s' if best.length > 1 else ''} a step"
        )


def rows(found: Sequence[Speculation], loaded: TimedRun) -> list[dict[str, Any]]:
    made = []
    for each in found:
        low, high = (bound if np.isfinite(bound) else None for bound in each.interval(loaded.experiment.seed))
        experts = loaded.experts_in(each.slots)
        figures = ("step_bytes", "step_ms", "tokens_per_s", "break_even")
        made.append(
            {
                "policy": each.policy,
                "cache_experts": experts,
                "cache_fraction": experts / loaded.all_experts,
                "trace": loaded.trace.name,
                "model": loaded.model,
                "hardware": loaded.hardware.name,
                "requests": len(each.plain.ns),
                "draft": each.length,
                "union": float(each.union.mean()),
                "union_by_layer": each.union.tolist(),
                **{name: getattr(each, name) for name in figures},
                "low": low,
                "high": high,
                "speedups": [each.speedup(n / 10) for n in range(11)],
            }
        )
    return made


def figure(found: Sequence[Speculation]) -> "Figure":
    held: dict[str, dict[str, tuple[Any, Any]]] = {}
    shares = [n / 20 for n in range(21)]
    for each in found:
        if each.length in (1, 2, 4, 8):
            lines = held.setdefault(f"{each.policy}, {each.size}", {"no draft": ([0, 1], [1, 1])})
            lines[f"{each.length} drafted"] = shares, [each.speedup(share) for share in shares]
    return plot.line_panels(held, "acceptance", "speed over that without drafts")


def save(found: Sequence[Speculation], loaded: TimedRun, folder: Path) -> list[Path]:
    table, picture = NAMES
    return files.save(folder, MAKER, {table: (rows(found, loaded), ROWS)}, {picture: lambda: figure(found)})
