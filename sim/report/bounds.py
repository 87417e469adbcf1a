"""What no policy gets below: Belady's misses, and the physical floor of a token (docs/contract.md).

What must be moved is what Belady would miss in decoding alone, without latencies; where a policy computes misses on the
CPU, link and CPU move it together, with one slot more, through which they would pass. Of a large trace it is that of a
sample of requests (`Loaded.sampled`).
"""

from collections.abc import Sequence

import numpy as np

from policies.core.stack_distances import Ids
from sim.analysis.curves import belady_misses
from sim.loaded import Loaded, TimedRun
from sim.loop.requests import Requests
from sim.profiles.timing import Int, Timing
from sim.results.metrics import Row


def belady(loaded: Loaded, rows: Sequence[Row]) -> list[Row]:
    """Return the hit rate of Belady as the sweep ran it, a row for each size that holds every event: a bound there."""
    trace = loaded.trace
    largest = trace.top_k if trace.phases == "decode" and not trace.drafts else trace.num_experts
    return [_row(row, hit_rate=row["belady_hit_rate"]) for row in rows if row["cache_experts"] >= largest]


def floor(loaded: Loaded, sizes: Sequence[Row], on_host: bool) -> list[Row]:
    """Return the least mean TPOT, a row for each size; none where nothing is decoded or nothing is timed."""
    if not isinstance(loaded, TimedRun) or loaded.sizes is not None or loaded.trace.phases == "prefill":
        return []
    misses, lookups, tokens = _unavoidable(loaded.sampled())
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
    tokens, stretches = 0, [(False, list[Ids]())]  # decoded in a row; whether the cache may be full of any
    for i, (steps, prompt) in enumerate(zip(decoded, trace.prompts.tolist(), strict=True)):
        if i < loaded.experiment.warmup_requests:
            stretches = [(True, [])]
            continue
        if prompt:
            stretches.append((True, []))
        stretches[-1][1].append(steps.experts.astype(np.int32))
        tokens += len(steps.phase)
    total, lookups = np.zeros(layers * experts + 1, np.int64), 0
    for filled, requests in stretches:
        accesses = np.concatenate([np.empty(0, np.int32), *requests])
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
