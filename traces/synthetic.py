"""Small seeded traces made from nothing, for tests and speed measurements; no substitute for a recording.

Three things that real routing shows are put in by hand: some experts are popular (Zipf), a request has a topic that
prefers some experts, and adjacent tokens reuse experts.
"""

from dataclasses import replace

import numpy as np

from traces.trace import Trace

TOPICS = 8
REUSE = 2.0
"""What an expert gains, in units of the noise, for having been chosen by the token before."""


def synthetic(
    requests: int, tokens: int, layers: int, experts: int, top_k: int, seed: int, prompt_tokens: int = 0
) -> Trace:
    """Make a trace of requests that decode `tokens` tokens after `prompt_tokens` of prefill (0: none)."""
    rng = np.random.default_rng(seed)
    popularity = -np.log(np.arange(1, experts + 1, dtype=np.float64))
    popular = np.stack([popularity[rng.permutation(experts)] for _ in range(layers)])
    topics = rng.gumbel(size=(TOPICS, layers, experts))
    topic = rng.integers(TOPICS, size=requests)
    length = prompt_tokens + tokens
    ids = np.empty((requests, length, layers, top_k), np.int64)
    reuse = np.zeros((requests, layers, experts))
    for token in range(length):
        score = popular + topics[topic] + reuse + rng.gumbel(size=reuse.shape)
        ids[:, token] = np.argsort(-score, axis=-1, kind="stable")[..., :top_k]
        reuse[:] = 0.0
        np.put_along_axis(reuse, ids[:, token], REUSE, axis=-1)
    trace = Trace.from_arrays(list(ids), experts, prompt_tokens, "synthetic", "synthetic")
    labels = trace.requests.assign(task=[f"topic-{t}" for t in topic], mode="synthetic")
    return replace(trace, meta=replace(trace.meta, mode="synthetic"), requests=labels)
