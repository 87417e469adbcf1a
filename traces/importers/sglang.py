"""SGLang with --enable-return-routed-experts and return_routed_experts: base64 of flat int32 in HTTP answers.

The values are [tokens - 1 - start, layers, k], where `start` is the request's routed_experts_start_len and dense
layers are counted; their shape is not told. They stand in `meta_info` of /generate, whose optional
`routed_experts_dtype` names another type, in `sglext` of an OpenAI answer, or in `sgl_ext` of its choices
(sglang's docs/basic_usage/openai_api_completions.md, srt/state_capturer/routed_experts.py and
test/registered/rl/test_return_routed_experts.py).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.errors import InputError
from traces.facts import whole
from traces.importers.answers import Answer, answers, taken_in, token_count, token_ids, unbase64
from traces.importers.dump import Dump, Sequence, check_start, join
from traces.importers.source import Source

EXTENSIONS = ("sglext", "sgl_ext")
TYPES = ("int32", "uint8", "uint16")


def read_answers(source: Source) -> Dump:
    """Read answers of /generate, /v1/completions or /v1/chat/completions. Raises InputError.

    Layers and k are --layers and --top-k (or top_k and moe_layers of the JSON); one of them follows from the
    other where the answer counts its tokens.
    """
    return join(source, [_sequence(source, answer) for answer in answers(source.path)])


def is_answer(body: dict[str, Any]) -> bool:
    """Whether an answer looks like SGLang's."""
    return _holder(body) is not None


def _holder(body: dict[str, Any]) -> dict[str, Any] | None:
    """The object in an answer that has the experts."""
    choices = body.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    places = [body.get("meta_info"), *(holder.get(name) for holder in (body, choice) for name in EXTENSIONS)]
    return next((one for one in places if isinstance(one, dict) and "routed_experts" in one), None)


def _sequence(source: Source, answer: Answer) -> Sequence:
    place, body = answer.place, answer.body
    holder = _holder(body)
    if holder is None:
        raise InputError(f"{place} has no routed_experts in meta_info, sglext or sgl_ext: ask return_routed_experts")
    choices = body.get("choices")
    if isinstance(choices, list) and len(choices) > 1:
        raise InputError(f"{place} has {len(choices)} choices and does not say whose experts these are: ask with n=1")
    counts = body["meta_info"] if "meta_info" in body else body.get("usage")
    prompt, output = (token_count(place, counts, key) for key in ("prompt_tokens", "completion_tokens"))
    check_start(place, source.start, prompt)
    flat = _flat(place, holder)
    rows = None if prompt is None or output is None else prompt + output - 1 - source.start
    layers, k = _shape(source, place, len(flat), rows)
    if len(flat) % (layers * k) or not len(flat):
        raise InputError(f"{place}: {len(flat)} ids are no whole rows of {layers} layers x top-{k}")
    answered = token_ids(place, body, "output_ids")
    if answered is not None and output not in (None, len(answered)):
        raise InputError(f"{place}: output_ids has {len(answered)} tokens, but completion_tokens is {output}")
    ids = taken_in(_asked(place, body, prompt), prompt, answered, len(flat) // (layers * k))
    return Sequence(place, answer.id, flat.reshape(-1, layers, k), prompt, output, ids)


def _asked(place: str, body: dict[str, Any], prompt: int | None) -> list[int] | None:
    """The prompt's token ids: by themselves, or as [logprob, id, text] of each, if `logprob_start_len` was 0."""
    meta = body.get("meta_info")
    told = meta.get("input_token_logprobs") if isinstance(meta, dict) else None
    if not isinstance(told, list) or len(told) != prompt or not all(isinstance(x, list) and len(x) > 1 for x in told):
        return token_ids(place, body, "prompt_token_ids")
    return token_ids(place, {"input_token_logprobs": [one[1] for one in told]}, "input_token_logprobs")


def _flat(place: str, holder: dict[str, Any]) -> NDArray[np.integer]:
    name = holder.get("routed_experts_dtype")
    if name is not None and name not in TYPES:
        raise InputError(f"{place}: routed_experts_dtype is {name!r}; known: {', '.join(TYPES)}")
    kind = np.dtype(name or "int32").newbyteorder("<")
    content = unbase64(place, holder["routed_experts"])
    if len(content) % kind.itemsize:
        raise InputError(f"{place}: routed_experts has {len(content)} bytes, which are no whole {kind.name} numbers")
    return np.frombuffer(content, kind).astype(kind.newbyteorder("="), copy=False)


def _shape(source: Source, place: str, ids: int, rows: int | None) -> tuple[int, int]:
    """(layers, k) of flat ids, as said or as they follow."""
    k = source.agreed("top_k", "top_k", None)
    layers = source.options.layers
    if layers is None and source.options.layer_map is None:
        layers = source.fact("moe_layers", whole, None)
    if rows and rows > 0 and (layers is None) != (k is None):
        known = layers or k
        assert known is not None
        other, rest = divmod(ids, rows * known)
        if rest or not other:
            raise InputError(
                f"{place}: {ids} ids are no whole number for {rows} tokens and "
                f"{f'{layers} layers' if layers else f'top-{k}'}; where the server was told to leave leading tokens "
                "out, say how many with --start"
            )
        layers, k = layers or other, k or other
    if layers is None or k is None:
        raise InputError(f"{place} does not tell the shape of its {ids} ids: give --layers and --top-k")
    return layers, k
