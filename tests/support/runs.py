"""Random runs of any built-in policy: of one tier, and with rules 13, 17, 18 and 19."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from policies.core import runner
from policies.core.policy import Int, Listener, Policy, Prefetcher, Shape
from policies.core.registry import built_in, is_pair
from policies.core.residency import PolicyResidency
from policies.core.spec import parse
from sim.loop.log import Ended, RunLog
from sim.loop.run import Run, Tier, Users, gpu_run
from sim.profiles.timing import FixedTiming, Link
from traces import DECODE, PREFILL, InputError, Trace
from traces.drafts import Drafts
from traces.steps import Lookahead, RequestSteps


def recorded_with(drafts: Drafts, trace: Trace) -> Trace:
    """The trace as if it had been recorded with these drafts."""
    drafted = np.zeros(len(trace.experts), np.int16)
    for request, row in enumerate(trace.offsets[1:].tolist()):
        steps = trace.in_steps(drafts=drafts).steps(request)
        assert steps.drafted is not None
        assert steps.rejected is not None
        decoded = steps.phase[::-1] == DECODE
        for count, wrong in zip(steps.drafted[::-1][decoded], steps.rejected[::-1][decoded], strict=True):
            end, row = row, row - int(1 + count - wrong)
            drafted[row:end] = [count, *[-1] * (count - wrong)]
    return replace(trace, drafted=drafted)


def playable(cls: type[Listener]) -> bool:
    """Whether it needs no file."""
    try:
        cls(Shape(2, 2), cls.Options())
    except InputError:
        return False
    return True


PLAIN = [cls for cls in built_in() if playable(cls)]
"""Every built-in, as soon as it is one."""

KEEPERS = (
    *("lfu-aged:half_life=7", "lrfu:decay=0.1", "multi-criteria:recency=0:distance=1", "eamc:capacity=2:decay=next"),
    "eamc:capacity=2:split=false:source=both:cosine=rows:matches=2:replacement=k-means",
    "eamc:capacity=2:source=request:layers=future:replacement=least-used:keep=most-visited:threshold=-1",
    "eamc:capacity=4:keep=least-visited:layers=past:replacement=fifo:depth=1",
    *("eamc-blend:wrong=0.01:distance=1", "expert-map:capacity=4", "expert-map:depth=0"),
    *sorted(cls.name for cls in PLAIN if issubclass(cls, Policy)),
)
FETCHERS = (
    *("all:depth=0:budget=0.5", "previous:depth=0", "popular:n=2:threshold=3", "markov:n=2:budget=1"),
    *("gate:budget=0.5", "oracle:horizon=9:depth=2", "oracle1:budget=1", "none", "previous:depth=2:threshold=-1"),
    *("eamc:capacity=3", "eamc:capacity=3:threshold=-1:decay=none", "eamc-blend:wrong=0.01"),
    *("expert-map:capacity=4", "expert-map:depth=1:capacity=2"),
    *sorted(cls.name for cls in PLAIN if issubclass(cls, Prefetcher)),
)

Draw = Callable[[int, int], int]
"""A whole number in a closed range."""


class Drawn(NamedTuple):
    """A random run; `one_scale` makes any keep score compare with any priority."""

    requests: list[RequestSteps]
    shape: Shape
    slots: int
    policy: str
    timing: FixedTiming
    link: Link
    cold: bool
    one_scale: bool
    window: float
    host: Tier | None = None
    users: Users | None = None

    def on(self, play: Callable[[Run, Ended], None]) -> list[RunLog]:
        """What an engine leaves behind, request by request."""
        parts: list[RunLog] = []

        def residency(
            shape: Shape, divided: Sequence[int], policy: Policy, one_scale: bool, *others: Any
        ) -> PolicyResidency:
            return PolicyResidency(shape, divided, policy, one_scale or self.one_scale, *others)

        with patch.object(runner, "PolicyResidency", residency):
            play(self.run, parts.append)
        return parts

    @property
    def run(self) -> Run:
        """As an engine takes it."""
        machine = self.timing, self.link, self.cold, self.window, self.host, self.users
        return gpu_run(self.requests, self.shape, self.slots, parse(self.policy), *machine)


def draw_request(integer: Draw, ordinal: int, shape: Shape) -> RequestSteps:
    """Maybe a prefill, then decoded tokens, of one request or of a few at once; some events have no experts."""
    L, E = shape.layers, shape.experts
    phases = [PREFILL] * integer(0, 1) + [DECODE] * integer(0, 5)
    tokens = [integer(1, 5) if phase == PREFILL or integer(0, 5) == 0 else 1 for phase in phases]
    density = integer(1, 4)

    def choices(ahead: int = 0) -> tuple[Int, Int, Int]:
        """Of each event, or of the layer that is so many layers ahead of it, if there is one."""
        steps = [
            [
                [(layer * E + e, integer(1, n)) for e in range(E) if integer(1, 4) <= density] if integer(0, 9) else []
                for layer in range(L)
            ]
            for n in tokens
        ]
        events = [event for step in steps for event in [*step[ahead:], *[[]] * ahead]]
        table = np.array([access for event in events for access in event], np.int64).reshape(-1, 2)
        offsets = np.cumsum([0, *map(len, events)]).astype(np.int64)
        return offsets, np.ascontiguousarray(table[:, 0]), np.ascontiguousarray(table[:, 1])

    sizes = np.array(tokens, np.int64)
    phase = np.array(phases, np.uint8)
    told, total = integer(0, 3), int(sizes.sum())  # few ids, so that they recur; some are withheld, or all
    ids = np.array([integer(-1, 4) for _ in range(total)], np.int64) if told else None
    picks = choices(ahead=1)
    ahead = Lookahead(L, 1, *picks, scores=picks[2] / 4)
    return RequestSteps(ordinal, phase, sizes, np.cumsum(sizes), *choices(), lookahead=ahead, token_ids=ids)


def draw_run(integer: Draw) -> Drawn:
    """Numbers are small, so that transfers and computes tie, contend and take no time at all."""

    def choice(options: Sequence[Any]) -> Any:
        return options[integer(0, len(options) - 1)]

    shape = Shape(integer(1, 4), integer(1, 6))
    L, total = shape.layers, shape.total
    longest = choice((1, 3, 10, 40))
    size = integer(1, 12)

    def duration() -> int:
        return integer(0, longest) if integer(0, 2) else 0

    keep, fetch = choice(KEEPERS), choice(FETCHERS)
    if is_pair(keep.partition(":")[0]) and integer(0, 1):
        fetch = keep
    scope = "@layer" if integer(0, 4) == 0 else ""
    slots = choice((integer(1, 3), integer(1, total + 2), integer(1, max(1, total // 2))))
    return Drawn(
        requests=[draw_request(integer, i, shape) for i in range(integer(1, 5))],
        shape=shape,
        slots=max(slots, L) if scope else slots,
        policy=f"{keep}+{fetch}{scope}",
        timing=FixedTiming(duration(), duration(), integer(0, 2), duration(), duration(), choice((0, 0, duration()))),
        link=Link(integer(0, 6), integer(0, 3), integer(1, 4), size, choice((None, integer(1, size + 1)))),
        cold=integer(0, 2) == 0,
        one_scale=integer(0, 2) == 0,
        window=choice((0.2, 1.0, 3.5, float("inf"))),
    )


@dataclass(frozen=True)
class Lopsided(FixedTiming):
    """Durations that depend on everything they may depend on."""

    def dense_ns(self, layer: int, tokens: int, context: int, requests: int = 1) -> int:
        return self.dense + layer + context % 3 + requests - 1

    def expert_ns(self, tokens: int, layer: int = 0) -> int:
        return super().expert_ns(tokens) + layer % 2

    def host_ns(self, tokens: int, layer: int = 0) -> int:
        return super().host_ns(tokens) + layer % 3

    def combine_ns(self, tokens: int, layer: int = 0, context: int = 0) -> int:
        return self.combine * tokens + (layer + context) % 2

    def head_ns(self, tokens: int, requests: int = 1) -> int:
        return self.head + tokens // 2 + requests - 1


def draw_tiers_run(integer: Draw) -> Drawn:
    """A random run with a placement, an admission, a disk, several users and sizes by layer, each absent at times."""

    def choice(options: Sequence[Any]) -> Any:
        return options[integer(0, len(options) - 1)]

    run = draw_run(integer)
    shape, link, L = run.shape, run.link, run.shape.layers
    longest = choice((1, 3, 10, 40))
    sizes = tuple(integer(1, 12) for _ in range(L)) if integer(0, 2) == 0 else None
    largest, everything = (max(sizes), shape.experts * sum(sizes)) if sizes else (1, shape.total)

    def room() -> Any:
        return largest * choice((1, 1, 2, integer(1, 4))) + integer(0, choice((1, everything)))

    if sizes:
        link = replace(link, expert_bytes=largest, layer_bytes=sizes)
    disk = replace(link, latency_ns=integer(0, longest), chunk_bytes=None) if integer(0, 1) else None
    several = integer(0, 2) > 0
    requests = [draw_request(integer, i, shape) for i in range(integer(1, 8))] if several else run.requests
    span = choice((0, 3, longest, 10 * longest, 50 * longest))
    arrivals = tuple(integer(0, span) for _ in requests) if integer(0, 1) else None
    placement = choice(("fetch", "host", "split", "split", "admitted", f"layers:n={integer(0, L)}"))
    admission = choice(("", "", "/never", "/second:window=3", "/second:window=9:insert_cap=1"))
    own = vars(run.timing) | {
        "hop_ns": integer(0, longest),
        "host": integer(0, longest),
        "host_per_token": integer(0, 2),
    }
    return run._replace(
        requests=requests,
        policy=f"{run.policy.removesuffix('@layer') if sizes else run.policy}/{placement}{admission}",
        slots=room() if sizes else run.slots,
        timing=choice((FixedTiming, Lopsided))(**own),
        link=link,
        host=Tier(room(), None, disk) if disk else None,
        users=Users(integer(1, 4), arrivals) if several else None,
    )
