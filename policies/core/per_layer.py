"""One instance of an eviction policy for each layer: how a policy with state of its own serves a partitioned cache.

Each hears of its own layer's events, hits, insertions and evictions alone, and names victims among its layer's
experts, so that what it takes for the size of the cache is its partition's. A score policy needs none of this:
scores are kept for all experts, and the least of a layer is found as well as the least of all.
"""

from collections.abc import Callable, Sequence
from typing import Any

from policies.core.policy import Event, Int, Policy


def _of_all(method: str) -> Callable[..., None]:
    def notify(self: "PerLayer", *arguments: Any) -> None:
        for keeper in self._of:
            getattr(keeper, method)(*arguments)

    return notify


def _of_one(method: str) -> Callable[..., None]:
    def notify(self: "PerLayer", expert: int, *arguments: int) -> None:
        getattr(self._of[expert // self.shape.experts], method)(expert, *arguments)

    return notify


class PerLayer(Policy):
    """`keeper` for the first layer and, of the same class and options, one of `others` for every other."""

    def __init__(self, keeper: Policy, others: Sequence[Policy]) -> None:
        super().__init__(keeper.shape, keeper.options)
        self._of = [keeper, *others]
        self.name = keeper.name  # type: ignore[misc]  # it passes for the policy whose instances it holds
        self.observes = keeper.observes

    foresee, begin_request, end_request = _of_all("foresee"), _of_all("begin_request"), _of_all("end_request")
    on_hit, on_insert, on_evict = _of_one("on_hit"), _of_one("on_insert"), _of_one("on_evict")
    on_need = _of_one("on_need")

    def observe(self, event: Event) -> None:
        self._of[event.layer].observe(event)

    def admit(self, event: Event) -> Int:
        return self._of[event.layer].admit(event)

    def victim(self, evictable: Int) -> int:
        """Of the offered experts' layer, which is one and the same."""
        return self._of[int(evictable[0]) // self.shape.experts].victim(evictable)
