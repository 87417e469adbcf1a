"""Engine-neutral cases: one JSON object in, one result line out, so that independent engines can be compared.

The keys of a case and of a result are those of the conformance format: times in ns, experts as [expert, tokens].
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from policies.core.policy import Shape
from policies.core.spec import parse
from sim.engines.engine import AUTO, SIMPY, check, simulate
from sim.loop.log import RunLog
from sim.loop.run import Tier, Users, gpu_run
from sim.profiles.timing import FixedTiming, Link
from traces.errors import InputError, unknown
from traces.facts import parse_json
from traces.files import plain
from traces.steps import DECODE, PREFILL, RequestSteps


def read_cases(path: Path) -> Iterator[dict[str, Any]]:
    """The cases of a JSONL file. InputError for a file or a line that cannot be read."""
    try:
        with plain(path).open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    case = parse_json(line, f"{path}, line {number}")
                    if not isinstance(case, dict):
                        raise InputError(f"{path}, line {number} is no JSON object")
                    yield case
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read cases from {path}: {error}") from None


def run_file(path: Path, out: TextIO, engine: str = AUTO, warn: Callable[[str], None] = lambda text: None) -> int:
    """Write one result line for each case of `path`, run on `engine` (`sim.engines.engine`); how many.

    warn: is called once for each key that no case has, which may be another engine's or wrongly written, and for each
    that its case does not use.
    """
    check(engine)
    count, known, unused = 0, {*LEAST, *LEAST_OF_TIERS, *LISTS_OF_TIERS, *OTHERS}, set[str]()
    for count, case in enumerate(read_cases(path), 1):
        for key in sorted(case.keys() - known):
            warn(f"{path}, case {count}: {unknown('key', key, known)} (ignored)")
            known.add(key)
        try:
            result = run_case(case, engine)
            for key, needed in _unused(case):
                if key not in unused:
                    warn(f"{path}, case {count}: {key} needs {needed} (ignored)")
                    unused.add(key)
        except KeyError as error:
            raise InputError(f"{path}, case {count}: no key {error}") from None
        except (TypeError, ValueError, OverflowError, AttributeError, IndexError, MemoryError) as error:
            raise InputError(f"{path}, case {count}: {error}") from None
        out.write(json.dumps(result, separators=(",", ":")) + "\n")
    return count


LEAST = {
    **dict.fromkeys(("L", "E", "slots", "expert_bytes", "link_ns_per_byte_den"), 1),
    **dict.fromkeys(("link_latency_ns", "link_ns_per_byte_num", "dense_ns", "expert_ns", "expert_ns_per_token"), 0),
    **dict.fromkeys(("combine_ns", "head_ns", "predictor_ns", "popular_n"), 0),
}
"""The whole numbers of a case, and the least that each may be."""

LEAST_OF_TIERS = {
    **dict.fromkeys(("host_slots", "disk_ns_per_byte_den", "max_batch", "capacity_bytes", "host_capacity_bytes"), 1),
    **dict.fromkeys(("host_ns", "host_ns_per_token", "hop_ns", "disk_latency_ns", "disk_ns_per_byte_num"), 0),
    "host_layers": 0,
}
"""The same of what tiers and users add, which may be absent, or null."""

LISTS_OF_TIERS = {"layer_bytes": "L", "arrival_ns": "requests", "prefill": "requests"}
"""Lists that they add, and what has an item of each."""

OTHERS = ("chunk_bytes", "evict", "prefetch", "placement", "cold", "requests", "expected")
"""The keys that are neither, and the result that an engine is compared with."""

NEEDED: dict[str, tuple[str, Callable[[dict[str, Any]], bool]]] = {
    "host_layers": ("placement layers", lambda case: case.get("placement") == "layers"),
    **dict.fromkeys(("arrival_ns", "prefill"), ("max_batch", lambda case: case.get("max_batch") is not None)),
    **dict.fromkeys(
        ("disk_latency_ns", "disk_ns_per_byte_num", "disk_ns_per_byte_den"),
        ("host_slots or host_capacity_bytes", lambda case: _host(case) is not None),
    ),
}
"""Keys that do nothing without another one, its name, and whether a case has it."""

PLACEMENTS = ("fetch", "host", "split", "layers")

MOST = 2**53


def check_case(case: dict[str, Any]) -> None:
    """Compiled code trusts its input, so a case is checked first. KeyError or ValueError, saying what is wrong."""
    given = {key: lowest for key, lowest in LEAST_OF_TIERS.items() if case.get(key) is not None}
    least = LEAST | given | ({} if case["chunk_bytes"] is None else {"chunk_bytes": 1})
    if case.get("capacity_bytes") is not None:
        del least["slots"]
    for key, lowest in least.items():
        _check(key, case[key], lowest)
    for key, of in LISTS_OF_TIERS.items():
        if case.get(key) is not None:
            wanted = case[of] if of == "L" else len(case[of])
            if len(case[key]) != wanted:
                raise ValueError(f"{key} needs {wanted} items, not {len(case[key])}")
    for ns in case.get("arrival_ns") or ():
        _check("arrival_ns", ns, 0)
    for flag in case.get("prefill") or ():
        _check_flag("prefill", flag)
    sizes = case.get("layer_bytes") or [case["expert_bytes"]]
    for sized, count in (("capacity_bytes", "slots"), ("host_capacity_bytes", "host_slots")):
        if case.get("layer_bytes") and case.get(sized) is None and case.get(count) is not None:
            raise ValueError(f"{count}: where layer_bytes differ, give {sized}")
        if not case.get("layer_bytes") and case.get(sized) is not None:
            raise ValueError(f"{sized} needs layer_bytes: give them, or {count}")
    for size in sizes:
        _check("layer_bytes", size, 1)
    for key in ("capacity_bytes", "host_capacity_bytes"):
        if case.get(key) is not None and case[key] < max(sizes):
            raise ValueError(f"{key} {case[key]} holds no expert of {max(sizes)} bytes")
    _check_flag("cold", case["cold"])
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


def _unused(case: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each key that does nothing in this case, and what it would need."""
    for key, (needed, has) in NEEDED.items():
        if case.get(key) is not None and not has(case):
            yield key, needed


def _check(key: str, value: object, lowest: int) -> None:
    if type(value) is not int or not lowest <= value <= MOST:
        raise ValueError(f"{key} must be a whole number from {lowest} to 2**53, not {value!r}")


def _check_flag(key: str, value: object) -> None:
    if type(value) is not bool:
        raise ValueError(f"{key} must be true or false, not {value!r}")


def run_case(case: dict[str, Any], engine: str = SIMPY) -> dict[str, Any]:
    """Run one case. KeyError or ValueError for what is no case."""
    check_case(case)
    prefetch = case["prefetch"]
    if prefetch == "popular":
        prefetch = f"popular:n={case['popular_n']}"
    users = case.get("max_batch")
    prefills = case.get("prefill") if users is not None else None
    log = simulate(
        engine,
        gpu_run(
            [
                case_request(ordinal, steps, case["E"], bool(prefills and prefills[ordinal]))
                for ordinal, steps in enumerate(case["requests"])
            ],
            Shape(case["L"], case["E"]),
            slots=case["slots"] if case.get("capacity_bytes") is None else case["capacity_bytes"],
            policy=parse(f"{case['evict']}+{prefetch}/{_placement(case)}"),
            timing=FixedTiming(
                dense=case["dense_ns"],
                expert=case["expert_ns"],
                expert_per_token=case["expert_ns_per_token"],
                combine=case["combine_ns"],
                head=case["head_ns"],
                predictor_ns=case["predictor_ns"],
                hop_ns=case.get("hop_ns") or 0,
                host=case.get("host_ns") or 0,
                host_per_token=case.get("host_ns_per_token") or 0,
            ),
            link=_link(case, "link", case["chunk_bytes"]),
            cold=case["cold"],
            host=_host(case),
            users=None if users is None else Users(users, _arrivals(case)),
        ),
    )
    return case_result(log, case)


def _placement(case: dict[str, Any]) -> str:
    placement = "fetch" if case.get("placement") is None else case["placement"]
    if placement not in PLACEMENTS:
        raise unknown("placement", placement, PLACEMENTS)
    return f"layers:n={case['host_layers']}" if placement == "layers" else placement


def _link(case: dict[str, Any], name: str, chunk_bytes: int | None = None) -> Link:
    latency, num, den = (case.get(f"{name}_{key}") for key in ("latency_ns", "ns_per_byte_num", "ns_per_byte_den"))
    sizes = case.get("layer_bytes")
    size = max(sizes) if sizes else case["expert_bytes"]
    return Link(latency or 0, num or 0, den or 1, size, chunk_bytes, tuple(sizes) if sizes else None)


def _host(case: dict[str, Any]) -> Tier | None:
    room = case.get("host_slots") if case.get("host_capacity_bytes") is None else case["host_capacity_bytes"]
    return None if room is None else Tier(room, None, _link(case, "disk"))


def _arrivals(case: dict[str, Any]) -> tuple[int, ...] | None:
    return None if case.get("arrival_ns") is None else tuple(case["arrival_ns"])


def case_request(ordinal: int, steps: list[list[list[list[int]]]], experts: int, prefill: bool = False) -> RequestSteps:
    """A case's request, steps x layers x [expert, tokens], as an engine runs it; prefill: whether the first one is."""
    events = [(layer, event) for step in steps for layer, event in enumerate(step)]
    accesses = [(layer * experts + expert, tokens) for layer, event in events for expert, tokens in event]
    table = np.array(accesses, np.int64).reshape(-1, 2)
    tokens = [max((n for event in step for _, n in event), default=1) for step in steps]
    return RequestSteps(
        request=ordinal,
        phase=np.array([PREFILL if prefill and not step else DECODE for step in range(len(steps))], np.uint8),
        tokens=np.array(tokens, np.int64),
        context=np.array(tokens, np.int64),
        offsets=np.concatenate([[0], np.cumsum([len(event) for _, event in events])]).astype(np.int64),
        experts=table[:, 0],
        counts=table[:, 1],
    )


def case_result(log: RunLog, case: dict[str, Any]) -> dict[str, Any]:
    """The result line of a run."""
    tokens_ns, wait_ns = log.step_ns.tolist(), None
    if case.get("max_batch") is not None:
        rows = log.by_request
        order = np.argsort(rows.request, kind="stable")
        tokens_ns = rows.latency_ns[order].tolist()
        wait_ns = np.bincount(rows.request, rows.waited_ns, len(case["requests"])).astype(np.int64).tolist()
    return {
        "token_ns": tokens_ns,
        "hits": int(log.hits.sum()),
        "late": int(log.late.sum()),
        "misses": int(log.misses.sum()),
        "bytes_demand": int(log.demand_bytes.sum()),
        "bytes_prefetch": int(log.prefetch_bytes.sum()),
        "bytes_wasted": int(log.wasted_bytes.sum()),
        "evictions": log.evictions.tolist(),
        "stall_ns": int((log.step_ns - log.compute_busy_ns).sum()),
        "wait_ns": wait_ns,
        "on_host": int(log.on_host.sum()),
        "reads_demand": int(log.reads_demand.sum()),
        "reads_prefetch": int(log.reads_prefetch.sum()),
        "host_evictions": log.host_evictions.tolist(),
        "end_ns": log.ended_ns,
    }
