"""What a predictor of the next layers would be worth whose recall and precision are stated: an oracle with noise.

Of what each layer will choose in a step, a share `recall` is kept, drawn for each expert; beside it stand wrong
experts, drawn by how often the run uses them, so many that a share `precision` of the guesses is right in the mean.
After layer l the guesses at the next `distance` layers of the same step are proposed; a guess is the same from each
distance. Priority is minus the distance in layers, so that the nearer layer goes first; ties fall to the lower id.
"""

from dataclasses import dataclass, replace

import numpy as np

from policies.core.compiled import compiled
from policies.core.limits import Limits
from policies.core.policy import Compiled, Event, Float, Int, Requests, Shape, bounded
from policies.core.registry import prefetcher
from policies.prefetch.oracle import Foreseeing, Horizon, add_next
from policies.prefetch.oracle import begin as foreseen
from traces.steps import RequestSteps


@dataclass(frozen=True)
class LookaheadOptions(Limits, policy="lookahead"):
    """recall: share of the experts chosen that are guessed. precision: share of the guesses that are right; 0: as
    recall, so that as many are guessed as are chosen. distance: layers ahead. seed: of the noise.
    """

    recall: float = bounded(1.0, least=0, most=1)
    precision: float = bounded(0.0, least=0, most=1)
    distance: int = bounded(1, least=1)
    seed: int = 0

    @property
    def wrong(self) -> float:
        """Wrong guesses for each expert that is chosen, in the mean."""
        return self.recall * (1 - self.precision) / self.precision if self.precision else 1 - self.recall


def begin(shape: Shape, options: LookaheadOptions) -> Horizon:
    return foreseen(shape, options)._replace(horizon=options.distance)


@compiled
def propose(seen: Horizon, event: Event, ids: Int, priorities: Float) -> int:
    """Fill ids and priorities with the guesses at the next layers of the step; how many."""
    seen.proposals[0] += 1
    n = 0
    for distance in range(1, min(seen.horizon, seen.layers - 1 - event.layer) + 1):
        n = add_next(seen, event, distance, ids, priorities, n, -distance)
    return n


@prefetcher("lookahead", oracle=True)
class Lookahead(Foreseeing):
    """The next layers' experts as a predictor of stated recall and precision would guess them (oracle with noise)."""

    Options = LookaheadOptions
    compiled = Compiled(begin, propose=propose)

    def foresee(self, requests: Requests) -> None:
        super().foresee(requests)
        uses = np.full(self.shape.total, 0.5)
        for request in requests:
            uses += np.bincount(request.experts, minlength=self.shape.total)
        self._log_uses = np.log(uses).reshape(self.shape.layers, self.shape.experts)

    def routing(self, request: int) -> RequestSteps:
        """Return the request with guesses in the place of what its layers choose."""
        steps, E, options = super().routing(request), self.shape.experts, self.options
        assert isinstance(options, LookaheadOptions)
        rng = np.random.default_rng([options.seed, request])
        event = np.repeat(np.arange(len(steps.offsets) - 1), np.diff(steps.offsets))
        guessed = np.zeros((len(steps.offsets) - 1, E), bool)
        guessed[event, steps.experts % E] = True
        for layer, log_uses in enumerate(self._log_uses):
            chosen = guessed[layer :: self.shape.layers]
            right = chosen & (rng.random(chosen.shape) < options.recall)
            wrong = chosen.sum(axis=1) * options.wrong
            count = np.minimum(np.floor(wrong + rng.random(len(wrong))), E - chosen.sum(axis=1))
            drawn = np.where(chosen, -np.inf, log_uses + rng.gumbel(size=chosen.shape))  # without replacement
            rank = np.argsort(np.argsort(-drawn, axis=1), axis=1)
            guessed[layer :: self.shape.layers] = right | (rank < count[:, None])
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(guessed.sum(axis=1))])
        event, expert = np.nonzero(guessed)
        return replace(steps, offsets=offsets, experts=event % self.shape.layers * E + expert)
