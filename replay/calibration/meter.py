"""A stopwatch for one kind of work on a device, among others like it.

Work comes in series. Where the host submits a decoded token's no faster than the device works, heads go before, which
keep the device busy until all is submitted: so it is the device's time that is found, not the host's.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from statistics import median_low

from sim.loop.device import Device

PROBE, LONGEST_SERIES, MOST_HEADS = 4, 64, 64
HEAD_START = 1.5
"""The heads take so many times as long as the host does to submit a series."""
SERIES_NS = 2_000_000
"""A series takes about so long: how exactly its end is seen then hardly matters."""
REPEATS, AT_LEAST = 15, 3
ENOUGH_NS = 40_000_000
"""Of one figure: work that takes long is repeated less often than REPEATS, but AT_LEAST times."""


class Meter:
    """Times work on a device; `spreads` holds, for each figure, how far its repeats lie from their median."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.spreads: list[float] = []
        self._submitting_ns = 0  # of the host, the latest series

    def of(self, submit: Callable[[int], object], tokens: int, each: int = 1, warm_up: int = 2) -> int:
        """ns of one submission among others like it; those of longer steps with what the host takes, as in a run.

        `submit` gets the number of the submission, which has `each` completions.
        """
        self._series(submit, 0, warm_up, each)
        one_ns, host_ns = self._series(submit, warm_up, PROBE, each) // PROBE, self._submitting_ns // PROBE
        length, number = min(max(SERIES_NS // max(one_ns, 1), 1), LONGEST_SERIES), warm_up + PROBE
        heads = 1 + int(HEAD_START * length * host_ns / self._head_ns) if tokens == 1 and 2 * host_ns > one_ns else 0
        heads = heads if heads <= MOST_HEADS else 0  # what cannot be hidden is measured as it shows
        took: list[int] = []
        while len(took) < AT_LEAST or (len(took) < REPEATS and sum(took) * length < ENOUGH_NS):
            took.append(self._series(submit, number, length, each, heads) // length)
            number += length
        return self.settled(took)

    def settled(self, took: Sequence[int]) -> int:
        """The median of repeats."""
        middle = median_low(took)
        self.spreads.append(median_low([abs(each - middle) for each in took]) / max(middle, 1))
        return middle

    @cached_property
    def _head_ns(self) -> int:
        """Of one head, about."""
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
        if heads:
            self._await(heads)
            began = device.now()
        self._await(length * each)
        return device.now() - began

    def _await(self, completions: int) -> None:
        for _ in range(completions):
            self.device.next_completion()


def rising(took: Sequence[int]) -> list[int]:
    """More tokens or a longer context take no less time: figures that fall are one in truth, which is their mean."""
    pools: list[tuple[int, int]] = []  # sum, how many
    for each in took:
        total, count = each, 1
        while pools and pools[-1][0] * count > total * pools[-1][1]:
            more, others = pools.pop()
            total, count = total + more, count + others
        pools.append((total, count))
    return [total // count for total, count in pools for _ in range(count)]
