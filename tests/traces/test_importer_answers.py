"""What vLLM and SGLang dump by request comes in as the routing that it was made from, or not at all."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.dumps import known, npy, rows, same, sglang_answer, told, vllm_answer, write_lines
from traces import PREFILL, InputError, Trace
from traces.importers import Options, import_dump
from traces.importers.build import parse_layer_map
from traces.writer import write_trace

TRACE = known()
E8 = Options(experts=8)
SHAPE = Options(experts=8, layers=3, top_k=2)


def refused(path: Path, options: Options = E8, meta: Path | None = None) -> None:
    with pytest.raises((ValueError, TypeError)):
        import_dump(path, meta, options)


@pytest.mark.parametrize("apart", [False, True])
def test_vllm_answers_give_the_trace_back(tmp_path: Path, apart: bool) -> None:
    file = write_lines(tmp_path / "a.jsonl", [vllm_answer(TRACE, i, apart) for i in range(3)])
    made, notes = import_dump(file, options=E8)
    same(made, TRACE, steps=True)
    assert not notes
    assert made.requests["id"].tolist() == ["cmpl-0", "cmpl-1", "cmpl-2"]
    write_trace(made, tmp_path / "t")
    same(Trace.read(tmp_path / "t"), TRACE)


def test_token_ids_come_in_where_an_answer_holds_them(tmp_path: Path) -> None:
    trace = told(TRACE)
    kinds: list[Callable[..., dict[str, Any]]] = [vllm_answer, partial(vllm_answer, apart=True), sglang_answer]
    for number, answer in enumerate(kinds):
        answers = [answer(trace, i) for i in range(3)]
        same(import_dump(write_lines(tmp_path / f"{number}.jsonl", answers), options=SHAPE)[0], trace)
    del answers[1]["meta_info"]["input_token_logprobs"], answers[2]["output_ids"]
    ids = import_dump(write_lines(tmp_path / "a.jsonl", answers), options=SHAPE)[0].token_id
    assert ids is not None
    assert trace.token_id is not None
    row, prompt = np.arange(len(ids)), trace.phase == PREFILL
    withheld = ((row >= trace.offsets[1]) & (row < trace.offsets[2]) & prompt) | ((row >= trace.offsets[2]) & ~prompt)
    assert np.array_equal(ids, np.where(withheld, -1, trace.token_id))


def test_answers_come_as_list_and_as_openais_batch_too(tmp_path: Path) -> None:
    answers = [vllm_answer(TRACE, i) for i in range(3)]
    (tmp_path / "a.json").write_text(json.dumps(answers))
    same(import_dump(tmp_path / "a.json", options=E8)[0], TRACE)
    batch = [{"custom_id": f"mine-{i}", "response": {"status_code": 200, "body": one}} for i, one in enumerate(answers)]
    made, _ = import_dump(write_lines(tmp_path / "b.jsonl", batch), options=E8)
    same(made, TRACE)
    assert made.requests["id"].tolist() == ["mine-0", "mine-1", "mine-2"]


def test_each_choice_is_a_request_with_the_prompt(tmp_path: Path) -> None:
    one, other = vllm_answer(TRACE, 0), vllm_answer(TRACE, 1)
    usage = {"prompt_tokens": 5, "completion_tokens": 5 + 4}
    answer = one | {"choices": [one["choices"][0], other["choices"][0]], "usage": usage}
    made, _ = import_dump(write_lines(tmp_path / "a.jsonl", [answer]), options=E8)
    same(made, TRACE.head(2))


def test_a_row_for_the_last_token_is_left_out_and_said(tmp_path: Path) -> None:
    answer = vllm_answer(TRACE, 0, apart=True)
    choice = answer["choices"][0]
    choice["routed_experts"] = [*choice["routed_experts"], choice["routed_experts"][0]]
    made, notes = import_dump(write_lines(tmp_path / "a.jsonl", [answer]), options=E8)
    same(made, TRACE.head(1))
    assert "the last token" in notes[0]


def test_a_folder_of_arrays_is_a_request_for_each_file(tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    folder.mkdir()
    for i in range(3):
        np.save(folder / f"r{i}.npy", rows(TRACE, i).astype(np.int16))
    listed = [{"id": f"r{i}", "prompt_tokens": 5, "task": f"t{i}"} for i in (2, 0, 1)]
    meta = tmp_path / "dump.json"
    meta.write_text(json.dumps({"experts": 8, "requests": listed}))
    made, _ = import_dump(folder, meta)
    same(made, TRACE, steps=True)
    assert made.requests["id"].tolist() == ["r0", "r1", "r2"]
    assert made.requests["task"].tolist() == ["t0", "t1", "t2"]
    refused(folder)  # where the prompts end is unknown
    meta.write_text(json.dumps({"experts": 8, "requests": [{}, {"prompt_tokens": 5}, {}]}))
    refused(folder, Options(phase="decode"), meta)
    assert import_dump(folder, options=Options(experts=8, phase="decode"))[0].phases == "decode"
    np.save(folder / "r3.npy", rows(TRACE, 0)[:, :2])
    refused(folder, Options(experts=8, phase="decode"))


def test_a_request_of_one_generated_token_is_its_prompt(tmp_path: Path) -> None:
    answer = vllm_answer(TRACE, 0, apart=True)
    answer["usage"]["completion_tokens"] = 1
    for generated in (list[Any](), answer["choices"][0]["routed_experts"][:1]):
        answer["choices"][0]["routed_experts"] = generated
        made, notes = import_dump(write_lines(tmp_path / "a.jsonl", [answer]), options=E8)
        assert np.array_equal(made.experts, TRACE.experts[:5])
        assert made.requests["output_tokens"].tolist() == [1]
        assert len(notes) == len(generated)


def test_minus_one_is_prefix_cached(tmp_path: Path) -> None:
    experts = rows(TRACE, 0).astype(np.int16)
    experts[:2] = -1
    answer = vllm_answer(TRACE, 0)
    answer["choices"][0]["routed_experts"] = npy(experts)
    made, _ = import_dump(write_lines(tmp_path / "a.jsonl", [answer]), options=E8)
    assert (made.experts[:2] == made.sentinel).all()
    assert np.array_equal(made.experts[2:], TRACE.experts[2:9])
    assert made.requests["prompt_tokens"].tolist() == [5]


@pytest.mark.parametrize(
    "options",
    [SHAPE, Options(experts=8, top_k=2), Options(experts=8, layers=3)],
    ids=["both told", "layers follow", "k follows"],
)
def test_sglang_answers_give_the_trace_back(tmp_path: Path, options: Options) -> None:
    file = write_lines(tmp_path / "a.jsonl", [sglang_answer(TRACE, i) for i in range(3)])
    made, _ = import_dump(file, options=options)
    same(made, TRACE, steps=True)
    assert made.requests["id"].tolist() == ["r0", "r1", "r2"]


@pytest.mark.parametrize("place", ["sglext", "choice"])
def test_sglangs_openai_answers_are_read_too(tmp_path: Path, place: str) -> None:
    answers = []
    for i in range(3):
        meta = sglang_answer(TRACE, i)["meta_info"]
        experts = {"routed_experts": meta.pop("routed_experts")}
        choice: dict[str, Any] = {"index": 0}
        answer = {"id": f"c{i}", "usage": meta, "choices": [choice]}
        (answer if place == "sglext" else choice)["sglext" if place == "sglext" else "sgl_ext"] = experts
        answers.append(answer)
    same(import_dump(write_lines(tmp_path / "a.jsonl", answers), options=SHAPE)[0], TRACE)


def test_what_sglang_left_out_is_not_routed_here(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", [sglang_answer(TRACE, i, start=3) for i in range(3)])
    refused(file, SHAPE)
    made, notes = import_dump(file, options=Options(experts=8, layers=3, top_k=2, start=3))
    assert any("9 tokens were left out of prompts: they are in the trace without experts" in note for note in notes)
    assert np.array_equal(made.position, TRACE.position)
    left_out = made.position < 3
    assert (made.experts[left_out] == made.sentinel).all()
    assert np.array_equal(made.experts[~left_out], TRACE.experts[~left_out])


def test_dense_layers_are_refused_until_the_moe_layers_are_named(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", [sglang_answer(TRACE, i, dense=1) for i in range(3)])
    with pytest.raises(InputError, match=r"layer 0 has expert id 0 everywhere.*--layer-map 1-3"):
        import_dump(file, options=Options(experts=8, top_k=2))
    for spec in ("1-3", "1:", "[1, 2, 3]"):
        made, _ = import_dump(file, options=Options(experts=8, top_k=2, layer_map=spec))
        same(made, TRACE)
        assert made.meta.layer_names == ("layers.1", "layers.2", "layers.3")


@pytest.mark.parametrize(
    ("spec", "layers"),
    [
        ("1-3", (1, 2, 3)),
        ("2:", (2, 3, 4)),
        (":", (0, 1, 2, 3, 4)),
        ("0,2-3", (0, 2, 3)),
        ("[4]", (4,)),
        (" 1 , 3", (1, 3)),
    ],
)
def test_a_layer_map_names_layers(spec: str, layers: tuple[int, ...]) -> None:
    assert parse_layer_map(spec, 5) == layers


@pytest.mark.parametrize("spec", ["", "a", "1-", "-3", "3:5", "1-9", "5", "2,1", "1,1", "[]", "[1.5]", "3-1"])
def test_a_layer_map_that_names_none_or_others_is_refused(spec: str) -> None:
    with pytest.raises(InputError, match="--layer-map"):
        parse_layer_map(spec, 5)


def vllm_with(**fields: Any) -> list[Any]:
    """Answers, of which the second has other fields in its choice, or itself where they are of answers."""
    answers = [vllm_answer(TRACE, i) for i in range(3)]
    (answers[1]["choices"][0] if "routed_experts" in fields else answers[1]).update(fields)
    return answers


def sglang_with(**fields: Any) -> list[Any]:
    answers = [sglang_answer(TRACE, i) for i in range(3)]
    answers[1]["meta_info"].update(fields)
    return answers


@pytest.mark.parametrize(
    "answers",
    [
        vllm_with(routed_experts=npy(np.where(rows(TRACE, 1) == 7, 8, rows(TRACE, 1)))),
        vllm_with(routed_experts=npy(np.full_like(rows(TRACE, 1), 3))),
        vllm_with(routed_experts=npy(rows(TRACE, 1).astype(np.float32))),
        vllm_with(routed_experts=npy(rows(TRACE, 1)[:-1])),
        vllm_with(routed_experts=npy(rows(TRACE, 1)[0])),
        vllm_with(routed_experts=None),
        vllm_with(error={"message": "busy"}),
        vllm_with(usage={"prompt_tokens": "x"}),
        vllm_with(prompt_token_ids=[1, -2]),
        vllm_with(prompt_routed_experts=[[[0, 1]] * 3]),
        vllm_with(usage=None),
        sglang_with(completion_tokens=9),
        sglang_with(routed_experts_dtype="float32"),
        sglang_with(routed_experts=None),
    ],
)
def test_a_damaged_answer_is_refused(tmp_path: Path, answers: list[Any]) -> None:
    refused(write_lines(tmp_path / "a.jsonl", answers), SHAPE if "meta_info" in answers[0] else E8)
