"""Cases that both an engine and the oracle `tests.reference` run: stored ones and random ones.

One generator serves both sources of chance: random.Random, which is fast, and Hypothesis, which shrinks.
Its numbers are small, so that transfers and computes tie, contend and take no time at all.
"""

import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from policies.core import registry, runner, spec
from policies.core.bent import COUNTS
from policies.core.policy import Event, Float, Int, Policy, Prefetcher, Shape
from policies.core.residency import PolicyResidency
from policies.core.spec import PolicySpec
from sim.engines import cases
from sim.loop.log import RunLog
from sim.loop.run import Run, gpu_run
from traces.steps import Choices, RequestSteps

Case = dict[str, Any]

STORED_CASES = Path(__file__).parents[1] / "sim" / "cases.jsonl.gz"
STORED_TIERS_CASES = Path(__file__).parents[1] / "sim" / "cases-tiers.jsonl.gz"


def draw_case(integer: Callable[[int, int], int]) -> Case:
    """A random case, from a source of integers in a closed range; part of it is the oracle's own format."""

    def choice(*options: Any) -> Any:
        return options[integer(0, len(options) - 1)]

    L, E = integer(1, 5), integer(1, 8)
    longest = choice(1, 3, 10, 40)
    expert_bytes = integer(1, 12)
    most_tokens = choice(1, 3)
    density = integer(1, 4)

    def duration() -> int:
        return int(choice(0, integer(0, longest), integer(0, longest)))

    def event() -> list[list[int]]:
        if integer(0, 9) == 0:
            return []
        return [[expert, integer(1, most_tokens)] for expert in range(E) if integer(1, 4) <= density]

    def proposal() -> list[list[float]]:
        if integer(0, 2) == 0:
            return []
        likely = integer(1, 4)
        return [[id, integer(0, 12) / 2] for id in range(L * E) if integer(1, 8) <= likely]

    requests = [[[event() for _ in range(L)] for _ in range(integer(1, 5))] for _ in range(integer(1, 4))]
    prefetch = choice("none", "oracle1", "oracle1", "popular", "popular", "scripted", "scripted")
    scripted = prefetch == "scripted"
    proposals = [[[proposal() if scripted else [] for _ in step] for step in request] for request in requests]
    partitions = choice(None, [choice(1, integer(1, E + 1)) for _ in range(L)])
    slots = choice(integer(1, 3), integer(1, L * E + 2), integer(1, max(1, L * E // 2)))
    at_start = scripted and integer(0, 1) == 1  # the last of a step's proposals is made when it starts
    for step in (step for request in proposals for step in request if at_start):
        step.append(proposal())
    return {
        "L": L,
        "E": E,
        "at_start": at_start,
        "partitions": partitions,
        "slots": sum(partitions) if partitions else slots,
        "expert_bytes": expert_bytes,
        "link_latency_ns": choice(0, integer(0, 6)),
        "link_ns_per_byte_num": choice(0, 1, 1, integer(0, 5)),
        "link_ns_per_byte_den": integer(1, 4),
        "chunk_bytes": choice(None, integer(1, expert_bytes + 3), integer(1, max(1, expert_bytes // 3))),
        "dense_ns": duration(),
        "expert_ns": duration(),
        "expert_ns_per_token": choice(0, 0, integer(0, 3)),
        "combine_ns": duration(),
        "head_ns": duration(),
        "predictor_ns": choice(0, 0, duration()),
        "evict": choice("lru", "lfu", "fifo", "belady"),
        "prefetch": prefetch,
        "popular_n": integer(1, E + 1),
        "cold": choice(False, False, True),
        "one_scale": choice(False, False, True),
        "requests": requests,
        "proposals": proposals,
    }


def draw_admission_case(integer: Callable[[int, int], int]) -> Case:
    """A random case of `draw_tiers_case` with an admission (rule 21)."""
    case = draw_tiers_case(integer)
    case |= {"admission": ("never", "score", "score", "second")[integer(0, 3)], "window": integer(1, 3)}
    if case.get("placement") and integer(0, 1):
        case |= {"placement": "admitted"}
    if integer(0, 1):
        case |= {"insert_cap": integer(0, 3)}
    if integer(0, 1):
        case |= {"staging": integer(1, 3)}
    return case


def draw_tiers_case(integer: Callable[[int, int], int]) -> Case:
    """A random case with what rules 13, 17, 18 and 19 add, each of them absent at times, in the oracle's own format.

    Its requests are those of `draw_case`, cut into more of them, so that there are users enough.
    """

    def choice(*options: Any) -> Any:
        return options[integer(0, len(options) - 1)]

    case = draw_case(integer)
    L, E, experts = case["L"], case["E"], case["L"] * case["E"]
    longest = choice(1, 3, 10, 40)

    def duration() -> int:
        return int(choice(0, integer(0, longest), integer(0, longest)))

    placement = choice(None, "fetch", "host", "split", "split", "layers")
    disk, by_layer, several = choice(True, True, False), choice(True, False, False), choice(True, True, False)
    if placement is not None:
        host_ns = choice(duration(), duration(), 5 * longest)  # long enough for prefetches meanwhile
        case |= {"placement": placement, "host_ns": host_ns, "host_ns_per_token": choice(0, 0, integer(0, 3))}
        case |= {"hop_ns": duration()}
    if placement == "layers":
        case |= {"host_layers": integer(0, L)}
    if disk:
        case |= {"host_slots": choice(integer(1, 3), integer(1, experts + 1), integer(1, max(1, experts // 2)))}
        case |= {"disk_latency_ns": duration(), "disk_ns_per_byte_num": choice(0, 1, 1, integer(0, 5))}
        case |= {"disk_ns_per_byte_den": integer(1, 4)}
    if by_layer:
        sizes = [integer(1, 12) for _ in range(L)]
        largest, everything = max(sizes), E * sum(sizes)
        case |= {"layer_bytes": sizes, "capacity_bytes": integer(largest, choice(largest * 3, everything + largest))}
        del case["slots"], case["partitions"]
        if disk:
            case |= {"host_capacity_bytes": integer(largest, choice(largest * 3, everything + largest))}
            del case["host_slots"]
    if several:
        if case["evict"] == "belady":
            case["evict"] = "lru"  # the future of a batch depends on its times
        for key in ("requests", "proposals"):
            case[key] = [list(request) for request in case[key]]
        for request in range(len(case["requests"])):
            while len(case["requests"][request]) > 1 and integer(0, 2) > 0:
                kept = integer(1, len(case["requests"][request]) - 1)
                for key in ("requests", "proposals"):
                    case[key].append(case[key][request][kept:])
                    del case[key][request][kept:]
        users = range(len(case["requests"]))
        span = choice(0, 2, longest, 10 * longest, 100 * longest)
        apart = integer(0, span)
        arrivals = choice(None, [integer(0, span) for _ in users], [user * apart for user in users])
        case |= {"max_batch": integer(1, 4), "arrival_ns": arrivals}
        case |= {"prefill": choice(None, [choice(False, True) for _ in users])}
    return case


def play(case: Case, engine: str = "simpy") -> Case:
    """An engine's result of a case, stall by cause included."""

    def result_with_stalls(log: RunLog, case: cases.Case) -> Case:
        counts = {"bent": [int(getattr(log, name).sum()) for name in COUNTS]} if bent else {}
        return {**case_result(log, case), "stalls": log.stall_ns.sum(axis=0).tolist(), **counts}

    bent = case.get("bent")

    def requests(stated: cases.Case) -> list[RequestSteps]:
        made = case_requests(stated)
        return [with_tokens(*each, case) for each in zip(made, bent["tokens"], strict=True)] if bent else made

    def bent_run(*args: Any, **options: Any) -> Run:
        if bent:
            names = {"drop": "below", "substitute": "bonus", "commit": "layers"}
            options["routing"] = spec.read_rule(f"{bent['rule']}:{names[bent['rule']]}={bent['by']}")
        return gpu_run(*args, **options)

    partitions = case.get("partitions")

    def residency(
        shape: Shape, divided: Sequence[int], policy: Policy, one_scale: bool, *others: Any
    ) -> PolicyResidency:
        assert len(divided) == (len(partitions) if partitions else 1)
        return PolicyResidency(shape, partitions or divided, policy, case.get("one_scale", False), *others)

    def parse(text: str) -> PolicySpec:
        return spec.parse(text).with_part("scope", "layer" if partitions else "global")

    class Scripted(Prefetcher):
        name, observes, at_start = "scripted", False, case.get("at_start", False)

        def __init__(self, shape: Shape, options: object) -> None:
            super().__init__(shape, options)
            self.scripts: dict[int, Any] = {}

        def begin_request(self, request: int, batch_slot: int) -> None:
            self.scripts[batch_slot] = case["proposals"][request]

        def propose(self, event: Event) -> tuple[Int, Float]:
            best: dict[int, float] = {}  # of all requests
            for batch_slot, step, *_ in event.by_request():
                for expert, priority in self.scripts[batch_slot][step][event.layer]:
                    best[expert] = max(priority, best.get(expert, -np.inf))
            return np.array(list(best), np.int64), np.array(list(best.values()), np.float64)

    case_result, case_requests = cases.case_result, cases.case_requests
    with (
        patch.object(cases, "case_requests", requests),
        patch.object(cases, "gpu_run", bent_run),
        patch.object(cases, "case_result", result_with_stalls),
        patch.object(runner, "PolicyResidency", residency),
        patch.object(cases, "parse", parse),
        patch.dict(registry._prefetch, scripted=Scripted),
    ):
        return cases.run_case(case, engine)


def with_tokens(request: RequestSteps, tokens: list[Any], case: Case) -> RequestSteps:
    """Return a request with the choices of each token, as traces have them. tokens: steps x tokens x layers."""
    k, rows = case["bent"]["k"], [token for step in tokens for token in step]
    width = case["E"]

    def padded(values: list[Any], size: int, empty: Any) -> list[Any]:
        return [*values, *[empty] * (size - len(values))]

    def column(of: Callable[[Any], list[Any]], size: int, empty: Any, dtype: Any) -> Any:
        return np.array([[padded(of(layer), size, empty) for layer in token] for token in rows], dtype)

    def behind(layer: Any, values: list[Any], empty: Any, place: int) -> list[Any]:
        return [*padded(values, k, empty), *(other[place] for other in layer["others"])]

    ids = column(lambda layer: [expert for expert, _ in layer["choices"]], k, 255, np.uint8)
    weights = column(lambda layer: [weight for _, weight in layer["choices"]], k, 0, np.float64)
    shown = column(
        lambda layer: behind(layer, [expert for expert, _ in layer["choices"]], 255, 0), k + width, 255, np.uint8
    )
    scores = column(lambda layer: behind(layer, layer["scores"], 0, 1), k + width, 0, np.float64)
    picks = column(lambda layer: layer["picks"][: len(layer["choices"])], k, 255, np.uint8)[:, :, None]
    each = np.array([len(step) for step in tokens], np.int64)
    choices = Choices(ids, 255, weights, shown, scores, picks, (case["bent"]["by"],))
    return replace(request, tokens=each, context=each, choices=choices)


def stored_cases(path: Path = STORED_CASES) -> list[Case]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
