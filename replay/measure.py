"""What this machine takes for each piece of work, measured through the device itself just before the run.

The simulator given these figures predicts this machine, so that prediction and measurement can be compared where no
profile describes the hardware. It knows nothing of the run to come: contention between copies and compute and the
host's handing over from one stream to the other are what the two differ by.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from time import perf_counter_ns

from policies.pair import Pair
from replay.device import Device
from replay.driver import Plan
from sim.timing import Link

REPEATS = 24
WARM_UP = 2
BURST, ONE = 8, 1
LONG_NS = 100_000_000
"""A burst that would take longer is no burst: one piece at a time."""
ENOUGH_NS = 400_000_000
"""Work that takes long is repeated less often than REPEATS, but at least three times."""

POLICY_EVENTS = 500

Table = tuple[tuple[int, int], ...]  # (tokens, ns), ascending


@dataclass(frozen=True)
class MeasuredTiming:
    """Durations, interpolated between the token counts that were measured; contexts do not matter here."""

    first_dense: Table
    other_dense: Table
    expert: Table
    combine: Table
    head: int
    predictor_ns: int  # of the policy, on the host

    def dense_ns(self, layer: int, tokens: int, context: int) -> int:
        """The layer's matmul; all layers but the first are of one size."""
        return interpolate(self.other_dense if layer else self.first_dense, tokens)

    def expert_ns(self, tokens: int) -> int:
        """One expert on `tokens` tokens."""
        return interpolate(self.expert, tokens)

    def combine_ns(self, tokens: int) -> int:
        """Adding up."""
        return interpolate(self.combine, tokens)

    def head_ns(self, tokens: int) -> int:
        """The vocabulary for one token, whatever the step."""
        return self.head


def measure(device: Device, plan: Plan, most_tokens: int) -> tuple[MeasuredTiming, Link]:
    """Time each kind of work alone, submission and completion included. Fills some slots.

    Repeats go round slots and layers, so that caches hold no more than they do in a run.
    """
    sizes = [1]
    while sizes[-1] < most_tokens:
        sizes.append(min(sizes[-1] * 4, most_tokens))
    layers, places, expert_bytes = plan.shape.layers, min(plan.slots, REPEATS), plan.expert_bytes

    def table(work: Callable[[int, int], None]) -> Table:
        took = [_time(device, lambda i, n=tokens: work(i, n)) for tokens in sizes]  # type: ignore[misc]
        return tuple(zip(sizes, never_less(took), strict=True))

    def copy(i: int, size: int) -> None:
        device.copy(i % places, i % places, 0, size)

    for place in range(places):
        copy(place, expert_bytes)
        device.next_completion()
    whole = _time(device, lambda i: copy(i, expert_bytes), ONE)  # as the pump does: the next when one has ended
    part_bytes = -(-expert_bytes // 4)
    part = _time(device, lambda i: copy(i, part_bytes), ONE)
    first_dense = table(lambda i, n: device.dense(0, n, n))
    timing = MeasuredTiming(
        first_dense=first_dense,
        other_dense=table(lambda i, n: device.dense(1 + i % (layers - 1), n, n)) if layers > 1 else first_dense,
        expert=table(lambda i, n: device.expert(i % places, i % places, n)),
        combine=table(lambda i, n: device.combine(n)),
        head=_time(device, lambda i: device.head(1)),
        predictor_ns=policy_ns(plan),
    )
    moving_ns = (whole - part) * expert_bytes // max(1, expert_bytes - part_bytes)
    moving_ns = min(max(moving_ns, 1), whole)
    return timing, Link(whole - moving_ns, moving_ns, expert_bytes, expert_bytes, plan.chunk_bytes)


def policy_ns(plan: Plan) -> int:
    """Median time for which an event occupies a fresh policy, over the first events: it has learned little by then."""
    policy = Pair(plan.policy, plan.shape, plan.requests, experts_per_layer=plan.experts_per_layer)
    if policy.silent:
        return 0
    took = [0]
    for ordinal in range(len(plan.requests)):
        request = plan.requests[ordinal]
        policy.begin_request(ordinal, request)
        for place in range(len(request.offsets) - 1):
            step, layer = divmod(place, plan.shape.layers)
            first, last = request.offsets[place : place + 2].tolist()
            policy.begin_step(step, int(request.phase[step]))
            began = perf_counter_ns()
            policy.observe(layer, first, last)
            policy.propose()
            took.append(perf_counter_ns() - began)
        if len(took) > POLICY_EVENTS:
            break
        policy.end_request()
    return int(median(took))


def never_less(took: list[int]) -> list[int]:
    """Work on fewer tokens takes no longer: a time above one for more tokens was disturbed, and is replaced by it."""
    return list(accumulate(reversed(took), min))[::-1]


def interpolate(table: Table, tokens: int) -> int:
    """Linear between the nearest two; `tokens` lies within the table."""
    at = bisect_left(table, (tokens, 0))
    more, more_ns = table[at]
    if more == tokens:
        return more_ns
    less, less_ns = table[at - 1]
    return less_ns + (more_ns - less_ns) * (tokens - less) // (more - less)


def _time(device: Device, submit: Callable[[int], None], in_flight: int = BURST) -> int:
    """Time of one piece of work among others like it; `submit` gets the repeat's number.

    Short work comes in bursts, at most `in_flight` at once: in a run too, a stream that works seldom wakes from sleep.
    The shortest counts: what disturbs a measurement only ever makes it longer.
    """
    took: list[int] = []
    size = 1
    while len(took) < WARM_UP + 3 or (len(took) < WARM_UP + REPEATS and sum(took) * size < ENOUGH_NS):
        began, under_way = device.now(), min(size, in_flight)
        for i in range(size):
            if i >= under_way:
                device.next_completion()
            submit(len(took) * size + i)
        for _ in range(under_way):
            device.next_completion()
        took.append((device.now() - began) // size)
        if len(took) == WARM_UP:
            size = BURST if took[-1] * BURST < LONG_NS else 1
    return min(took[WARM_UP:])
