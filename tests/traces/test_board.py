"""The traces that policies are compared on are what their cards say, and the page shows the cards."""

from pathlib import Path

import pytest

from benchmarks.cards import table
from traces import Trace
from traces.board import Card, board, sum_of
from traces.defects import of_trace

ROOT = Path(__file__).parents[2]
HERE = [card for card in board().cards if card.sha256]


@pytest.mark.parametrize("card", HERE, ids=lambda card: card.name)
def test_a_trace_is_what_its_card_says(card: Card) -> None:
    trace = Trace.read(card.folder)
    tokens = sum(int(trace.steps(i).tokens.sum()) for i in range(card.requests))
    assert (trace.meta.model, len(trace.requests), tokens) == (card.model, card.requests, card.tokens)
    assert (trace.layers, trace.num_experts, trace.top_k) == (card.layers, card.experts, card.top_k)
    assert tuple(found.name for found in of_trace([trace])[0]) == card.defects
    assert sum_of(card.folder) == card.sha256


def test_only_what_may_be_passed_on_is_here() -> None:
    assert {card.licence for card in HERE} == {"Apache-2.0"}
    folders = {file.name for file in HERE[0].folder.parent.iterdir() if (file / "requests.parquet").exists()}
    assert folders == {card.name for card in HERE}


def test_the_page_shows_the_cards() -> None:
    page = (ROOT / "docs" / "board.md").read_text("utf-8")
    assert table() in page, "to renew it: python -m benchmarks.cards, into docs/board.md"
