"""What no policy gets below: Belady's misses, and the physical floor of a token.

The floor of a token is the longer of computing with every expert at hand, and moving what Belady would miss in decoding
alone, at the link's bandwidth without latencies; where a policy computes misses on the CPU, at link and CPU together.
"""

from collections.abc import Sequence

import numpy as np

from sim.analysis.curves import Accesses, belady_misses
from sim.profiles.timing import Timing
from sim.results.metrics import Row
from sim.sweeps.setup import Loaded, Requests
from traces.steps import DECODE, RequestSteps


def belady(loaded: Loaded, sizes: Sequence[Row]) -> list[Row]:
    """Return Belady's hit rate over all lookups, a row for each size."""
    accesses = Accesses.of(Requests(loaded.trace), loaded.trace.layers, loaded.trace.num_experts)
    if not len(accesses.experts):
        return []
    misses = belady_misses(accesses.experts, accesses.total)
    return [_row(row, hit_rate=1 - int(misses[row["cache_experts"]]) / len(accesses.experts)) for row in sizes]


def floor(loaded: Loaded, sizes: Sequence[Row], on_host: bool) -> list[Row]:
    """Return the least mean TPOT, a row for each size; none where nothing is decoded or nothing is timed."""
    if not loaded.hardware or not loaded.profile or loaded.sizes is not None:
        return []
    decoded = [_decoded(steps) for steps in Requests(loaded.trace)]
    tokens = sum(len(steps.phase) for steps in decoded)
    if not tokens:
        return []
    accesses = Accesses.of(decoded, loaded.trace.layers, loaded.trace.num_experts)
    misses = belady_misses(accesses.experts, accesses.total)
    timing = loaded.timing("lru")
    computing = _computing_ns(loaded, timing)
    rate = 1 / (loaded.link.ns_per_byte_num / loaded.link.ns_per_byte_den * loaded.link.expert_bytes)
    if on_host:
        rate += 1 / timing.host_ns(1)
    moving = {row["cache_experts"]: int(misses[row["cache_experts"]]) / tokens / rate for row in sizes}
    return [_row(row, tpot_mean_ms=max(computing, moving[row["cache_experts"]]) / 1e6) for row in sizes]


def _computing_ns(loaded: Loaded, timing: Timing) -> float:
    """Return what a decoded token computes, its context empty and its experts at hand."""
    layers = range(loaded.trace.layers)
    dense = sum(timing.dense_ns(layer, 1, 1) for layer in layers)
    experts = sum(loaded.trace.top_k * timing.expert_ns(1, layer) for layer in layers)
    return dense + experts + len(layers) * timing.combine_ns(1) + timing.head_ns(1)


def _decoded(steps: RequestSteps) -> RequestSteps:
    """Return the decode steps of a request."""
    kept = steps.phase == DECODE
    layers = (len(steps.offsets) - 1) // max(len(steps.phase), 1)
    sizes = np.diff(steps.offsets).reshape(-1, layers) if layers else np.empty((0, 0), np.int64)
    of_step = np.repeat(kept, sizes.sum(axis=1)) if layers else np.empty(0, np.bool_)
    return RequestSteps(
        request=steps.request,
        phase=steps.phase[kept],
        tokens=steps.tokens[kept],
        context=steps.context[kept],
        offsets=np.concatenate([[0], np.cumsum(sizes[kept].ravel())]).astype(np.int64),
        experts=steps.experts[of_step],
        counts=steps.counts[of_step],
    )


def _row(row: Row, **values: float) -> Row:
    return {"cache_experts": row["cache_experts"], "cache_fraction": row["cache_fraction"], **values}
