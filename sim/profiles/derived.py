"""Times that are another timing's, but for what a subclass changes: what several systems have in common."""

from dataclasses import dataclass
from typing import Any

from sim.profiles.timing import Timing


@dataclass(frozen=True)
class Derived:
    """Times that are another's, but for what a subclass changes."""

    timing: Timing

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "timing"), name)  # AttributeError before it is there, as in pickle


@dataclass(frozen=True)
class Blocking(Derived):
    """No expert is computed before all of its layer have arrived: their compute comes behind the layer's combine.

    Of n tokens that choose k of E experts, min(E, n k) are computed, with as many tokens each.
    """

    layers: int
    experts: int
    top_k: int

    def expert_ns(self, tokens: int, layer: int = 0) -> int:
        return 0

    def dense_ns(self, layer: int, tokens: int, context: int, requests: int = 1) -> int:
        """Return the layer's own part behind the experts of the layer before, if that runs: an encoder's may not."""
        own = self.timing.dense_ns(layer, tokens, context, requests)
        before = self.timing.dense_ns(layer - 1, tokens, context, requests) if layer else 0
        return own + (self._computing_ns(tokens, layer - 1) if before else 0)

    def head_ns(self, tokens: int, requests: int = 1) -> int:
        return self._computing_ns(tokens, self.layers - 1) + self.timing.head_ns(tokens, requests)

    def _computing_ns(self, tokens: int, layer: int) -> int:
        computed = min(self.experts, tokens * self.top_k)
        each = -(-tokens * self.top_k // max(computed, 1))
        return computed * self.timing.expert_ns(each, layer)


@dataclass(frozen=True)
class FirstLayersElsewhere(Derived):
    """The first `layers` have their dense part computed by another device."""

    other: Timing
    layers: int

    def dense_ns(self, layer: int, tokens: int, context: int, requests: int = 1) -> int:
        timing = self.other if layer < self.layers else self.timing
        return timing.dense_ns(layer, tokens, context, requests)
