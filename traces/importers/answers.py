"""Answers of servers that return the routed experts of a request, as JSON: vLLM and SGLang.

Lines of OpenAI's batch format, {"custom_id", "response": {"body"}}, are unwrapped. Rows are the prompt's and the
generated tokens' but the last.

- vLLM with --enable-return-routed-experts: base64 of a .npy [rows, layers, k] in each choice, only MoE layers, -1 where
  routing came from the prefix cache (0.22 on: vllm/entrypoints/openai/completion/protocol.py); or, in 0.21, nested
  lists, apart for the prompt (docs/training/routed_experts_replay.md).
- SGLang with --enable-return-routed-experts: base64 of flat int32 [rows - start, layers, k], dense layers counted, in
  `meta_info` of /generate, in `sglext` of an OpenAI answer or in `sgl_ext` of its choices
  (docs/basic_usage/openai_api_completions.md, test/registered/rl/test_return_routed_experts.py).
"""

from base64 import b64decode
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from io import BytesIO
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from traces.arrays import read_npy
from traces.errors import InputError
from traces.importers.dump import Dump, Sequence, integers, join
from traces.importers.source import Count, Source, convert

TokenIds = list[Count]
Nested = list[list[list[Annotated[int, Meta(ge=-1, lt=2**31)]]]]
"""[tokens, layers, k]"""


@dataclass(frozen=True)
class Counted:
    """How many tokens an answer counts, and, in SGLang's, the experts."""

    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    routed_experts: str | None = None
    routed_experts_dtype: Literal["int32", "uint8", "uint16"] | None = None
    input_token_logprobs: list[list[Any]] | None = None  # [logprob, id, text] of each prompt token


@dataclass(frozen=True)
class Choice:
    """One continuation of the prompt."""

    routed_experts: str | Nested | None = None
    prompt_token_ids: TokenIds | None = None
    token_ids: TokenIds | None = None
    sglext: Counted | None = None
    sgl_ext: Counted | None = None


@dataclass(frozen=True)
class Body:
    """An answer of /generate, /v1/completions, /v1/chat/completions or /inference/v1/generate."""

    choices: list[Choice] = field(default_factory=list)
    usage: Counted | None = None
    prompt_token_ids: TokenIds | None = None
    prompt_routed_experts: Nested | None = None
    meta_info: Counted | None = None
    sglext: Counted | None = None
    sgl_ext: Counted | None = None
    output_ids: TokenIds | None = None

    @property
    def holder(self) -> Counted | None:
        """What holds the experts in SGLang's."""
        first = self.choices[0] if self.choices else Choice()
        places = (self.meta_info, self.sglext, self.sgl_ext, first.sglext, first.sgl_ext)
        return next((one for one in places if one and one.routed_experts is not None), None)


def is_answer(record: Any) -> bool:
    """Return whether a record is an answer with routed experts."""
    if isinstance(record, dict) and isinstance(record.get("response"), dict):
        record = record["response"].get("body")
    try:
        body = msgspec.convert(record, Body)
    except msgspec.ValidationError:
        return isinstance(record, dict) and bool({"choices", "meta_info"} & record.keys())
    vllm = body.prompt_routed_experts is not None or any(one.routed_experts is not None for one in body.choices)
    return vllm or body.holder is not None


def read(source: Source, answers: Items[tuple[str, str, Any]]) -> Dump:
    """Read answers: place, name where one has none of its own, and content. Raises InputError."""
    sequences, dropped, kinds = [], 0, set()
    for place, name, content in answers:
        own = None
        if isinstance(content, dict) and isinstance(content.get("response"), dict):
            own, content = content.get("custom_id"), content["response"].get("body")
        if not isinstance(content, dict) or content.get("error"):
            raise InputError(f"{place} is an error of the server, or no answer: {str(content)[:200]}")
        meta = content.get("meta_info")
        names = (own, content.get("id"), content.get("request_id"), meta.get("id") if isinstance(meta, dict) else None)
        name = str(next((one for one in names if one is not None), name))
        body = convert(content, Body, place)
        sglang = body.meta_info is not None or body.holder is not None
        kinds.add("SGLang" if sglang else "vLLM")
        for sequence, rows in [(_of_sglang(source, place, name, body), 0)] if sglang else _of_vllm(place, name, body):
            sequences.append(sequence)
            dropped += rows
    if dropped:
        source.notes.append(
            f"{dropped} choices have a row for their last token, which decoding never feeds back: it is left out"
        )
    source.says(f"{source.path}: {len(sequences)} requests of {' and '.join(sorted(kinds))}")
    return join(source, sequences)


def _of_vllm(place: str, name: str, body: Body) -> list[tuple[Sequence, int]]:
    """Return each choice, which repeats the prompt, as a request, and how many rows of a last token it had."""
    usage, alone = body.usage or Counted(), len(body.choices) == 1
    sequences = []
    for i, choice in enumerate(body.choices):
        at, own = (place, name) if alone else (f"{place} choice {i}", f"{name}-{i}")
        experts, dropped = _nested(at, choice.routed_experts), 0
        ids = choice.prompt_token_ids or body.prompt_token_ids
        prompt = usage.prompt_tokens if ids is None else len(ids)
        output = len(choice.token_ids) if choice.token_ids is not None else usage.completion_tokens if alone else None
        if body.prompt_routed_experts is not None:
            if output is None:
                raise InputError(f"{at} does not say how many tokens were generated: it has no usage or token_ids")
            first, generated = _nested(at, body.prompt_routed_experts), experts[: output - 1]
            prompt, dropped = len(first) if prompt is None else prompt, len(experts) - len(generated)
            experts = np.concatenate([first, generated]) if len(generated) else first
        if output is None and prompt is not None:
            output = len(experts) - prompt + 1
        known = taken_in(ids, prompt, choice.token_ids, len(experts))
        sequences.append((Sequence(at, own, experts, prompt, output, known), dropped))
    return sequences


def _nested(place: str, value: str | Nested | None) -> NDArray[np.integer]:
    """[rows, layers, k] from base64 of a .npy, or from nested lists."""
    if value is None:
        raise InputError(
            f"{place}: routed_experts is missing: the server was started without --enable-return-routed-experts, "
            "or dropped it (0.21 does so when it preempts a request)"
        )
    if isinstance(value, str):
        return integers(read_npy(BytesIO(b64decode(value, validate=True)), f"{place}: routed_experts"), place)
    # empty: of a generated token that was the only one, and the last
    return np.array(value, np.int64) if value else np.zeros((0, 0, 0), np.int16)


def _of_sglang(source: Source, place: str, name: str, body: Body) -> Sequence:
    holder = body.holder
    if holder is None or holder.routed_experts is None:
        raise InputError(f"{place} has no routed_experts in meta_info, sglext or sgl_ext: ask return_routed_experts")
    if len(body.choices) > 1:
        raise InputError(f"{place} has {len(body.choices)} choices and does not say whose experts these are")
    counts = body.meta_info or body.usage or Counted()
    prompt, output = counts.prompt_tokens, counts.completion_tokens
    kind, content = np.dtype(holder.routed_experts_dtype or "int32"), b64decode(holder.routed_experts, validate=True)
    rows = None if prompt is None or output is None else prompt + output - 1 - source.start
    layers, k = _shape(source, place, len(content) // kind.itemsize, rows)
    experts = np.frombuffer(content, kind.newbyteorder("<")).astype(kind, copy=False).reshape(-1, layers, k)
    generated = body.output_ids if body.output_ids and output in (None, len(body.output_ids)) else None
    # the prompt's ids: by themselves, or with logprobs, all of which are there if `logprob_start_len` was 0
    logged = body.meta_info and body.meta_info.input_token_logprobs
    token_ids = [one[1] for one in logged] if logged and len(logged) == prompt else body.prompt_token_ids
    return Sequence(place, name, experts, prompt, output, taken_in(token_ids, prompt, generated, len(experts)))


def _shape(source: Source, place: str, ids: int, rows: int | None) -> tuple[int, int]:
    """Return (layers, k) of flat ids: as stated by options or JSON; one gives the other."""
    k, layers = source.agreed("top_k"), source.options.layers
    if layers is None and source.options.layer_map is None:
        layers = source.facts.moe_layers
    if rows and rows > 0:
        layers, k = layers or (ids // (rows * k) if k else None), k or (ids // (rows * layers) if layers else None)
    if not layers or not k:
        raise InputError(f"{place} does not tell the shape of its {ids} ids: give --layers and --top-k")
    return layers, k


def taken_in(
    prompt: list[int] | None, prompt_tokens: int | None, output: list[int] | None, rows: int
) -> NDArray[np.int32] | None:
    """Return ids [rows] of the tokens that the rows' passes took in, without the sequence's last; None if unknown.

    -1 where an answer holds only those of the prompt, or of what was generated. The rows are the sequence's last ones.
    """
    if prompt is None and (output is None or prompt_tokens is None):
        return None
    first = (prompt_tokens or 0) if prompt is None else len(prompt)
    length = max(first, rows) if output is None else first + max(0, len(output) - 1)
    if length < rows:
        return None
    known, left_out = np.full(rows, -1, np.int32), length - rows
    for begin, ids in ((0, prompt), (first, output and output[:-1])):
        shown = (ids or [])[max(0, left_out - begin) :]
        at = max(0, begin - left_out)
        known[at : at + len(shown)] = shown
    return known
