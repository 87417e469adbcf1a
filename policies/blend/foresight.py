"""Foresight, an oracle: the experts of the next tokens are known, and of what comes later what `eamc-blend` knows.

What a predictor of the next tokens could reach with the best policy behind it. What is used within these tokens stays,
the furthest use goes first; behind all of that the keep scores of `eamc-blend` decide. Ties: lower id.
"""

from dataclasses import dataclass
from typing import NamedTuple

from policies.blend import eamc_blend
from policies.blend.decisions import Blend, observe
from policies.blend.eamc_blend import BlendOptions
from policies.core.compiled import compiled
from policies.core.policy import Compiled, Event, Float, Options, Requests, ScorePolicy, Shape, bounded
from policies.core.registry import retention
from policies.retention import belady
from policies.retention.belady import Belady, NextUses

KNOWN = 2.0**50
"""More than any event's number."""


@dataclass(frozen=True)
class ForesightOptions(Options, policy="foresight"):
    """tokens: how many tokens ahead the routing is known."""

    tokens: int = bounded(4, least=0)


class Foresees(NamedTuple):
    """What is known of later, and Belady's next uses with its scores."""

    blend: Blend
    uses: NextUses
    due: Float  # [2, L*E] of Belady
    tokens: int


def begin(shape: Shape, options: ForesightOptions) -> Foresees:
    oracle = Belady(shape, Options())
    return Foresees(eamc_blend.begin(shape, BlendOptions()), oracle.state, oracle.keep, int(options.tokens))


@compiled
def score(own: Foresees, keep: Float, event: Event) -> None:
    """Keep what is used within the tokens that are known, and score all else as `eamc-blend` does."""
    belady.observe(own.uses, own.due, event)
    observe(own.blend, event)
    number = event.serial if len(own.uses.upcoming) == 0 else 0  # Belady numbers events of one request at a time
    reach = number + own.tokens * own.uses.layers
    for expert in range(keep.shape[1]):
        due = own.due[0, expert]
        keep[0, expert] = KNOWN + due if -due <= reach else own.blend.scores[expert]


@retention("foresight", oracle=True)
class Foresight(ScorePolicy):
    """The experts of the next tokens, and behind them what `eamc-blend` knows (oracle)."""

    Options = ForesightOptions
    compiled = Compiled(begin, score)

    def __init__(self, shape: Shape, options: ForesightOptions) -> None:
        super().__init__(shape, options)
        self._oracle = Belady(shape, Options())
        self.state = self.state._replace(due=self._oracle.keep)

    def foresee(self, requests: Requests) -> None:
        self._oracle.foresee(requests)

    def begin_request(self, request: int, batch_slot: int) -> None:
        self._oracle.begin_request(request, batch_slot)
        eamc_blend.begin_request(self.state.blend, batch_slot)
        self.state = self.state._replace(uses=self._oracle.state)

    def end_request(self, batch_slot: int) -> None:
        self._oracle.end_request(batch_slot)
