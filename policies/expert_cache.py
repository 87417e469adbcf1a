"""A policy in an engine of your own: it says what to load into which slot, and your engine moves the bytes.

The residency and the policies are those of the simulator, and so are the decisions: without prefetching, the misses
of a trace are those of `moe-sim sweep --untimed`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from policies.core.events import NOTHING_PICKED, Picked, alone
from policies.core.policy import NO_FLOATS, NO_INTS, START, Event, Float, Int, Shape
from policies.core.residency import BLOCKED, NO_EXPERT
from policies.core.runner import PolicyRunner
from policies.core.spec import PolicyLike, make_policy


class Load(NamedTuple):
    """Expert `expert` of MoE layer `layer` goes into `slot`, from 0, whose content may be overwritten."""

    layer: int
    expert: int
    slot: int


class ExpertCache:
    """The cache of one model that runs one request at a time.

    policy: name, class, or what `make_policy` returns. layers: MoE layers. experts: of each. slots: experts that fast
    memory holds.

    For each step of a request call `begin_step`, and for each layer `route`, which returns what has to be loaded before
    the layer's experts can be computed; `prefetch` returns what to load while the link has nothing else to do. Loads
    are done in their order, and are taken for done when the cache is called next. Raise InputError for a policy that
    does not exist or fit, and ValueError for one that needs what no engine knows (the future, the time of a layer).
    """

    def __init__(self, policy: PolicyLike, layers: int, experts: int, slots: int) -> None:
        spec = make_policy(policy)
        if spec.oracle:
            raise ValueError(f"{spec.text} needs to know what comes later")
        if spec.admits:
            raise ValueError(f"{spec.text}: this cache admits every miss: leave the admission out")
        self.shape = Shape(layers, experts)
        spec.require(self.shape)
        self._runner = PolicyRunner(spec, self.shape, ())
        self._residency = self._runner.residency(slots)
        self._requests = self._serial = 0
        self._step = self._phase = -1
        self._tokens = NO_INTS
        self._computing: list[int] = []
        self._loading = False

    def begin_request(self) -> None:
        """A request starts; what is cached stays."""
        self._runner.begin_request(self._requests)
        self._requests, self._step = self._requests + 1, -1

    def begin_step(self, token_ids: ArrayLike = (), prefill: bool = False) -> None:
        """A forward pass starts, of these tokens (int[T]; may be left out: few policies use them)."""
        self._settle()
        self._step, self._phase = self._step + 1, 0 if prefill else 1
        self._tokens = np.array(token_ids, np.int64)
        if self._runner.at_start:
            self._propose(self._event(START, NO_INTS, NO_INTS))

    def route(
        self,
        layer: int,
        experts: ArrayLike,
        counts: ArrayLike | None = None,
        weights: ArrayLike | None = None,
        ahead: Sequence[tuple[ArrayLike, ArrayLike]] = (),
    ) -> list[Load]:
        """Return what to load for a layer: `experts` int[n], distinct, in any order; `counts` int[n], tokens of each.

        weights: float[n], the router's, added up over these tokens; few policies use them. ahead: what the routers of
        the next layers would choose for this layer's input, nearest first: experts int[m], distinct, and their scores,
        the router's probabilities added up over tokens; policies such as `gate` go by them.

        When the loads are done, `slot` says where each expert is. Where the layer chose more experts than there are
        slots, a load may overwrite one of the same layer: compute the hits first, and each expert as it comes.
        """
        self._settle()
        chosen, order = np.unique(np.asarray(experts, np.int64), return_index=True)
        tokens = np.ones(len(chosen), np.int64) if counts is None else np.asarray(counts, np.int64)[order]
        chosen += layer * self.shape.experts
        hits, _ = self._residency.route(chosen)
        self._serial += 1
        held = NO_FLOATS if weights is None else np.asarray(weights, np.float64)[order]
        event = self._event(layer, chosen, tokens, self._picked(layer, ahead), held)
        self._runner.observe(event)
        self._propose(event)
        self._computing = [*hits, *(expert for expert in chosen.tolist() if expert not in hits)]
        return self._loads(prefetches=0)

    def prefetch(self, at_most: int = 1) -> list[Load]:
        """Return up to so many loads that the policy wants early, the likeliest first; call it after `route`.

        They overwrite nothing that the layer which was routed last needs.
        """
        self._arrive()
        return self._loads(at_most)

    def slot(self, layer: int, expert: int) -> int | None:
        """Return the slot that holds an expert, or that it is being loaded into."""
        slot = self._residency.slot(layer * self.shape.experts + expert)
        return None if slot == NO_EXPERT else slot

    def end_request(self) -> None:
        """The request has ended: the policy learns from it, and queued prefetches are dropped."""
        self._settle()
        self._runner.end_request()
        self._residency.end_request(cold=False)

    @property
    def counters(self) -> dict[str, int]:
        """Lookups that hit and that missed, by their events' routing."""
        hits, late, misses = self._residency.counters()[:3]
        return {"hits": hits + late, "misses": misses}

    def _settle(self) -> None:
        """All that was under way, or computed, has ended."""
        self._arrive()
        for expert in self._computing:
            self._residency.computed(expert)
        self._computing = []

    def _arrive(self) -> None:
        if self._loading:
            self._residency.arrived()
        self._loading = False

    def _event(
        self, layer: int, chosen: Int, tokens: Int, picks: Picked = NOTHING_PICKED, weights: Float = NO_FLOATS
    ) -> Event:
        return alone(self._phase, layer, self._step, chosen, tokens, self._serial, self._tokens, picks, weights)

    def _picked(self, layer: int, ahead: Sequence[tuple[ArrayLike, ArrayLike]]) -> Picked:
        """Return the picks of layers that there are as an event holds them."""
        if not ahead:
            return NOTHING_PICKED
        E, offsets, ids, scores = self.shape.experts, [0], [NO_INTS], [NO_FLOATS]
        for distance, (experts, of_each) in enumerate(ahead[: self.shape.layers - 1 - layer], start=1):
            own, order = np.unique(np.asarray(experts, np.int64), return_index=True)
            offsets.append(offsets[-1] + len(own))
            ids.append(own + (layer + distance) * E)
            scores.append(np.asarray(of_each, np.float64)[order])
        experts = np.concatenate(ids)
        return np.array(offsets, np.int64), experts, np.ones_like(experts), np.concatenate(scores)

    def _propose(self, event: Event) -> None:
        proposal: tuple[Int, Float] | None = self._runner.propose(event)
        if proposal is not None:
            self._residency.propose(*proposal)

    def _loads(self, prefetches: int) -> list[Load]:
        """Return the demands that are queued, and so many prefetches; the last one is under way then."""
        loads: list[Load] = []
        waiting = list(self._computing)
        while prefetches or self._residency.next_demand() != NO_EXPERT:
            self._arrive()
            expert, _, early = self._residency.next_transfer()
            if expert == BLOCKED and waiting and not early:
                self._residency.computed(waiting.pop(0))  # rule 9
                continue
            if expert < 0:
                break
            self._loading = True
            layer, own = divmod(expert, self.shape.experts)
            loads.append(Load(layer, own, self._residency.slot(expert)))
            prefetches -= bool(early and prefetches)
        self._computing = waiting
        return loads
