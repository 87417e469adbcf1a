"""Prompts are read from the files that people have."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tracer import demo
from tracer.prompts import Columns, Prompt, read_prompts
from traces.errors import InputError

ROWS = [{"uid": "a", "question": "One?", "category": "x"}, {"uid": "b", "question": "Two?", "category": "y"}]
READ = [Prompt("a", "file", "x", "One?"), Prompt("b", "file", "y", "Two?")]


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


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "json", "csv", "csv.gz", "tsv", "parquet"])
def test_usual_columns_are_found_in_every_kind_of_file(tmp_path: Path, ending: str) -> None:
    assert read_prompts(write(tmp_path / f"file.{ending}"), Columns()) == READ


def test_a_text_file_holds_a_prompt_a_line(tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text("One?\n\n  Two?\n")
    assert read_prompts(tmp_path / "file.txt", Columns()) == [
        Prompt("0", "file", "", "One?"),
        Prompt("1", "file", "", "  Two?"),
    ]


def test_a_csv_without_header_has_numbered_columns(tmp_path: Path) -> None:
    (tmp_path / "file.csv").write_text('"One, or\ntwo?",1,B\nThree?,2,C\n')
    prompts = read_prompts(tmp_path / "file.csv", Columns(prompt="0", task="2"))
    assert [(p.text, p.task) for p in prompts] == [("One, or\ntwo?", "B"), ("Three?", "C")]


def test_named_columns_and_labels_come_first(tmp_path: Path) -> None:
    columns = Columns(prompt="category", id="question", labels={"task": "t", "dataset": "d"})
    assert read_prompts(write(tmp_path / "file.csv"), columns)[0] == Prompt("One?", "d", "t", "x")


def test_a_conversation_starts_with_its_first_turn(tmp_path: Path) -> None:
    (tmp_path / "file.jsonl").write_text('{"question_id": 81, "turns": ["first", "second"]}\n')
    assert read_prompts(tmp_path / "file.jsonl", Columns()) == [Prompt("81", "file", "", "first")]


def test_a_limit_takes_the_first_prompts(tmp_path: Path) -> None:
    assert read_prompts(write(tmp_path / "file.csv"), Columns(), limit=1) == READ[:1]


@pytest.mark.parametrize(
    ("name", "content", "columns", "reason"),
    [
        ("f.jsonl", '{"prompt": "a"}\n{"prompt"\n', Columns(), "line 2 is no JSON"),
        ("f.jsonl", "[1]\n", Columns(), "line 1 is no JSON object"),
        ("f.jsonl", '{"prompt": "a"}\n{"prompt": " "}\n', Columns(), "row 2 has no prompt"),
        ("f.jsonl", '{"prompt": 3}\n', Columns(), "row 1 has no prompt"),
        ("f.jsonl", '{"id": 1, "prompt": "a"}\n{"id": 1, "prompt": "b"}\n', Columns(), "row 2 repeats the id '1'"),
        ("f.jsonl", "", Columns(), "holds no prompts"),
        ("f.json", '{"a": 1}', Columns(), "no list of JSON objects"),
        ("f.json", "[1]", Columns(), "no list of JSON objects"),
        ("f.csv", "a,b\n1,2\n", Columns(), "--prompt-column (has: a, b)"),
        ("f.csv", "a,b\n1,2\n", Columns(prompt="c"), "no column 'c' for --prompt-column; it has a, b"),
        ("f.parquet", "text", Columns(), "cannot be read"),
        ("f.jsonl.gz", "text", Columns(), "cannot be read"),
        ("f.doc", "text", Columns(), ".jsonl, .json, .csv"),
        ("f.json", "[" * 100_000, Columns(), "nested too deeply"),
        ("f.jsonl", '{"prompt": "a"}\n' + "[" * 100_000, Columns(), "line 2 is nested too deeply"),
        ("f.jsonl", '{"prompt": "half a character: \\ud800"}\n', Columns(), "row 1"),
        ("f.csv", "", Columns(), "holds no prompts"),
        ("f.csv", "prompt,task\n", Columns(), "holds no prompts"),
        ("f.csv", "prompt,task\n,x\n", Columns(), "row 1 has no prompt"),
    ],
)
def test_a_file_without_usable_prompts_is_refused(
    tmp_path: Path, name: str, content: str, columns: Columns, reason: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError) as error:
        read_prompts(tmp_path / name, columns)
    assert reason in str(error.value)


def test_a_field_of_a_csv_may_be_long(tmp_path: Path) -> None:
    (tmp_path / "file.csv").write_text("prompt\n" + "long " * 100_000 + "\n")
    assert len(read_prompts(tmp_path / "file.csv", Columns())[0].text) == 500_000


def test_a_csv_may_be_ragged_and_end_its_lines_in_any_way(tmp_path: Path) -> None:
    (tmp_path / "file.csv").write_bytes(b'prompt,task\rOne?\r\r"Two\r\nlines?",b,c\r')
    prompts = read_prompts(tmp_path / "file.csv", Columns())
    assert [(p.text, p.task) for p in prompts] == [("One?", ""), ("Two\r\nlines?", "b")]


def test_damaged_compression_is_told(tmp_path: Path) -> None:
    content = bytearray(gzip.compress(b'{"prompt": "a"}' * 100))
    content[12:20] = b"\xff" * 8
    (tmp_path / "f.jsonl.gz").write_bytes(content)
    with pytest.raises(InputError, match="cannot be read"):
        read_prompts(tmp_path / "f.jsonl.gz", Columns())


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_prompts(tmp_path / "none.txt", Columns())


def test_the_shipped_prompts_are_64_of_eight_tasks() -> None:
    prompts = read_prompts(demo.PROMPTS, Columns())
    assert len(prompts) == 64
    assert len({p.task for p in prompts}) == 8
    assert len({p.text for p in prompts}) == 64
