"""SGLang with --enable-return-routed-experts and return_routed_experts: base64 of flat int32 in HTTP answers.

The values are [tokens - 1 - start, layers, k], where `start` is the request's routed_experts_start_len and dense
layers are counted; their shape is not stated. They stand in `meta_info` of /generate, whose optional
`routed_experts_dtype` names another type, in `sglext` of an OpenAI answer, or in `sgl_ext` of its choices
(sglang's docs/basic_usage/openai_api_completions.md, srt/state_capturer/routed_experts.py and
test/registered/rl/test_return_routed_experts.py).
"""

from base64 import b64decode
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from traces.errors import InputError
from traces.importers.answers import Answer, TokenIds, Usage, answers, taken_in
from traces.importers.dump import Dump, Sequence, join
from traces.importers.source import Source, convert


@dataclass(frozen=True)
class Extension(Usage):
    """The object of an answer that holds the experts."""

    routed_experts: str | None = None
    routed_experts_dtype: Literal["int32", "uint8", "uint16"] | None = None
    input_token_logprobs: list[list[Any]] | None = None  # [logprob, id, text] of each prompt token


@dataclass(frozen=True)
class Choice:
    """One continuation of the prompt."""

    sglext: Extension | None = None
    sgl_ext: Extension | None = None


@dataclass(frozen=True)
class Body:
    """An answer of /generate, /v1/completions or /v1/chat/completions."""

    meta_info: Extension | None = None
    sglext: Extension | None = None
    sgl_ext: Extension | None = None
    choices: list[Choice] = field(default_factory=list)
    usage: Usage | None = None
    output_ids: TokenIds | None = None
    prompt_token_ids: TokenIds | None = None

    @property
    def holder(self) -> Extension | None:
        first = self.choices[0] if self.choices else Choice()
        places = (self.meta_info, self.sglext, self.sgl_ext, first.sglext, first.sgl_ext)
        return next((one for one in places if one and one.routed_experts is not None), None)


def read(source: Source) -> Dump:
    """Read answers of /generate, /v1/completions or /v1/chat/completions. Raises InputError.

    Layers and k are --layers and --top-k (or top_k and moe_layers of the JSON); one of them follows from the
    other where the answer counts its tokens.
    """
    return join(source, [_sequence(source, answer) for answer in answers(source.path)])


def is_answer(body: dict[str, Any]) -> bool:
    try:
        return convert(body, Body, "").holder is not None
    except InputError:
        return False


def _sequence(source: Source, answer: Answer) -> Sequence:
    place, body = answer.place, convert(answer.body, Body, answer.place)
    holder = body.holder
    if holder is None or holder.routed_experts is None:
        raise InputError(f"{place} has no routed_experts in meta_info, sglext or sgl_ext: ask return_routed_experts")
    if len(body.choices) > 1:
        raise InputError(f"{place} has {len(body.choices)} choices and does not say whose experts these are")
    counts = body.meta_info or body.usage or Usage()
    prompt, output = counts.prompt_tokens, counts.completion_tokens
    kind, content = np.dtype(holder.routed_experts_dtype or "int32"), b64decode(holder.routed_experts, validate=True)
    rows = None if prompt is None or output is None else prompt + output - 1 - source.start
    layers, k = _shape(source, place, len(content) // kind.itemsize, rows)
    experts = np.frombuffer(content, kind.newbyteorder("<")).astype(kind, copy=False).reshape(-1, layers, k)
    generated = body.output_ids if body.output_ids and output in (None, len(body.output_ids)) else None
    # the prompt's ids: by themselves, or with logprobs, all of which are there if `logprob_start_len` was 0
    logged = body.meta_info and body.meta_info.input_token_logprobs
    token_ids = [one[1] for one in logged] if logged and len(logged) == prompt else body.prompt_token_ids
    ids = taken_in(token_ids, prompt, generated, len(experts))
    return Sequence(place, answer.id, experts, prompt, output, ids)


def _shape(source: Source, place: str, ids: int, rows: int | None) -> tuple[int, int]:
    """Return (layers, k) of flat ids, as stated or as they follow."""
    k, layers = source.agreed("top_k"), source.options.layers
    if layers is None and source.options.layer_map is None:
        layers = source.facts.moe_layers
    if rows and rows > 0:
        layers, k = layers or (ids // (rows * k) if k else None), k or (ids // (rows * layers) if layers else None)
    if not layers or not k:
        raise InputError(f"{place} does not tell the shape of its {ids} ids: give --layers and --top-k")
    return layers, k
