"""Both engines, on a synthetic trace of the shape of gpt-oss-20b (24 layers x 32 experts, top-4) at a quarter of all.

The SimPy engine against a bare SimPy loop of the same number of waits: at most 4 times its time under LRU. The other
policy overhead (matching, proposing hundreds of experts an event) comes on top and is shown beside it.

The compiled engine against libcachesim's untimed LRU on the same accesses (GPL, a test-only extra; see
`benchmarks.curves`), in accesses per second: under LRU at least 0.55, with the next layer known and fetched ahead a
twelfth, under the policies that match or learn and prefetch 0.08, which is not reached yet. And against the SimPy
engine, which runs the first requests alone: under LRU at least 30 times as fast. What other policies do of their own,
compiled as it is, takes both engines as long, so theirs is shown without a bound. Counting without a clock: at least
0.7 of libcachesim's same policy. Policies in Python: at most 10 and 20 times a short run under LRU.
`python -m benchmarks engine --trace=FOLDER` runs a recorded trace, on the profiles that `moe-sim` takes by default.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import simpy

from benchmarks.curves import at_one_size, write_accesses
from policies.core.policy import Event, Int, Options, Policy, ScorePolicy, Shape
from policies.core.spec import PolicySpec, parse
from sim.engines import compiled_engine
from sim.engines.simpy_engine import simulate
from sim.engines.untimed import count
from sim.experiment import Experiment
from sim.loaded import TimedRun
from sim.loop.run import Run, gpu_run
from sim.profiles.timing import FixedTiming, Link, experts_per_layer
from traces.steps import RequestSteps
from traces.synthetic import synthetic

ROUNDS = 9
LAYERS, EXPERTS, SLOTS = 24, 32, 192
TIMING = FixedTiming(dense=100_000, expert=20_000, expert_per_token=1_000, combine=2_000, head=300_000)
LINK = Link(latency_ns=10_000, ns_per_byte_num=1, ns_per_byte_den=24, expert_bytes=13_219_200)

LONG = (20, 500)  # requests and tokens of each, for the compiled engine
FEW_TOKENS = 1_000  # at least, for SimPy
SHARES = {"lru": 0.55, "lru+oracle": 1 / 12, "eamc-blend": 0.08, "eamc": 0.08}
"""Of libcachesim's accesses per second, at least."""
GAINS = {"lru": 30}
"""Of SimPy's layer-steps per second, at least so many times."""
COUNTED = {"lru": "LRU", "lfu": "LFU", "belady": "Belady"}
"""Policies that count without a clock, by their name in libcachesim: at least 0.7 of the same policy's speed there."""


class Newest(ScorePolicy):
    """LRU in Python."""

    def observe(self, event: Event) -> None:
        self.keep[0, event.experts] = event.serial


class Oldest(Policy):
    """FIFO in Python, which names its victims."""

    def __init__(self, shape: Shape, options: Options) -> None:
        super().__init__(shape, options)
        self.came = np.zeros(shape.total, np.int64)

    def on_insert(self, expert: int, serial: int, start: int) -> None:
        self.came[expert] = start

    def victim(self, evictable: Int) -> int:
        return int(evictable[self.came[evictable].argmin()])


IN_PYTHON = {Newest: 10, Oldest: 20}
"""Policies in Python: at most so many times the time of a sweep's cell under `lru`, an event."""


def bare_loop(waits: int) -> None:
    env = simpy.Environment()

    def process():
        for _ in range(waits):
            yield env.timeout(1)

    env.process(process())
    env.run()


def seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def count_waits(work: Callable[[], object]) -> int:
    """Return how many events were scheduled: SimPy numbers them, whoever puts them in its queue."""
    made: list[simpy.Environment] = []
    init = simpy.Environment.__init__

    def remembered(env: simpy.Environment, *args: Any, **options: Any) -> None:
        init(env, *args, **options)
        made.append(env)

    with patch.object(simpy.Environment, "__init__", remembered):
        work()
    return sum(next(env._eid) for env in made)


def requests_of(requests: int, tokens: int) -> list[RequestSteps]:
    trace = synthetic(requests, tokens, LAYERS, EXPERTS, top_k=4, seed=1)
    return [trace.steps(i) for i in range(requests)]


def against_a_bare_loop() -> None:
    requests = requests_of(4, 150)
    steps = sum(len(request.tokens) for request in requests) * LAYERS
    for policy in ("lru", "eamc", "lru+popular", "belady"):

        def play(policy: str = policy) -> object:
            return simulate(gpu_run(requests, Shape(LAYERS, EXPERTS), SLOTS, parse(policy), TIMING, LINK))

        waits = count_waits(play)
        pairs = [(seconds(play), seconds(lambda waits=waits: bare_loop(waits))) for _ in range(ROUNDS)]
        ratio = statistics.median(ours / bare for ours, bare in pairs)
        ours = statistics.median(ours for ours, _ in pairs)
        print(
            f"engine: {policy}: {ratio:.2f} times a bare SimPy loop of {waits / steps:.1f} waits a layer-step"
            f"{' (at most 4)' if policy == 'lru' else ''}; {steps / ours:,.0f} layer-steps/s"
        )


def synthetic_run(policy: PolicySpec) -> Run:
    return gpu_run(requests_of(*LONG), Shape(LAYERS, EXPERTS), SLOTS, policy, TIMING, LINK)


def recorded_run(folder: str) -> Callable[[PolicySpec], Run]:
    """Runs over a recorded trace, its requests laid out beforehand."""
    loaded = TimedRun.of(Experiment(folder))
    trace, link = loaded.trace, loaded.link
    requests = [trace.steps(i) for i in range(len(trace.requests))]
    slots = round(loaded.all_experts / 4)

    def run(policy: PolicySpec) -> Run:
        timing = loaded.timing(policy)
        window = experts_per_layer(timing, link, trace.layers, trace.top_k)
        return gpu_run(
            requests, Shape(trace.layers, trace.num_experts), slots, policy, timing, link, experts_per_layer=window
        )

    return run


def tokens(run: Run) -> int:
    """Steps, of which each is a decoded token but for prefills."""
    return sum(len(request.tokens) for request in run.requests)


def first_requests(run: Run) -> Run:
    """The same over as few of its requests as make up FEW_TOKENS, or over all."""
    upto = np.cumsum([len(request.tokens) for request in run.requests])
    return replace(run, requests=run.requests[: int(np.searchsorted(upto, FEW_TOKENS)) + 1])


def against_libcachesim_and_simpy(run_of: Callable[[PolicySpec], Run]) -> None:
    try:
        import libcachesim
    except ImportError:
        libcachesim = None
        print("compiled: no share of libcachesim's speed, it is not installed: pip install -e '.[oracle]'")
    compiled_engine.prepare()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "accesses.oracleGeneral.bin"
        write_accesses(np.concatenate([request.experts for request in run_of(parse("lru")).requests]), file)
        for policy, least in SHARES.items():
            run = run_of(parse(policy))
            few = first_requests(run)
            shares, gains, took = [], [], []
            for _ in range(5):
                took.append(seconds(lambda run=run: compiled_engine.simulate(run)) / tokens(run))
                if libcachesim:
                    shares.append(at_one_size(libcachesim, file, run.gpu.slots)[0] / tokens(run) / took[-1])
                gains.append(seconds(lambda few=few: simulate(few)) / tokens(few) / took[-1])
            share = f"{statistics.median(shares):.3f} of libcachesim's LRU (at least {least:.3f}), " if shares else ""
            bound = f" (at least {GAINS[policy]})" if policy in GAINS else ""
            print(
                f"compiled: {policy}: {share}{statistics.median(gains):.0f} times SimPy{bound}, "
                f"{run.shape.layers / statistics.median(took):,.0f} layer-steps/s"
            )


def counted_against_libcachesim(run_of: Callable[[PolicySpec], Run]) -> None:
    try:
        import libcachesim
    except ImportError:
        return
    run = run_of(parse("lru"))
    shape, accesses = run.shape, np.concatenate([request.experts for request in run.requests])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "accesses.oracleGeneral.bin"
        write_accesses(accesses, file)
        for ours, theirs in COUNTED.items():

            def play(ours: str = ours) -> object:
                return count(run.requests, shape.layers, shape.experts, run.gpu.slots, parse(ours))

            play()
            pairs = [(seconds(play), at_one_size(libcachesim, file, run.gpu.slots, theirs)[0]) for _ in range(5)]
            share = statistics.median(his / mine for mine, his in pairs)
            rate = len(accesses) / min(mine for mine, _ in pairs)
            print(f"counted: {ours}: {share:.2f} of libcachesim's {theirs} (at least 0.70), {rate:,.0f} accesses/s")


def in_python(run_of: Callable[[PolicySpec], Run]) -> None:
    """Policies in Python beside `lru`, as cells of a sweep: with the work of laying out requests and summing up."""
    few = {each: first_requests(run_of(PolicySpec.of(each))) for each in ("lru", *IN_PYTHON)}
    events = tokens(few["lru"]) * few["lru"].shape.layers
    play = compiled_engine.simulate
    for run in few.values():
        play(run)
    for each, most in IN_PYTHON.items():
        pairs = [(seconds(partial(play, few[each])), seconds(partial(play, few["lru"]))) for _ in range(5)]
        ratio = statistics.median(mine / lru for mine, lru in pairs)
        us = statistics.median(mine for mine, _ in pairs) / events * 1e6
        print(f"in Python: {each.__name__}: {us:.1f} us an event, {ratio:.0f} times lru (at most {most})")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks engine", allow_abbrev=False)
    parser.add_argument("--trace", metavar="FOLDER", help="a recorded trace instead of a synthetic one")
    folder = parser.parse_known_args()[0].trace
    if folder:
        run_of = recorded_run(folder)
    else:
        against_a_bare_loop()
        run_of = synthetic_run
    against_libcachesim_and_simpy(run_of)
    counted_against_libcachesim(run_of)
    in_python(run_of)


if __name__ == "__main__":
    main()
