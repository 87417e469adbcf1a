"""vLLM with --enable-return-routed-experts: arrays of one request each, and HTTP answers.

An array is [tokens - 1, layers, k]: prompt and generated tokens but the last, only MoE layers by the documents;
-1 where a token's routing came from the prefix cache and was not seen. Offline, `np.save` of
`output.outputs[0].routed_experts` makes a .npy of it. In answers it is base64 of such a .npy in each choice
(0.22 on: vllm/entrypoints/openai/completion/protocol.py and tests/entrypoints/openai/test_return_routed_experts.py),
or, in 0.21, int16 apart for the prompt, `prompt_routed_experts` of the answer, and for the generated tokens,
`routed_experts` of the choice, as nested lists (docs/training/routed_experts_replay.md).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.arrays import read_npy
from traces.errors import InputError
from traces.importers.answers import Answer, answers, is_file, taken_in, token_count, token_ids, unbase64
from traces.importers.dump import Dump, Sequence, each_file, integers, join
from traces.importers.plain import load_npy
from traces.importers.source import Source


def read(source: Source) -> Dump:
    """Read a .npy of one request, a folder of them, or answers. Raises InputError."""
    return read_answers(source) if is_file(source.path) else read_arrays(source)


def read_arrays(source: Source) -> Dump:
    """Read a .npy of one request, or a folder of them, each named by its file. Raises InputError."""
    files = each_file(source.path, ".npy")
    return join(source, [Sequence(str(file), file.stem, integers(load_npy(file), str(file))) for file in files])


def read_answers(source: Source) -> Dump:
    """Read answers of /v1/completions, /v1/chat/completions or /inference/v1/generate. Raises InputError.

    With several choices each is a request of its own, which repeats the prompt.
    """
    dropped = [0]
    sequences = [one for answer in answers(source.path) for one in _choices(answer, dropped)]
    if dropped[0]:
        source.notes.append(
            f"{dropped[0]} choices have a row for their last token, which decoding never feeds back: it is left out"
        )
    return join(source, sequences)


def is_answer(body: dict[str, Any]) -> bool:
    """Whether an answer looks like vLLM's."""
    choices = body.get("choices")
    inside = isinstance(choices, list) and any(isinstance(one, dict) and "routed_experts" in one for one in choices)
    return inside or "prompt_routed_experts" in body


def _choices(answer: Answer, dropped: list[int]) -> list[Sequence]:
    body, choices = answer.body, answer.body.get("choices")
    if not isinstance(choices, list) or not choices or not all(isinstance(one, dict) for one in choices):
        raise InputError(f"{answer.place} has no list of choices")
    usage, alone = body.get("usage"), len(choices) == 1
    sequences = []
    for i, choice in enumerate(choices):
        place, name = (answer.place, answer.id) if alone else (f"{answer.place} choice {i}", f"{answer.id}-{i}")
        experts = _experts(place, choice.get("routed_experts"), "routed_experts")
        asked = [token_ids(place, one, "prompt_token_ids") for one in (choice, body)]
        counted = [len(ids) for ids in asked if ids is not None]
        prompt = _same(place, "prompt tokens", [*counted, token_count(place, usage, "prompt_tokens")])
        generated = token_count(place, usage, "completion_tokens") if alone else None
        answered = token_ids(place, choice, "token_ids")
        output = _same(place, "generated tokens", [None if answered is None else len(answered), generated])
        if body.get("prompt_routed_experts") is not None:
            first = _experts(place, body["prompt_routed_experts"], "prompt_routed_experts")
            experts = _together(place, first, experts, prompt, output, dropped)
            prompt = len(first)
        if output is None and prompt is not None:
            output = len(experts) - prompt + 1
        known = taken_in(next(filter(None, asked), None), prompt, answered, len(experts))
        sequences.append(Sequence(place, name, experts, prompt, output, known))
    _check_sum(answer.place, usage, sequences)
    return sequences


def _experts(place: str, value: Any, what: str) -> NDArray[np.integer]:
    """[rows, layers, k] from base64 of a .npy, or from nested lists."""
    if value is None:
        raise InputError(
            f"{place}: {what} is missing: the server was started without --enable-return-routed-experts, "
            "or dropped it (0.21 does so when it preempts a request)"
        )
    if value == []:  # of a generated token that was the only one, and the last
        return np.zeros((0, 0, 0), np.int16)
    if isinstance(value, list):
        return integers(_array(place, value, what), place, what)
    content = unbase64(place, value)
    try:
        array = read_npy(content)
    except InputError as error:
        raise InputError(f"{place}: {what} {error}") from error
    return integers(array, place, what)


def _array(place: str, value: list[Any], what: str) -> NDArray[np.integer]:
    """Nested lists as an array. Objects first: of texts, numpy makes all as wide as the longest."""
    try:
        held = np.array(value, object)
        whole = all(type(one) is int for one in held.flat)
        array = held.astype(np.int64 if whole else object)
    except (ValueError, OverflowError, RuntimeError) as error:  # the last one beyond 32 axes
        raise InputError(f"{place}: {what} is no array: {error}") from error
    if not whole:
        raise InputError(f"{place}: {what} is no array of whole numbers")
    return array


def _together(
    place: str,
    prompt: NDArray[np.integer],
    generated: NDArray[np.integer],
    prompt_tokens: int | None,
    output: int | None,
    dropped: list[int],
) -> NDArray[np.integer]:
    """Prompt and generated tokens but the last, which 0.21 told apart."""
    if prompt_tokens not in (None, len(prompt)):
        raise InputError(f"{place}: prompt_routed_experts has {len(prompt)} rows for {prompt_tokens} prompt tokens")
    if output is None:
        raise InputError(f"{place} does not say how many tokens were generated: it has no usage and no token_ids")
    if len(generated) not in (output - 1, output):
        raise InputError(f"{place}: routed_experts has {len(generated)} rows for {output} generated tokens")
    if output == 1:
        dropped[0] += len(generated)
        return prompt
    if prompt.shape[1:] != generated.shape[1:]:
        raise InputError(f"{place}: the prompt has [layers, k] {prompt.shape[1:]}, the rest {generated.shape[1:]}")
    dropped[0] += len(generated) == output
    return np.concatenate([prompt, generated[: output - 1]])


def _same(place: str, what: str, numbers: list[int | None]) -> int | None:
    """The number that all tell that tell one."""
    known = [number for number in numbers if number is not None]
    if len(set(known)) > 1:
        raise InputError(f"{place} disagrees in the number of {what}: {' and '.join(map(str, known))}")
    return known[0] if known else None


def _check_sum(place: str, usage: Any, sequences: list[Sequence]) -> None:
    """All choices together must have generated what `usage` counts: it sums over choices, and over prompts."""
    total = token_count(place, usage, "completion_tokens")
    outputs = [one.output_tokens for one in sequences]
    if total is not None and None not in outputs and sum(filter(None, outputs)) != total:
        rows = " + ".join(str(len(one.experts)) for one in sequences)
        raise InputError(
            f"{place}: {rows} rows do not fit usage: {token_count(place, usage, 'prompt_tokens')} prompt and {total} "
            "generated tokens (send one prompt a request, and ask for token ids with return_token_ids)"
        )
