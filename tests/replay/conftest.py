"""Settings of the tests of replay: a machine is measured for a short time, since none judges how exactly."""

import pytest

from tests.support.short_calibrations import shorten


@pytest.fixture(autouse=True)
def _short_calibrations(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten them, but in the tests of measuring itself."""
    if request.path.name != "test_measure.py":
        shorten(monkeypatch.setattr)
