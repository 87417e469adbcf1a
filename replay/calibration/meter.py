"""A stopwatch for one kind of work on a device: series of it, repeated until their mean is sure, or took long enough.

Heads go before a series, which keep the device busy until all is submitted: so the device's time is measured, not the
host's. Means count, not medians: the mean of a run is predicted, and a run is disturbed as the measurement is.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from math import sqrt
from statistics import fmean, median_low, stdev

from sim.loop.device import Device

PROBE, LONGEST_SERIES, MOST_HEADS = 4, 64, 64
HEAD_START = 1.5  # the heads take so many times as long as the host does to submit a series
SERIES_NS = 2_000_000  # a series takes about so long: how exactly its end is seen then hardly matters
REPEATS, AT_LEAST = 15, 3
ENOUGH_NS = 40_000_000
"""Of one figure: work that takes long is repeated less often than REPEATS, but AT_LEAST times."""
SURE = 0.01  # standard error of a mean that needs no more repeats
LONGEST_NS, MOST_REPEATS = 2 * ENOUGH_NS, 16
"""Of a figure that is not sure: it is repeated for so long, or for so many of it where that takes longer."""


class Meter:
    """Times work on a device; `spreads` holds, for each figure, how far its repeats lie from their mean."""

    def __init__(self, device: Device, passes: int = 1) -> None:
        """passes: share the time of a figure, each with a meter of its own."""
        self.device = device
        self.passes = passes
        self.spreads: list[float] = []
        self._submitting_ns = 0  # of the host, the latest series

    def of(self, submit: Callable[[int], object], tokens: int, each: int = 1, warm_up: int = 2) -> int:
        """Return the ns of one submission among others; those of longer steps with what the host takes, as in a run.

        `submit` gets the number of the submission, which has `each` completions.
        """
        self._series(submit, 0, warm_up, each)
        one_ns, host_ns = self._series(submit, warm_up, PROBE, each) // PROBE, self._submitting_ns // PROBE
        length, number = min(max(SERIES_NS // max(one_ns, 1), 1), LONGEST_SERIES), warm_up + PROBE
        heads = 1 + int(HEAD_START * length * host_ns / self._head_ns) if tokens == 1 and 2 * host_ns > one_ns else 0
        heads = heads if heads <= MOST_HEADS else 0  # what cannot be hidden is measured as it shows

        def series() -> int:
            nonlocal number
            number += length
            return self._series(submit, number - length, length, each, heads) // length

        return self.repeated(series, length)

    def repeated(self, series: Callable[[], int], length: int, at_least: int = AT_LEAST) -> int:
        """Return the mean of what `series` returns: ns of one of the `length` that it times."""
        took: list[int] = []
        while len(took) < at_least or not self._is_sure(took, length):
            took.append(series())
        return self.mean(took)

    def mean(self, took: Sequence[int]) -> int:
        mean = fmean(took)
        self.spreads.append(median_low([abs(each - mean) for each in took]) / max(mean, 1))
        return round(mean)

    def _is_sure(self, took: Sequence[int], length: int) -> bool:
        spent_ns = sum(took) * length * self.passes
        if len(took) < AT_LEAST or (len(took) * self.passes < REPEATS and spent_ns < ENOUGH_NS):
            return False
        if stdev(took) <= SURE * fmean(took) * sqrt(len(took) * self.passes):
            return True
        return spent_ns >= max(LONGEST_NS, MOST_REPEATS * fmean(took) * length)

    @cached_property
    def _head_ns(self) -> int:
        self._series(lambda _: self.device.head(1), 0, 2)
        return max(self._series(lambda _: self.device.head(1), 0, 4) // 4, 1)

    def _series(self, submit: Callable[[int], object], first: int, length: int, each: int = 1, heads: int = 0) -> int:
        """Submit heads, then the series, then wait: ns from the end of the heads to the end of the series."""
        device = self.device
        began = device.now()
        for _ in range(heads):
            device.head(1)
        for number in range(first, first + length):
            submit(number)
        self._submitting_ns = device.now() - began
        for _ in range(heads):
            device.next_completion()
        began = device.now() if heads else began
        for _ in range(length * each):
            device.next_completion()
        return device.now() - began


def rising(took: Sequence[int]) -> list[int]:
    """Return ns that never fall: more tokens take no less time, so figures that fall are replaced by their mean."""
    pools: list[tuple[int, int]] = []  # sum, how many
    for each in took:
        total, count = each, 1
        while pools and pools[-1][0] * count > total * pools[-1][1]:
            more, others = pools.pop()
            total, count = total + more, count + others
        pools.append((total, count))
    return [total // count for total, count in pools for _ in range(count)]
