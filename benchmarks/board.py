"""What a cold start leaves to policies, and what knowing the next tokens would be worth: `python -m benchmarks.board`.

Prints the tables of docs/board.md: first what each kind of information is worth; then, of each trace of `traces.board`
that is one request, from an empty cache and counted
without a clock, the share of the gap from LRU to Belady closed in hits, in percent, at 5, 10, 25 and 50% of the
experts. `Foresight` is LRU that knows which experts the next tokens will use: what a policy would have to foresee.
"""

import warnings
from dataclasses import dataclass
from itertools import pairwise

from policies import Event, ScorePolicy, Shape, make_policy
from policies.core.policy import Requests
from sim import sweep
from sim.board.cases import SIZES, cards_of
from traces.board import Card

POLICIES = ["lrfu", "lfu-aged", "arc", "s3fifo", "eamc", "eamc-blend"]
TOKENS = (1, 2, 4, 8)
KNOWN = 1e12
"""More events than a run has."""


@dataclass(frozen=True)
class ForesightOptions:
    """tokens: how many tokens ahead the routing is known."""

    tokens: int = 1


class Foresight(ScorePolicy):
    """LRU that knows the next tokens: what they use goes last, the furthest use first. Ties: lower id."""

    Options = ForesightOptions
    oracle = True

    def __init__(self, shape: Shape, options: ForesightOptions) -> None:
        super().__init__(shape, options)
        self.ahead = options.tokens * shape.layers
        self.number = -1
        self.events: list[list[int]] = []
        self.following: list[list[int]] = []

    def foresee(self, requests: Requests) -> None:
        for request in requests:
            ends = request.offsets.tolist()
            self.events += [request.experts[a:b].tolist() for a, b in pairwise(ends)]
        upcoming = dict[int, int]()
        for number in range(len(self.events) - 1, -1, -1):
            self.following.append(
                [upcoming.get(expert, len(self.events) + self.ahead) for expert in self.events[number]]
            )
            upcoming.update(dict.fromkeys(self.events[number], number))
        self.following.reverse()

    def observe(self, event: Event) -> None:
        self.number += 1
        reach = self.number + self.ahead
        for expert in self.events[reach] if reach < len(self.events) else ():
            if self.keep[0, expert] < KNOWN / 2:
                self.keep[0, expert] = KNOWN - reach
        for expert, following in zip(self.events[self.number], self.following[self.number], strict=True):
            self.keep[0, expert] = KNOWN - following if following <= reach else self.number


def rows(card: Card) -> list[tuple[str, list[float | None]]]:
    """Return by policy the share of the gap closed, at each size; before them the hit rates of both bounds."""
    foreseeing = [make_policy(Foresight, tokens=n) for n in TOKENS]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of caches below the working set of a token
        found = sweep(card.folder, ["lru", "belady", *POLICIES, *foreseeing], SIZES, untimed=True).frame
    names = list(dict.fromkeys(found.policy))
    columns = {name: found[found.policy == name] for name in names}
    return [
        *((f"{name}, hit rate", list(columns[name].hit_rate)) for name in ("lru", "belady")),
        *((name, list(columns[name].gap_hits)) for name in names if name not in ("lru", "belady")),
    ]


INFORMATION = {
    "how lately an expert was used (`lru`)": "lru",
    "and how often (`lrfu`)": "lrfu",
    "earlier requests, or parts of this one, that are like it (`eamc`)": "eamc",
    "what was used after passes that are like this one (`eamc-blend`)": "eamc-blend",
    "the experts of the next token (foresight)": "Foresight:tokens=1",
    "of the next 4 tokens": "Foresight:tokens=4",
    "of the next 8 tokens": "Foresight:tokens=8",
    "of all (`belady`)": "belady",
}


def worth(card: Card, size: str = "25%") -> dict[str, float]:
    """Return the share of the gap closed in hits from cold, by what a policy knows."""
    foreseeing = [make_policy(Foresight, tokens=n) for n in (1, 4, 8)]
    found = sweep(
        card.folder, ["lru", "lrfu", "eamc", "eamc-blend", *foreseeing, "belady"], [size], untimed=True, cold=True
    ).frame
    return dict(zip(found.policy, found.gap_hits, strict=True))


def shown(value: float | None) -> str:
    return "-" if value is None or value != value else f"{100 * value:.1f}"


def main() -> None:
    """Print what information is worth, and a table for each trace of one request."""
    cards = cards_of()
    print(f"| known | {' | '.join(card.name for card in cards)} |\n| --- |{' ---: |' * len(cards)}")
    known = [worth(card) for card in cards]
    for text, name in INFORMATION.items():
        print(f"| {text} | {' | '.join(shown(shares.get(name)) for shares in known)} |", flush=True)
    print()
    for card in (card for card in cards if card.requests == 1):
        print(f"| {card.name} | {' | '.join(SIZES)} |\n| --- |{' ---: |' * len(SIZES)}")
        for name, values in rows(card):
            print(f"| {name} | {' | '.join(map(shown, values))} |", flush=True)
        print()


if __name__ == "__main__":
    main()
