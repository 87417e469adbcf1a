"""Retention and prefetch of one run, as one thing that hears of requests and events (rules 3, 4 and 10).

Every engine tells it what happens, in the order in which it happens; whatever a policy is told passes here.
"""

import numpy as np

from policies.core.limits import limiter
from policies.core.policy import Event, Float, Int, Requests, Shape
from policies.core.residency import PolicyResidency
from policies.core.spec import PolicySpec
from traces.errors import InputError


class PolicyRunner:
    """Fresh instances of both halves of `spec`; oracles among them read the whole run now.

    checks: whether proposals are looked at before compiled code takes them: those of a user's prefetcher are.
    silent: neither half wants to hear of events, so that an engine may spare itself the telling.
    experts_per_layer: how many experts the link carries while one layer of a decoded token computes, which a prefetch
    budget (`policies.core.limits`) is a share of; an engine that cannot tell plays no policy with a budget.
    """

    def __init__(
        self,
        spec: PolicySpec,
        shape: Shape,
        requests: Requests,
        per_access: bool = False,
        experts_per_layer: float | None = None,
    ) -> None:
        self.shape = shape
        self._divide = spec.divide
        self.retention, self.prefetcher = spec.build(shape)
        if self.prefetcher.needs_lookahead and not per_access and requests and requests[0].lookahead is None:
            raise ValueError(f"{self.prefetcher.name} needs the trace's lookahead, and the requests have none")
        for half in (self.retention, self.prefetcher):
            half.foresee(requests, per_access)
        if experts_per_layer is not None:
            self.prefetcher.window(experts_per_layer)
        self._observers = [half.observe for half in (self.retention, self.prefetcher) if half.observes]
        self.silent = not self._observers and not self.prefetcher.proposes
        self.checks = not type(self.prefetcher).__module__.startswith("policies.")
        self._limiter = None if per_access else limiter(self.prefetcher.options, shape, experts_per_layer)

    def residency(self, slots: int) -> PolicyResidency:
        """Return the residency of a cache of `slots` experts under this retention, divided as its scope says."""
        same = self.prefetcher.options == self.retention.options
        one_scale = same and self.prefetcher.one_scale_with == self.retention.name
        residency = PolicyResidency(self.shape, self._divide(self.shape, slots), self.retention, one_scale)
        if self._limiter:
            self._states = residency.states
        return residency

    def begin_request(self, ordinal: int, seat: int = 0) -> None:
        """The `ordinal`-th request of the run takes `seat`."""
        self.retention.begin_request(ordinal, seat)
        self.prefetcher.begin_request(ordinal, seat)

    def observe(self, event: Event) -> None:
        """Rule 3. A limit on prefetches goes by what is READY now, before the link acts."""
        if self._limiter:
            self._limiter.state[:] = self._states
        for observe in self._observers:
            observe(event)

    def propose(self, event: Event) -> tuple[Int, Float] | None:
        """Rule 4, for the same event, within the prefetcher's limits; None from a prefetcher that never proposes."""
        if not self.prefetcher.proposes:
            return None
        proposal = self.prefetcher.propose(event)
        if self.checks:
            self._check(proposal)
        return proposal if self._limiter is None else self._limiter(event.layer, *proposal)

    def _check(self, proposal: object) -> None:
        """Compiled code takes a proposal as it is: InputError for one of a user's that is not what rule 4 asks for."""
        name = type(self.prefetcher).__name__
        arrays = proposal if isinstance(proposal, tuple) else ()
        if [getattr(array, "dtype", None) for array in arrays] != [np.int64, np.float64]:
            raise InputError(f"prefetcher {name} proposes something else than int64 ids and float64 priorities")
        experts, priorities = arrays
        if experts.ndim != 1 or experts.shape != priorities.shape:
            raise InputError(f"prefetcher {name} proposes {experts.shape} experts with {priorities.shape} priorities")
        if len(experts) and not (experts.min() >= 0 and experts.max() < self.shape.total):
            raise InputError(f"prefetcher {name} proposes an id that is not of 0 to {self.shape.total - 1}")
        if len(np.unique(experts)) < len(experts) or not np.isfinite(priorities).all():
            raise InputError(f"prefetcher {name} proposes an expert twice, or a priority that is not finite")

    def end_request(self, seat: int = 0) -> None:
        """The last step of the request in `seat` has ended."""
        self.retention.end_request(seat)
        self.prefetcher.end_request(seat)
