"""Retention and prefetch of one run, as one thing that hears of requests and events (rules 3, 4 and 10).

Every engine tells it what happens, in the order in which it happens; whatever a policy is told passes here.
"""

import numpy as np

from policies.core import dispatch
from policies.core.admission import Own
from policies.core.calling import ADMIT, OBSERVE, START, Asked, Proposal
from policies.core.events import Events
from policies.core.limits import limiter
from policies.core.policy import DID_NOTHING, NO_INTS, Event, Float, Int, Policy, Prefetcher, Requests, Shape
from policies.core.policy import START as STEP_STARTS
from policies.core.residency import PolicyResidency
from policies.core.spec import PolicySpec


class PolicyRunner:
    """Fresh instances of both halves of `spec`; oracles among them read the whole run now.

    pairs: both halves as each residency so far has them, the first those that learn.
    learns_apart: what the policies learn is one for all residencies (`PolicySpec.learns_apart`).
    silent: neither half wants to hear of events, so that an engine may spare itself the telling.
    idle: no policy did anything of the latest event, so that it is free (rule 14).
    experts_per_layer: how many experts the link carries while one layer of a decoded token computes, which a prefetch
    budget (`policies.core.limits`) is a share of; an engine that cannot tell runs no policy with a budget.
    """

    def __init__(
        self,
        spec: PolicySpec,
        shape: Shape,
        requests: Requests,
        experts_per_layer: float | None = None,
        guarded: bool = True,
    ) -> None:
        self.shape = shape
        self._spec, self.learns_apart = spec, spec.learns_apart
        self.pairs: list[tuple[Policy, Prefetcher]] = []
        self._divide = spec.divide
        self.admission = spec.admits
        self.retention, self.prefetcher = spec.build(shape, guarded)
        if self.prefetcher.needs_lookahead and requests and requests[0].lookahead is None:
            raise ValueError(f"{self.prefetcher.name} needs the trace's lookahead, and the requests have none")
        for half in (self.retention, self.prefetcher):
            half.foresee(requests)
        self._experts_per_layer = experts_per_layer
        self._set_window(self.prefetcher)
        self._observers = [half.observe for half in (self.retention, self.prefetcher) if half.observes]
        self._names = isinstance(self.admission, Own)
        self.silent = not self._observers and not self.prefetcher.proposes and not self._names
        self.may_be_idle, self.idle = spec.shares or not self.prefetcher.proposes, False
        self._limiter = limiter(self.prefetcher.options, shape, experts_per_layer)
        self._states = np.zeros(shape.total, np.int64)

    def residency(self, room: int, sizes: Int | None = None) -> PolicyResidency:
        """Return the residency of a cache of `room` slots, or bytes where `sizes` [L*E] are the experts' bytes."""
        # rule 6: one scale only where both halves have the same options, if they are of the same kind
        ours, theirs = self.prefetcher.options, self.retention.options
        same = ours == theirs or type(ours) is not type(theirs)
        one_scale = same and self.prefetcher.one_scale_with == self.retention.name
        keeper, fetcher = self.retention, self.prefetcher
        declared = type(keeper).compiled
        if self.pairs and self.learns_apart and declared and declared.beside:
            keeper = type(keeper)(self.shape, keeper.options, declared.beside(keeper.state, self.shape))
            fetcher = type(fetcher).beside(keeper)
            self._set_window(fetcher)
        elif self.pairs and any(dispatch.hooks_of(keeper)):
            keeper = self._spec.evict.build(self.shape)  # its scores are of one cache
        self.pairs.append((keeper, fetcher))
        divided = self._divide(self.shape, room, sizes)
        residency = PolicyResidency(self.shape, divided, keeper, one_scale, sizes, self.admission)
        self._states = residency.states
        return residency

    @property
    def shares_cells(self) -> bool:
        """Whether its policies may serve several caches at once: what they learn depends on events alone."""
        limited = self._limiter is not None and len(self._limiter.bounds.room) > 0
        return self._spec.learns_from_events_alone and not limited

    def begin_request(self, ordinal: int, batch_slot: int = 0) -> None:
        self.retention.begin_request(ordinal, batch_slot)
        self.prefetcher.begin_request(ordinal, batch_slot)
        declared = type(self.retention).compiled
        if self.learns_apart and declared and declared.begin_request:
            for keeper, _ in self.pairs[1:]:
                declared.begin_request(keeper.state, batch_slot)

    def observe(self, event: Event) -> None:
        self._take_states()
        idle = [(observe(event) or 0) & DID_NOTHING for observe in self._observers]
        self.idle = self.may_be_idle and bool(idle) and all(idle)

    def admit(self, event: Event | None) -> Int:
        """Return what the policy itself admits of an event (rule 21); nothing of one that does not."""
        return np.asarray(self.retention.admit(event), np.int64) if event and self._names else NO_INTS

    def propose(self, event: Event) -> tuple[Int, Float] | None:
        """Rule 4, for the same event, within the prefetcher's limits; None from a prefetcher that never proposes."""
        if not self.prefetcher.proposes:
            return None
        if event.layer == STEP_STARTS:
            self._take_states()
        proposal = self.prefetcher.propose(event)
        return proposal if self._limiter is None else self._limiter(event.layer, *proposal)

    def _set_window(self, prefetcher: Prefetcher) -> None:
        if self._experts_per_layer is not None:
            prefetcher.window(self._experts_per_layer)

    def _take_states(self) -> None:
        """A limit on prefetches goes by what is READY when an event is looked up, or a step starts."""
        if self._limiter:
            self._limiter.state[:] = self._states

    @property
    def at_start(self) -> bool:
        """Whether the prefetcher is asked when a step starts as well: `propose` of an event that tells no more."""
        return self.prefetcher.at_start

    def end_request(self, batch_slot: int = 0) -> None:
        self.retention.end_request(batch_slot)
        self.prefetcher.end_request(batch_slot)


class AskedRunner:
    """A runner's policies for compiled code to ask, of `events`: `proposal` takes one."""

    def __init__(self, runner: PolicyRunner, residency: PolicyResidency) -> None:
        self.events: Events | None = None
        total = runner.shape.total
        self.proposal = Proposal(np.empty(total, np.int64), np.empty(total))
        self._runner, self._layers = runner, runner.shape.layers
        self._event: Event | None = None
        self._asked = Asked(self._answer, residency.failed)
        self.address, self.check = self._asked.address, self._asked.check

    def _answer(self, question: int, number: int) -> int:
        """Have the policies hear of an event, or propose; return how many experts are proposed."""
        assert self.events
        if question == OBSERVE:
            self._event = self.events.event(*divmod(number, self._layers))
            self._runner.observe(self._event)
            return int(self._runner.idle)
        if question == ADMIT:
            assert self._event
            named = self._runner.admit(self._event)
            self.proposal.ids[: len(named)] = named
            return len(named)
        if question == START:
            self._event = self.events.start(number)
        assert self._event
        proposal = self._runner.propose(self._event)
        if proposal is None:
            return 0
        n = len(proposal[0])
        self.proposal.ids[:n], self.proposal.priorities[:n] = proposal
        return n
