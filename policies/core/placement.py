"""Placement: where a miss is computed, on the GPU after a transfer or on the host (rule 13).

A placement is asked at each lookup, after hits and late experts are known. It names the misses that the host computes;
the others are fetched. `fetch` is what every policy does that names no placement.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from policies.core.policy import Options, bounded

FETCH, HOST, SPLIT, LAYERS, ADMITTED = range(5)
"""Placements that the compiled engine runs."""


class Costs(NamedTuple):
    """What a placement may reckon with, in ns: from now on, and of an expert by its tokens."""

    link_ready: int  # until the link is free of what nothing interrupts
    host_ready: int  # until the host can begin: the hop
    transfer: int
    expert: Callable[[int], int]  # on the GPU
    host: Callable[[int], int]


class Placement:
    """Where misses are computed."""

    name: ClassVar[str]
    number: ClassVar[int]
    Options: ClassVar[type] = Options

    def __init__(self, options: object) -> None:
        self.options = options

    @property
    def layers(self) -> int:
        """Of how many layers, the first ones, the host computes every miss."""
        return 0

    def on_host(self, layer: int, misses: Sequence[int], tokens: dict[int, int], costs: Costs) -> list[int]:
        """Return which of the misses the host computes; misses: ascending ids, tokens: of each expert of the event."""
        return list(misses) if layer < self.layers else []


class Fetch(Placement):
    """Fetch every miss and compute it on the GPU."""

    name, number = "fetch", FETCH


class Host(Placement):
    """Compute every miss on the host."""

    name, number = "host", HOST

    def on_host(self, layer: int, misses: Sequence[int], tokens: dict[int, int], costs: Costs) -> list[int]:
        return list(misses)


class Split(Placement):
    """Compute each miss where it ends first, after Fiddler (arXiv 2402.07033) and HybriMoE (2504.05897); rule 13."""

    name, number = "split", SPLIT

    def on_host(self, layer: int, misses: Sequence[int], tokens: dict[int, int], costs: Costs) -> list[int]:
        link_ready, host_ready, chosen = costs.link_ready, costs.host_ready, []
        for expert in misses:
            ended = host_ready + costs.host(tokens[expert])
            if ended < link_ready + costs.transfer + costs.expert(tokens[expert]):
                host_ready = ended
                chosen.append(expert)
            else:
                link_ready += costs.transfer
        return chosen


@dataclass(frozen=True)
class LayersOptions(Options, policy="layers"):
    """n: of how many layers, the first ones, the host computes every miss."""

    n: int = bounded(1, least=0)


class Layers(Placement):
    """Compute the misses of the first n layers on the host, as llama.cpp's --n-cpu-moe; fetch the others."""

    name, number = "layers", LAYERS
    Options = LayersOptions
    options: LayersOptions

    @property
    def layers(self) -> int:
        return self.options.n


class Admitted(Fetch):
    """Fetch what is admitted, and compute the other misses on the host: each is read once (rule 21)."""

    name, number = "admitted", ADMITTED


PLACEMENTS: dict[str, type[Placement]] = {cls.name: cls for cls in (Fetch, Host, Split, Layers, Admitted)}
