"""What one model takes on one machine, as measured there: `[[measured]]` of a hardware profile, and the timing it is.

`moe-replay calibrate` measures these tables of the parts of a step and of a transfer through the device that replays.
Between two measured points a duration lies on the line through them, beyond the last on the line through the last two,
before the first it is the first's. Everything is rounded up to whole ns.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from typing import Annotated, Any

from msgspec import Meta

from sim.profiles.timing import Link, Timing
from traces.errors import refuse
from traces.models.profile import MOST, Count, NotNegative, Size

Curve = Annotated[tuple[tuple[Count, Size], ...], Meta(min_length=1)]
"""(tokens, ns) or (context, ns), the first ascending."""

Surface = Annotated[tuple[tuple[Count, Count, Size], ...], Meta(min_length=1)]
"""(tokens, context, ns), ascending by tokens, then context."""

TABLES = ("first_dense", "dense", "expert", "combine", "head")


@dataclass(frozen=True)
class MeasuredModel:
    """One model on one machine; ns are whole."""

    model: str  # name of its profile
    expert_bytes: Count  # of the largest where layers differ
    transfer_ns: Count  # of a whole expert of that size, one behind another
    latency_ns: Size  # of it what does not grow with bytes
    turnaround_ns: Size  # of the host: from a router's end to what answers it
    launch_ns: Annotated[int, Meta(ge=-MOST, le=MOST)]  # of the host: what each expert of a decoded token adds
    # to that; below 0 where transfers start later
    first_dense: Surface  # layer 0, with what comes before it
    dense: Surface  # every other layer
    expert: Curve  # one of top-k that are launched together
    combine: Curve
    head: Curve
    compute_slowed: Annotated[float, Meta(ge=1, le=MOST)] = 1.0  # beside transfers, an expert's compute for a token
    # takes so many times as long
    transfer_slowed: Annotated[float, Meta(ge=1, le=MOST)] = 1.0  # beside compute, a transfer does
    predictor_us: Mapping[str, NotNegative] = field(default_factory=dict)  # an event, by policies as stated
    layer_bytes: tuple[Count, ...] = ()  # of an expert of each layer, where they differ

    def __post_init__(self) -> None:
        descends = (any(row[:-1] <= before[:-1] for before, row in pairwise(getattr(self, key))) for key in TABLES)
        refuse(
            (any(descends), f"{', '.join(TABLES)}: rows ascend by tokens, then context, none twice"),
            (self.latency_ns > self.transfer_ns, "latency_ns is above transfer_ns"),
            (self.launch_ns < -self.expert[0][1], "launch_ns: an expert of one token would take less than no time"),
        )

    def with_ns(self, changed: Callable[[str, int, int], int], **fields: Any) -> "MeasuredModel":
        """Return the model with other durations. changed: gets the table's name, a row's tokens and its ns."""
        tables: dict[str, Any] = {
            key: tuple((*row[:-1], changed(key, row[0], row[-1])) for row in getattr(self, key)) for key in TABLES
        }
        return replace(self, **tables, **fields)

    def timing(self, predictor_ns: int = 0, host: Timing | None = None) -> "MeasuredTiming":
        """Return its durations under a policy with this overhead for each event; host: of experts computed there."""
        return MeasuredTiming(self, predictor_ns, host)

    def link(self, chunk_bytes: int | None = None) -> Link:
        """Return the link as it carries this model's experts: exact at a whole one, which takes 1 ns or more."""
        moving_ns, size = max(self.transfer_ns - self.latency_ns, 1), self.expert_bytes
        return Link(self.transfer_ns - moving_ns, moving_ns, size, size, chunk_bytes, self.layer_bytes or None)


@dataclass(frozen=True)
class MeasuredTiming:
    """Durations from a model's tables: a `sim.profiles.timing.Timing`."""

    model: MeasuredModel
    predictor_ns: int = 0
    host: Timing | None = None  # of experts that the host computes, which no calibration measures

    def dense_ns(self, layer: int, tokens: int, context: int, requests: int = 1) -> int:
        """Return the layer's part and the host's answer to its router; measured with one request, of this context."""
        first, other = self._dense
        return _on_surface(other if layer else first, tokens, context) + self.model.turnaround_ns

    @property
    def hop_ns(self) -> int:
        return self.host.hop_ns if self.host else 0

    def host_ns(self, tokens: int, layer: int = 0) -> int:
        assert self.host
        return self.host.host_ns(tokens, layer)

    def expert_ns(self, tokens: int, layer: int = 0) -> int:
        """Return the time of one expert among top-k; of a single token with its launch."""
        return max(0, _on_curve(self.model.expert, tokens) + (self.model.launch_ns if tokens == 1 else 0))

    def combine_ns(self, tokens: int, layer: int = 0, context: int = 0) -> int:
        return _on_curve(self.model.combine, tokens)

    def head_ns(self, tokens: int, requests: int = 1) -> int:
        return _on_curve(self.model.head, tokens)

    def without_host(self) -> "MeasuredTiming":
        """Return the same machine with a host that takes no time: neither to answer and launch nor for the policy."""
        return MeasuredTiming(replace(self.model, turnaround_ns=0, launch_ns=0))

    @cached_property
    def _dense(self) -> tuple["Curves", "Curves"]:
        return _curves(self.model.first_dense), _curves(self.model.dense)


Curves = tuple[tuple[int, Curve], ...]
"""For each number of tokens, ns by context."""


def _curves(surface: Surface) -> Curves:
    by_tokens: dict[int, list[tuple[int, int]]] = {}
    for tokens, context, ns in surface:
        by_tokens.setdefault(tokens, []).append((context, ns))
    return tuple((tokens, tuple(points)) for tokens, points in by_tokens.items())


def _on_surface(curves: Curves, tokens: int, context: int) -> int:
    """Interpolate along the context at the two nearest numbers of tokens, then between them."""
    at = _segment(curves, tokens)
    return _on_curve(tuple((each, _on_curve(curve, context)) for each, curve in curves[at]), tokens)


def _on_curve(curve: Curve, x: int) -> int:
    """Interpolate between points and beyond the last; before the first one take its value."""
    points = curve[_segment(curve, x)]
    if len(points) == 1:
        return points[0][1]
    (x0, ns0), (x1, ns1) = points
    return max(0, ns0 - (ns0 - ns1) * (x - x0) // (x1 - x0))


def _segment(points: Sequence[tuple[int, Any]], x: int) -> slice:
    """Return the two points whose line is taken at `x`, or the only one that counts there."""
    if len(points) == 1 or x <= points[0][0]:
        return slice(1)
    last = min(bisect_left(points, x, key=itemgetter(0)), len(points) - 1)
    return slice(last - 1, last + 1)
