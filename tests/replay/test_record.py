"""The file of real runs: what is in it survives whatever ends the run."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay.comparison.record import CELLS, TOP, Record
from replay.keys import key_of
from traces import InputError

CELL = {"policy": "lru", "measured": {"tpot_mean_ms": 1.5}}


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def begun(path: Path, resume: bool = False, machine: str = "H200") -> Record:
    record = Record.open(path, resume)
    record.begin(gpu=machine, machine=machine, device="cuda", driver="1", torch="2")
    return record


def test_the_file_holds_every_cell_as_it_ends_with_the_facts_before_the_cells(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    record = begun(path)
    assert not path.exists(), "opening writes nothing"
    for number in range(3):
        record.put(f"key{number}", CELL)
        assert [cell["key"] for cell in read(path)[CELLS]] == [f"key{each}" for each in range(number + 1)]
    found = read(path)
    assert list(found)[: len(TOP)] == list(TOP)
    assert list(found)[-1] == CELLS
    assert found["gpu"] == "H200"
    assert found["commit"]
    assert found["date"].endswith("+00:00")
    assert [file.name for file in tmp_path.iterdir()] == ["here.json"]


def test_resuming_keeps_what_is_finished_and_what_failed_is_due_again(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    record = begun(path)
    record.put("good", CELL)
    record.fail("bad", {"policy": "eamc"}, InputError("out of\nmemory"))
    assert "bad" not in record
    assert len(record) == 1
    assert read(path)[CELLS][1] == {"key": "bad", "policy": "eamc", "error": "out of memory"}
    again = begun(path, resume=True)
    assert "good" in again
    assert "bad" not in again
    assert list(again) == [{"key": "good", **CELL}]
    again.put("bad", CELL)
    assert [cell["key"] for cell in read(path)[CELLS]] == ["good", "bad"]
    assert "error" not in read(path)[CELLS][1]
    assert len(begun(path)) == 0, "without resume nothing is kept"


@pytest.mark.parametrize("content", ["", "[]", "{}"])
def test_a_file_that_is_no_record_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "here.json"
    path.write_text(content)
    with pytest.raises(InputError, match=r"here\.json is not a record of cells") as caught:
        Record.open(path, resume=True)
    assert "\n" not in str(caught.value)
    assert len(Record.open(path, resume=False)) == 0


def test_a_record_of_another_machine_is_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    begun(path).put("one", CELL)
    with pytest.raises(InputError, match="is of machine H200, this is A100"):
        begun(path, resume=True, machine="A100")
    begun(path, resume=True)


def test_infinity_is_null_and_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    record = begun(tmp_path / "here.json")
    record.put("one", {"a": math.inf, "b": [math.nan, np.float64(0.5)], "c": {"d": np.int64(7)}})
    assert read(tmp_path / "here.json")[CELLS][0] == {"key": "one", "a": None, "b": [None, 0.5], "c": {"d": 7}}


def test_a_key_is_of_everything_that_decides_a_cell_and_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"trace": "abc", "slots": 5, "hardware": {"link": 50.0}, "mode": "lockstep"}
    keys = {key_of(**facts), *(key_of(**{**facts, name: "other"}) for name in facts)}
    assert len(keys) == 5
    assert key_of(**facts) == key_of(**dict(reversed(facts.items())))
    monkeypatch.setattr("replay.keys.code_digest", lambda: "edited")
    assert key_of(**facts) not in keys
