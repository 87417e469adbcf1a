"""The oracle of rule 20: what drafted tokens, and prompts in chunks, are in steps, which `tests.reference` then runs.

Written from the rule's text alone, importing nothing of this project but that oracle and random cases for it. The
keys of a case are those of docs/cases.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.reference import Reference
from tests.support.reference_cases import draw_tiers_case

Token = list[list[int]]


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """The result of a case, as `tests.reference.run_case` has it, and `kept`: of each request's steps, in turn."""
    planned = [
        plan(tokens, prompt, case["draft"], acceptor(case, request, len(tokens) - prompt), case["prefill_chunk"])
        for request, (tokens, prompt) in enumerate(zip(case["tokens"], case["prompt"], strict=True))
    ]
    case = {
        **case,
        "requests": [[union(step["tokens"]) for step in steps] for steps in planned],
        "prefill": [prompt > 0 for prompt in case["prompt"]],
        "drafted": [[step["drafted"] for step in steps] for steps in planned],
    }
    kept = [len(step["tokens"]) - step["rejected"] for steps in planned for step in steps]
    return {**Drafting(case).run(), "kept": kept}


def acceptor(case: dict[str, Any], request: int, decoded: int) -> Callable[[int, int], int]:
    """How many tokens a step would accept, by its number and the decoded token that it begins with."""
    if case["accepted"] is not None:
        return lambda number, at: case["accepted"][number % len(case["accepted"])]
    drawn = np.random.default_rng([case["seed"], request]).random((decoded, case["draft"]))

    def run_of_good(number: int, at: int) -> int:
        good = 0
        while good < case["draft"] and drawn[at][good] < case["acceptance"]:
            good += 1
        return good

    return run_of_good


def plan(
    tokens: list[Token], prompt: int, draft: int, accepted: Callable[[int, int], int], chunk: int | None
) -> list[dict[str, Any]]:
    """The steps of a request."""
    steps = []
    at = 0
    while at < prompt:
        end = min(at + (chunk or prompt), prompt)
        steps.append({"tokens": tokens[at:end], "drafted": 0, "rejected": 0})
        at = end
    decoded = tokens[prompt:]
    number = at = 0
    while at < len(decoded):
        drafted = min(draft, len(decoded) - at - 1)
        good = min(accepted(number, at), drafted)
        taken = decoded[at : at + 1 + good]
        for place in range(at + 1 + good, at + 1 + drafted):  # rejected: routed as tokens half of them away
            taken.append(decoded[(place + len(decoded) // 2) % len(decoded)])
        steps.append({"tokens": taken, "drafted": drafted, "rejected": drafted - good})
        number += 1
        at += 1 + good
    return steps


def union(tokens: list[Token]) -> list[list[list[int]]]:
    """By layer the experts of some tokens, each with how many of them chose it."""
    events = []
    for layer in range(len(tokens[0])):
        chosen = [expert for token in tokens for expert in token[layer]]
        events.append([[expert, chosen.count(expert)] for expert in sorted(set(chosen))])
    return events


class Drafting(Reference):
    """Before the first dense part of a step its drafts are made: one after another, of all requests at once."""

    def begin_dense(self) -> None:
        ns = self.case["dense_ns"]
        if self.layer == 0:
            done, drafted = self.batch.steps_done, self.case["drafted"]
            most = max(drafted[request][done[request]] for request in self.batch.stepping)
            ns += most * self.case["draft_ns"]
        self.compute("dense", ns, self.on_router)


def draw_drafts_case(integer: Callable[[int, int], int]) -> dict[str, Any]:
    """A random case: the machine, tiers and users of another, with requests of tokens, drafts and chunks."""
    case = draw_tiers_case(integer)
    if case["prefetch"] == "scripted":
        case |= {"prefetch": "oracle1", "at_start": False}
    E, k = case["E"], integer(1, min(4, case["E"]))

    def token() -> Token:
        shuffled = [sorted(range(E), key=lambda _: integer(0, 99)) for _ in range(case["L"])]
        return [sorted(experts[:k]) if integer(0, 9) else [] for experts in shuffled]

    tokens = [[token() for _ in range(integer(1, 9))] for _ in case["requests"]]
    lengths, likely = [integer(0, 4) for _ in range(integer(1, 4))], integer(0, 2) == 0
    return {
        **case,
        "requests": None,
        "tokens": tokens,
        "prompt": [integer(0, len(each)) if integer(0, 1) else 0 for each in tokens],
        "draft": integer(0, 4),
        "accepted": None if likely else lengths,
        "acceptance": integer(0, 10) / 10 if likely else None,
        "seed": integer(0, 9) if likely else None,
        "draft_ns": integer(0, 1) * integer(0, 40),
        "prefill_chunk": integer(1, 4) if integer(0, 1) else None,
    }
