"""`eamc-blend`, our own: keep the experts that several kinds of evidence say will be used soonest, and fetch early only
what is likely enough.

The keep score of an expert is the logarithm of the greatest of its chances of use within a number of passes, over the
passes that are waited until then, less a share of a pass for the layers still to go before it can be used at all. The
chances are logistic functions of the evidence of `policies.blend.evidence`. A layer that a decoded token did not run,
as an encoder's, is set aside until it runs again: whatever else is worth more. Ties fall to the lower id.

Prefetch, in decode, of the `depth` layers that come next, unless they are set aside, by their experts' chance of use:
after each layer but the last in this pass, and after the last, while the head computes, in the next pass. What is not
in the cache was thought unlikely, and what seems likely of it is more often wrong: for each kind of guess (the next
layer, one behind it, the next step) a shift of the log odds is fitted, while the run lasts, to what came of the guesses
at absent experts, as weights are in `policies.blend.learning`. Where the next layers' routers are known to pick experts
for a layer's input, what they say of an expert has a shift of its own, by whether it is picked, how far its score is
above the least that would be chosen, and whether it was picked from one layer further away. Where the link
carries r experts while a layer computes, a right guess saves so much of a transfer, and a wrong one delays the next
miss and costs a slot, `wrong` transfers in all: it pays from a chance of wrong / (wrong + r). The head counts as `head`
layers.
Priorities are on the scale of the keep scores, so that a prefetch never takes the place
of what is worth as much (rule 6); each layer further away takes `later` from them.

Of a step of several requests each one's choice is a pass of its own; what is worth most to any of them counts.

All weights begin as `python -m benchmarks.fit_blend` fitted them and learn from the run (`policies.blend.learning`).
Where its time is worth more than what it saves it does as LRU does, and is free (`policies.blend.worth`). Causal; an
event costs O(E * k) for its layer and the next ones.

`policies.blend.decisions` is what a run knows and what the two halves decide from it.
"""

from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from policies.blend import evidence, worth
from policies.blend.decisions import (
    CACHED,
    NONE,
    Blend,
    beside,
    follow,
    learn,
    learned,
    note_eviction,
    note_insert,
    nothing_known,
    observe,
    propose,
    score,
)
from policies.blend.profile import Profile
from policies.core.policy import Compiled, Listener, Options, Prefetcher, ScorePolicy, Shape, bounded
from policies.core.registry import prefetcher, retention

DEFAULT_WINDOW = 0.5
"""Experts the link carries while a layer computes, where no engine has said."""


@dataclass(frozen=True)
class BlendOptions(Options, policy="eamc-blend"):
    """distance: what one pass of distance to the next possible use is worth, in logarithms of passes.

    wrong: what a wrong guess of the prefetch costs, in transfers; inf: nothing is fetched early. depth: layers ahead of
    which experts are fetched. later: what each of these after the first takes from a priority. head: how many layers'
    window the head gives. profile: file of `moe-sim profile build` to start from; none: nothing is known.
    """

    distance: float = bounded(0.75, least=0, most=100)
    wrong: float = bounded(0.6, least=0)
    depth: int = bounded(3, least=1)
    later: float = bounded(0.3, least=0, most=100)
    head: float = bounded(4.0, above=0)
    profile: str = ""


def begin(shape: Shape, options: BlendOptions) -> Blend:
    own = nothing_known(shape, options.distance, options.depth, options.later)
    if options.profile:
        profile = Profile.read(options.profile)
        profile.require(shape, options.profile)
        for name, array in learned(own).items():
            array[...] = profile.learned[name]
    return own


def begin_request(own: Blend, batch_slot: int) -> None:
    """The request before it in this batch slot is over, and the new one has counts of its own."""
    evidence.begin_request(own.known, batch_slot)
    own.cache.made[:] = own.cache.picks[:] = 0  # guesses at the next step of the one before
    own.steps[batch_slot] = NONE
    if not own.cache.keep[CACHED].any():
        worth.empty(own.cache.worth)


def profile_of(half: Listener, *sources: str) -> Profile:
    """Return what a half of `eamc-blend` has learned, from `sources` and from what it started with."""
    assert isinstance(half.options, BlendOptions)
    start = half.options.profile
    before = Profile.read(start).traces if start else ()
    return Profile(half.shape, (*before, *sources), learned(half.state))


class _StartsFromAProfile(Listener):
    """What both halves have in common."""

    Options = BlendOptions
    starts_from = "profile"

    @classmethod
    def require(cls, options: BlendOptions, shape: Shape) -> None:
        if options.profile:
            Profile.read(options.profile).require(shape, options.profile)

    def save(self, file: BinaryIO, source: str) -> None:
        profile_of(self, source).write(file)


@retention("eamc-blend")
class BlendRetention(_StartsFromAProfile, ScorePolicy):
    """Ours: recency, frequencies, what follows what, and passes that were alike; fetches what is likely enough."""

    compiled = Compiled(
        begin,
        score,
        begin_request=begin_request,
        on_insert=note_insert,
        on_evict=note_eviction,
        more_rows=2,
        learn=learn,
        follow=follow,
        beside=beside,
    )

    def __init__(self, shape: Shape, options: BlendOptions, state: Blend | None = None) -> None:
        super().__init__(shape, options, state)
        self.keep = self.state.cache.keep

    def charged(self, transfers: float, slots: int) -> None:
        own = self.state.cache.worth
        own.sums[worth.CHARGE], own.numbers[worth.SLOTS] = transfers, slots


@prefetcher("eamc-blend")
class BlendPrefetcher(_StartsFromAProfile, Prefetcher):
    """Ours: experts of the layers that come next, that are likely enough."""

    one_scale_with = "eamc-blend"

    compiled = Compiled(begin, observe, propose, begin_request)

    def __init__(self, shape: Shape, options: BlendOptions, state: Blend | None = None) -> None:
        super().__init__(shape, options, state)
        self._wrong, self._head = options.wrong, options.head
        self.window(DEFAULT_WINDOW)

    def window(self, experts_per_layer: float) -> None:
        """What pays: the log odds of wrong / (wrong + r)."""
        with np.errstate(divide="ignore", invalid="ignore"):
            least, head = (np.log(self._wrong) - np.log(experts_per_layer * n) for n in (1.0, self._head))
        self.state = self.state._replace(least=float(least), least_at_head=float(head))
