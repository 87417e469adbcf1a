"""Options of systems as pure transforms: of the requests, the times and the link of a run, before it starts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.profiles.derived import Derived
from sim.profiles.timing import Link
from traces.steps import DECODE, RequestSteps

Int = NDArray[np.int64]

NOT_HERE_NS = 2**40
"""What the host takes for an expert that is preloaded: so long that `split` has it fetched."""


def copying_back(link: Link) -> Link:
    """Return a link on which each transfer also moves a victim the other way, first: it takes twice as long."""
    return replace(link, latency_ns=2 * link.latency_ns, ns_per_byte_num=2 * link.ns_per_byte_num)


def of_whole_layers(link: Link, experts: int) -> Link:
    sizes = tuple(size * experts for size in link.layer_bytes) if link.layer_bytes else None
    return replace(link, expert_bytes=link.expert_bytes * experts, layer_bytes=sizes, chunk_bytes=None)


@dataclass(frozen=True)
class ZeroCopy(Derived):
    """What lies on the host is computed by the GPU, whose kernels read it over the link: no hop, no latency."""

    link: Link
    hop_ns = 0

    def host_ns(self, tokens: int, layer: int = 0) -> int:
        reading = self.link.used_ns(self.link.bytes_of(layer)) - self.link.latency_ns
        return max(reading, self.timing.expert_ns(tokens, layer))


@dataclass(frozen=True)
class Preloaded(Derived):
    """An expert of `mark` tokens, more than any step has, is only loaded: it computes nothing, nowhere."""

    mark: int

    def expert_ns(self, tokens: int, layer: int = 0) -> int:
        return 0 if tokens == self.mark else self.timing.expert_ns(tokens, layer)

    def host_ns(self, tokens: int, layer: int = 0) -> int:
        return NOT_HERE_NS if tokens == self.mark else self.timing.host_ns(tokens, layer)


def preload(ids: Int, layers: int, experts: int, mark: int) -> RequestSteps:
    """Return a request of one step of `mark` tokens, which all choose these experts. ids: [n], ascending."""
    offsets = np.searchsorted(ids, np.arange(layers + 1) * experts)
    marked = np.full(1, mark, np.int64)
    return RequestSteps(
        request=0,
        phase=np.array([DECODE], np.uint8),
        tokens=marked,
        context=marked,
        offsets=offsets.astype(np.int64),
        experts=ids.astype(np.int64),
        counts=np.full(len(ids), mark, np.int64),
    )


def streamed(steps: RequestSteps, layers: int, resident: int) -> RequestSteps:
    """Return the steps of a model with one expert a layer, which all tokens choose but in `resident` first layers."""
    passed = np.diff(steps.offsets).reshape(-1, layers) > 0  # [S, L]
    moved = passed & (np.arange(layers) >= resident)
    step, ids = np.nonzero(moved)
    offsets = np.concatenate([[0], np.cumsum(moved.ravel())]).astype(np.int64)
    return replace(steps, offsets=offsets, experts=ids, counts=steps.tokens[step], lookahead=None)


@dataclass(frozen=True, eq=False)
class Changed(Sequence[RequestSteps]):
    """Requests, each changed when it is taken, behind those that come first. They are numbered again."""

    requests: Sequence[RequestSteps]
    change: Callable[[RequestSteps], RequestSteps] = lambda steps: steps
    first: Sequence[RequestSteps] = ()

    def __len__(self) -> int:
        return len(self.first) + len(self.requests)

    def __getitem__(self, i: Any) -> Any:
        n = len(self.first)
        return replace(self.first[i] if i < n else self.change(self.requests[i - n]), request=i)
