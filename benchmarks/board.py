"""What a cold start leaves to policies, and what knowing the next tokens would be worth: `python -m benchmarks.board`.

Prints the tables of docs/board.md: first what each kind of information is worth, and what the next layers' routers
are; then, of each trace of `traces.board` that is one request, from an empty cache and counted without a clock, the
share of the gap from LRU to Belady closed in hits, in percent, at 5, 10, 25 and 50% of the experts. `foresight` knows
which experts the next tokens will use: what a policy would have to foresee.
"""

import warnings
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from sim import sweep
from sim.board.cases import MACHINES, QUARTER, SIZES, cards_of
from tracer.demo import MODEL, NAME, PROMPTS
from tracer.loading import Loading
from tracer.models import load_model
from tracer.prompts import Columns, read_prompts
from tracer.record import Options, record
from traces.board import Card
from traces.models.profile import known
from traces.schema import Picks
from traces.trace import Trace

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


def named_ahead(trace: Trace, recall: float, precision: float, distances: int) -> Trace:
    """Return the trace as if the routers of the next layers had been recorded, with noise of that recall and precision.

    A choice is picked with the chance `recall`; wrong picks are drawn by how often a layer uses an expert. Each
    distance has draws of its own.
    """
    rng, (T, L, k), E = np.random.default_rng(0), trace.experts.shape, trace.num_experts
    chosen = np.zeros((T, L, E + 1), bool)
    np.put_along_axis(chosen, np.minimum(trace.experts, E).astype(np.int64), True, axis=2)
    chosen = chosen[:, :, :E]  # without the place of those that chose nothing
    log_uses, wrong = np.log(chosen.sum(axis=0) + 0.5), k * recall * (1 - precision) / precision
    count = k + int(np.ceil(wrong))
    picks = np.full((T, L, distances, count), trace.sentinel, trace.experts.dtype)
    for place in range(distances):  # of a layer those that the layer so far before it named
        right = chosen & (rng.random(chosen.shape) < recall)
        noise = np.where(chosen, -np.inf, log_uses + rng.gumbel(size=chosen.shape))
        several = np.floor(wrong + rng.random((T, L))).astype(np.int64)
        drawn = np.argsort(np.argsort(-noise, axis=2), axis=2) < several[..., None]
        order = np.argsort(~(right | drawn), axis=2, kind="stable")[..., :count]
        ids = np.where(np.take_along_axis(right | drawn, order, axis=2), order, trace.sentinel)
        picks[:, place + 1 :, place] = ids[:, place + 1 :]
    scores = np.where(picks == trace.sentinel, 0, 1 / k).astype(np.float16)
    meta = replace(trace.meta, lookahead=Picks(tuple(range(1, distances + 1)), count))
    return replace(trace, meta=meta, lookahead=picks, lookahead_scores=scores)


WITH_PICKS = ("lru+gate", "eamc-blend")
FEW = 4
"""Requests of a trace."""

PREDICTORS = {
    "one layer, recall .8": (0.8, 0.8, 1),
    "three layers, recall .8, precision .95": (0.8, 0.95, 3),
}


def saved(trace: Trace, as_named: list[Trace], **options: Any) -> str:
    """Return the percent of LRU's time a token that are saved at 25%: alone, and with picks by `lru+gate` and alone."""

    runs = [(trace, "eamc-blend"), *((each, policy) for each in as_named for policy in WITH_PICKS)]
    lru, *ms = (
        sweep(of, [policy], [QUARTER], cold=True, **options).frame.tpot_mean_ms[0]
        for of, policy in [(trace, "lru"), *runs]
    )
    return " | ".join(f"{100 * (1 - each / lru):.1f}" for each in ms)


def recorded() -> tuple[Trace, Trace]:
    """Return the shipped model's answers to some of its prompts, without and with the routers of three layers."""
    with TemporaryDirectory() as scratch:
        loaded = replace(load_model(str(MODEL), Loading(device="cpu")), name=NAME)
        prompts = list(read_prompts(PROMPTS, Columns(dataset="demo")))[:8]
        record(loaded, prompts, Path(scratch) / "trace", Options(lookahead="1,2,3"))
        folder = Path(scratch) / "trace"
        return Trace.read(folder), Trace.read(folder, ["lookahead", "lookahead_scores"])


def print_routers(cards: list[Card]) -> None:
    """Print what the next layers' routers are worth, of noise, and of the shipped model as recorded."""
    heads = [f"{name}: `{policy}`" for name in PREDICTORS for policy in WITH_PICKS]
    print(f"| machine, trace | `eamc-blend` alone | {' | '.join(heads)} |\n| --- |{' ---: |' * (1 + len(heads))}")
    for card in (card for card in cards if known(card.model)):
        trace = Trace.read(card.folder).head(min(card.requests, FEW))
        named = [named_ahead(trace, *quality) for quality in PREDICTORS.values()]
        sizes = {"expert_sizes": card.expert_sizes} if card.expert_sizes else {}
        for machine in MACHINES:
            values = saved(trace, named, hardware=machine.hardware, host_memory=machine.host_memory, **sizes)
            print(f"| {machine.wall}, {card.name} | {values} |", flush=True)
    shipped, with_picks = recorded()
    values = saved(shipped, [with_picks], hardware="demo", model_profile="demo-stand-in")
    print(f"| demo, {NAME}, as recorded, three layers | {values} |\n")


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
    print_routers(cards)
    for card in (card for card in cards if card.requests == 1):
        print(f"| {card.name} | {' | '.join(SIZES)} |\n| --- |{' ---: |' * len(SIZES)}")
        for name, values in rows(card):
            print(f"| {name} | {' | '.join(map(shown, values))} |", flush=True)
        print()


if __name__ == "__main__":
    main()
