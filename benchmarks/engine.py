"""Both engines, on a synthetic trace of the shape of gpt-oss-20b (24 layers x 32 experts, top-4) at a quarter of all.

The SimPy engine against a bare SimPy loop of the same number of waits: at most 3 times its time under LRU. The other
policies' own work (matching, proposing hundreds of experts an event) comes on top and is shown beside it.

The compiled engine against libcachesim's untimed LRU on the same accesses (GPL, a test-only extra; see
`benchmarks.curves`), in accesses per second: under LRU at least a sixth, with the next layer known and fetched ahead a
twelfth, under the policies that match or learn and prefetch a fiftieth; and against the SimPy engine 30 times or more.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import numpy as np
import simpy

from benchmarks.curves import at_one_size, write_accesses
from policies.registry import parse
from sim import kernel
from sim.log import Run
from sim.model import simulate
from sim.timing import FixedTiming, Link
from traces.steps import RequestSteps
from traces.synthetic import synthetic

ROUNDS = 9
LAYERS, EXPERTS, SLOTS = 24, 32, 192
TIMING = FixedTiming(dense=100_000, expert=20_000, expert_per_token=1_000, combine=2_000, head=300_000)
LINK = Link(latency_ns=10_000, ns_per_byte_num=1, ns_per_byte_den=24, expert_bytes=13_219_200)

LONG = (20, 500)  # requests and tokens of each, for the compiled engine
SHARES = {"lru": 1 / 6, "lru+oracle": 1 / 12, "eamc-blend": 1 / 50, "eamc": 1 / 50}
"""Of libcachesim's accesses per second, at least."""


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
    schedule, waits = simpy.Environment.schedule, 0

    def counted(env: simpy.Environment, *args: object, **options: object) -> None:
        nonlocal waits
        waits += 1
        schedule(env, *args, **options)

    with patch.object(simpy.Environment, "schedule", counted):
        work()
    return waits


def requests_of(requests: int, tokens: int) -> list[RequestSteps]:
    trace = synthetic(requests, tokens, LAYERS, EXPERTS, top_k=4, seed=1)
    return [trace.steps(i) for i in range(requests)]


def against_a_bare_loop() -> None:
    requests = requests_of(4, 150)
    steps = sum(len(request.tokens) for request in requests) * LAYERS
    for policy in ("lru", "eamc", "lru+popular", "belady"):

        def play(policy: str = policy) -> object:
            return simulate(Run(requests, LAYERS, EXPERTS, SLOTS, parse(policy), TIMING, LINK))

        waits = count_waits(play)
        pairs = [(seconds(play), seconds(lambda waits=waits: bare_loop(waits))) for _ in range(ROUNDS)]
        ratio = statistics.median(ours / bare for ours, bare in pairs)
        ours = statistics.median(ours for ours, _ in pairs)
        print(
            f"engine: {policy}: {ratio:.2f} times a bare SimPy loop of {waits / steps:.1f} waits a layer-step"
            f"{' (at most 3)' if policy == 'lru' else ''}; {steps / ours:,.0f} layer-steps/s"
        )


def against_libcachesim_and_simpy() -> None:
    try:
        import libcachesim
    except ImportError:
        libcachesim = None
        print("compiled: no share of libcachesim's speed, it is not installed: pip install -e '.[oracle]'")
    requests = requests_of(*LONG)
    few = requests[:2]
    experts = np.concatenate([request.experts for request in requests])
    steps, few_steps = (sum(len(request.tokens) for request in played) * LAYERS for played in (requests, few))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "accesses.oracleGeneral.bin"
        write_accesses(experts, file)
        for policy, least in SHARES.items():
            run = LAYERS, EXPERTS, SLOTS, parse(policy), TIMING, LINK
            kernel.simulate(Run(few, *run))
            shares, gains, took = [], [], []
            for _ in range(5):
                took.append(seconds(lambda run=run: kernel.simulate(Run(requests, *run))))
                if libcachesim:
                    shares.append(at_one_size(libcachesim, file, SLOTS)[0] / took[-1])
                slow = seconds(lambda run=run: simulate(Run(few, *run)))
                gains.append(slow / few_steps / (took[-1] / steps))
            share = f"{statistics.median(shares):.3f} of libcachesim's LRU (at least {least:.3f}), " if shares else ""
            print(
                f"compiled: {policy}: {share}{statistics.median(gains):.0f} times SimPy (at least 30), "
                f"{steps / statistics.median(took):,.0f} layer-steps/s"
            )


def main() -> None:
    against_a_bare_loop()
    against_libcachesim_and_simpy()
