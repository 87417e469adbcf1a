"""Random: evict any evictable expert, each as likely as the next; the baseline that a policy has to beat.

The draws depend on `seed` and on nothing else, so the same run twice is the same. No ties.
"""

from dataclasses import dataclass
from random import Random

from policies.core.policy import Int, Options, Policy, Shape, bounded
from policies.core.registry import retention


@dataclass(frozen=True)
class RandomOptions(Options, policy="random"):
    """seed: of the draws."""

    seed: int = bounded(0, least=0)


@retention("random")
class RandomVictim(Policy):
    """Any evictable expert, drawn evenly."""

    observes = False
    Options = RandomOptions

    def __init__(self, shape: Shape, options: RandomOptions) -> None:
        super().__init__(shape, options)
        self._draws = Random(options.seed)

    def victim(self, evictable: Int) -> int:
        return int(evictable[self._draws.randrange(len(evictable))])
