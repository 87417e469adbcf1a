"""Answers of servers that return the routed experts of a request, as JSON: vLLM and SGLang.

Rows are the prompt's and the generated tokens' but the last. vLLM (completion/protocol.py of its OpenAI entrypoints):
base64 of a .npy [rows, layers, k] in each choice, only MoE layers, or, in 0.21, nested lists. SGLang
(test_return_routed_experts.py): base64 of flat int32 [rows - start, layers, k], dense layers counted.
"""

from base64 import b64decode
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from traces.arrays import read_npy
from traces.defects import Routing
from traces.errors import InputError
from traces.importers.cells import whole
from traces.importers.dump import Sequence, join
from traces.importers.source import Request, Source

Body = dict[str, Any]
"""An answer of /generate, /v1/completions, /v1/chat/completions or /inference/v1/generate."""


def body_of(record: Any) -> Any:
    """Return an answer without what OpenAI's batch format puts around it."""
    batch = isinstance(record, dict) and isinstance(record.get("response"), dict)
    return record["response"].get("body") if batch else record


def reads(record: Any) -> bool:
    """Return whether a record is an answer."""
    body = body_of(record)
    return isinstance(body, dict) and bool({"choices", "meta_info"} & body.keys())


def read(source: Source, files: list[tuple[Path, list[Any]]]) -> Routing:
    """Read the answers of files. Raises InputError."""
    sequences: list[Sequence] = []
    for path, i, content in [(path, i, one) for path, held in files for i, one in enumerate(held)]:
        place, name = f"{path} answer {i}", f"{path.stem}-{i}"
        body = body_of(content)
        if not isinstance(body, dict) or body.get("error"):
            raise InputError(f"{place} is an error of the server, or no answer: {str(body)[:200]}")
        meta, choices = body.get("meta_info") or {}, body.get("choices") or [{}]
        names = (content.get("custom_id"), body.get("id"), body.get("request_id"), meta.get("id"), name)
        name = next(str(one) for one in names if one is not None)
        extra = [one.get(key) or {} for one in (body, choices[0]) for key in ("sglext", "sgl_ext")]
        holder = next((one for one in (meta, *extra) if one.get("routed_experts") is not None), None)
        if holder is not None or meta:
            source.found.append("answers of SGLang")
            sequences.append(_of_sglang(source, place, name, body, holder))
            continue
        source.found.append("answers of vLLM")
        for i, choice in enumerate(choices):  # each repeats the prompt
            at, own = (place, name) if len(choices) == 1 else (f"{place} choice {i}", f"{name}-{i}")
            sequences.append(_of_vllm(source, at, own, body, choice))
    return join(source, sequences)


def _counted(place: str, usage: Body | None) -> Body:
    """Return what an answer says of itself, with its tokens counted in whole numbers."""
    counts = {name: count for name, count in (usage or {}).items() if name.endswith("_tokens") and count is not None}
    return (usage or {}) | {name: int(whole(count, f"{place}: {name}", 0)) for name, count in counts.items()}


def _of_vllm(source: Source, place: str, name: str, body: Body, choice: Body) -> Sequence:
    usage = _counted(place, body.get("usage"))
    held, apart = choice.get("routed_experts"), body.get("prompt_routed_experts")
    if held is None:
        raise InputError(
            f"{place}: routed_experts is missing: the server was started without --enable-return-routed-experts, "
            "or dropped it (0.21 does so when it preempts a request)"
        )
    both = (holder.get("prompt_token_ids") for holder in (choice, body))
    ids, generated = next((ids for ids in both if ids is not None), None), choice.get("token_ids")
    prompt = usage.get("prompt_tokens") if ids is None else len(ids)
    counted = usage.get("completion_tokens") if len(body["choices"]) == 1 else None
    output: Any = counted if generated is None else len(generated)
    if apart is not None:
        prompt = len(apart) if prompt is None else prompt
        if len(held) >= output:
            source.notes.append("decoding never feeds the last token back: a choice's row for it is left out")
        held = [*apart, *held[: output - 1]]
    if isinstance(held, str):
        experts = read_npy(BytesIO(b64decode(held, validate=True)), f"{place}: routed_experts")
    else:
        experts = whole(held, f"{place}: routed_experts", 3, -1)
    if output is None and prompt is not None:
        output = len(experts) - prompt + 1
    return Sequence(place, experts, Request(name, prompt_tokens=prompt, output_tokens=output), ids, generated)


def _of_sglang(source: Source, place: str, name: str, body: Body, holder: Body | None) -> Sequence:
    if holder is None:
        raise InputError(f"{place} has no routed_experts in meta_info, sglext or sgl_ext: ask return_routed_experts")
    if len(body.get("choices") or ()) > 1:
        raise InputError(f"{place} has {len(body['choices'])} choices and does not say whose experts these are")
    counts = _counted(place, body.get("meta_info") or body.get("usage"))
    prompt, output = counts.get("prompt_tokens"), counts.get("completion_tokens")
    kind = np.dtype(holder.get("routed_experts_dtype") or "int32").newbyteorder("<")
    flat = np.frombuffer(b64decode(holder["routed_experts"], validate=True), kind)
    rows = -1 if prompt is None or output is None else prompt + output - 1 - source.start
    k, layers = source.agreed("top_k") or -1, source.options.layers or -1
    if layers < 0 and source.options.layer_map is None:
        layers = source.facts.moe_layers or -1
    if [rows, layers, k].count(-1) > 1:
        raise InputError(f"{place} does not state the shape of its {flat.size} ids: give --layers and --top-k")
    experts = flat.reshape(rows if -1 in (layers, k) else -1, layers, k)  # one of the two gives the other
    # the prompt's ids: with logprobs, all of which are there if `logprob_start_len` was 0, or by themselves
    logged = [one[1] for one in counts.get("input_token_logprobs") or ()]
    ids = logged if len(logged) == prompt else body.get("prompt_token_ids")
    request = Request(name, prompt_tokens=prompt, output_tokens=output)
    return Sequence(place, experts, request, ids, body.get("output_ids"))
