"""How often a trace uses experts again, as sim/prediction/data/reuse.toml has it: `python -m benchmarks.reuse TRACE`.

Experts of each layer stand in the order of their latest use. Printed is how many of a decoded token are those at
each place, in the mean of tokens and layers, the first token of each request aside.
"""

import sys

import numpy as np

from traces import Trace
from traces.steps import DECODE


def reuse(trace: Trace) -> np.ndarray:
    """Return float64[E]: the experts of a token by place in the order of the latest use."""
    L, E = trace.layers, trace.num_experts
    counts, events = np.zeros(E), 0
    for number in range(len(trace.requests)):
        steps, order = trace.steps(number), [list(range(E)) for _ in range(L)]
        for event in range(len(steps.offsets) - 1):
            step, layer = divmod(event, L)
            ids = (steps.experts[steps.offsets[event] : steps.offsets[event + 1]] - layer * E).tolist()
            places = sorted(order[layer].index(one) for one in ids)
            if step and steps.phase[step] == DECODE and ids:
                counts[places] += 1
                events += 1
            for place in reversed(places):
                del order[layer][place]
            order[layer][:0] = ids
    return counts / events


def main() -> None:
    found = reuse(Trace.read(sys.argv[1]))
    print(f"reuse = {[round(float(each), 4) for each in found]}")


if __name__ == "__main__":
    main()
