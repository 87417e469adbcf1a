"""Aged LFU: evict the expert with the smallest count, ties to the least recently looked up; all counts halve in time.

They halve, fractions kept, with events number `half_life`, 2 x `half_life` and so on, and outlive eviction. An event
is one (step, layer), so a token of a model of L layers is L events; in untimed mode each access is one. Robinson and
Devarakonda, SIGMETRICS 1990 (there halved when the mean count passes a limit); TinyLFU's reset (Einziger et al. 2017).
"""

from dataclasses import dataclass

from policies.core.compiled import compiled
from policies.core.policy import KEEP_ROWS, Compiled, Float, Options, ScorePolicy, Shape, bounded
from policies.core.registry import retention

HALF_LIFE, CLOCK = KEEP_ROWS, KEEP_ROWS + 1
"""Rows of `keep`, of which the first places are used."""


@dataclass(frozen=True)
class AgedOptions(Options, policy="lfu-aged"):
    """half_life: events between two halvings of all counts."""

    half_life: int = bounded(1024, least=1, below=2**53)


@compiled
def on_lookup(keep: Float, expert: int, serial: int) -> None:
    """Halve all counts as often as is due, then count the lookup."""
    age = serial // keep[HALF_LIFE, 0]
    if age > keep[CLOCK, 0]:
        left = 0.5 ** (age - keep[CLOCK, 0])
        for other in range(keep.shape[1]):
            keep[0, other] *= left
        keep[CLOCK, 0] = age
    keep[0, expert] += 1
    keep[1, expert] = serial


@retention("lfu-aged")
class AgedLFU(ScorePolicy):
    """Least frequently used, all counts halved at intervals."""

    compiled = Compiled(on_lookup=on_lookup, more_rows=2)
    Options = AgedOptions

    def __init__(self, shape: Shape, options: AgedOptions) -> None:
        super().__init__(shape, options)
        self.keep[HALF_LIFE] = options.half_life
