"""What is no case is refused in one line, before compiled code sees it."""

import io
import json
from typing import Any

import pytest

from sim.engines.cases import run_case, run_file
from traces import InputError

CASE = {
    "L": 2,
    "E": 2,
    "slots": 1,
    "expert_bytes": 10,
    "link_latency_ns": 1,
    "link_ns_per_byte_num": 1,
    "link_ns_per_byte_den": 2,
    "chunk_bytes": None,
    "dense_ns": 5,
    "expert_ns": 3,
    "expert_ns_per_token": 1,
    "combine_ns": 1,
    "head_ns": 1,
    "predictor_ns": 0,
    "evict": "lru",
    "prefetch": "none",
    "popular_n": 0,
    "cold": False,
    "requests": [[[[[0, 1], [1, 2]], [[1, 1]]]]],
}


def test_a_case_by_hand():
    """One slot, so nothing overlaps: 5 + (6 + 4) + (6 + 5) + 1 in layer 0, 5 + (6 + 4) + 1 in layer 1, head 1."""
    result = run_case(CASE)
    assert result["token_ns"] == [27 + 16 + 1]
    assert result["evictions"] == [0, 1]
    assert (result["hits"], result["misses"], result["stall_ns"]) == (0, 3, 18)


@pytest.mark.parametrize(
    "wrong",
    [
        {"requests": [[[[[5, 1]], []]]]},
        {"requests": [[[[[1, 1], [1, 1]], []]]]},
        {"requests": [[[[[1, 0]], []]]]},
        {"requests": [[[[]]]]},
        {"link_ns_per_byte_den": 0},
        {"dense_ns": 10**30},
        {"slots": None},
        {"placement": "hosst"},
        {"capacity_bytes": 40},
    ],
)
def test_what_is_no_case_is_refused_with_its_number(wrong, tmp_path):
    path = tmp_path / "cases.jsonl"
    path.write_text(json.dumps(CASE) + "\n" + json.dumps(CASE | wrong) + "\n")
    with pytest.raises(InputError, match="case 2: "):
        run_file(path, io.StringIO())


def test_a_key_that_no_case_has_is_warned_of_once(tmp_path):
    path, told = tmp_path / "cases.jsonl", list[str]()
    path.write_text((json.dumps(CASE | {"placements": "host", "expected": {}}) + "\n") * 2)
    assert run_file(path, io.StringIO(), warn=told.append) == 2
    assert told == [f"{path}, case 1: unknown key 'placements'; did you mean placement? (ignored)"]


def test_a_case_of_tokens_is_run_with_what_is_drafted_and_what_contradicts_is_refused():
    tokens: dict[str, Any] = {key: value for key, value in CASE.items() if key != "requests"}
    token = [[0]] * tokens["L"]
    tokens |= {"tokens": [[token] * 5], "prompt": [1], "draft": 2, "accepted": [1]}
    assert run_case(tokens)["kept"] == [1, 2, 2]
    for wrong, message in (
        ({"requests": []}, "a case has requests, or tokens"),
        ({"accepted": None}, "draft needs accepted, or acceptance"),
        ({"prompt": [1, 1]}, "prompt has 2 items, not 1"),
    ):
        with pytest.raises(InputError, match=message):
            run_case(tokens | wrong)
