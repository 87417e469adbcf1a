"""Hypothesis strategies that several test packages share."""

import numpy as np
import pandas as pd
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.support.ahead import with_lookahead
from traces import DECODE, PREFILL, Trace
from traces.schema import TraceMeta


@st.composite
def metas(draw: st.DrawFn) -> TraceMeta:
    E = draw(st.sampled_from([1, 2, 5, 64, 255, 256, 300]))
    L = draw(st.integers(1, 3))
    return TraceMeta(
        model=draw(st.text(max_size=8)),
        layers=L,
        experts=E,
        top_k=draw(st.integers(1, min(E, 4))),
        layer_names=tuple(f"layers.{layer}" for layer in range(L)),
        expert_bytes=draw(st.none() | st.integers(1, 2**40)),
        dtype=draw(st.sampled_from([None, "bfloat16"])),
        tools={"torch": "2.13.0"},
    )


@st.composite
def traces(draw: st.DrawFn, max_requests: int = 4) -> Trace:
    """Valid traces of any shape: prefill, decode or both, batches that interleave, some places not routed."""
    meta = draw(metas())
    R = draw(st.integers(1, max_requests))
    output = np.array(draw(st.lists(st.integers(0, 4), min_size=R, max_size=R)), np.int64)
    prompt = np.array(draw(st.lists(st.integers(1, 4), min_size=R, max_size=R)), np.int64)
    prefilled = np.where(draw(hnp.arrays(bool, R)), prompt, 0)
    decoded = np.maximum(output - 1, 0)
    lengths = prefilled + decoded
    T = int(lengths.sum())
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    chosen = np.argsort(rng.random((T, meta.layers, meta.experts)), axis=-1)[..., : meta.top_k]
    chosen[rng.random(chosen.shape) < draw(st.sampled_from([0.0, 0.3]))] = meta.sentinel
    first = rng.integers(0, 3, R)
    steps = [
        np.concatenate([np.full(p, f), f + np.arange(1, d + 1)])
        for p, d, f in zip(prefilled, decoded, first, strict=True)
    ]
    positions = [np.arange(n) + (0 if p else q) for n, p, q in zip(lengths, prefilled, prompt, strict=True)]
    phases = [np.repeat([PREFILL, DECODE], [p, d]) for p, d in zip(prefilled, decoded, strict=True)]
    labels = st.lists(st.text(max_size=3), min_size=R, max_size=R)
    made = Trace(
        name="trace",
        meta=meta,
        requests=pd.DataFrame(
            {
                "id": [f"request {r}" for r in range(R)],
                "dataset": draw(labels),
                "task": draw(labels),
                "prompt_tokens": pd.array(
                    [None if draw(st.booleans()) and not f else p for p, f in zip(prompt, prefilled, strict=True)],
                    dtype="Int64",
                ),
                "output_tokens": output,
                "arrival_ns": pd.array(
                    draw(st.lists(st.none() | st.integers(0, 2**60), min_size=R, max_size=R)), dtype="Int64"
                ),
                "mode": "generate",
            }
        ),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        experts=chosen.astype(meta.id_type),
        phase=np.concatenate(phases).astype(np.uint8),
        position=np.concatenate(positions).astype(np.uint32),
        step=np.concatenate(steps).astype(np.uint32),
        weights=rng.random(chosen.shape).astype(np.float16) if draw(st.booleans()) else None,
        token_id=rng.integers(-1, 9, T).astype(np.int32),
        drafted=rng.integers(-1, 5, T).astype(np.int16) if draw(st.booleans()) else None,
    )
    distances = draw(st.sampled_from([(), (1,), (1, 2), (3,)]))
    return with_lookahead(made, made.experts[::-1], distances) if distances else made
