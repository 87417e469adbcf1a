"""What vLLM and SGLang dump by request comes in as the routing that it was made from, or not at all."""

import base64
import json
import tempfile
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.dumps import known, npy, rows, same, sglang_answer, told, vllm_answer, write_lines
from traces.errors import InputError
from traces.importers import Options, import_dump
from traces.importers.answers import taken_in
from traces.importers.layers import first_dense, parse_layer_map
from traces.steps import PREFILL
from traces.trace import Trace
from traces.writer import write_trace

TRACE = known()
E8 = Options(experts=8)
SHAPE = Options(experts=8, layers=3, top_k=2)


def refused(path: Path, *parts: str, options: Options = E8, meta: Path | None = None) -> None:
    with pytest.raises(InputError) as error:
        import_dump(path, meta, options)
    for part in (*parts, str(path)):
        assert part in str(error.value)


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


def test_a_count_of_prompt_tokens_takes_no_memory() -> None:
    tracemalloc.start()
    try:
        assert taken_in([7, 8], 2**27, [9, 10], 4) is None
        found = taken_in(None, 2**27, [9, 10], 4)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert found is not None
    assert found.tolist() == [-1, -1, -1, 9]


def test_texts_in_place_of_ids_take_their_length_once(tmp_path: Path) -> None:
    ids: list[Any] = [[["x" * 1_000_000, "y"]], *([["y", "y"]] for _ in range(99))]
    path = write_lines(tmp_path / "a.jsonl", [{"choices": [{"routed_experts": ids}]}])
    tracemalloc.start()
    try:
        refused(path, "routed_experts is no array of whole numbers")
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


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
    answer["usage"] = usage | {"completion_tokens": 11}
    refused(write_lines(tmp_path / "a.jsonl", [answer]), "line 1", "9 + 8 rows do not fit usage", "11 generated")


def test_a_row_for_the_last_token_is_left_out_and_said(tmp_path: Path) -> None:
    answer = vllm_answer(TRACE, 0, apart=True)
    choice = answer["choices"][0]
    choice["routed_experts"] = [*choice["routed_experts"], choice["routed_experts"][0]]
    made, notes = import_dump(write_lines(tmp_path / "a.jsonl", [answer]), options=E8)
    same(made, TRACE.head(1))
    assert "1 choices have a row for their last token" in notes[0]


def test_a_folder_of_arrays_is_a_request_for_each_file(tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    folder.mkdir()
    for i in range(3):
        np.save(folder / f"r{i}.npy", rows(TRACE, i).astype(np.int16))
    told = [{"id": f"r{i}", "prompt_tokens": 5, "task": f"t{i}"} for i in (2, 0, 1)]
    meta = tmp_path / "dump.json"
    meta.write_text(json.dumps({"experts": 8, "requests": told}))
    made, _ = import_dump(folder, meta)
    same(made, TRACE, steps=True)
    assert made.requests["id"].tolist() == ["r0", "r1", "r2"]
    assert made.requests["task"].tolist() == ["t0", "t1", "t2"]
    refused(folder, "where the prompt ends")
    meta.write_text(json.dumps({"experts": 8, "requests": [{}, {"prompt_tokens": 5}, {}]}))
    with pytest.raises(InputError, match=r"r0\.npy does not say where the prompt ends"):
        import_dump(folder, meta, Options(phase="decode"))
    assert import_dump(folder, options=Options(experts=8, phase="decode"))[0].phases == "decode"
    np.save(folder / "r3.npy", rows(TRACE, 0)[:, :2])
    refused(folder, "r3.npy", "[layers, k] is (2, 2)")


def test_a_request_of_one_generated_token_is_its_prompt(tmp_path: Path) -> None:
    answer = vllm_answer(TRACE, 0, apart=True)
    answer["usage"]["completion_tokens"] = 1
    for generated in (list[Any](), answer["choices"][0]["routed_experts"][:1]):
        answer["choices"][0]["routed_experts"] = generated
        made, notes = import_dump(write_lines(tmp_path / "a.jsonl", [answer]), options=E8)
        assert np.array_equal(made.experts, TRACE.experts[:5])
        assert made.requests["output_tokens"].tolist() == [1]
        assert len(notes) == len(generated)


def test_an_answer_without_id_is_named_by_its_file(tmp_path: Path) -> None:
    answers = [vllm_answer(TRACE, i) for i in range(2)]
    for answer in answers:
        del answer["id"]
    made, _ = import_dump(write_lines(tmp_path / "a.jsonl", answers), options=E8)
    assert made.requests["id"].tolist() == ["a-0", "a-1"]


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


def test_numbers_that_would_fill_the_memory_are_refused(tmp_path: Path) -> None:
    answers = [sglang_answer(TRACE, i) for i in range(3)]
    for answer in answers:
        answer["meta_info"]["prompt_tokens"] += 2**24
    path = write_lines(tmp_path / "a.jsonl", answers)
    refused(path, f"{3 * 2**24} tokens that were left out would take", options=replace(SHAPE, start=2**24))
    many = write_lines(tmp_path / "b.jsonl", [sglang_answer(TRACE, 0) | {"id": str(i)} for i in range(300)])
    refused(many, "EAMs of 300 requests x 3 layers x 65534 experts", options=replace(SHAPE, experts=65534))


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
    refused(file, "--start", options=SHAPE)
    made, notes = import_dump(file, options=Options(experts=8, layers=3, top_k=2, start=3))
    assert any("9 tokens were left out of prompts: they are in the trace without experts" in note for note in notes)
    assert np.array_equal(made.position, TRACE.position)
    for options in (SHAPE, Options(experts=8, layers=3), Options(experts=8)):  # whatever else is told
        refused(file, "--start 99 leaves out more than", options=replace(options, start=99))
    left_out = made.position < 3
    assert (made.experts[left_out] == made.sentinel).all()
    assert np.array_equal(made.experts[~left_out], TRACE.experts[~left_out])


def test_dense_layers_are_refused_until_the_moe_layers_are_named(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", [sglang_answer(TRACE, i, dense=1) for i in range(3)])
    refused(file, "layer 0 has expert id 0 everywhere", "--layer-map 1-3", options=Options(experts=8, top_k=2))
    for spec in ("1-3", "1:", "[1, 2, 3]"):
        made, _ = import_dump(file, options=Options(experts=8, top_k=2, layer_map=spec))
        same(made, TRACE)
        assert made.meta.layer_names == ("layers.1", "layers.2", "layers.3")
    bad = sglang_answer(TRACE, 0, dense=1)
    ids = np.frombuffer(base64.b64decode(bad["meta_info"]["routed_experts"]), "<i4").reshape(-1, 4, 2).copy()
    ids[6, 2] = 5
    bad["meta_info"]["routed_experts"] = base64.b64encode(ids.tobytes()).decode()
    write_lines(file, [bad])
    refused(file, "row 6, MoE layer 1 (layer 2 of the dump)", options=Options(experts=8, top_k=2, layer_map="1:"))


def test_a_layer_map_takes_the_layers_apart_that_it_names(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", [vllm_answer(TRACE, i) for i in range(3)])
    made, _ = import_dump(file, options=Options(experts=8, layer_map="0,2"))
    assert np.array_equal(made.experts, TRACE.experts[:, [0, 2]])


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


@pytest.mark.parametrize(
    "spec", ["", "a", "1-", "-3", "3:5", "1-9", "5", "2,1", "1,1", "[]", "[1.5]", "[true]", "[", "{}", "3-1"]
)
def test_a_layer_map_that_names_none_or_others_is_refused(spec: str) -> None:
    with pytest.raises(InputError, match="--layer-map"):
        parse_layer_map(spec, 5)


def test_a_layer_looks_dense_when_it_routes_nothing_or_one_id() -> None:
    experts = np.array([[[0, 1], [2, 3]], [[1, 0], [3, 4]]])
    assert first_dense(experts) is None
    for fill, reason in ((-1, "routes nothing"), (0, "id 0 everywhere"), (7, "id 7 everywhere")):
        experts[:, 1] = fill
        found = first_dense(experts)
        assert found is not None
        assert found[0] == 1
        assert reason in found[1]
    assert first_dense(np.array([[[0], [1]]])) is None  # top-1, one row: that may be
    assert first_dense(np.array([[[5], [1]], [[5], [2]]])) is None


Change = Callable[[dict[str, Any]], object]


def _ids(change: Callable[[np.ndarray], object], dtype: str = "int16") -> Change:
    def apply(answer: dict[str, Any]) -> None:
        experts = rows(TRACE, 1).astype(dtype)
        change(experts)
        answer["choices"][0]["routed_experts"] = npy(experts)

    return apply


def _put(row: int, layer: int, ids: list[int]) -> Change:
    return _ids(lambda experts: experts.__setitem__((row, layer), ids))


def _choice(value: Any) -> Change:
    return lambda answer: answer["choices"][0].update(routed_experts=value)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (_put(3, 1, [8, 1]), ["row 3, MoE layer 1", "8 is no id of 8 experts"]),
        (_put(4, 0, [-2, 1]), ["row 4", "-2 is no id"]),
        (_put(0, 2, [3, 3]), ["row 0, MoE layer 2", "repeated"]),
        (_ids(lambda experts: None, "float32"), ["float32", "integers are needed"]),
        (_choice(npy(rows(TRACE, 1)[:-1])), ["7 rows", "5 prompt and 4 generated", "are 8"]),
        (_choice(npy(rows(TRACE, 1)[0])), ["shape (3, 2)"]),
        (_choice(npy(rows(TRACE, 1))[:-40]), ["no .npy, or damaged"]),
        (_choice("@@@"), ["is no base64"]),
        (_choice(base64.b64encode(b"\x80\x04K\x01.").decode()), ["no .npy, or damaged"]),
        (_choice(base64.b64encode(b"").decode()), ["no .npy, or damaged"]),
        (_choice(npy(np.array([[[{}]]], object))), ["no .npy, or damaged"]),
        (_choice([[[1, 2]], [[1]]]), ["damaged"]),
        (_choice(json.loads("[" * 70 + "1" + "]" * 70)), ["routed_experts is no array"]),
        (_choice(None), ["routed_experts is missing"]),
        (_choice(3), ["int, not a base64 text"]),
        (lambda answer: answer.update(choices=[]), ["no list of choices"]),
        (lambda answer: answer.update(error={"message": "busy"}), ["error of the server", "busy"]),
        (lambda answer: answer["usage"].update(prompt_tokens="x"), ["prompt_tokens is 'x'"]),
        (lambda answer: answer.update(prompt_token_ids=[1, -2]), ["prompt_token_ids is no list of token ids"]),
        (lambda answer: answer.update(prompt_token_ids=[1, 2]), ["disagrees in the number of prompt tokens: 2 and 5"]),
        (lambda answer: answer.update(prompt_routed_experts=[[[0, 1]] * 3]), ["1 rows for 5 prompt tokens"]),
        (lambda answer: answer.pop("usage"), ["where the prompt ends"]),
        (lambda answer: answer.update(id=[1]), ["id is [1]"]),
    ],
)
def test_a_damaged_vllm_answer_is_named_by_line_row_and_reason(
    tmp_path: Path, change: Change, parts: list[str]
) -> None:
    answers = [vllm_answer(TRACE, i) for i in range(3)]
    change(answers[1])
    refused(write_lines(tmp_path / "a.jsonl", answers), "line 2", *parts)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda meta: meta.update(routed_experts="AAA"), ["is no base64"]),
        (lambda meta: meta.update(routed_experts="AAAA"), ["3 bytes", "int32"]),
        (lambda meta: meta.update(routed_experts="AAAAAA=="), ["1 ids are no whole rows"]),
        (lambda meta: meta.update(routed_experts=""), ["0 ids"]),
        (lambda meta: meta.update(completion_tokens=9), ["8 rows", "--start"]),
        (lambda meta: meta.update(routed_experts_dtype="float32"), ["routed_experts_dtype is 'float32'"]),
        (lambda meta: meta.pop("routed_experts"), ["no routed_experts"]),
    ],
)
def test_a_damaged_sglang_answer_is_named_by_line_and_reason(tmp_path: Path, change: Change, parts: list[str]) -> None:
    answers = [sglang_answer(TRACE, i) for i in range(3)]
    change(answers[1]["meta_info"])
    refused(write_lines(tmp_path / "a.jsonl", answers), "line 2", *parts, options=SHAPE)


@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_sglang_output_ids_that_are_not_as_many_as_were_completed_are_refused(tmp_path: Path, tokens: int) -> None:
    answers = [sglang_answer(told(TRACE), i) for i in range(3)]
    answers[1]["output_ids"] = [7] * tokens
    refused(write_lines(tmp_path / "a.jsonl", answers), "line 2", f"output_ids has {tokens} tokens", options=SHAPE)


def test_a_shape_that_does_not_follow_is_asked_for(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", [sglang_answer(TRACE, 0)])
    refused(file, "give --layers and --top-k")
    refused(file, "no whole number", options=Options(experts=8, top_k=5))
    refused(file, "no whole rows of 5 layers", options=Options(experts=8, top_k=2, layers=5))


def test_files_of_other_kinds_are_told_apart(tmp_path: Path) -> None:
    for name, content in (("a.jsonl", "{}\n"), ("a.json", "[]"), ("a.txt", ""), ("a.json", '{"choices": [1]}')):
        (tmp_path / name).write_text(content)
        refused(tmp_path / name, "no dump of a known format", "sglang-pt")
    (tmp_path / "a.jsonl").write_text('{}\n{"a": \n')
    with pytest.raises(InputError, match=r"a.jsonl line 2 is no JSON"):
        import_dump(write_bad(tmp_path), format="vllm")
    with pytest.raises(InputError, match="unknown format 'vlm'"):
        import_dump(tmp_path / "a.jsonl", format="vlm")
    (tmp_path / "folder").mkdir()
    refused(tmp_path / "folder", "no dump of a known format")
    with pytest.raises(InputError, match=r"holds no \.npy file"):
        import_dump(tmp_path / "folder", format="vllm")


def write_bad(folder: Path) -> Path:
    file = write_lines(folder / "a.jsonl", [vllm_answer(TRACE, 0)])
    file.write_text(file.read_text() + '{"a": \n')
    return file


@given(st.data())
def test_a_changed_byte_is_refused_or_read_whole(data: st.DataObject) -> None:
    content = bytearray(json.dumps(vllm_answer(TRACE, 0)).encode())
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "a.jsonl"
        file.write_bytes(content)
        with suppress(InputError):
            assert len(import_dump(file, options=E8, format="vllm")[0].experts) == 9
