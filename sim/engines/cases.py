"""Engine-neutral cases: one JSON object in, one result line out, so that independent engines can be compared.

The keys of a case and of a result are those of the conformance format (docs/cases.md): times in ns, experts as
[expert, tokens].
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

import numpy as np
from msgspec import Meta

from policies.core.policy import Shape
from policies.core.spec import parse
from sim.engines import compiled_engine, simpy_engine
from sim.loop.log import RunLog
from sim.loop.run import Tier, Users, gpu_run
from sim.profiles.timing import FixedTiming, Link
from traces.drafts import Drafts
from traces.errors import InputError, located, unknown
from traces.facts import parse_json
from traces.steps import DECODE, PREFILL, RequestSteps
from traces.trace import Trace
from traces.typed import typed

COMPILED = "compiled"
ENGINES = {COMPILED: compiled_engine.simulate, "simpy": simpy_engine.simulate}

ADMITTED = ("admitted", "bypassed", "copied_bytes")
"""What a result counts of rule 21, where that is in force."""

MOST = 2**53
Time = Annotated[int, Meta(ge=0, le=MOST)]
Count = Annotated[int, Meta(ge=1, le=MOST)]
Steps = tuple[tuple[tuple[tuple[Time, Count], ...], ...], ...]
"""Of one request: steps x layers x [expert, tokens]."""

Tokens = tuple[tuple[tuple[Time, ...], ...], ...]
"""Of one request: tokens x layers x experts."""


@dataclass(frozen=True)
class Case:
    """One case. Compiled code trusts its input, so what no engine can run is refused here."""

    L: Count
    E: Count
    expert_bytes: Count
    link_latency_ns: Time
    link_ns_per_byte_num: Time
    link_ns_per_byte_den: Count
    chunk_bytes: Count | None
    dense_ns: Time
    expert_ns: Time
    expert_ns_per_token: Time
    combine_ns: Time
    head_ns: Time
    predictor_ns: Time
    evict: str
    prefetch: str
    popular_n: Time
    cold: bool
    requests: tuple[Steps, ...] | None = None
    slots: Count | None = None
    expected: Any = None  # the result that an engine is compared with
    # what rules 13, 17, 18 and 19 add
    placement: Literal["fetch", "host", "split", "layers", "admitted"] | None = None
    host_layers: Time | None = None
    host_ns: Time | None = None
    host_ns_per_token: Time | None = None
    hop_ns: Time | None = None
    # what rule 21 adds
    admission: Literal["always", "never", "score", "second", "own"] | None = None
    window: Count | None = None
    insert_cap: Time | None = None
    staging: Count | None = None
    host_slots: Count | None = None
    disk_latency_ns: Time | None = None
    disk_ns_per_byte_num: Time | None = None
    disk_ns_per_byte_den: Count | None = None
    max_batch: Count | None = None
    arrival_ns: tuple[Time, ...] | None = None
    prefill: tuple[bool, ...] | None = None
    layer_bytes: tuple[Count, ...] | None = None
    capacity_bytes: Count | None = None
    host_capacity_bytes: Count | None = None
    # what rule 20 adds
    tokens: tuple[Tokens, ...] | None = None
    prompt: tuple[Time, ...] | None = None
    draft: Time | None = None
    accepted: Annotated[tuple[Time, ...], Meta(min_length=1)] | None = None
    acceptance: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Time | None = None
    draft_ns: Time | None = None
    prefill_chunk: Count | None = None

    def __post_init__(self) -> None:
        for text in self._wrong():
            raise InputError(text)

    def _wrong(self) -> Iterator[str]:
        if (self.requests is None) == (self.tokens is None):
            yield "a case has requests, or tokens"
        lengths = {"layer_bytes": self.L, **dict.fromkeys(("arrival_ns", "prefill", "prompt"), self.count)}
        for key, wanted in lengths.items():
            if (stated := getattr(self, key)) is not None and len(stated) != wanted:
                yield f"{key} has {len(stated)} items, not {wanted}"
        for sized, count in (("capacity_bytes", "slots"), ("host_capacity_bytes", "host_slots")):
            size = getattr(self, sized)
            if (self.layer_bytes is None) != (size is None) and (size or getattr(self, count)) is not None:
                yield f"{sized} goes with layer_bytes, {count} with experts of one size"
            elif size is not None and size < max(self.layer_bytes or ()):
                yield f"{sized} {size} does not hold every expert"
        if self.slots is None and self.capacity_bytes is None:
            yield "slots are missing"
        if self.tokens and any(len(token) != self.L for tokens in self.tokens for token in tokens):
            yield f"a token has not {self.L} layers"
        if self.draft and (self.accepted is None) == (self.acceptance is None):
            yield "draft needs accepted, or acceptance"
        for step in (step for steps in self.requests or () for step in steps):
            if len(step) != self.L:
                yield f"a step has {len(step)} events, but there are {self.L} layers"
            for event in step:
                ids = [-1, *(expert for expert, _ in event), self.E]
                if any(before >= expert for before, expert in pairwise(ids)):
                    yield f"experts of an event must be ascending ids below {self.E}: {event}"

    @property
    def count(self) -> int:
        return len(self.tokens or self.requests or ())

    @property
    def gpu_capacity(self) -> int:
        """Slots, or bytes where experts differ in size."""
        capacity = self.slots if self.capacity_bytes is None else self.capacity_bytes
        assert capacity
        return capacity

    @property
    def host_capacity(self) -> int | None:
        """Slots of host memory over a disk, or bytes; None: there is no disk."""
        return self.host_slots if self.host_capacity_bytes is None else self.host_capacity_bytes


KEYS = {field.name for field in fields(Case)}


def run_file(path: Path, out: TextIO, engine: str = COMPILED, warn: Callable[[str], None] = lambda text: None) -> int:
    """Write one result line for each case of `path`, run on the engine of that name; return how many.

    warn: gets once each key that no case has.
    """
    if engine not in ENGINES:
        raise unknown("engine", engine, ENGINES)
    count, known = 0, set(KEYS)
    lines = [(at, line) for at, line in enumerate(path.read_text("utf-8").split("\n"), 1) if line.strip()]
    for count, (at, line) in enumerate(lines, 1):
        values = parse_json(line, f"{path}, line {at}")
        for key in sorted(values.keys() - known):
            warn(f"{path}, case {count}: {unknown('key', key, known)} (ignored)")
            known.add(key)
        with located(f"{path}, case {count}"):
            out.write(json.dumps(run_case(values, engine), separators=(",", ":")) + "\n")
    return count


def run_case(values: dict[str, Any], engine: str = COMPILED) -> dict[str, Any]:
    """Run one case, without keys of other engines. Raise InputError for what no case may be."""
    return run(typed(Case, {key: value for key, value in values.items() if key in KEYS}), engine)


def run(case: Case, engine: str = COMPILED) -> dict[str, Any]:
    prefetch = f"popular:n={case.popular_n}" if case.prefetch == "popular" else case.prefetch
    placement = f"layers:n={case.host_layers}" if case.placement == "layers" else case.placement or "fetch"
    requests, policy = case_requests(case), parse(f"{case.evict}+{prefetch}/{placement}{_admission(case)}")
    policy.require(Shape(case.L, case.E))
    run = gpu_run(
        requests,
        Shape(case.L, case.E, top_k=max(int(np.diff(each.offsets).max(initial=1)) for each in requests)),
        slots=case.gpu_capacity,
        policy=policy,
        timing=FixedTiming(
            dense=case.dense_ns,
            expert=case.expert_ns,
            expert_per_token=case.expert_ns_per_token,
            combine=case.combine_ns,
            head=case.head_ns,
            predictor_ns=case.predictor_ns,
            hop_ns=case.hop_ns or 0,
            host=case.host_ns or 0,
            host_per_token=case.host_ns_per_token or 0,
        ),
        link=_link(case, "link", case.chunk_bytes),
        cold=case.cold,
        host=None if case.host_capacity is None else Tier(case.host_capacity, None, _link(case, "disk")),
        users=Users(case.max_batch, case.arrival_ns) if case.max_batch else None,
    )
    return case_result(ENGINES[engine](run), case)


def _admission(case: Case) -> str:
    """Return the admission as policies name it."""
    if case.admission in (None, "always"):
        return ""
    names = ("insert_cap", "staging", *(["window"] if case.admission == "second" else []))
    options = {name: getattr(case, name) for name in names}
    return ":".join([f"/{case.admission}", *(f"{name}={n}" for name, n in options.items() if n is not None)])


def _link(case: Case, name: str, chunk_bytes: int | None = None) -> Link:
    latency, num, den = (getattr(case, f"{name}_{key}") for key in ("latency_ns", "ns_per_byte_num", "ns_per_byte_den"))
    size = max(case.layer_bytes) if case.layer_bytes else case.expert_bytes
    return Link(latency or 0, num or 0, den or 1, size, chunk_bytes, case.layer_bytes)


def case_requests(case: Case) -> list[RequestSteps]:
    """Return a case's requests as an engine runs them: steps that are stated, or those of their tokens (rule 20)."""
    if case.tokens is None:
        prefills = case.prefill if case.max_batch and case.prefill else (False,) * case.count
        return [case_request(i, steps, case.E, prefills[i]) for i, steps in enumerate(case.requests or ())]
    k = max((len(event) for tokens in case.tokens for token in tokens for event in token), default=0) or 1
    wide = [
        np.array([[[*event, *[-1] * (k - len(event))] for event in token] for token in tokens], np.int64)
        for tokens in case.tokens
    ]
    trace = Trace.from_arrays([each.reshape(-1, case.L, k) for each in wide], case.E, case.prompt or 0)
    accepted = case.accepted if case.acceptance is None else case.acceptance
    drafts = Drafts(case.draft, accepted, case.seed or 0) if case.draft else None
    requests = map(trace.in_steps(case.prefill_chunk, drafts).steps, range(case.count))
    ns = case.draft_ns or 0
    return [replace(each, draft_ns=None if each.drafted is None else ns * each.drafted) for each in requests]


def case_request(
    ordinal: int, steps: Sequence[Sequence[Sequence[Sequence[int]]]], experts: int, prefill: bool = False
) -> RequestSteps:
    """Return a case's request, steps x layers x [expert, tokens], as an engine runs it; prefill: its first step."""
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


def case_result(log: RunLog, case: Case) -> dict[str, Any]:
    tokens_ns, wait_ns, rows = log.step_ns.tolist(), None, log.by_request
    order = np.argsort(rows.request, kind="stable")
    if case.max_batch is not None:
        tokens_ns = rows.latency_ns[order].tolist()
        wait_ns = np.bincount(rows.request, rows.waited_ns, case.count).astype(np.int64).tolist()
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
        **({} if _admission(case) == "" else {name: int(getattr(log, name).sum()) for name in ADMITTED}),
        "reads_demand": int(log.reads_demand.sum()),
        "reads_prefetch": int(log.reads_prefetch.sum()),
        "host_evictions": log.host_evictions.tolist(),
        "end_ns": log.ended_ns,
        **({} if case.tokens is None else {"kept": (rows.tokens - rows.rejected)[order].tolist()}),
    }
