"""What memory a policy holds is what it allocates beyond LRU; what time it takes is that of all its calls."""

import time

import numpy as np
import pytest

from policies import Event, Policy, ScorePolicy, Shape
from policies.core.spec import PolicySpec, parse
from policies.overhead import measured_bytes, measured_us
from sim.loop.requests import Requests
from traces.synthetic import synthetic

REQUESTS = Requests(synthetic(2, tokens=5, layers=2, experts=8, top_k=2, seed=0))


class AtFirst(ScorePolicy):
    """Holds a MiB from the start."""

    def __init__(self, shape: Shape, options: object) -> None:
        super().__init__(shape, options)
        self.table = np.zeros(2**17)


class ByEvent(ScorePolicy):
    """Holds 64 KiB more with each event."""

    def __init__(self, shape: Shape, options: object) -> None:
        super().__init__(shape, options)
        self.seen: list[object] = []

    def observe(self, event: Event) -> None:
        self.seen.append(np.zeros(2**13))


@pytest.mark.parametrize(("policy", "held"), [(AtFirst, 2**20), (ByEvent, 20 * 2**16)])
def test_memory_is_what_a_policy_allocates(policy: type[Policy], held: int) -> None:
    assert measured_bytes(PolicySpec.of(policy), Shape(2, 8), REQUESTS) == pytest.approx(held, abs=2**17)


def test_lru_and_oracles_hold_nothing_more() -> None:
    held = [measured_bytes(parse(name), Shape(2, 8), REQUESTS) for name in ("lru", "belady")]
    assert held == pytest.approx([0, 0], abs=1_000)  # what another thread of this process allocates is counted too


class SlowVictim(Policy):
    """Takes a fifth of a millisecond to name a victim."""

    def victim(self, evictable: np.ndarray) -> int:
        time.sleep(200e-6)
        return int(evictable[0])


def test_the_time_of_naming_victims_counts() -> None:
    """Of 16 experts 4 are cached: at most 2 of an event, and most of them, need a victim."""
    assert 100 < measured_us(PolicySpec.of(SlowVictim), Shape(2, 8), REQUESTS) < 2_000
