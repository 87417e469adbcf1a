"""The cards of the traces that policies are compared on, as a table of docs/board.md: `python -m benchmarks.cards`."""

from traces.board import board


def table() -> str:
    """Return the cards as a table of a page, those that ship first."""
    cards = sorted(board().cards, key=lambda card: not card.sha256)
    rows = [
        f"| {card.name} | {card.model}, {card.layers} x {card.experts}, top-{card.top_k} | {card.decoded} | "
        f"{card.requests}, {card.tokens:,} | {'; '.join(card.defects) or '-'} | {card.source}, {card.licence} |"
        for card in cards
    ]
    heading = "trace", "model, experts", "what was decoded", "requests, tokens", "defects", "source, licence"
    lines = " | ".join(heading), " | ".join("---" for _ in heading)
    return "\n".join([*(f"| {line} |" for line in lines), *rows])


if __name__ == "__main__":
    print(table())
