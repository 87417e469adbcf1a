"""Prompts are read from the files that people have."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tracer.prompts import Columns, Prompt, read_prompts
from traces import InputError

ROWS = [{"uid": "a", "question": "One?", "category": "x"}, {"uid": "b", "question": "Two?", "category": "y"}]
READ = [Prompt("a", "file", "x", ("One?",)), Prompt("b", "file", "y", ("Two?",))]


SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "prompts"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason=f"real prompts are not at {SHARED}")

GSM8K = [
    {"question": "Two and two?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"},
    {"question": "None?", "answer": "#### 0"},
]
HUMAN_EVAL = [
    {
        "task_id": "HumanEval/0",
        "prompt": "def f(x):\n",
        "entry_point": "f",
        "canonical_solution": "    return x\n",
        "test": "assert f(1)",
    }
]
MT_BENCH = [
    {"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."]},
    {"question_id": 101, "category": "math", "turns": ["Add.", "Again."], "reference": ["2", "3"]},
    {"question_id": 103, "category": "math", "turns": ["Guess.", "Why?"], "reference": ["2", ""]},
]
BBH = {"canary": "c", "examples": [{"input": "Is it?\n- Yes\n- No", "target": "No"}]}
MMLU = '"Which, of\nthese?",one,2,three,four,B\nNext?,a,b,c,d,D\n'
FLAN = [{"inputs": "Translate: ja", "targets": "yes", "task": "wmt"}, {"inputs": "Say no", "targets": " "}]


def write(path: Path) -> Path:
    kind = path.name.removesuffix(".gz").rsplit(".", 1)[1]
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path)
        return path
    texts = {
        "jsonl": "\n".join(map(json.dumps, ROWS)) + "\n",
        "json": json.dumps({"canary": "c", "examples": ROWS}),
        "csv": "uid,question,category\na,One?,x\nb,Two?,y\n",
        "tsv": "uid\tquestion\tcategory\na\tOne?\tx\nb\tTwo?\ty\n",
    }
    content = texts[kind].encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def lines(rows: list[dict[str, Any]]) -> str:
    return "\n".join(map(json.dumps, rows)) + "\n"


def read(folder: Path, name: str, content: str, **columns: Any) -> list[Prompt]:
    raw = content.encode()
    (folder / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    return read_prompts(folder / name, Columns(**columns))


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "json", "csv", "csv.gz", "tsv", "parquet"])
def test_usual_columns_are_found_in_every_kind_of_file(tmp_path: Path, ending: str) -> None:
    assert read_prompts(write(tmp_path / f"file.{ending}"), Columns()) == READ


def test_a_text_file_holds_a_prompt_a_line(tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_bytes("One?\n\n  Two?\r\nThree,\u2028still\x0cthree?".encode())
    assert read_prompts(tmp_path / "file.txt", Columns()) == [
        Prompt("0", "file", "", ("One?",)),
        Prompt("1", "file", "", ("  Two?",)),
        Prompt("2", "file", "", ("Three,\u2028still\x0cthree?",)),
    ]


def test_a_csv_without_header_has_numbered_columns(tmp_path: Path) -> None:
    (tmp_path / "file.csv").write_text('"One, or\ntwo?",1,B\nThree?,2,C\n')
    prompts = read_prompts(tmp_path / "file.csv", Columns(prompt_column="0", task_column="2"))
    assert [(p.turns, p.task) for p in prompts] == [(("One, or\ntwo?",), "B"), (("Three?",), "C")]


def test_named_columns_and_labels_come_first(tmp_path: Path) -> None:
    columns = Columns(prompt_column="category", id_column="question", task="t", dataset="d")
    assert read_prompts(write(tmp_path / "file.csv"), columns)[0] == Prompt("One?", "d", "t", ("x",))


def test_a_list_of_turns_of_any_length_is_a_conversation(tmp_path: Path) -> None:
    rows = [{"question_id": 81, "turns": ["first", "second", "third"]}, {"question_id": 82, "turns": ["only"]}]
    assert read(tmp_path, "file.jsonl", lines(rows)) == [
        Prompt("81", "file", "", ("first", "second", "third")),
        Prompt("82", "file", "", ("only",)),
    ]


def test_a_limit_takes_the_first_prompts(tmp_path: Path) -> None:
    assert read_prompts(write(tmp_path / "file.csv"), Columns(limit=1)) == READ[:1]


@pytest.mark.parametrize("name", ["gsm8k_test.jsonl", "renamed.jsonl.gz"])
def test_gsm8k_is_one_task_with_worked_answers(tmp_path: Path, name: str) -> None:
    assert read(tmp_path, name, lines(GSM8K)) == [
        Prompt("0", "gsm8k", "gsm8k", ("Two and two?",), ("2 + 2 = <<2+2=4>>4\n#### 4",)),
        Prompt("1", "gsm8k", "gsm8k", ("None?",), ("#### 0",)),
    ]


@pytest.mark.parametrize("name", ["HumanEval.jsonl.gz", "renamed.jsonl"])
def test_human_eval_is_one_task_with_its_own_ids(tmp_path: Path, name: str) -> None:
    expected = Prompt("HumanEval/0", "humaneval", "humaneval", ("def f(x):\n",), ("    return x\n",))
    assert read(tmp_path, name, lines(HUMAN_EVAL)) == [expected]


def test_mt_bench_has_two_turns_and_responses_only_where_both_have_a_reference(tmp_path: Path) -> None:
    assert read(tmp_path, "renamed.jsonl", lines(MT_BENCH)) == [
        Prompt("81", "mt_bench", "writing", ("Write.", "Rewrite.")),
        Prompt("101", "mt_bench", "math", ("Add.", "Again."), ("2", "3")),
        Prompt("103", "mt_bench", "math", ("Guess.", "Why?")),
    ]


def test_the_task_of_big_bench_hard_is_the_name_of_its_file(tmp_path: Path) -> None:
    expected = Prompt("0", "bbh", "snarks", ("Is it?\n- Yes\n- No",), ("No",))
    assert read(tmp_path, "snarks.json", json.dumps(BBH)) == [expected]


@pytest.mark.parametrize("name", ["anatomy_test.csv", "anatomy_dev.csv", "anatomy_val.csv.gz", "anatomy.csv"])
def test_mmlu_is_worded_as_usual_and_its_task_is_its_subject(tmp_path: Path, name: str) -> None:
    assert read(tmp_path, name, MMLU) == [
        Prompt("0", "mmlu", "anatomy", ("Which, of\nthese?\nA. one\nB. 2\nC. three\nD. four\nAnswer:",), ("B",)),
        Prompt("1", "mmlu", "anatomy", ("Next?\nA. a\nB. b\nC. c\nD. d\nAnswer:",), ("D",)),
    ]


def test_flan_takes_its_task_from_a_column_else_from_the_name_of_its_file(tmp_path: Path) -> None:
    assert read(tmp_path, "cot.jsonl", lines(FLAN)) == [
        Prompt("0", "flan", "wmt", ("Translate: ja",), ("yes",)),
        Prompt("1", "flan", "cot", ("Say no",)),
    ]
    named = [{**row, "task_name": "named"} for row in FLAN[1:]]
    assert [p.task for p in read(tmp_path, "cot.jsonl", lines(named))] == ["named"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("file.jsonl", lines([*GSM8K, {"question": "Q?", "answer": "no working"}])),
        ("file.jsonl", lines([{**HUMAN_EVAL[0], "plus_input": [1]}])),
        ("file.jsonl", lines([*MT_BENCH, {"question_id": 1, "category": "math", "turns": ["one"]}])),
        ("file.jsonl", lines([{"input": "a", "target": "b"}])),
        ("file.json", json.dumps({"examples": [{"input": "a", "target": "b", "more": "c"}]})),
        ("file.jsonl", lines([{str(i): i for i in range(6)} | {"prompt": "a"}])),
        ("file.jsonl", lines([{"inputs": "a", "targets": 3}])),
    ],
)
def test_a_file_is_a_known_dataset_only_if_every_row_is(tmp_path: Path, name: str, content: str) -> None:
    assert {p.dataset for p in read(tmp_path, name, content)} == {"file"}


def test_options_come_before_what_is_known_of_a_dataset(tmp_path: Path) -> None:
    assert read(tmp_path, "f.jsonl", lines(GSM8K[1:]), dataset="d", task="t") == [
        Prompt("0", "d", "t", ("None?",), ("#### 0",))
    ]
    swapped = read(
        tmp_path, "f.jsonl", lines(GSM8K[1:]), prompt_column="answer", response_column="question", id_column="question"
    )
    assert swapped == [Prompt("None?", "gsm8k", "gsm8k", ("#### 0",), ("None?",))]
    assert read(tmp_path, "f.jsonl", lines(GSM8K[1:]), prompt_column="answer")[0].responses == ()
    assert read(tmp_path, "f.jsonl", lines(MT_BENCH), task_column="question_id")[0].task == "81"


@pytest.mark.parametrize(
    "column", ["response", "completion", "output", "answer", "target", "targets", "reference", "canonical_solution"]
)
def test_responses_are_found_by_usual_names(tmp_path: Path, column: str) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "a"},
        {"prompt": "b", column: "B"},
        {"prompt": "c", column: 3},
        {"prompt": "d", column: None},
    ]
    assert [p.responses for p in read(tmp_path, "f.jsonl", lines(rows))] == [(), ("B",), ("3",), ()]


def test_a_named_response_column_comes_first(tmp_path: Path) -> None:
    rows = [{"turns": ["a", "b"], "answer": ["x", "y"], "said": ["1", "2"]}, {"turns": ["c", "d"], "said": ["1"]}]
    assert [p.responses for p in read(tmp_path, "f.jsonl", lines(rows), response_column="said")] == [("1", "2"), ()]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_the_messages_of_a_chat_are_turns_and_responses(tmp_path: Path, ending: str) -> None:
    said = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello"), ("user", "Bye"), ("assistant", "See you")]
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    for column, chat in (
        ("messages", [{"role": role, "content": text} for role, text in said]),
        ("conversations", [{"from": names[role], "value": text} for role, text in said]),
    ):
        rows = [{column: chat}, {column: chat[1:4]}]
        if ending == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), tmp_path / "f.parquet")
        else:
            (tmp_path / "f.jsonl").write_text(lines(rows))
        assert read_prompts(tmp_path / f"f.{ending}", Columns()) == [
            Prompt("0", "f", "", ("Be brief.\n\nHi", "Bye"), ("Hello", "See you")),
            Prompt("1", "f", "", ("Hi", "Bye")),
        ]


def test_a_folder_is_read_in_order_with_ids_that_tell_its_files_apart(tmp_path: Path) -> None:
    for name in ("snarks", "causal"):
        (tmp_path / f"{name}.json").write_text(json.dumps(BBH))
    (tmp_path / "README.md").write_text("Not a prompt")
    (tmp_path / ".hidden.txt").write_text("Not a prompt")
    (tmp_path / "more").mkdir()
    found = read_prompts(tmp_path, Columns())
    assert [(p.id, p.task) for p in found] == [("causal/0", "causal"), ("snarks/0", "snarks")]
    assert read_prompts(tmp_path, Columns(limit=1)) == found[:1]


def test_ids_that_differ_from_file_to_file_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text(lines(HUMAN_EVAL))
    (tmp_path / "a.jsonl").write_text(lines(MT_BENCH))
    found = read_prompts(tmp_path, Columns(dataset="d"))
    assert [(p.id, p.dataset) for p in found] == [("81", "d"), ("101", "d"), ("103", "d"), ("HumanEval/0", "d")]


@needs_shared
@pytest.mark.parametrize(
    ("name", "dataset", "tasks", "requests", "responses"),
    [
        ("gsm8k_test.jsonl", "gsm8k", 1, 1319, 1319),
        ("HumanEval.jsonl.gz", "humaneval", 1, 164, 164),
        ("mt_bench_question.jsonl", "mt_bench", 8, 80, 31),
        ("bbh", "bbh", 8, 1865, 1865),
        ("mmlu", "mmlu", 16, 3631, 3631),
    ],
)
def test_real_datasets_are_read_without_options(
    name: str, dataset: str, tasks: int, requests: int, responses: int
) -> None:
    prompts = read_prompts(SHARED / name, Columns())
    assert {p.dataset for p in prompts} == {dataset}
    assert len({p.task for p in prompts} - {""}) == tasks
    assert len({p.id for p in prompts}) == len(prompts) == requests
    assert sum(bool(p.responses) for p in prompts) == responses
    assert {len(p.turns) for p in prompts} == ({2} if dataset == "mt_bench" else {1})


def test_a_field_of_a_csv_may_be_long(tmp_path: Path) -> None:
    (tmp_path / "file.csv").write_text("prompt\n" + "long " * 100_000 + "\n")
    assert len(read_prompts(tmp_path / "file.csv", Columns())[0].turns[0]) == 500_000


def test_a_csv_may_be_ragged_and_end_its_lines_in_any_way(tmp_path: Path) -> None:
    (tmp_path / "file.csv").write_bytes(b'prompt,task\rOne?\r\r"Two\r\nlines?",b,\r')
    prompts = read_prompts(tmp_path / "file.csv", Columns())
    assert [(p.turns, p.task) for p in prompts] == [(("One?",), ""), (("Two\r\nlines?",), "b")]


@pytest.mark.parametrize(
    ("name", "content", "columns", "reason"),
    [
        ("f.jsonl", '{"prompt": "a"}\n{"prompt"\n', Columns(), "line 2 is no JSON"),
        ("f.jsonl", '{"prompt": "a"}\n{"prompt": " "}\n', Columns(), "row 2 has no prompt"),
        ("f.csv", "a,b\n1,2\n", Columns(prompt_column="c"), "no column 'c' for --prompt-column; it has a, b"),
        ("f.csv", "prompt\na,\nb, c\n", Columns(), "row 2 has 2 fields for 1 columns: a text that holds ','"),
        (
            "f.jsonl",
            '{"messages": [{"role": "assistant", "content": "Hi"}]}',
            Columns(),
            "must take turns",
        ),
    ],
)
def test_a_file_without_usable_prompts_is_refused_with_the_place(
    tmp_path: Path, name: str, content: str, columns: Columns, reason: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=reason):
        read_prompts(tmp_path / name, columns)
