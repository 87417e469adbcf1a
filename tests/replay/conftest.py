"""Settings of the tests of replay: a machine is measured for a short time, since none judges how exactly."""

from functools import partial
from pathlib import Path

import pytest

from replay.commands import main
from tests.support.command import Run, run
from tests.support.short_calibrations import shorten


@pytest.fixture(autouse=True)
def _short_calibrations(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten them, but in the tests of measuring itself."""
    if request.path.name != "test_measure.py":
        shorten(monkeypatch.setattr)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run `moe-replay` in an empty folder: its exit status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    return partial(run, main)
