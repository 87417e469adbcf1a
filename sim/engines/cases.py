"""Engine-neutral cases: one JSON object in, one result line out, so that independent engines can be compared.

The keys of a case and of a result are those of the conformance format: times in ns, experts as [expert, tokens].
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from policies.core.policy import Shape
from policies.core.spec import parse
from sim.engines.engine import AUTO, SIMPY, check, simulate
from sim.loop.log import RunLog
from sim.loop.run import gpu_run
from sim.profiles.timing import FixedTiming, Link
from traces.errors import InputError
from traces.steps import DECODE, RequestSteps


def read_cases(path: Path) -> Iterator[dict[str, Any]]:
    """The cases of a JSONL file. InputError for a file or a line that cannot be read."""
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    try:
                        yield json.loads(line)
                    except json.JSONDecodeError as error:
                        raise InputError(f"{path}, line {number}: not JSON ({error.msg})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read cases from {path}: {error}") from None


def run_file(path: Path, out: TextIO, engine: str = AUTO) -> int:
    """Write one result line for each case of `path`, played on `engine` (`sim.engines.engine`); how many."""
    check(engine)
    count = 0
    for count, case in enumerate(read_cases(path), 1):
        try:
            result = run_case(case, engine)
        except KeyError as error:
            raise InputError(f"{path}, case {count}: no key {error}") from None
        except (TypeError, ValueError, OverflowError) as error:
            raise InputError(f"{path}, case {count}: {error}") from None
        out.write(json.dumps(result, separators=(",", ":")) + "\n")
    return count


LEAST = {
    **dict.fromkeys(("L", "E", "slots", "expert_bytes", "link_ns_per_byte_den"), 1),
    **dict.fromkeys(("link_latency_ns", "link_ns_per_byte_num", "dense_ns", "expert_ns", "expert_ns_per_token"), 0),
    **dict.fromkeys(("combine_ns", "head_ns", "predictor_ns", "popular_n"), 0),
}
"""The whole numbers of a case, and the least that each may be."""

MOST = 2**53


def check_case(case: dict[str, Any]) -> None:
    """Compiled code trusts its input, so a case is checked first. KeyError or ValueError, saying what is wrong."""
    least = LEAST if case["chunk_bytes"] is None else LEAST | {"chunk_bytes": 1}
    for key, lowest in least.items():
        if type(case[key]) is not int or not lowest <= case[key] <= MOST:
            raise ValueError(f"{key} must be a whole number from {lowest} to 2**53, not {case[key]!r}")
    if type(case["cold"]) is not bool:
        raise ValueError(f"cold must be true or false, not {case['cold']!r}")
    for steps in case["requests"]:
        for step in steps:
            if len(step) != case["L"]:
                raise ValueError(f"a step has {len(step)} events, but there are {case['L']} layers")
            for event in step:
                before = -1
                for expert, tokens in event:
                    if type(expert) is not int or not before < expert < case["E"]:
                        raise ValueError(f"experts of an event must be ascending ids below {case['E']}: {event}")
                    if type(tokens) is not int or not 1 <= tokens <= MOST:
                        raise ValueError(f"an expert that was chosen has at least one token: {event}")
                    before = expert


def run_case(case: dict[str, Any], engine: str = SIMPY) -> dict[str, Any]:
    """Play one case. KeyError or ValueError for what is no case."""
    check_case(case)
    prefetch = case["prefetch"]
    if prefetch == "popular":
        prefetch = f"popular:n={case['popular_n']}"
    log = simulate(
        engine,
        gpu_run(
            [case_request(ordinal, steps, case["E"]) for ordinal, steps in enumerate(case["requests"])],
            Shape(case["L"], case["E"]),
            slots=case["slots"],
            policy=parse(f"{case['evict']}+{prefetch}"),
            timing=FixedTiming(
                dense=case["dense_ns"],
                expert=case["expert_ns"],
                expert_per_token=case["expert_ns_per_token"],
                combine=case["combine_ns"],
                head=case["head_ns"],
                predictor_ns=case["predictor_ns"],
            ),
            link=Link(
                latency_ns=case["link_latency_ns"],
                ns_per_byte_num=case["link_ns_per_byte_num"],
                ns_per_byte_den=case["link_ns_per_byte_den"],
                expert_bytes=case["expert_bytes"],
                chunk_bytes=case["chunk_bytes"],
            ),
            cold=case["cold"],
        ),
    )
    return case_result(log)


def case_request(ordinal: int, steps: list[list[list[list[int]]]], experts: int) -> RequestSteps:
    """A case's request, steps x layers x [expert, tokens], as an engine plays it."""
    events = [(layer, event) for step in steps for layer, event in enumerate(step)]
    accesses = [(layer * experts + expert, tokens) for layer, event in events for expert, tokens in event]
    table = np.array(accesses, np.int64).reshape(-1, 2)
    tokens = [max((n for event in step for _, n in event), default=1) for step in steps]
    return RequestSteps(
        request=ordinal,
        phase=np.full(len(steps), DECODE, np.uint8),
        tokens=np.array(tokens, np.int64),
        context=np.array(tokens, np.int64),
        offsets=np.concatenate([[0], np.cumsum([len(event) for _, event in events])]).astype(np.int64),
        experts=table[:, 0],
        counts=table[:, 1],
    )


def case_result(log: RunLog) -> dict[str, Any]:
    """The result line of a run."""
    return {
        "token_ns": log.step_ns.tolist(),
        "hits": int(log.hits.sum()),
        "late": int(log.late.sum()),
        "misses": int(log.misses.sum()),
        "bytes_demand": int(log.demand_transfers.sum()) * log.expert_bytes,
        "bytes_prefetch": int(log.prefetch_transfers.sum()) * log.expert_bytes,
        "bytes_wasted": int(log.prefetch_wasted.sum()) * log.expert_bytes,
        "evictions": log.evictions.tolist(),
        "stall_ns": int(log.stall_ns.sum()),
    }
