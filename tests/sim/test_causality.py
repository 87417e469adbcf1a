"""Rule 16: what is routed after an event changes no decision before it, on either engine, for any built-in policy.

A run is repeated with another future behind some event, and SimPy's decisions are watched one by one. Nothing can watch
the compiled engine: it must leave the same log as SimPy, of both runs.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from policies.core.catalog import available
from policies.core.policy import Int, Shape
from policies.core.spec import parse
from policies.random_routing import Script, scripts
from sim.engines import simpy_engine
from sim.engines.compiled_engine import simulate
from sim.loop.log import whole
from sim.loop.observer import LoopObserver
from sim.loop.run import gpu_run
from sim.profiles.timing import FixedTiming, Link
from tests.support.logs import assert_logs_equal
from traces.synthetic import synthetic
from traces.writer import write_trace

SHAPE = Shape(3, 5)
TIMING, LINK = FixedTiming(7, 3, 1, 2, 5), Link(2, 1, 2, expert_bytes=10, chunk_bytes=4)
NEED_A_PROFILE = ("static", "fiddler", "brainstorm", "adapmoe")
NAMES = [info.name if info.kind != "prefetch" else f"lru+{info.name}" for info in available() if not info.oracle]
ORACLES = ["belady", "lru+oracle", "lru+oracle1", "lru+lookahead:recall=0.5"]


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files") / "profile"
    write_trace(synthetic(2, tokens=5, layers=3, experts=5, top_k=2, seed=1), folder)
    return folder


class Watched(LoopObserver):
    """Keeps the transfers that are started, with their victims, and how many there were at each router."""

    def __init__(self) -> None:
        self.started: list[tuple[int, int]] = []
        self.at_router: list[int] = []

    def routed(self, experts: Int, hits: list[int]) -> None:
        self.at_router.append(len(self.started))

    def turned_to(self, expert: int, victim: int, prefetch: bool) -> None:
        self.interrupted(expert, victim)

    def interrupted(self, expert: int, victim: int) -> None:
        if expert >= 0:
            self.started.append((expert, victim))


def watched(script: Script, policy: str) -> Watched:
    """Run a script on SimPy, and on the compiled engine if it serves the policy."""
    run = gpu_run(script.requests(), SHAPE, script.slots, parse(policy), TIMING, LINK, script.cold, 1.0)
    observer = Watched()
    log = whole(partial(simpy_engine.play, observer=observer), run)
    assert_logs_equal(simulate(run), log)
    return observer


def futures() -> Iterator[tuple[Script, list[tuple[int, Script]]]]:
    """A run, with events of it and for each a run that is the same before that event."""
    rng = np.random.default_rng(5)
    script = next(script for script in scripts(0) if script.shape == SHAPE)
    for slots, cold in ((3, False), (6, True), (9, False)):
        one = replace(script, slots=slots, cold=cold)
        cuts = rng.integers(script.events, size=5).tolist()
        yield one, [(cut, one.with_another_future(cut, rng)) for cut in cuts]


def decisions_that_knew_the_future(policy: str) -> int:
    """How many of the runs have a decision before the event that differs."""
    differing = 0
    for one, others in futures():
        ours = watched(one, policy)
        for cut, other in others:
            theirs = watched(other, policy)
            differing += ours.started[: ours.at_router[cut]] != theirs.started[: theirs.at_router[cut]]
    return differing


@pytest.mark.parametrize("name", NAMES)
def test_what_is_routed_later_changes_no_decision(name: str, profile: Path) -> None:
    assert decisions_that_knew_the_future(f"{name}:profile={profile}" if name in NEED_A_PROFILE else name) == 0


@pytest.mark.parametrize("oracle", ORACLES)
def test_an_oracle_is_caught(oracle: str) -> None:
    assert decisions_that_knew_the_future(oracle) >= 3
