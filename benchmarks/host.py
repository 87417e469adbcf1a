"""What the replay's host loop costs a layer, beside what policies cost: `python -m benchmarks host`.

The driver runs synthetic decode of DeepSeek-V2-Lite's shape on a logical clock, which answers at once: what is left is
bookkeeping (residency, pump, accounting), policy overhead, and the little that the clock does. The ratio
is to the compiled engine, which does the same in one loop. On a GPU, `host_us_per_layer` says it of a real run.
"""

import time
from collections.abc import Callable

from policies.core.policy import Shape
from policies.core.spec import parse
from sim.engines import compiled_engine
from sim.engines.simpy_engine import SimpyDevice
from sim.loop.driver import play
from sim.loop.log import RunLog
from sim.loop.requests import Requests
from sim.loop.run import gpu_run
from sim.profiles.timing import FixedTiming, Link
from traces.synthetic import synthetic

LAYERS, EXPERTS, TOP_K = 26, 64, 6
TIMING = FixedTiming(40_000, 10_000, 0, 5_000, 100_000)
EXPERT_BYTES = 17_301_504
LINK = Link(8_000, 1, 55, EXPERT_BYTES)
POLICIES = ("lru", "eamc", "eamc-blend")


def main() -> None:
    """Print microseconds a layer."""
    trace = synthetic(6, 40, LAYERS, EXPERTS, TOP_K, seed=1)
    requests, shape = Requests(trace), Shape(LAYERS, EXPERTS)
    slots = shape.total // 4
    print(f"host loop of a replay, {LAYERS} x {EXPERTS} experts, top-{TOP_K}, a quarter in the cache:")
    for text in POLICIES:
        run = gpu_run(requests, Shape(LAYERS, EXPERTS), slots, parse(text), TIMING, LINK, experts_per_layer=1.0)
        play(run, SimpyDevice(TIMING, LINK))
        simulated = _seconds(lambda run=run: compiled_engine.simulate(run))
        whole = _seconds(lambda run=run: play(run, SimpyDevice(TIMING, LINK)))
        layers = sum(len(request.tokens) for request in requests) * LAYERS
        print(
            f"  {text}: {whole / layers * 1e6:.1f} us a layer, the logical clock's overhead included;  "
            f"{whole / simulated:.1f} times the compiled engine"
        )


def _seconds(play_once: Callable[[], RunLog]) -> float:
    """The least of three."""
    took = []
    for _ in range(3):
        began = time.perf_counter()
        play_once()
        took.append(time.perf_counter() - began)
    return min(took)
