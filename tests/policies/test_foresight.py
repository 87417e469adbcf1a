"""An oracle that foresees all tokens misses as often as Belady, and one that foresees none as `eamc-blend`."""

import pytest

from policies.core.policy import Shape
from policies.core.spec import parse
from sim.engines import compiled_engine
from sim.loop.requests import Requests
from sim.loop.run import Users, gpu_run
from sim.profiles.timing import FixedTiming, Link
from traces.synthetic import synthetic

REQUESTS = list(Requests(synthetic(requests=3, tokens=40, layers=3, experts=8, top_k=2, seed=0)))


@pytest.mark.parametrize("users", [None, Users(2)])
def test_foresight_reaches_from_eamc_blend_to_belady(users: Users | None) -> None:
    def misses(policy: str) -> int:
        times = FixedTiming(5, 2, 1, 1, 3), Link(1, 1, 2, 4)
        run = gpu_run(REQUESTS, Shape(3, 8), 12, parse(policy), *times, experts_per_layer=1.0, users=users)
        return int(compiled_engine.simulate(run).misses.sum())

    assert misses("foresight:tokens=0") == misses("eamc-blend+none")
    assert misses("eamc-blend+none") > misses("foresight") > misses("belady")
    if users is None:  # Belady also knows requests that have not begun
        assert misses("foresight:tokens=999") == misses("belady")
