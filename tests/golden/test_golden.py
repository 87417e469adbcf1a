"""What some 60 commands print and write stays as it is stored: `python -m tests.golden` renews the folder."""

from pathlib import Path

import pytest

from tests.golden.__main__ import main

OUTPUTS = Path(__file__).parent / "outputs"


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("golden")
    main(folder)
    return folder


@pytest.mark.parametrize("name", [path.name for path in sorted(OUTPUTS.glob("*.txt"))])
def test_a_command_prints_and_writes_what_is_stored(name: str, fresh: Path) -> None:
    made, stored = ((folder / name).read_text(encoding="utf-8") for folder in (fresh, OUTPUTS))
    assert made == stored


def test_every_command_is_stored(fresh: Path) -> None:
    assert {path.name for path in fresh.iterdir()} == {path.name for path in OUTPUTS.iterdir()}
