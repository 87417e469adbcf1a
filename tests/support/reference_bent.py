"""Bent routing for the oracle `tests.reference`, and random cases of it.

Rule 22 of docs/contract.md, written from its text alone, importing nothing of this project. A case has under `bent` its
`rule` (drop, substitute or commit), the number `by` (below, bonus or layers), and `tokens`: requests x steps x tokens x
layers, each with the k `choices` as [expert, weight], the best first, and their `scores`; the `others` as [expert,
score]; and the `picks` of the lookahead, `by` layers before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Case = dict[str, Any]
Token = dict[str, Any]


class Bent:
    def __init__(self, case: Case) -> None:
        self.rule, self.by, self.tokens = (case["bent"][key] for key in ("rule", "by", "tokens"))
        self.counts = [0, 0, 0, 0]  # tokens that chose, their choices, those not computed, and their weight in 1e-9

    def event(self, layer: int, steps: list[tuple[int, int]], present: set[int]) -> dict[int, int]:
        """The experts, with their tokens, of the requests' present steps; present: experts in the layer."""
        together: dict[int, int] = {}
        for request, step in steps:
            for token in self.tokens[request][step]:
                for expert in self.choose(token[layer], layer, present):
                    together[expert] = together.get(expert, 0) + 1
        return together

    def choose(self, token: Token, layer: int, present: set[int]) -> list[int]:
        own = [expert for expert, _weight in token["choices"]]
        if not own:
            return []
        weights = [weight for _expert, weight in token["choices"]]
        shares = [weight / sum(weights) for weight in weights]
        if self.rule == "drop":
            best = own[shares.index(max(shares))]
            kept = [
                expert
                for expert, share in zip(own, shares, strict=True)
                if expert in present or share >= self.by or expert == best
            ]
        elif self.rule == "substitute":
            kept, shares = self.substitute(token, own, present)
        else:
            kept = token["picks"][: len(own)] if layer >= self.by else own
        self.counts[0] += 1
        self.counts[1] += len(own)
        for expert, share in zip(own, shares, strict=True):
            if expert not in kept:
                self.counts[2] += 1
                self.counts[3] += round(share * 1e9)
        return kept

    def substitute(self, token: Token, own: list[int], present: set[int]) -> tuple[list[int], list[float]]:
        scores = dict(zip(own, token["scores"], strict=True))
        lowest = min(scores.values())
        scores |= {expert: min(score, lowest) for expert, score in token["others"]}
        bonus = self.by * (max(scores.values()) - min(scores.values()))
        ranked = sorted(scores, key=lambda expert: -(scores[expert] + (bonus if expert in present else 0)))
        weights = [math.exp(score) for score in token["scores"]]
        return ranked[: len(own)], [weight / sum(weights) for weight in weights]


def bend(case: Case, integer: Callable[[int, int], int], rule: str | None = None, by: float | None = None) -> Case:
    """Return a case with the routing of single tokens, which a rule bends."""

    def choice(*options: Any) -> Any:
        return options[integer(0, len(options) - 1)]

    L, E = case["L"], case["E"]
    k, most = integer(1, E), choice(1, 1, 4)
    rule = rule or choice("drop", "substitute", "commit")
    numbers = {"drop": (0, 0.25, 0.5, 1), "substitute": (0, 0.25, 0.5, 2), "commit": (1, 1, 2)}

    def shuffled() -> list[int]:
        left, drawn = list(range(E)), []
        while left:
            drawn.append(left.pop(integer(0, len(left) - 1)))
        return drawn

    def token() -> Token:
        order, n = shuffled(), choice(k, k, k, integer(0, k))
        return {
            "choices": [[expert, integer(0, 8)] if place else [expert, 8] for place, expert in enumerate(order[:n])],
            "scores": sorted((integer(-12, 0) / 4 for _ in range(n)), reverse=True),
            "others": [[expert, integer(-16, 0) / 4] for expert in order[n:]][: integer(0, E)],
            "picks": shuffled()[:k],
        }

    tokens = [
        [[[token() for _ in range(L)] for _ in range(integer(1, most))] for _ in request]
        for request in case["requests"]
    ]
    case = {
        **case,
        "bent": {"rule": rule, "by": choice(*numbers[rule]) if by is None else by, "tokens": tokens, "k": k},
    }

    def event(step: list[list[Token]], layer: int) -> list[list[int]]:
        chosen = [expert for each in step for expert, _ in each[layer]["choices"]]
        return [[expert, chosen.count(expert)] for expert in sorted(set(chosen))]

    case["requests"] = [[[event(step, layer) for layer in range(L)] for step in request] for request in tokens]
    return case
