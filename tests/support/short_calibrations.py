"""Calibrations as short as they can be: for tests of what is done with the figures, of which none judges how exact."""

from collections.abc import Callable
from typing import Any

from replay import warmup
from replay.calibration import in_loop, measure, meter, rates
from replay.calibration.in_loop import InLoop
from replay.devices import cpu, lanes


def shorten(change: Callable[[Any, str, Any], None] = setattr) -> None:
    """Change the modules that measure: (module, name, value) each."""
    change(meter, "SERIES_NS", meter.SERIES_NS // 10)
    change(meter, "REPEATS", meter.AT_LEAST)
    change(meter, "SURE", 1.0)
    change(meter, "ENOUGH_NS", meter.ENOUGH_NS // 10)
    change(meter, "LONGEST_NS", meter.LONGEST_NS // 10)
    change(in_loop, "LOOP", InLoop(least=4, most=12, ns=in_loop.LOOP.ns // 10))
    change(in_loop, "MIXED_LOOP", InLoop(least=3, most=6, ns=in_loop.MIXED_LOOP.ns // 10))
    change(measure, "PASSES", 1)
    change(measure, "POLICY_S", measure.POLICY_S / 10)
    change(warmup, "DECISIONS_S", warmup.DECISIONS_S / 10)
    change(rates, "SERIES_S", rates.SERIES_S / 10)
    change(rates, "BUFFER_BYTES", rates.BUFFER_BYTES // 4)
    change(rates, "LARGE", rates.LARGE // 4)
    change(lanes, "SERIES_S", lanes.SERIES_S / 10)
    change(lanes, "SLOTS_BYTES", lanes.SLOTS_BYTES // 16)
    change(cpu, "MOST_PACED", cpu.PACED)
