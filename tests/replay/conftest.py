"""Settings of the tests of replay: a machine is measured for a short time, since none judges how exactly."""

import pytest

from replay.calibration import contention, host_time, measure, meter
from replay.calibration.host_time import InLoop


@pytest.fixture(autouse=True)
def _short_calibrations(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each figure a tenth of its time, but in the tests of measuring itself."""
    if request.path.name == "test_measure.py":
        return
    monkeypatch.setattr(meter, "ENOUGH_NS", meter.ENOUGH_NS // 10)
    monkeypatch.setattr(meter, "LONGEST_NS", meter.LONGEST_NS // 10)
    monkeypatch.setattr(host_time, "LOOP", InLoop(least=4, most=12, ns=host_time.LOOP.ns // 10))
    monkeypatch.setattr(contention, "LOOP", InLoop(least=3, most=6, ns=contention.LOOP.ns // 10))
    monkeypatch.setattr(measure, "POLICY_S", measure.POLICY_S / 10)
