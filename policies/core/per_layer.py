"""One instance of a retention policy for each layer: how a policy with state of its own serves a partitioned cache.

Each hears of its own layer's events, hits, insertions and evictions alone, and names victims among its layer's
experts, so that what it takes for the size of the cache is its partition's. A score policy needs none of this:
scores are kept for all experts, and the least of a layer is found as well as the least of all.
"""

from policies.core.policy import Event, Int, Requests, RetentionPolicy


class PerLayer(RetentionPolicy):
    """`keeper` for the first layer and its like, of the same options, for every other."""

    def __init__(self, keeper: RetentionPolicy) -> None:
        super().__init__(keeper.shape, keeper.options)
        others = [type(keeper)(keeper.shape, keeper.options) for _ in range(1, keeper.shape.layers)]
        self._of = [keeper, *others]
        self.name = keeper.name  # type: ignore[misc]  # it passes for the policy whose instances it holds
        self.observes = keeper.observes

    def foresee(self, requests: Requests, per_access: bool) -> None:
        """The routing of all layers: the numbers of events are the run's."""
        for keeper in self._of:
            keeper.foresee(requests, per_access)

    def begin_request(self, request: int, seat: int) -> None:
        """For every layer."""
        for keeper in self._of:
            keeper.begin_request(request, seat)

    def observe(self, event: Event) -> None:
        """For the event's layer."""
        self._of[event.layer].observe(event)

    def end_request(self, seat: int) -> None:
        """For every layer."""
        for keeper in self._of:
            keeper.end_request(seat)

    def on_hit(self, expert: int, serial: int) -> None:
        """For the expert's layer."""
        self._of[expert // self.shape.experts].on_hit(expert, serial)

    def on_insert(self, expert: int, serial: int, start: int) -> None:
        """For the expert's layer."""
        self._of[expert // self.shape.experts].on_insert(expert, serial, start)

    def on_evict(self, expert: int) -> None:
        """For the expert's layer."""
        self._of[expert // self.shape.experts].on_evict(expert)

    def victim(self, evictable: Int) -> int:
        """Of the offered experts' layer, which is one and the same."""
        return self._of[int(evictable[0]) // self.shape.experts].victim(evictable)
