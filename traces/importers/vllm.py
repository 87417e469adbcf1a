"""vLLM with --enable-return-routed-experts: arrays of one request each, and HTTP answers.

An array is [tokens - 1, layers, k]: prompt and generated tokens but the last, only MoE layers by the documents;
-1 where a token's routing came from the prefix cache and was not seen. Offline, `np.save` of
`output.outputs[0].routed_experts` makes a .npy of it. In answers it is base64 of such a .npy in each choice
(0.22 on: vllm/entrypoints/openai/completion/protocol.py and tests/entrypoints/openai/test_return_routed_experts.py),
or, in 0.21, int16 apart for the prompt, `prompt_routed_experts` of the answer, and for the generated tokens,
`routed_experts` of the choice, as nested lists (docs/training/routed_experts_replay.md).
"""

from base64 import b64decode
from dataclasses import dataclass
from io import BytesIO
from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from traces.arrays import read_npy
from traces.errors import InputError
from traces.importers.answers import Answer, TokenIds, Usage, answers, taken_in
from traces.importers.dump import Dump, Sequence, each_file, integers, join
from traces.importers.source import Source, convert

Nested = list[list[list[Annotated[int, Meta(ge=-1, lt=2**31)]]]]
"""[tokens, layers, k]"""


@dataclass(frozen=True)
class Choice:
    """One continuation of the prompt."""

    routed_experts: str | Nested | None = None
    prompt_token_ids: TokenIds | None = None
    token_ids: TokenIds | None = None


@dataclass(frozen=True)
class Body:
    """An answer of /v1/completions, /v1/chat/completions or /inference/v1/generate."""

    choices: list[Choice]
    usage: Usage | None = None
    prompt_token_ids: TokenIds | None = None
    prompt_routed_experts: Nested | None = None


def read(source: Source) -> Dump:
    """Read a .npy of one request, a folder of them, or answers. Raises InputError."""
    if source.path.suffix == ".npy" or any(source.path.glob("*.npy")):
        files = each_file(source.path, ".npy")
        return join(source, [Sequence(str(file), file.stem, integers(read_npy(file), str(file))) for file in files])
    sequences, dropped = [], 0
    for answer in answers(source.path):
        for sequence, last_rows in _choices(answer):
            sequences.append(sequence)
            dropped += last_rows
    if dropped:
        source.notes.append(
            f"{dropped} choices have a row for their last token, which decoding never feeds back: it is left out"
        )
    return join(source, sequences)


def is_answer(body: dict[str, Any]) -> bool:
    choices = body.get("choices")
    inside = isinstance(choices, list) and any(isinstance(one, dict) and "routed_experts" in one for one in choices)
    return inside or "prompt_routed_experts" in body


def _choices(answer: Answer) -> list[tuple[Sequence, int]]:
    """Return each choice, which repeats the prompt, as a request, and how many rows of a last token it had."""
    body = convert(answer.body, Body, answer.place)
    usage, alone = body.usage or Usage(), len(body.choices) == 1
    sequences = []
    for i, choice in enumerate(body.choices):
        place, name = (answer.place, answer.id) if alone else (f"{answer.place} choice {i}", f"{answer.id}-{i}")
        experts, dropped = _experts(place, choice.routed_experts), 0
        ids = choice.prompt_token_ids or body.prompt_token_ids
        prompt = usage.prompt_tokens if ids is None else len(ids)
        output = len(choice.token_ids) if choice.token_ids is not None else usage.completion_tokens if alone else None
        if body.prompt_routed_experts is not None:
            if output is None:
                raise InputError(f"{place} does not say how many tokens were generated: it has no usage or token_ids")
            first, generated = _experts(place, body.prompt_routed_experts), experts[: output - 1]
            prompt, dropped = len(first) if prompt is None else prompt, len(experts) - len(generated)
            experts = np.concatenate([first, generated]) if len(generated) else first
        if output is None and prompt is not None:
            output = len(experts) - prompt + 1
        known = taken_in(ids, prompt, choice.token_ids, len(experts))
        sequences.append((Sequence(place, name, experts, prompt, output, known), dropped))
    return sequences


def _experts(place: str, value: str | Nested | None) -> NDArray[np.integer]:
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
