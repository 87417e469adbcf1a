"""What a cold start leaves to policies, and what knowing the next tokens would be worth: `python -m benchmarks.board`.

Prints the tables of docs/board.md: first what each kind of information is worth; then, of each trace of `traces.board`
that is one request, from an empty cache and counted
without a clock, the share of the gap from LRU to Belady closed in hits, in percent, at 5, 10, 25 and 50% of the
experts. `foresight` knows which experts the next tokens will use: what a policy would have to foresee.
"""

import warnings

from sim import sweep
from sim.board.cases import SIZES, cards_of
from traces.board import Card

POLICIES = ["lrfu", "lfu-aged", "arc", "s3fifo", "eamc", "eamc-blend"]
TOKENS = (1, 2, 4, 8)
FORESEEING = [f"foresight:tokens={tokens}" for tokens in TOKENS]


def rows(card: Card) -> list[tuple[str, list[float | None]]]:
    """Return by policy the share of the gap closed, at each size; before them the hit rates of both bounds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of caches below the working set of a token
        found = sweep(card.folder, ["lru", "belady", *POLICIES, *FORESEEING], SIZES, untimed=True).frame
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
    "and the experts of the next token (`foresight`)": "foresight:tokens=1",
    "of the next 4 tokens": "foresight:tokens=4",
    "of the next 8 tokens": "foresight:tokens=8",
    "of all (`belady`)": "belady",
}


def worth(card: Card, size: str = "25%") -> dict[str, float]:
    """Return the share of the gap closed in hits from cold, by what a policy knows."""
    found = sweep(
        card.folder, ["lru", "lrfu", "eamc", "eamc-blend", *FORESEEING, "belady"], [size], untimed=True, cold=True
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
