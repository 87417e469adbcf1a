"""What an engine runs: requests of a model through tiers of memory, on a simulated machine's times."""

from dataclasses import dataclass, replace

from policies.core.bent import Rule
from policies.core.policy import Requests, Shape
from policies.core.spec import PolicySpec
from sim.profiles.timing import Link, Timing


@dataclass(frozen=True)
class Tier:
    """A memory of `slots` experts under `policy`, filled over `link`.

    slots: bytes, where experts differ in size (rule 19: `link.layer_bytes`). policy: None of host memory (rule 17).
    experts_per_layer: see `sim.profiles.timing.experts_per_layer`; a policy with a prefetch budget needs it.
    transfers_per_event: how many transfers take as long as an event is charged for the policy (rule 14).
    """

    slots: int
    policy: PolicySpec | None
    link: Link
    experts_per_layer: float | None = None
    transfers_per_event: float = 0.0

    @property
    def experts(self) -> int:
        """How many experts it holds whatever their sizes: of the largest."""
        return self.slots // self.link.expert_bytes if self.link.layer_bytes else self.slots

    def room(self, layers: int, each: int) -> int:
        """Return the slots, or bytes, of `each` experts of every one of the first `layers` layers."""
        return each * (sum(self.link.layer_bytes[:layers]) if self.link.layer_bytes else layers)


@dataclass(frozen=True)
class Users:
    """Several requests at a time (rule 18). arrival_ns: of each request; None: `max_batch` users ask at once."""

    max_batch: int
    arrival_ns: tuple[int, ...] | None = None


@dataclass(frozen=True, eq=False)
class Run:
    """Requests of a model of `shape`, one after another, through `tiers`, the fastest first.

    An oracle policy reads `requests` before the run, no other does. `timing` and the links' times are those of a
    simulated machine: a real device takes its own, and reads of a link only how many bytes it moves.
    cold: empty the cache after each request but the last (rule 10). users: None: one request after another. routing:
    bends what the routers chose (rule 22).
    """

    requests: Requests
    shape: Shape
    tiers: tuple[Tier, ...]
    timing: Timing
    cold: bool = False
    users: Users | None = None
    routing: Rule | None = None

    @property
    def gpu(self) -> Tier:
        """The tier in which experts compute."""
        return self.tiers[0]

    @property
    def host(self) -> Tier | None:
        """Host memory over a disk; None: it holds all experts."""
        return self.tiers[1] if len(self.tiers) > 1 else None

    @property
    def policy(self) -> PolicySpec:
        """The policy of GPU memory, and where it has misses computed."""
        assert self.gpu.policy
        return self.gpu.policy

    def on(self, timing: Timing, link: Link, experts_per_layer: float | None) -> "Run":
        gpu = replace(self.gpu, link=link, experts_per_layer=experts_per_layer)
        return replace(self, tiers=(gpu, *self.tiers[1:]), timing=timing)

    def under(self, policy: PolicySpec) -> "Run":
        return replace(self, tiers=(replace(self.gpu, policy=policy), *self.tiers[1:]))

    def with_slots(self, slots: int) -> "Run":
        return replace(self, tiers=(replace(self.gpu, slots=slots), *self.tiers[1:]))


def gpu_run(
    requests: Requests,
    shape: Shape,
    slots: int,
    policy: PolicySpec,
    timing: Timing,
    link: Link,
    cold: bool = False,
    experts_per_layer: float | None = None,
    host: Tier | None = None,
    users: Users | None = None,
    routing: Rule | None = None,
) -> Run:
    """Return a run of GPU memory under a policy; `host`: host memory over a disk."""
    below = [host] if host else []
    slowest_ns = max(each.used_ns(each.expert_bytes) for each in (link, *(tier.link for tier in below)))
    charge = timing.predictor_ns / max(1, slowest_ns)
    tiers = (Tier(slots, policy, link, experts_per_layer, charge), *below)
    shape = replace(shape, batch_slots=users.max_batch if users else 1)
    return Run(requests, shape, tiers, timing, cold, users, routing)
