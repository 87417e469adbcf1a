"""A cell that is no id, count, number or phase ends the import, by its file, row and column; any text is a name."""

import copy
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.traces.test_importer_forms import L, Record, by_token, cells, lines, long, nested, table, wide
from traces import InputError, Trace
from traces.importers import Options, import_dump

COUNTS: list[Record] = [{"layer": layer, "expert": e, "count": 3 + e} for layer in range(L) for e in range(8)]
IDS: list[Record] = [{**record, "token_id": 20 + i % 7} for i, record in enumerate(cells())]
RECORDS = [long(), long(slot=None), IDS, wide(), wide(dense=True), by_token(flat=True), COUNTS]
NESTED = [by_token(), nested(), nested(flat=True)]
TEXTS = ["x", "", "nan", "NA", "inf", "True", "0x5", "1_0", "1;x", "5-", str(2**40), "1.5", "-2"]
VALUES: list[Any] = [*TEXTS, None, True, {}, [[1]], float("nan"), 2**40, 1.5, -2]
LABELS = re.compile("request|req_id|seq_id|prompt_id")
WEIGHTS = re.compile(r"weight|prob|^w\d")


def imported(name: str, content: bytes) -> Trace:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / name).write_bytes(content)
        return import_dump(Path(folder) / name, options=Options("decode" if name[0] == "c" else None, 8, top_k=2))[0]


def invalid(name: str, values: list[Any]) -> st.SearchStrategy[Any]:
    """Return what a cell of this column cannot hold: a weight may be any number that float16 holds."""
    if name == "is_prefill":
        return st.sampled_from([value for value in values if str(value) != "True"])
    weight = WEIGHTS.search(name) or name.startswith("expert_")
    return st.sampled_from([value for value in values if not weight or str(value) not in ("1.5", "-2")])


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(RECORDS), st.booleans(), st.data())
def test_an_invalid_cell_ends_the_import_with_its_place(
    made: list[Record], is_table: bool, data: st.DataObject
) -> None:
    records, row = copy.deepcopy(made), data.draw(st.integers(0, len(made) - 1))
    column = data.draw(st.sampled_from([name for name in made[0] if not LABELS.search(name)]))
    bad, cell = data.draw(invalid(column, TEXTS if is_table else VALUES)), made[row][column]
    if isinstance(cell, list):
        records[row][column][data.draw(st.integers(0, len(cell) - 1))] = bad
    else:
        records[row][column] = bad
    name = f"{'c' if made is COUNTS else 'a'}.{'csv' if is_table else 'jsonl'}"
    shown = "expert" if re.fullmatch(r"l\d", column) else column
    place = rf", row {row + 1 + is_table}.*, column '{shown}'|: record {row + 1}[: ]"
    if isinstance(bad, list):  # which makes a nested record, whose values are named by their depth
        place = rf"(, row|: record) {row + 1}\b"
    with pytest.raises(InputError, match=rf"{re.escape(name)}({place})"):
        imported(name, table(records) if is_table else lines(records))


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(NESTED), st.data())
def test_an_invalid_value_of_a_nested_record_ends_the_import(made: list[Record], data: st.DataObject) -> None:
    records, row = copy.deepcopy(made), data.draw(st.integers(0, len(made) - 1))
    holder: Any = records[row]
    key = data.draw(st.sampled_from([name for name in holder if not LABELS.search(name)]))
    column = key
    while isinstance(holder[key], list | dict):
        holder = holder[key]
        key = data.draw(st.sampled_from(range(len(holder)) if isinstance(holder, list) else sorted(holder)))
        column = key if isinstance(key, str) else column
    holder[key] = data.draw(invalid(column, VALUES))
    with pytest.raises(InputError, match=rf"a\.jsonl(, row|: record) {row + 1}\b"):
        imported("a.jsonl", lines(records))


def test_ids_of_tokens_that_are_a_text_are_no_ids(tmp_path: Path) -> None:
    record = {"experts": [[[1, 2], [3, 4]]] * 3, "token_ids": "x"}
    (tmp_path / "a.jsonl").write_bytes(lines([record]))
    with pytest.raises(InputError, match=r"a\.jsonl, row 1.*, column 'token_ids': 'x'"):
        import_dump(tmp_path / "a.jsonl", options=Options("decode", axes="token,layer"))


@pytest.mark.parametrize("name", ["NA", "null", "None", "nan", "N/A", "#", "007", "1.50"])
def test_a_request_may_have_any_name(name: str) -> None:
    records = [{**record, "req_id": name if record["req_id"] == "r1" else record["req_id"]} for record in cells()]
    for file, content in (("a.csv", table(records)), ("a.jsonl", lines(records))):
        assert imported(file, content).requests["id"].tolist() == ["r0", name, "r2"]


@pytest.mark.parametrize("kind", ["u1", "u2", "u4", "u8", "i2", ">i4", "i8"])
def test_ids_of_every_integer_type_are_read_and_none_wraps(kind: str, tmp_path: Path) -> None:
    ids = np.tile(np.arange(6, dtype=kind).reshape(2, 3), (4, 1, 1))
    np.save(tmp_path / "a.npy", ids)
    assert np.array_equal(import_dump(tmp_path / "a.npy", options=Options("decode"))[0].experts, ids)
    if ids.dtype.itemsize == 8:
        ids[2, 1, 0] = 2**40
        np.save(tmp_path / "a.npy", ids)
        with pytest.raises(InputError, match=r"a.npy: experts\[2, 1, 0\] is 1099511627776"):
            import_dump(tmp_path / "a.npy", options=Options("decode"))
