"""Every reader of foreign bytes reads what its fuzzer's corpus holds, and some mutations of it, or raises InputError.

`make fuzz` goes on for longer, guided by coverage.
"""

import io
import random
import struct
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz.edits import edited
from tests.fuzz.harness import CORPUS, Target, bounded, members, mutated, packed
from tests.fuzz.targets import TARGETS
from traces.errors import InputError

EXAMPLES = 15


@pytest.fixture(autouse=True)
def _warnings_are_no_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_every_target_has_a_corpus_and_every_corpus_a_target() -> None:
    assert {folder.name for folder in CORPUS.iterdir()} == set(TARGETS)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_a_reader_reads_its_corpus_and_mutations_of_it_or_says_in_one_line_why_not(target: Target, tmp_path: Path):
    seeds = target.seeds()
    assert seeds
    with bounded():
        for seed in seeds.values():
            target.attack(seed, tmp_path)

    @settings(max_examples=EXAMPLES, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(content=mutated(list(seeds.values())))
    def fuzz(content: bytes) -> None:
        with bounded():
            target.attack(content, tmp_path)

    fuzz()
    edits = list(edited(min(seeds.values(), key=len)))
    for edit in random.Random(0).sample(edits, min(EXAMPLES, len(edits))):
        with bounded():
            target.attack(edit, tmp_path)


def test_edits_change_one_thing_of_texts_archives_and_headers() -> None:
    assert {b'{"a": -1}', b'{"a": 2}', b'{"a": NaN}', b'{"x": 1}', b""} <= set(edited(b'{"a": 1}'))
    file = io.BytesIO()
    np.save(file, np.array([1, 2]))
    found = [members(edit) for edit in edited(packed({"x.npy": file.getvalue(), "text": b"1"}))]
    arrays = [np.load(io.BytesIO(edit["x.npy"])).tolist() for edit in found if len(edit.get("x.npy", b"")) > 9]
    assert {"text": b"1"} in found
    assert all(values in arrays for values in ([-1, 2], [1, -1], [2, 1], [1], [], [1, 2, 1, 2], [[1, 2]]))
    header = next(iter(edited(struct.pack("<Q", 7) + b'{"a":1}\xff')))
    assert header.endswith(b"\xff")
    assert struct.unpack("<Q", header[:8])[0] == len(header) - 9
    assert list(edited(b"PAR1\xff")) == []


UNREAD = {"trace-values", "results-values", "pt-pickle"}
"""Targets whose seeds are damage."""


@pytest.mark.parametrize("name", sorted(set(TARGETS) - UNREAD))
def test_what_a_reader_is_fuzzed_from_is_read(name: str, tmp_path: Path) -> None:
    valid = [content for seed, content in TARGETS[name].seeds().items() if seed.startswith("seed-")]
    assert valid, "there is an input that must be read"
    for content in valid:
        TARGETS[name].read(content, tmp_path)


def test_the_harness_ends_what_takes_too_much_memory_and_says_what_is_no_input_error(tmp_path: Path) -> None:
    with bounded(), pytest.raises(MemoryError):
        bytearray(3 << 30)

    def damaged(content: bytes, _: Path) -> None:
        if content:
            raise InputError("two\nlines")
        raise KeyError("x")

    with pytest.raises(KeyError):
        Target("x", damaged).attack(b"", tmp_path)
    Target("x", damaged).attack(b"1", tmp_path)


def test_members_come_back_as_they_were_packed() -> None:
    held = {"a.npy": b"\0" * 300, "b": b""}
    assert members(packed(held)) == held
    members(b"\xff\xff\xff")
