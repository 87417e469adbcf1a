"""Every reader of foreign binary files reads its corpus, and neither hangs on mutations of it nor accepts nonsense."""

import warnings
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz.targets import TARGETS, Target, bounded, mutated


@pytest.fixture(autouse=True)
def _warnings_are_no_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_a_reader_reads_its_seeds_and_survives_mutations_of_them(target: Target, tmp_path: Path) -> None:
    accepted = [target.attack(seed, tmp_path) for seed in target.seeds()]
    assert any(accepted), "a seed is a good file"

    @settings(max_examples=25, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(content=mutated(target.seeds()))
    def fuzz(content: bytes) -> None:
        target.attack(content, tmp_path)

    fuzz()


def test_what_takes_too_much_memory_or_is_unusable_is_a_finding(tmp_path: Path) -> None:
    with bounded(), pytest.raises(MemoryError):
        bytearray(3 << 30)

    def unusable(content: bytes, _: Path) -> None:
        assert not content

    with pytest.raises(AssertionError):
        Target("x", unusable).attack(b"1", tmp_path)
    assert Target("x", unusable).attack(b"", tmp_path)
