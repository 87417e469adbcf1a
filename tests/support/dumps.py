"""Dumps as other tools write them, made from a known trace by the documented formats."""

import base64
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from traces import DECODE, PREFILL, Trace
from traces.synthetic import synthetic


def known(requests: int = 3, tokens: int = 4, prompt: int = 5, layers: int = 3, experts: int = 8) -> Trace:
    """A trace with both phases; requests differ in length."""
    trace = synthetic(requests, tokens, layers, experts, top_k=2, seed=1, prompt_tokens=prompt)
    return shortened(trace)


def shortened(trace: Trace) -> Trace:
    """Request i without its last i % 3 decoded tokens."""
    length = np.diff(trace.offsets)
    cut = np.arange(len(length)) % 3
    keep = np.concatenate([np.arange(n) < n - c for n, c in zip(length, cut, strict=True)])
    output = trace.requests["output_tokens"] - cut
    rows = {name: getattr(trace, name)[keep] for name in ("experts", "phase", "position", "step")}
    rows["step"] = np.unique(rows["step"], return_inverse=True)[1].astype(np.uint32)
    offsets = np.concatenate([[0], np.cumsum(length - cut)]).astype(np.int64)
    return replace(trace, requests=trace.requests.assign(output_tokens=output), offsets=offsets, **rows)


def told(trace: Trace) -> Trace:
    """The same, with token ids."""
    return replace(trace, token_id=np.random.default_rng(0).integers(0, 99, len(trace.experts)).astype(np.int32))


def same(made: Trace, trace: Trace, steps: bool = False) -> None:
    """Claim that an imported trace is the known one."""
    assert np.array_equal(made.experts, trace.experts)
    assert np.array_equal(made.offsets, trace.offsets)
    assert np.array_equal(made.phase, trace.phase)
    assert np.array_equal(made.position, trace.position)
    assert made.requests["prompt_tokens"].tolist() == trace.requests["prompt_tokens"].tolist()
    assert made.requests["output_tokens"].tolist() == trace.requests["output_tokens"].tolist()
    assert (made.num_experts, made.layers, made.top_k) == (trace.num_experts, trace.layers, trace.top_k)
    if trace.token_id is not None:
        assert made.token_id is not None
        assert np.array_equal(made.token_id, trace.token_id)
    if steps:
        assert np.array_equal(made.step, trace.step)


def rows(trace: Trace, i: int) -> np.ndarray:
    """[rows, L, k] of request i, -1: not routed."""
    held = trace.experts[trace.offsets[i] : trace.offsets[i + 1]].astype(np.int32)
    held[held == trace.sentinel] = -1
    return held


def npy(array: np.ndarray) -> str:
    """base64 of a .npy."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    return base64.b64encode(buffer.getvalue()).decode()


def usage(trace: Trace, i: int) -> dict[str, int]:
    prompt, output = (int(trace.requests[name][i]) for name in ("prompt_tokens", "output_tokens"))
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def vllm_answer(trace: Trace, i: int, apart: bool = False) -> dict[str, Any]:
    """An answer of /v1/completions; `apart`: as 0.21 gives it."""
    counts, experts = usage(trace, i), rows(trace, i)
    p = counts["prompt_tokens"]
    body: dict[str, Any] = {"id": f"cmpl-{i}", "object": "text_completion", "usage": counts}
    if apart:
        body["prompt_routed_experts"] = experts[:p].tolist()
    value = experts[p:].tolist() if apart else npy(experts.astype(np.uint8))
    choice: dict[str, Any] = {"index": 0, "text": "...", "routed_experts": value}
    if trace.token_id is not None:
        ids = [*trace.token_id[trace.offsets[i] : trace.offsets[i + 1]].tolist(), 7]
        choice |= {"prompt_token_ids": ids[:p], "token_ids": ids[p:]}
    return body | {"choices": [choice]}


def sglang_answer(trace: Trace, i: int, start: int = 0, dense: int = 0) -> dict[str, Any]:
    """An answer of /generate; `dense` layers of zeros are counted first."""
    counts, experts = usage(trace, i), rows(trace, i)[start:]
    experts = np.pad(experts, ((0, 0), (dense, 0), (0, 0)))
    text = base64.b64encode(experts.astype("<i4").tobytes()).decode()
    answer: dict[str, Any] = {"text": "...", "meta_info": {"id": f"r{i}", "routed_experts": text, **counts}}
    if trace.token_id is not None:
        ids, p = [*trace.token_id[trace.offsets[i] : trace.offsets[i + 1]].tolist(), 7], counts["prompt_tokens"]
        answer["output_ids"] = ids[p:]
        answer["meta_info"]["input_token_logprobs"] = [[-0.5, token, None] for token in ids[:p]]
    return answer


def write_lines(path: Path, answers: list[Any]) -> Path:
    path.write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    return path


def passes(trace: Trace, mapping: np.ndarray, dense: int = 1, together: int = 2) -> dict[str, Any]:
    """SGLang's recorder in mode per_token: `together` requests are prefilled in a pass and decoded in lockstep.

    mapping: [dense + L, physical experts] -> logical. Its .pt holds tensors where this has arrays.
    """
    records: list[dict[str, Any]] = []

    def record(mode: int, at: list[int], lengths: list[int] | None) -> None:
        logical = trace.experts[at].astype(np.int64).transpose(1, 0, 2)  # [L, tokens, k]
        ids = np.full((dense + trace.layers, len(at), 8), -1, np.int32)
        for layer in range(trace.layers):
            inverse = np.zeros(trace.num_experts, np.int64)
            inverse[mapping[dense + layer]] = np.arange(mapping.shape[1])
            ids[dense + layer, :, : trace.top_k] = inverse[logical[layer]]
        records.append(
            {
                "forward_pass_id": len(records) + 7,
                "rank": 0,
                "gatherer_key": "primary",
                "input_ids": [0] * len(at) if trace.token_id is None else trace.token_id[at].tolist(),
                "positions": trace.position[at].tolist(),
                "extend_seq_lens": lengths,
                "forward_mode": mode,
                "topk_ids_of_layer": ids,
                "misc_objects": [],
                "global_physical_count": np.zeros(mapping.shape, np.int32),
            }
        )

    for first in range(0, len(trace.requests), together):
        batch = range(first, min(first + together, len(trace.requests)))
        held = [np.arange(trace.offsets[r], trace.offsets[r + 1]) for r in batch]
        prefill = [at[trace.phase[at] == PREFILL].tolist() for at in held]
        decode = [at[trace.phase[at] == DECODE].tolist() for at in held]
        record(1, [row for at in prefill for row in at], [len(at) for at in prefill])
        for token in range(max(map(len, decode))):
            record(2, [at[token] for at in decode if token < len(at)], None)
    return {"records": records, "last_physical_to_logical_map": mapping}


KNOWN = known(requests=3, prompt=4)

MAPPING = np.stack([np.random.default_rng(layer).permutation(8) for layer in range(4)])  # a dense layer first


def stat(trace: Trace, dense: int = 1) -> dict[str, Any]:
    """SGLang's recorder in mode stat: a pass for each request."""
    counts = (trace.eams(PREFILL) + trace.eams(DECODE)).astype(np.int32)
    return {"rank": 0, "logical_count": np.pad(counts, ((0, 0), (dense, 0), (0, 0)))}
