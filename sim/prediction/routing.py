"""The routing that a row is run with: the very trace, or one made to reuse experts as it is known to.

Made routing draws each token's experts from the places of its layer's recency order: reuse[i] is how often the one at
place i is chosen, so under LRU with C slots a layer its hit rate is sum(reuse[:C]) / top-k, by construction. Where
every expert is computed where it lies, no routing matters: the same experts are chosen each time.
"""

import numpy as np
from numpy.typing import NDArray

from sim.prediction.tables import DATA, table
from traces.errors import InputError, unknown
from traces.files import expanded
from traces.importers import Options, import_dump
from traces.reader import RUN
from traces.steps import DECODE, RequestSteps
from traces.trace import Trace

Float = NDArray[np.float64]
Reuse = Float
"""float64[E]: by place in the recency order, experts of a token; the sum is top-k."""


def of_hit_rate(hit_rate: float, slots: float, experts: int, top_k: int) -> Reuse:
    """Return the reuse with which a cache of so many slots a layer hits at this rate. Raise InputError if none can."""
    inside = min(max(round(slots), 1), experts)
    hits, misses = hit_rate * top_k, (1 - hit_rate) * top_k
    if hits > inside + 1e-9 or misses > experts - inside + 1e-9:
        raise InputError(f"setting: {top_k} of {experts} experts never hit {hit_rate} in {inside} slots a layer")
    reuse = np.zeros(experts)
    reuse[:inside] = hits / inside
    reuse[inside:] = misses / max(experts - inside, 1)
    return reuse


def like(name: str, experts: int, top_k: int) -> Reuse:
    """Return a real model's reuse, by the share of a layer's experts that a cache holds."""
    if name not in table("reuse"):
        raise unknown("routing statistics", name, table("reuse"))
    theirs = np.array(table("reuse")[name]["reuse"])
    hits = np.concatenate([[0.0], np.cumsum(theirs) / theirs.sum()])
    ours = np.interp(np.linspace(0, 1, experts + 1), np.linspace(0, 1, len(hits)), hits)
    reuse: Reuse = np.diff(ours) * top_k
    over = 0.0
    for place, value in enumerate(reuse.tolist()):  # what is above 1 moves to the places behind
        reuse[place] = min(value + over, 1.0)
        over = value + over - reuse[place]
    return reuse


def nearest(experts: int) -> str:
    return min(table("reuse"), key=lambda name: abs(np.log(len(table("reuse")[name]["reuse"]) / experts)))


def made(
    reuse: Reuse, layers: int, top_k: int, tokens: int, loaded: int, context: int, request: int = 0, seed: int = 0
) -> RequestSteps:
    """Return a request of 1 + `tokens` decode steps; the first fills the cache with `loaded` experts of each layer."""
    E, rng = len(reuse), np.random.default_rng([seed, request])
    bounds = np.cumsum(reuse) * top_k / reuse.sum()
    order = [list(range(E)) for _ in range(layers)]
    chosen = [np.sort(np.arange(max(loaded, 1)))] * layers
    for _ in range(tokens):
        for layer in range(layers):
            places = np.searchsorted(bounds, rng.random() + np.arange(top_k), side="right")
            places = np.unique(np.minimum(places, E - 1))
            ids = [order[layer][place] for place in places]
            for place in places[::-1]:
                del order[layer][place]
            order[layer][:0] = ids
            chosen.append(np.sort(ids))
    sizes = np.array([len(ids) for ids in chosen])
    of_layer = np.tile(np.arange(layers), tokens + 1)
    experts = np.concatenate(chosen) + np.repeat(of_layer * E, sizes)
    return RequestSteps(
        request=request,
        phase=np.full(tokens + 1, DECODE, np.uint8),
        tokens=np.ones(tokens + 1, np.int64),
        context=np.full(tokens + 1, context, np.int64),
        offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        experts=experts.astype(np.int64),
        counts=np.ones(len(experts), np.int64),
    )


def traced(name: str, as_decode: bool, shape: tuple[int, int, int], most: int = 0) -> list[RequestSteps]:
    """Return the first `most` requests (0: all) of a trace folder, shipped or not, or of an imported dump.

    as_decode: run prompts token by token. shape: layers, experts and top-k, which must be the trace's.
    """
    path = DATA / name if (DATA / name).is_dir() else expanded(name)
    if path.is_dir():
        trace = Trace.read(str(path), RUN)
    else:
        meta = path.with_suffix(".json")
        meta_file = meta if meta.is_file() else None
        trace, *_ = import_dump(path, meta_file, None if meta_file else Options(phase="decode"))
    if as_decode and trace.phases != "decode":
        trace = trace.as_decode()
    theirs = trace.layers, trace.num_experts, trace.top_k
    if theirs != shape:
        raise InputError(f"setting: trace {name} has {theirs} layers, experts and top-k, the row's model {shape}")
    return [trace.steps(i) for i in range(min(most or len(trace.requests), len(trace.requests)))]
