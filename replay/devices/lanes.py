"""Lanes: threads that read one expert together, each its part, for disks that are fast only with several reads at once.

How many it takes is measured: the fewest whose rate is close to the best one's (the knee).
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median

from replay.devices.store import Bytes, ExpertSource, anonymous

PAGE = 4_096
"""Places and lengths of direct reads are multiples of this, on every disk in use."""

TRIED = (1, 2, 4, 8)
CLOSE = 0.95
"""Of the best rate: more lanes than it takes for this are not worth their threads."""
SERIES, SERIES_S = 3, 0.15
SLOTS_BYTES = 512 << 20
"""Read into slots of so many bytes in turn, as in a run: one slot alone would stay in the processor's caches."""


def page_up(size: int) -> int:
    return -(-size // PAGE) * PAGE


def parts(first: int, last: int, lanes: int) -> list[tuple[int, int]]:
    """Cut bytes `first` to `last` into a part for each lane, at pages; parts may be empty."""
    cuts = [min(max(first, page_up(first + (last - first) * lane // lanes)), last) for lane in range(1, lanes)]
    return list(zip([first, *cuts], [*cuts, last], strict=True))


def rates(store: ExpertSource, tried: Sequence[int] = TRIED, slots: Bytes | None = None) -> dict[int, float]:
    """Return GB/s by number of lanes, which take turns, of reads of whole experts in a row; slots: to read into."""
    if slots is None:
        count = max(1, SLOTS_BYTES // store.stride)
        slots = anonymous(count * store.stride).reshape(count, store.stride)
        slots.fill(1)
    by_lanes: dict[int, list[float]] = {lanes: [] for lanes in tried}
    at = 0
    for _ in range(SERIES):
        for lanes in tried:
            read_bytes = 0
            with ThreadPoolExecutor(lanes) as threads:
                began = time.perf_counter()
                while not read_bytes or time.perf_counter() - began < SERIES_S:
                    expert, slot = at % store.distinct, slots[at % len(slots)]
                    cut = parts(0, store.bytes_of(expert), lanes)
                    for each in [threads.submit(store.read, expert, begin, end, slot) for begin, end in cut]:
                        each.result()
                    at += 1
                    read_bytes += store.bytes_of(expert)
                seconds = time.perf_counter() - began
            by_lanes[lanes].append(read_bytes / seconds / 1e9)
    return {lanes: median(each) for lanes, each in by_lanes.items()}


def knee(by_lanes: dict[int, float]) -> int:
    """Return the fewest lanes whose rate is close to the best."""
    best = max(by_lanes.values())
    return min(lanes for lanes, rate in by_lanes.items() if rate >= CLOSE * best)
