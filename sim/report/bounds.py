"""What no policy gets below: Belady's misses, and the physical floor of a token.

The floor is the longer of computing with every expert at hand, and moving what Belady would miss in decoding alone, at
the link's bandwidth without latencies; where a policy computes misses on the CPU, at link and CPU together, with one
slot more, through which they would pass. What a prefill or the warm-up leaves in the cache costs a token nothing.
"""

from collections.abc import Sequence

import numpy as np

from sim.analysis.curves import Accesses, belady_misses
from sim.loaded import Loaded, TimedRun
from sim.loop.requests import Requests
from sim.profiles.timing import Int, Timing
from sim.results.metrics import Row
from traces.steps import RequestSteps


def belady(loaded: Loaded, sizes: Sequence[Row]) -> list[Row]:
    """Return Belady's hit rate over all lookups but those of warm-up requests, a row for each size."""
    requests = Requests(loaded.trace)
    accesses = Accesses.of(requests, loaded.trace.layers, loaded.trace.num_experts)
    first = sum(len(request.experts) for request in requests[: loaded.experiment.warmup_requests])
    counted = len(accesses.experts) - first
    if not counted:
        return []
    misses = belady_misses(accesses.experts, accesses.total, first)  # of one access at a time: a bound at any size
    exact = belady_misses(accesses.experts, accesses.total, first, accesses.ends)
    misses[accesses.largest_event :] = exact[accesses.largest_event :]
    return [_row(row, hit_rate=1 - int(misses[row["cache_experts"]]) / counted) for row in sizes]


def floor(loaded: Loaded, sizes: Sequence[Row], on_host: bool) -> list[Row]:
    """Return the least mean TPOT, a row for each size; none where nothing is decoded or nothing is timed."""
    if not isinstance(loaded, TimedRun) or loaded.sizes is not None or loaded.trace.phases == "prefill":
        return []
    misses, lookups, tokens = _unavoidable(loaded)
    if not tokens:
        return []
    timing = loaded.timing()
    computing = _computing_ns(loaded, timing, lookups / tokens, on_host)
    rate = 1 / (loaded.link.ns_per_byte_num / loaded.link.ns_per_byte_den * loaded.link.expert_bytes)
    if on_host:
        rate += 1 / timing.host_ns(1)
    slots_of = {row["cache_experts"]: min(row["cache_experts"] + on_host, len(misses) - 1) for row in sizes}
    moving = {experts: int(misses[slots]) / tokens / rate for experts, slots in slots_of.items()}
    return [_row(row, tpot_mean_ms=max(computing, moving[row["cache_experts"]]) / 1e6) for row in sizes]


def _unavoidable(loaded: Loaded) -> tuple[Int, int, int]:
    """Return the misses in decoding that no policy avoids, by slots, all lookups there, and the decoded tokens."""
    trace, layers, experts = loaded.trace, loaded.trace.layers, loaded.trace.num_experts
    decoded = Requests(trace if trace.phases == "decode" else trace.without_prompts())
    tokens, stretches = 0, [(False, list[RequestSteps]())]  # decoded in a row; whether the cache may be full of any
    for i, (steps, prompt) in enumerate(zip(decoded, trace.prompts.tolist(), strict=True)):
        if i < loaded.experiment.warmup_requests:
            stretches = [(True, [])]
            continue
        if prompt:
            stretches.append((True, []))
        stretches[-1][1].append(steps)
        tokens += len(steps.phase)
    total, lookups = np.zeros(layers * experts + 1, np.int64), 0
    for filled, requests in stretches:
        accesses = Accesses.of(requests, layers, experts).experts
        lookups += len(accesses)
        misses = belady_misses(accesses, layers * experts)
        total += misses - np.minimum(np.arange(len(misses)), misses[-1]) if filled else misses
    return total, lookups, tokens


def _computing_ns(loaded: TimedRun, timing: Timing, experts: float, on_host: bool) -> float:
    """Return what a decoded token computes with so many experts at hand and no context; on_host: with the CPU."""
    layers = range(loaded.profile.encoder_moe_layers, loaded.trace.layers)
    dense = sum(timing.dense_ns(layer, 1, 1) for layer in layers)
    rate = 1 / timing.expert_ns(1)
    if on_host:
        rate += 1 / timing.host_ns(1)
    return dense + experts / rate + len(layers) * timing.combine_ns(1) + timing.head_ns(1)


def _row(row: Row, **values: float) -> Row:
    return {"cache_experts": row["cache_experts"], "cache_fraction": row["cache_fraction"], **values}
