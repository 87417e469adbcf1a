"""Which engine plays a run: the compiled one where it serves the policy, else SimPy. What comes out is the same."""

from collections.abc import Callable

from policies import dispatch
from policies.contract import Requests, Shape
from policies.registry import PolicySpec
from sim.log import RunLog
from sim.timing import Link, Timing
from traces.errors import InputError, unknown

AUTO, SIMPY, COMPILED = "auto", "simpy", "compiled"
ENGINES = (AUTO, SIMPY, COMPILED)


def check(engine: str) -> None:
    """InputError for a name that no engine has."""
    if engine not in ENGINES:
        raise unknown("engine", engine, ENGINES)


def require(engine: str, policy: PolicySpec, shape: Shape) -> None:
    """InputError where `engine` cannot play `policy`."""
    reason = dispatch.refusal(*policy.build(shape)) if engine == COMPILED else None
    if reason:
        raise InputError(f"--engine compiled does not play {policy.text}: {reason}; --engine auto plays it on SimPy")


def simulate(
    engine: str,
    requests: Requests,
    layers: int,
    experts: int,
    slots: int,
    policy: PolicySpec,
    timing: Timing,
    link: Link,
    cold: bool = False,
    progress: Callable[[int], None] | None = None,
    experts_per_layer: float | None = None,
) -> RunLog:
    """As `sim.model.simulate`, on `engine`. InputError where that cannot play the policy."""
    run = requests, layers, experts, slots, policy, timing, link, cold, progress, experts_per_layer
    if engine != SIMPY:
        from sim import kernel

        try:
            return kernel.simulate(*run)
        except kernel.NotServedError:
            if engine == COMPILED:
                raise
    from sim import model

    return model.simulate(*run)
