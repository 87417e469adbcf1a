"""A result of `moe-sim board --out` as a page: `python -m benchmarks.board_page RESULT.toml PAGE.html`.

The ranking, how sure it is, hit rates and times by model and size.
"""

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from policies.core.catalog import available
from policies.core.grammar import policy_title
from policies.core.spec import parse
from sim.board.cases import HITS, MACHINES, QUARTER, SIZES, cards_of, of_systems
from sim.board.result import BELADY, LRU, Result, gain_text, mean, number, percent, read, sentences
from sim.quantities import show_ms
from sim.report.elements import Item, Section, figure_item
from sim.report.page import rendered
from sim.results import plot
from sim.results.compare import CONFIDENCE, FEWEST

DRAWN = 3
"""Policies in the figure beside LRU and Belady: the best ones."""

RANKING = (
    "Percent of the gap from LRU (0) to Belady (100), which knows the future, that a policy closes: in hits, on traces "
    "from an empty cache (cold) and from one that earlier requests filled (warm), in the worst case; and how much of "
    "the time that Belady saves a policy saves, where the link, computing or the disk is the wall. Slower: percent of "
    "time more than LRU takes, at most, on any model, machine and size. us: charged an event. MiB: held beyond LRU's. "
    "As in: systems whose policy that is."
)
LEFT_OUT = (
    "Left out: what needs a profile, a trained predictor, a trace with the next layer's gate or slots of each layer, "
    "and systems that compute misses on the CPU or move whole layers, which moe-sim systems has. Rows move experts as "
    "this project does, whatever else the system does."
)
ENTER = "The first command puts a policy in a file of your own on the board, the second runs a result again."
COMMANDS = "moe-sim board my_file.py:MyPolicy --out mine.toml\nmoe-sim board --check mine.toml --trust-folder"


def page(found: Result, command: str) -> str:
    """Return the page as HTML. command: the one that makes it again."""
    sections = [_ranking(found), _figure(found), *_certainty(found)]
    for start in found.requests:
        sections += [_hits(found, start), *_times(found, start)]
    sections.append(_what_was_run(found))
    enter = Item("text", ENTER), Item("code", COMMANDS), Item("text", "This page:"), Item("code", command)
    sections.append(Section("How to enter a policy", enter))
    return rendered("The board of expert-cache policies", sentences(found), sections, "moe-sim board")


def also(text: str) -> list[str]:
    """Return the systems, and presets of none of them, that decide as a policy does."""
    policy = parse(text)
    named = {system.name: system.title for system, other in of_systems() if parse(other) == policy}
    presets = [each.name for each in available() if each.kind == "preset" and parse(each.name) == policy]
    return [*named.values(), *(name for name in presets if name not in {*named, text})]


def mean_share(found: Result, policy: str, start: str) -> float:
    """Return the mean of the shares from a cold or a warm start."""
    return mean(share for name, values in found.shares(policy).items() if name.endswith(start) for share in values)


def counts(found: Result, start: str) -> str:
    hits, *times = dict.fromkeys(found.requests[start].values())
    return f"{hits} requests{''.join(f', timed over {each}' for each in times)}"


def _ranking(found: Result) -> Section:
    walls = found.measures[1:]
    head = "policy", "score", "cold", "warm", "worst", *walls, "slower, %", "us", "MiB", "as in"
    rows = [
        (
            _title(found, text),
            percent(entry.score[HITS]),
            *(percent(mean_share(found, text, kind)) for kind in ("cold", "warm")),
            percent(entry.worst),
            *(percent(entry.score[wall]) for wall in walls),
            *map(number, (entry.slower, entry.overhead_us, entry.memory_mib)),
            ", ".join(also(text)),
        )
        for text, entry in found.ranking
    ]
    return Section("Ranking", (Item("text", RANKING), Item("table", head=head, rows=rows)))


def _figure(found: Result) -> Section:
    best = [text for text, entry in found.ranking if not entry.oracle and text != LRU][:DRAWN]
    sizes = [float(size.rstrip("%")) for size in SIZES]
    caption = "Hit rates of LRU and of the best policies. Dashed: Belady, the ceiling."
    figures = []
    for start in found.requests:
        drawn = {
            policy: (sizes, [100 * rate for rate in found.policies[policy].figures[HITS][start]])
            for policy in (BELADY, *best, LRU)
        }
        figure = plot.line_panels({start: drawn}, "cache (% of the experts)", "hit rate (%)")
        figure.axes[0].set_ylim(0, 100)
        figures.append(figure_item(figure, start))
    return Section("How far the ceiling is", (Item("text", caption), *figures))


def _certainty(found: Result) -> Iterator[Section]:
    """Yield what each policy gains over LRU, with intervals, where any trace has requests enough."""
    gained = {text: entry.gains for text, entry in found.ranking if entry.gains}
    if not gained:
        return
    starts = list(next(iter(gained.values()))[HITS])
    columns = [
        (start, measure)
        for start in starts
        for measure in found.measures
        if start in found.policies[LRU].figures[measure]
    ]
    place = SIZES.index(QUARTER)
    rows = []
    for text, gains in gained.items():
        rows.append((_title(found, text), *(gain_text(gains[measure][start][place]) for start, measure in columns)))
    head = ("policy", *(f"{start}: {measure}, {'points' if measure == HITS else '%'}" for start, measure in columns))
    requests = "; ".join(f"{counts(found, start)} of {start}" for start in starts)
    text = (
        f"What is gained over LRU at {QUARTER}: points of the hit rate, and percent of time on each machine, with "
        f"intervals of {CONFIDENCE:.0%}, paired over {requests}. An interval that reaches 0 may be chance. Of fewer "
        f"than {FEWEST} requests blocks of tokens are drawn: how sure a gain is on such text, not on other requests."
    )
    yield Section("How sure it is", (Item("text", text), Item("table", head=head, rows=rows)))


def _hits(found: Result, start: str) -> Section:
    head = ("policy", *(f"hits at {size}" for size in SIZES), *(f"gap at {size}" for size in SIZES))
    rows = [
        (
            _title(found, text),
            *map(percent, entry.figures[HITS][start]),
            *map(percent, found.shares(text)[start]),
        )
        for text, entry in found.ranking
    ]
    place = SIZES.index(QUARTER)
    rates = {text: entry.figures[HITS][start][place] for text, entry in found.policies.items()}
    best = max((text for text in rates if not found.policies[text].oracle), key=lambda text: rates[text])
    text = (
        f"At {QUARTER} {best} hits most: {rates[best]:.1%}; LRU {rates[LRU]:.1%}, Belady {rates[BELADY]:.1%}. Below: "
        "hit rates, and shares of the gap from LRU to Belady that are closed, in percent."
    )
    return Section(f"{start}: hits", (Item("text", text), Item("table", head=head, rows=rows)))


def _times(found: Result, start: str) -> Iterator[Section]:
    walls = [wall for wall in found.measures[1:] if start in found.policies[LRU].figures[wall]]
    if not walls:
        return
    rows = [
        (_title(found, text), *(show_ms(ms) for wall in walls for ms in entry.figures[wall][start]))
        for text, entry in found.ranking
    ]
    head = ("policy", *(f"{wall} {size}" for wall in walls for size in SIZES))
    text = "Mean time per output token in ms, by the machine's wall and the size of the cache."
    yield Section(f"{start}: time", (Item("text", text), Item("table", head=head, rows=rows)))


def _what_was_run(found: Result) -> Section:
    cards = [
        f"{card.name}: {card.model}, {card.layers} x {card.experts} experts, top-{card.top_k}; {card.decoded}; "
        f"{card.source}, {card.licence}; defects: {', '.join(card.defects) or 'none found'}"
        for card in cards_of(found.traces)
    ]
    machines = [f"{each.wall} as the wall: {each.title}" for each in MACHINES if each.wall in found.measures]
    items = Item("list", "\n".join([*cards, *machines])), Item("text", LEFT_OUT)
    return Section(f"What was run (version {found.version} of the traces)", items)


def _title(found: Result, policy: str) -> str:
    return policy_title(policy, found.policies[policy].oracle)


def main() -> None:
    result, out = sys.argv[1:]
    command = shlex.join(["python", "-m", "benchmarks.board_page", result, out])
    Path(out).write_text(page(read(Path(result), trust=True), command), "utf-8")


if __name__ == "__main__":
    main()
