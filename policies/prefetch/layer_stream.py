"""Layer-ordered prefetch of everything: after layer l, every expert of the next `depth` layers, the nearest first.

What ZeRO-Inference does with the layers of a dense model (DeepSpeed Inference, arXiv 2207.00032), applied to
experts: no prediction, all the bytes. Priority is minus the distance in layers, so within a layer ties fall to the
lower id; nothing is proposed at the last layer, since a token's layers are streamed in their order of execution.
"""

from dataclasses import dataclass
from typing import NamedTuple

from policies.core.compiled import compiled
from policies.core.limits import Limits, layers_ahead
from policies.core.policy import Compiled, Event, Float, Int, Prefetcher, Shape
from policies.core.registry import prefetcher


@dataclass(frozen=True)
class AllOptions(Limits):
    """One layer ahead, unless told otherwise."""

    keeps_to_depth = True

    depth: int = 1


class Reach(NamedTuple):
    """How much is proposed."""

    depth: int  # layers ahead
    layers: int
    experts: int  # of a layer


def begin(shape: Shape, options: AllOptions) -> Reach:
    return Reach(layers_ahead(options.depth, shape), shape.layers, shape.experts)


@compiled
def propose(reach: Reach, event: Event, ids: Int, priorities: Float) -> int:
    """Fill ids and priorities with the next layers, as far as there are any; how many experts."""
    n = 0
    for ahead in range(event.layer + 1, min(event.layer + 1 + reach.depth, reach.layers)):
        for expert in range(ahead * reach.experts, (ahead + 1) * reach.experts):
            ids[n], priorities[n] = expert, event.layer - ahead
            n += 1
    return n


@prefetcher("all")
class All(Prefetcher):
    """Every expert of the next layers, in the order of execution."""

    Options = AllOptions
    compiled = Compiled(begin, propose=propose)
