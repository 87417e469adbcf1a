"""The SimPy engine against a bare SimPy loop of the same number of waits: at most 3 times its time under LRU.

The other policies' own work (matching, proposing hundreds of experts an event) comes on top and is shown beside it.

A synthetic trace of the shape of gpt-oss-20b (24 layers x 32 experts, top-4) at a quarter of all experts.
"""

import statistics
import time
from collections.abc import Callable
from unittest.mock import patch

import simpy

from policies.registry import parse
from sim.model import simulate
from sim.timing import FixedTiming, Link
from traces.synthetic import synthetic

ROUNDS = 9
LAYERS, EXPERTS, SLOTS = 24, 32, 192
TIMING = FixedTiming(dense=100_000, expert=20_000, expert_per_token=1_000, combine=2_000, head=300_000)
LINK = Link(latency_ns=10_000, ns_per_byte_num=1, ns_per_byte_den=24, expert_bytes=13_219_200)


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


def main() -> None:
    trace = synthetic(requests=4, tokens=150, layers=LAYERS, experts=EXPERTS, top_k=4, seed=1)
    requests = [trace.steps(i) for i in range(4)]
    steps = sum(len(request.tokens) for request in requests) * LAYERS
    for policy in ("lru", "eamc", "lru+popular", "belady"):

        def play(policy: str = policy) -> object:
            return simulate(requests, LAYERS, EXPERTS, SLOTS, parse(policy), TIMING, LINK)

        waits = count_waits(play)
        pairs = [(seconds(play), seconds(lambda waits=waits: bare_loop(waits))) for _ in range(ROUNDS)]
        ratio = statistics.median(ours / bare for ours, bare in pairs)
        ours = statistics.median(ours for ours, _ in pairs)
        print(
            f"engine: {policy}: {ratio:.2f} times a bare SimPy loop of {waits / steps:.1f} waits a layer-step"
            f"{' (at most 3)' if policy == 'lru' else ''}; {steps / ours:,.0f} layer-steps/s"
        )
