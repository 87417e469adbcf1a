"""Small seeded traces made from nothing, for tests and speed measurements; no substitute for a recording.

Three things that real routing shows are put in by hand: some experts are popular (Zipf), a request has a topic that
prefers some experts, and adjacent tokens reuse experts. `traces.score_model` behaves as a real trace.
"""

import numpy as np

from traces.schema import TraceMeta
from traces.trace import Trace, in_turn, listed

TOPICS = 8
REUSE = 2.0
"""What an expert gains, in units of the noise, for having been chosen by the token before."""


def synthetic(
    requests: int, tokens: int, layers: int, experts: int, top_k: int, seed: int, prompt_tokens: int = 0
) -> Trace:
    """Make a trace of requests that decode `tokens` tokens after `prompt_tokens` of prefill (0: none)."""
    meta = TraceMeta(
        model="synthetic",
        layers=layers,
        experts=experts,
        top_k=top_k,
        layer_names=tuple(f"layers.{layer}" for layer in range(layers)),
        mode="synthetic",
    )
    rng = np.random.default_rng(seed)
    popularity = -np.log(np.arange(1, experts + 1, dtype=np.float64))
    popular = np.stack([popularity[rng.permutation(experts)] for _ in range(layers)])
    topics = rng.gumbel(size=(TOPICS, layers, experts))
    topic = rng.integers(TOPICS, size=requests)
    length = prompt_tokens + tokens
    ids = np.empty((requests, length, layers, top_k), meta.id_type)
    reuse = np.zeros((requests, layers, experts))
    for token in range(length):
        score = popular + topics[topic] + reuse + rng.gumbel(size=reuse.shape)
        ids[:, token] = np.argsort(-score, axis=-1, kind="stable")[..., :top_k]
        reuse[:] = 0.0
        np.put_along_axis(reuse, ids[:, token].astype(np.int64), REUSE, axis=-1)
    decoded, tasks = np.full(requests, tokens + 1 if tokens else 0, np.int64), [f"topic-{t}" for t in topic]
    names, prompts = [str(r) for r in range(requests)], [prompt_tokens] * requests
    return Trace(
        name="synthetic",
        meta=meta,
        requests=listed(names, "synthetic", tasks, prompts, decoded, "synthetic"),
        experts=ids.reshape(requests * length, layers, top_k),
        **in_turn(np.full(requests, length, np.int64), np.full(requests, prompt_tokens, np.int64)),
    )
