"""Learning a profile of a model from traces, without a cache: what `moe-sim profile build` does."""

from collections.abc import Sequence
from pathlib import Path

from policies.blend.eamc_blend import profile_of
from policies.blend.profile import Profile
from policies.core.events import Events
from policies.core.policy import Requests, Shape
from policies.core.runner import PolicyRunner
from policies.core.spec import make_policy


def build(traces: Sequence[tuple[str, Requests]], shape: Shape, start: Path | None = None) -> Profile:
    """Return what `eamc-blend` knows after the traces' requests, by name; start: a profile to continue."""
    runner = PolicyRunner(make_policy("eamc-blend", profile=str(start or "")), shape, ())
    ordinal = 0
    for _, requests in traces:
        for request in requests:
            events = Events.of(request, shape.layers)
            runner.begin_request(ordinal)
            for step in range(len(request.phase)):
                runner.propose(events.start(step))
                for layer in range(shape.layers):
                    event = events.event(step, layer)
                    runner.observe(event)
                    runner.propose(event)
            runner.end_request()
            ordinal += 1
    return profile_of(runner.retention, *(name for name, _ in traces))
