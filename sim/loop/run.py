"""What an engine runs: requests of a model through tiers of memory, on a simulated machine's times.

A tier is a memory that caches experts: slots, the policy that manages them, and the link to the tier below. There is
one so far, GPU memory over host memory. A disk below the host (rule 17) will be a second entry of `tiers`.
"""

from dataclasses import dataclass, replace

from policies.core.policy import Requests, Shape
from policies.core.spec import Policy, PolicySpec, parse
from sim.profiles.timing import Link, Timing


@dataclass(frozen=True)
class Tier:
    """A memory of `slots` experts under `policy`, filled over `link`.

    experts_per_layer: how many experts the link carries while one layer of a decoded token computes
    (`sim.profiles.timing.experts_per_layer`). A policy with a prefetch budget needs it.
    """

    slots: int
    policy: PolicySpec
    link: Link
    experts_per_layer: float | None = None


@dataclass(frozen=True, eq=False)
class Run:
    """Requests of a model of `shape`, one after another, through `tiers`, the fastest first.

    An oracle policy reads `requests` before the run, no other does. `timing` and the links' times are those of a
    simulated machine: a real device takes its own, and reads of a link only how many bytes it moves.
    cold: empty the cache after each request but the last (rule 10).
    """

    requests: Requests
    shape: Shape
    tiers: tuple[Tier, ...]
    timing: Timing
    cold: bool = False

    def __post_init__(self) -> None:
        if len(self.tiers) != 1:
            raise ValueError(f"a run needs one tier so far, GPU memory over host memory, not {len(self.tiers)}")

    @property
    def gpu(self) -> Tier:
        """The tier in which experts compute."""
        return self.tiers[0]

    def on(self, timing: Timing, link: Link, experts_per_layer: float | None) -> "Run":
        """Return the same run on a machine with other times."""
        gpu = replace(self.gpu, link=link, experts_per_layer=experts_per_layer)
        return replace(self, tiers=(gpu,), timing=timing)

    def under(self, policy: Policy) -> "Run":
        """Return the same run under another policy."""
        return replace(self, tiers=(replace(self.gpu, policy=parse(policy)),))

    def with_slots(self, slots: int) -> "Run":
        """Return the same run with another cache size."""
        return replace(self, tiers=(replace(self.gpu, slots=slots),))


def gpu_run(
    requests: Requests,
    shape: Shape,
    slots: int,
    policy: Policy,
    timing: Timing,
    link: Link,
    cold: bool = False,
    experts_per_layer: float | None = None,
) -> Run:
    """Return a run with one tier, GPU memory over host memory, under a policy, its name or its class."""
    return Run(requests, shape, (Tier(slots, parse(policy), link, experts_per_layer),), timing, cold)
