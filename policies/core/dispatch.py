"""The dispatch table of compiled policies: which functions observe and propose for which built-in policy, by number.

Numba cannot keep on disk a kernel that takes functions as arguments, nor need it: a compiled engine takes numbers, and
what the policies of the run know as one `Minds`, of one type whatever they are, so that it is compiled once. A policy's
own module holds its functions and calls the same ones from Python.

Served is every score policy and every prefetcher of this package. A policy of a user's file, or one that names its
victims itself, is not; nor are two halves of one family with different options, since `Minds` has one place for each.
A score policy whose bookkeeping is a rule of `policies.core.scores` hears of no events and needs no place.
"""

from typing import NamedTuple

import numpy as np

from policies.blend import eamc_blend
from policies.core.compiled import compiled
from policies.core.policy import NO_INTS, Float, Int, Listener, Prefetcher, RetentionPolicy, Shape
from policies.core.registry import NoPrefetch
from policies.eamc import eamc, expert_map
from policies.eamc.options import EamcOptions
from policies.prefetch import gate, layer_stream, markov, oracle, oracle1, popular, previous, stride
from policies.retention import belady, least_stale, multi_criteria
from policies.retention.fifo import FIFO
from policies.retention.lfu import LFU
from policies.retention.lfu_aged import AgedLFU
from policies.retention.lfu_perfect import PerfectLFU
from policies.retention.lrfu import LRFU
from policies.retention.lru import LRU
from policies.retention.static import Static
from traces.steps import RequestSteps

(
    NONE,  # hears of no events, proposes nothing
    BELADY,
    LEAST_STALE,
    MULTI_CRITERIA,
    EAMC,
    EAMC_BLEND,
    EXPERT_MAP,
    ALL,
    GATE,
    MARKOV,
    ORACLE,
    ORACLE1,
    POPULAR,
    PREVIOUS,
    STRIDE,
) = range(15)

KINDS: dict[type[Listener], int] = {
    **dict.fromkeys((LRU, FIFO, LFU, PerfectLFU, AgedLFU, LRFU, Static, NoPrefetch), NONE),
    belady.Belady: BELADY,
    least_stale.LeastStale: LEAST_STALE,
    multi_criteria.MultiCriteria: MULTI_CRITERIA,
    eamc.EamcRetention: EAMC,
    eamc.EamcPrefetcher: EAMC,
    eamc_blend.BlendRetention: EAMC_BLEND,
    eamc_blend.BlendPrefetcher: EAMC_BLEND,
    expert_map.ExpertMapRetention: EXPERT_MAP,
    expert_map.ExpertMap: EXPERT_MAP,
    layer_stream.All: ALL,
    gate.Gate: GATE,
    markov.Markov: MARKOV,
    oracle.Oracle: ORACLE,
    oracle1.NextLayerOracle: ORACLE1,
    popular.Popular: POPULAR,
    previous.Previous: PREVIOUS,
    stride.Stride: STRIDE,
}


class Minds(NamedTuple):
    """What each family of policies knows; of a family that is not played, next to nothing."""

    following: Int  # of Belady
    current: Int  # of least-stale
    uses: multi_criteria.Uses
    matched: eamc.Matched
    blend: eamc_blend.Blend
    maps: expert_map.ExpertMaps
    depth: Int  # of all
    chain: markov.Chain
    seen: oracle.Horizon
    popularity: popular.Popularity
    latest: previous.Latest
    foresight: stride.Foresight


class Told(NamedTuple):
    """A request as the functions of policies are told of it: accesses by event, and what gates pick ahead of time.

    Without lookahead the last three are empty.
    """

    phase: Int  # [S]
    offsets: Int  # [S * L + 1]
    experts: Int  # [A]
    counts: Int  # [A]
    ahead_offsets: Int  # [S * L + 1]
    ahead_experts: Int
    ahead_counts: Int


def told(request: RequestSteps) -> Told:
    """The request's arrays."""
    ahead = request.lookahead
    picks = (ahead.offsets, ahead.experts, ahead.counts) if ahead else (NO_INTS, NO_INTS, NO_INTS)
    accesses = request.offsets, request.experts, request.counts
    return Told(request.phase.astype(np.int64), *map(np.ascontiguousarray, (*accesses, *picks)))


def refusal(keeper: RetentionPolicy, fetcher: Prefetcher) -> str | None:
    """Why compiled engines cannot serve this pair; None if they can."""
    for half in (keeper, fetcher):
        if type(half) not in KINDS:
            return f"{half.name} is not one of the built-in score policies and prefetchers"
    kind = KINDS[type(keeper)]
    if kind != NONE and kind == KINDS[type(fetcher)] and fetcher.observes:
        return f"its halves are two different {keeper.name}"
    return None


def nothing() -> Minds:
    """Of no family, of a model of one expert."""
    one = Shape(1, 1)
    return Minds(
        following=NO_INTS,
        current=NO_INTS,
        uses=multi_criteria.unused(one, multi_criteria.MultiCriteriaOptions()),
        matched=eamc.Predictor(one, EamcOptions(capacity=1)).matched,
        blend=eamc_blend.blend(one, eamc_blend.BlendOptions(), np.zeros((1, 1))),
        maps=expert_map.no_maps(one, expert_map.ExpertMapOptions(capacity=1)),
        depth=NO_INTS,
        chain=markov.nothing_followed(one, markov.MarkovOptions()),
        seen=oracle.horizon(one, oracle.OracleOptions()),
        popularity=popular.nothing_used(one, popular.PopularOptions()),
        latest=previous.nothing_decoded(one, previous.PreviousOptions()),
        foresight=stride.nothing_foreseen(stride.NOTHING_TRAINED, 1),
    )


def minds(rest: Minds, *halves: Listener) -> Minds:
    """What the two halves know, in a request that has begun; of other families `rest`."""
    for half in halves:
        match half:
            case belady.Belady():
                rest = rest._replace(following=half.following)
            case least_stale.LeastStale():
                rest = rest._replace(current=half.current)
            case multi_criteria.MultiCriteria():
                rest = rest._replace(uses=half.uses)
            case eamc.EamcRetention() | eamc.EamcPrefetcher():
                rest = rest._replace(matched=half.predictor.matched)
            case eamc_blend.BlendRetention() | eamc_blend.BlendPrefetcher():
                rest = rest._replace(blend=half.blend)
            case expert_map.ExpertMapRetention() | expert_map.ExpertMap():
                rest = rest._replace(maps=half.maps)
            case layer_stream.All():
                rest = rest._replace(depth=half.depth)
            case markov.Markov():
                rest = rest._replace(chain=half.chain)
            case oracle.Oracle():
                rest = rest._replace(seen=half.seen)
            case popular.Popular():
                rest = rest._replace(popularity=half.known)
            case previous.Previous():
                rest = rest._replace(latest=half.latest)
            case stride.Stride():
                rest = rest._replace(foresight=half.known)
    return rest


@compiled
def observe(
    kind: int, minds: Minds, told: Told, phase: int, step: int, layer: int, L: int, keep: Float, scores: bool
) -> None:
    """Rule 3: the policy of number `kind` hears of an event; a retention policy (`scores`) writes its keep scores."""
    experts, counts = told.experts, told.counts
    first, last = told.offsets[step * L + layer], told.offsets[step * L + layer + 1]
    if kind == BELADY:
        belady.observe(minds.following, keep, experts, first, last)
    elif kind == LEAST_STALE:
        least_stale.observe(minds.current, keep, step, experts, first, last)
    elif kind == MULTI_CRITERIA:
        multi_criteria.observe(minds.uses, keep, step + 1, layer, experts, first, last)
    elif kind == EAMC:
        changed = eamc.observe(minds.matched, phase, step, layer, experts, counts, first, last)
        if scores:
            eamc.score(minds.matched.says, keep, changed, layer)
    elif kind == EAMC_BLEND:
        eamc_blend.observe(minds.blend, phase, step, layer, experts, counts, first, last)
    elif kind == EXPERT_MAP:
        expert_map.observe(minds.maps, step, layer, experts, counts, first, last)
        if scores:
            expert_map.score(minds.maps, keep, experts, first, last)
    elif kind == MARKOV:
        markov.observe(minds.chain, layer, experts, first, last)
    elif kind == POPULAR:
        popular.observe(minds.popularity, experts, first, last)
    elif kind == PREVIOUS:
        previous.observe(minds.latest, phase, layer, experts, first, last)
    elif kind == STRIDE:
        stride.observe(minds.foresight, phase, layer, experts, first, last)


@compiled
def propose(
    kind: int,
    minds: Minds,
    told: Told,
    phase: int,
    step: int,
    layer: int,
    L: int,
    E: int,
    ids: Int,
    priorities: Float,
) -> int:
    """Rule 4: fill ids and priorities, [L*E] each, with what the prefetcher of number `kind` proposes; how many."""
    experts, offsets, event = told.experts, told.offsets, step * L + layer
    first, last = offsets[event], offsets[event + 1]
    n = 0
    if kind == EAMC:
        n = eamc.fetch(minds.matched.says, layer, ids, priorities)
    elif kind == EAMC_BLEND:
        begin, end = picked(told, event, L)
        n = eamc_blend.propose(minds.blend, phase, layer, told.ahead_experts[begin:end], ids, priorities)
    elif kind == EXPERT_MAP:
        n = expert_map.propose(minds.maps, layer, last - first, ids, priorities)
    elif kind == ALL:
        n = layer_stream.propose(minds.depth, layer, L, E, ids, priorities)
    elif kind == GATE:
        begin, end = picked(told, event, L)
        n = gate.propose(told.ahead_experts[begin:end], told.ahead_counts[begin:end], ids, priorities)
    elif kind == MARKOV:
        n = markov.propose(minds.chain, layer, L, experts, first, last, ids, priorities)
    elif kind == ORACLE:
        n = oracle.propose(minds.seen, event, offsets, experts, ids, priorities)
    elif kind == ORACLE1:
        n = oracle1.propose(event, L, offsets, experts, ids, priorities)
    elif kind == POPULAR:
        n = popular.propose(minds.popularity, layer, L, E, ids, priorities)
    elif kind == PREVIOUS:
        n = previous.propose(minds.latest, layer, ids, priorities)
    elif kind == STRIDE:
        n = stride.propose(minds.foresight, phase, layer, ids, priorities)
    return n


@compiled
def picked(told: Told, event: int, L: int) -> tuple[int, int]:
    """Where the picks for the layer after `event` begin and end (`traces.steps.Lookahead.after`)."""
    if len(told.ahead_offsets) == 0 or event % L == L - 1:
        return 0, 0
    return told.ahead_offsets[event + 1], told.ahead_offsets[event + 2]
