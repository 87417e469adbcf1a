"""What was found: figures of each policy, the score made of them, intervals, costs, and the file that holds all of it.

docs/board.md defines shares and scores, in hits and in time.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from sim.board.cases import HITS, MEASURES, QUARTER, SIZES
from sim.experiment import from_file
from sim.quantities import show_ms
from sim.results.compare import CONFIDENCE, FEWEST
from sim.results.files import write_toml
from traces.board import board
from traces.errors import InputError
from traces.files import read_toml
from traces.typed import typed

LRU, BELADY = "lru", "belady"
KNOWABLE = "foresight:tokens=4"
"""What a predictor of the next tokens could reach: these tokens are known, and behind them what `eamc-blend` knows."""
UNKNOWN = float("nan")
DIGITS = 6
"""Of milliseconds and shares; hit rates have two more."""

Figures = dict[str, dict[str, tuple[float, ...]]]
"""By measure and start, at each size: hit rates, and milliseconds of mean TPOT on the machine with that wall."""

Gain = tuple[float, float, float]
"""What a policy gains over LRU, paired over requests, with its interval: points of hits, or percent of TPOT."""


@dataclass(frozen=True)
class Entry:
    """A policy on the board."""

    digest: str  # SHA-256 of a user's own file; empty: built in
    oracle: bool
    overhead_us: float  # charged an event, on the model where it takes most; NaN: nothing is timed
    memory_mib: float  # that it holds beyond LRU, on the model with the most experts
    score: dict[str, float]  # by measure
    worst: float  # the least share
    slower: float  # percent of TPOT more than LRU takes, at most, anywhere; NaN: nothing is timed
    slowest: str  # where
    figures: Figures
    gains: dict[str, dict[str, tuple[Gain, ...]]]  # of starts with requests enough


@dataclass(frozen=True)
class Result:
    """All that a file of results holds, LRU and Belady among the policies."""

    version: int  # of the set of traces
    traces: dict[str, str]  # SHA-256 of each
    requests: dict[str, dict[str, int]]  # by start and measure
    policies: dict[str, Entry]  # as named

    @property
    def ranking(self) -> list[tuple[str, Entry]]:
        return sorted(self.policies.items(), key=lambda each: -each[1].score[HITS])

    @property
    def leader(self) -> str:
        return next(text for text, entry in self.ranking if not entry.oracle)

    @cached_property
    def measures(self) -> list[str]:
        """Return `hits` and the walls of the machines on which something was timed."""
        return [name for name in MEASURES if name in self.policies[LRU].figures]

    def shares(self, policy: str) -> dict[str, tuple[float, ...]]:
        return shares(*(self.policies[name].figures for name in (policy, LRU, BELADY)))


def entry(
    measured: Mapping[str, Figures], policy: str, gains: dict[str, dict[str, tuple[Gain, ...]]], **about: Any
) -> Entry:
    figures, lru, belady = (measured[name] for name in (policy, LRU, BELADY))
    found = shares(figures, lru, belady)
    slower = {
        f"{start} {measure} {size}": round(100 * (ms / base - 1), 2)
        for measure, starts in figures.items()
        if measure != HITS
        for start, values in starts.items()
        for size, ms, base in zip(SIZES, values, lru[measure][start], strict=True)
    }
    slowest = max(slower, key=lambda name: slower[name], default="")
    return Entry(
        score={HITS: round(_mean_of_traces(found), DIGITS), **dict(_saved(figures, lru, belady))},
        worst=min((share for values in found.values() for share in values if share == share), default=UNKNOWN),
        slower=slower.get(slowest, UNKNOWN),
        slowest=slowest,
        figures=figures,
        gains=gains,
        **about,
    )


def shares(figures: Figures, lru: Figures, belady: Figures) -> dict[str, tuple[float, ...]]:
    """Return by start the share of the gap in hits that is closed at each size: NaN where there is none."""
    return {
        start: tuple(
            round((value - base) / (best - base), DIGITS) + 0.0 if best > base else UNKNOWN
            for value, base, best in zip(values, lru[HITS][start], belady[HITS][start], strict=True)
        )
        for start, values in figures[HITS].items()
    }


def _saved(figures: Figures, lru: Figures, belady: Figures) -> Iterator[tuple[str, float]]:
    """Yield by wall what is saved of LRU's time, over what Belady saves."""
    for wall in (measure for measure in figures if measure != HITS):
        mine, best = (
            _mean_of_traces(
                {
                    start: tuple(1 - ms / base for ms, base in zip(values, lru[wall][start], strict=True))
                    for start, values in each[wall].items()
                }
            )
            for each in (figures, belady)
        )
        yield wall, round(mine / best, DIGITS) if best > 0 else UNKNOWN


def _mean_of_traces(held: Mapping[str, tuple[float, ...]]) -> float:
    traces: dict[str, list[float]] = {}
    for start, values in held.items():
        traces.setdefault(start.rpartition(" ")[0], []).extend(values)
    return mean(map(mean, traces.values()))


def mean(values: Iterable[float]) -> float:
    """Return the mean of the values that are known; NaN where there are none."""
    known = [value for value in values if value == value]
    return fmean(known) if known else UNKNOWN


def percent(share: float, digits: int = 1) -> str:
    return "-" if share != share else f"{100 * share:.{digits}f}"


def number(value: float) -> str:
    return "-" if value != value else f"{value:.3g}"


def sentences(found: Result) -> list[str]:
    """Return which policy leads, by how much, and how far the ceiling is; whether it costs time; how sure that is."""
    able = [(text, entry) for text, entry in found.ranking if not entry.oracle]
    (leader, best), *others = able
    score = best.score[HITS]
    before = f", {100 * (score - others[0][1].score[HITS]):.1f} points ahead of {others[0][0]}" if others else ""
    timed = ", ".join(f"{best.score[wall]:.1%} ({wall})" for wall in found.measures[1:])
    saved = f"; of the time that Belady saves it saves, by the wall, {timed}" if timed else ""
    knowable = found.policies[KNOWABLE].score[HITS]
    first = (
        f"{leader} leads: it gets {score / knowable:.0%} of what can be known, the {knowable:.1%} of the gap from LRU "
        f"to Belady in hits that who knows the next 4 tokens closes with eamc-blend behind. That is {score:.1%} of the "
        f"gap{before}{saved}."
    )
    if leader == LRU:
        return [first]
    slower = f"At worst {leader} is {best.slower:.1f}% slower than LRU: {best.slowest}."
    slowness = f"{leader} is nowhere slower than LRU." if best.slower <= 0 else slower
    return [first, *_to_ship(found), *[slowness] * (best.slower == best.slower), *_certainty(best, found)]


def _to_ship(found: Result) -> Iterator[str]:
    """Yield what the leader takes, and its times at a quarter on the machines, beside LRU's, on the longest trace."""
    best, lru, walls = found.policies[found.leader], found.policies[LRU], found.measures[1:]
    if walls:
        start = max(lru.figures[walls[0]], key=lambda name: found.requests[name][HITS])
        place = SIZES.index(QUARTER)
        each = (
            f"{show_ms(best.figures[wall][start][place])} ({wall}; LRU {show_ms(lru.figures[wall][start][place])})"
            for wall in walls
        )
        yield (
            f"What to ship: {found.leader} takes up to {best.memory_mib:.3g} MiB and {best.overhead_us:.3g} us an "
            f"event, which is charged; at {QUARTER} a token of {start} takes {', '.join(each)} ms."
        )


def _certainty(entry: Entry, found: Result) -> Iterator[str]:
    """Yield what is gained over LRU at a quarter, with intervals, and which traces have none."""
    for start in entry.gains.get(HITS, ()):
        gain, count = gain_text(entry.gains[HITS][start][SIZES.index(QUARTER)]), found.requests[start][HITS]
        of = f"{f'{count} requests' if count >= FEWEST else 'blocks of tokens'} of {start} ({CONFIDENCE:.0%})"
        yield f"Over LRU at {QUARTER} it gains {gain} points of hits on {of}."
    if few := [start for start in found.requests if start not in entry.gains.get(HITS, ())]:
        yield f"Too few requests and tokens for intervals: {', '.join(few)}."


def gain_text(gain: Gain) -> str:
    """Return `9.1 (8.0 to 10.2)`."""
    middle, low, high = gain
    return f"{middle:.1f} ({low:.1f} to {high:.1f})"


def write(found: Result, path: Path, overwrite: bool = False) -> None:
    heading = f"# Figures at {', '.join(SIZES)} of the experts. `moe-sim board --check THIS` runs the same again.\n"
    write_toml(heading, asdict(found), path, overwrite)


def read(path: Path, trust: bool = False) -> Result:
    """Return the result of a file. Raise InputError for one that holds none, and see `from_file` of its policies."""
    found = typed(Result, read_toml(path), str(path))
    from_file(path, "policies", list(found.policies), trust)
    if found.version != board().version:
        raise InputError(f"{path} is of version {found.version} of the traces, and version {board().version} is here")
    return found


def difference(stored: Result, found: Result) -> str | None:
    """Return the first figure that differs, with both values; None: all are equal."""
    one, other = (dict(_figures(asdict(each))) for each in (stored, found))
    for name in {**one, **other}:
        if repr(one.get(name)) != repr(other.get(name)):
            return f"{name} is {one.get(name)} in the file, and {other.get(name)} now"
    return None


def _figures(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, tuple):
        value = {str(place): each for place, each in enumerate(value)}
    if not isinstance(value, Mapping):
        yield name, value
        return
    for key, each in value.items():
        yield from _figures(each, f"{name} {key}".strip())
