"""What the replay's host loop costs a layer, beside what policies cost: `python -m benchmarks host`.

The driver runs synthetic decode of DeepSeek-V2-Lite's shape on a logical clock, which answers at once: what is left is
bookkeeping, policy overhead, and the little that the clock does. The ratio is to the compiled engine, which does the
same in one loop. Then by part: the compiled machine (policies included), each kind of call into the device, and the
rest, which is Python between them. Timing the parts takes time. On a GPU a run's `host_us_per_layer` is the machine and
Python, `copy_us_per_layer` and the like are the calls.
"""

import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from policies.core.policy import Shape
from policies.core.spec import parse
from sim.engines import compiled_engine
from sim.engines.simpy_engine import SimpyDevice
from sim.loop import machine, session
from sim.loop.driver import Driver
from sim.loop.log import RunLog
from sim.loop.requests import Requests
from sim.loop.run import Run, gpu_run
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
        Driver(run, SimpyDevice(TIMING, LINK)).run(lambda row: None)
        simulated = _seconds(lambda run=run: compiled_engine.simulate(run))
        whole = _seconds(lambda run=run: Driver(run, SimpyDevice(TIMING, LINK)).run(lambda row: None))
        layers = sum(len(request.tokens) for request in requests) * LAYERS
        print(
            f"  {text}: {whole / layers * 1e6:.1f} us a layer, the logical clock's overhead included;  "
            f"{whole / simulated:.1f} times the compiled engine"
        )
        parts = _parts(run, layers)
        print("    us a layer (calls): " + ", ".join(f"{name} {us:.1f} ({calls:.1f})" for name, us, calls in parts))


def _parts(run: Run, layers: int) -> list[tuple[str, float, float]]:
    """Return by part of the loop: its name, microseconds a layer and calls a layer."""
    spent: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        row = spent.setdefault(name, [0.0, 0])

        def timed_call(*given: Any) -> Any:
            began = time.perf_counter()
            answer = call(*given)
            row[0] += time.perf_counter() - began
            row[1] += 1
            return answer

        return timed_call

    device = SimpyDevice(TIMING, LINK)
    for name in ("copy", "dense", "experts", "combine", "head", "completions"):
        setattr(device, name, timed(f"device.{name}", getattr(device, name)))
    with patch.object(machine, "CALL", timed("machine", machine.CALL)) as call, patch.object(session, "CALL", call):
        began = time.perf_counter()
        Driver(run, device).run(lambda row: None)
        whole = time.perf_counter() - began
    rest = whole - sum(seconds for seconds, _ in spent.values())
    return [(name, row[0] / layers * 1e6, row[1] / layers) for name, row in ({**spent, "Python": [rest, 0]}).items()]


def _seconds(play_once: Callable[[], RunLog]) -> float:
    """The least of three."""
    took = []
    for _ in range(3):
        began = time.perf_counter()
        play_once()
        took.append(time.perf_counter() - began)
    return min(took)
