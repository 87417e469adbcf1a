"""Untimed mode: exact cache counts. The experts of an event are looked up, loaded and released one at a time.

Ascending id within a (token, layer) whatever the trace stores; no link, no prefetch, no pins; every access is an
event of its own for recency, counts and EAMs. Misses equal those of an independent cache simulator to the unit.
"""

import numpy as np

from policies.core.policy import Requests, Shape
from policies.core.residency import Residency
from policies.core.runner import Pair
from policies.core.spec import Policy, parse
from sim.loop.log import STALLS, Ended, RunLog, joined
from traces.steps import RequestSteps


def count(requests: Requests, layers: int, experts: int, slots: int, policy: Policy, cold: bool = False) -> RunLog:
    """Play `requests` with no clock: the log's durations are zero, its lookups, misses and evictions exact."""
    parts: list[RunLog] = []
    play(requests, layers, experts, slots, policy, parts.append, cold)
    return joined(parts)


def play(
    requests: Requests, layers: int, experts: int, slots: int, policy: Policy, ended: Ended, cold: bool = False
) -> None:
    """The same; `ended` takes the log of each request as it ends."""
    pair = Pair(parse(policy), Shape(layers, experts), requests, per_access=True)
    machine = pair.residency(slots)
    last = len(requests) - 1
    for ordinal in range(last + 1):
        request, evictions = requests[ordinal], list[int]()
        pair.begin_request(ordinal, request)
        rows = _play(pair, machine, request, evictions)
        pair.end_request()
        machine.end_request(cold and ordinal != last)
        ended(_log(np.array(rows, np.int64).reshape(-1, 5), evictions))


def _play(pair: Pair, machine: Residency, request: RequestSteps, evictions: list[int]) -> list[list[int]]:
    """One request; a row (request, phase, tokens, hits, misses) for each step."""
    rows = []
    layers, experts, offsets = pair.shape.layers, request.experts.tolist(), request.offsets.tolist()
    for step, (phase, tokens) in enumerate(zip(request.phase.tolist(), request.tokens.tolist(), strict=True)):
        pair.begin_step(step, phase)
        hits = 0
        for layer in range(layers):
            for i in range(offsets[step * layers + layer], offsets[step * layers + layer + 1]):
                hit = machine.route(request.experts, i, i + 1)
                if not pair.silent:
                    pair.observe(layer, i, i + 1)
                if not hit:
                    _, victim, _ = machine.next_transfer()
                    if victim >= 0:
                        evictions.append(victim)
                    machine.arrived()
                machine.computed(experts[i])
                hits += hit
        lookups = offsets[(step + 1) * layers] - offsets[step * layers]
        rows.append([request.request, phase, tokens, hits, lookups - hits])
    return rows


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
