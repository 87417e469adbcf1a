"""Untimed mode: exact cache counts. The experts of an event are looked up, loaded and released one at a time.

Ascending id within a (token, layer) whatever the trace stores; no link, no prefetch, no pins; every access is an
event of its own for recency, counts and EAMs. Misses equal those of an independent cache simulator to the unit.
"""

from collections.abc import Callable

import numpy as np

from policies.contract import Event, Requests, Shape
from policies.registry import PolicySpec
from policies.residency import Residency
from sim.log import STALLS, RunLog
from traces.steps import RequestSteps


def count(
    requests: Requests,
    layers: int,
    experts: int,
    slots: int,
    policy: PolicySpec,
    cold: bool = False,
    progress: Callable[[int], None] | None = None,
) -> RunLog:
    """Play `requests` with no clock: the log's durations are zero, its lookups, misses and evictions exact."""
    shape = Shape(layers, experts)
    retention, _ = policy.build(shape)
    retention.foresee(requests, per_access=True)
    machine = Residency(shape, slots, retention)
    rows: list[list[int]] = []
    evictions: list[int] = []
    last = len(requests) - 1
    for ordinal in range(last + 1):
        request = requests[ordinal]
        retention.begin_request(ordinal)
        rows += _play(machine, request, ordinal, layers, evictions)
        retention.end_request()
        machine.end_request(cold and ordinal != last)
        if progress:
            progress(len(request.tokens))
    return _log(np.array(rows, np.int64).reshape(-1, 5), evictions)


def _play(
    machine: Residency, request: RequestSteps, ordinal: int, layers: int, evictions: list[int]
) -> list[list[int]]:
    """One request; a row (request, phase, tokens, hits, misses) for each step."""
    rows = []
    for step in range(len(request.tokens)):
        hits = 0
        begin, end = request.offsets[step * layers], request.offsets[(step + 1) * layers]
        for layer in range(layers):
            first, last = request.offsets[step * layers + layer], request.offsets[step * layers + layer + 1]
            hits += _play_event(machine, request, (ordinal, step, layer), range(first, last), evictions)
        rows.append([request.request, int(request.phase[step]), int(request.tokens[step]), hits, end - begin - hits])
    return rows


def _play_event(
    machine: Residency,
    request: RequestSteps,
    place: tuple[int, int, int],
    accesses: range,
    evictions: list[int],
) -> int:
    """One event of (ordinal, step, layer), access by access; its hits."""
    hits = 0
    retention = machine.policy
    event = None
    if retention.observes:
        ordinal, step, layer = place
        event = Event(ordinal, step, int(request.phase[step]), layer)
        event.request_experts, event.request_counts = request.experts, request.counts
    for i in accesses:
        expert = int(request.experts[i])
        hit = machine.route(request.experts, i, i + 1)
        if event:
            event.serial, event.first, event.last = machine.serial, i, i + 1
            retention.observe(event)
        if hit:
            hits += 1
        else:
            _, victim, _ = machine.next_transfer()
            if victim >= 0:
                evictions.append(victim)
            machine.arrived()
        machine.computed(expert)
    return hits


def _log(table: np.ndarray, evictions: list[int]) -> RunLog:
    zeros = np.zeros(len(table), np.int64)
    return RunLog(
        request=table[:, 0],
        phase=table[:, 1].astype(np.uint8),
        tokens=table[:, 2],
        step_ns=zeros,
        stall_ns=np.zeros((len(table), len(STALLS)), np.int64),
        hits=table[:, 3],
        late=zeros,
        misses=table[:, 4],
        demand_transfers=table[:, 4],
        prefetch_transfers=zeros,
        prefetch_used=zeros,
        prefetch_wasted=zeros,
        link_busy_ns=zeros,
        compute_busy_ns=zeros,
        expert_bytes=0,
        evictions=np.array(evictions, np.int64),
    )
