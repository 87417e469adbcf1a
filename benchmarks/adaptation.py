"""Count the requests that a policy needs after a task shift: `python -m benchmarks.adaptation TRACE`.

A shift runs `WARMUP` requests of one task, then `AFTER` of another, untimed. Requests differ in difficulty, so each of
the latter is compared with itself in the undisturbed run, where as many requests of its own task went before it. A
policy needs the least i such that the next `WINDOW` differences, from the i-th on, are on average at least -1 point.
The table is that of docs/results.md, over all ordered pairs of tasks that have enough requests.

Source: MoE-Infinity (arXiv 2401.14361), which prints the requests needed, but neither its own definition nor hit rates.
"""

import sys
from collections.abc import Sequence
from itertools import permutations

import numpy as np
import pandas as pd

from sim import sweep
from traces import Trace
from traces.trace import concatenate

POLICIES = ("lru", "eamc-blend", "eamc", "lfu-perfect")
CACHE_SIZE = "25%"
WARMUP, AFTER, WINDOW = 30, 40, 5
TOLERANCE = 0.01
"""How far below the undisturbed hit rate counts as recovered: one point."""


def requests_needed(differences: np.ndarray, window: int = WINDOW) -> int | None:
    """Return the least i with mean(differences[i : i + window]) >= -TOLERANCE; None where no whole window has it."""
    means = np.lib.stride_tricks.sliding_window_view(differences, window).mean(axis=-1)
    recovered = np.flatnonzero(means >= -TOLERANCE)
    return int(recovered[0]) if len(recovered) else None


def hit_rates(
    trace: Trace, before: Sequence[int], after: Sequence[int], policies: Sequence[str], cache_size: str
) -> dict[str, np.ndarray]:
    """Return by policy the hit rates of the requests `after`, once those `before` have run from an empty cache."""
    run = concatenate([trace.select(np.array([number])) for number in (*before, *after)])
    requests = sweep(run, policies, [cache_size], untimed=True, warmup_requests=len(before)).requests
    rates = (requests["hits"] / requests["lookups"]).groupby(requests["policy"])
    return {str(policy): rate.to_numpy() for policy, rate in rates}


def shifts(
    trace: Trace,
    policies: Sequence[str] = POLICIES,
    cache_size: str = CACHE_SIZE,
    warmup: int = WARMUP,
    after: int = AFTER,
) -> pd.DataFrame:
    """Return a row for each shift and policy: the tasks, and the differences in hit rate of the requests after it.

    Each task's requests are shuffled once: its first `warmup` come before, its next `after` after a shift. So no run
    has a request twice, and all shifts to a task share one undisturbed run.
    """
    rng = np.random.default_rng(0)
    tasks = trace.requests["task"].reset_index(drop=True).groupby(trace.requests["task"].to_numpy()).groups
    orders = {str(task): rng.permutation(numbers).tolist() for task, numbers in tasks.items()}
    orders = {task: numbers for task, numbers in orders.items() if len(numbers) >= warmup + after}
    undisturbed = {
        task: hit_rates(trace, numbers[:warmup], numbers[warmup:][:after], policies, cache_size)
        for task, numbers in orders.items()
    }
    rows = []
    for old, new in permutations(orders, 2):
        rates = hit_rates(trace, orders[old][:warmup], orders[new][warmup:][:after], policies, cache_size)
        rows += [
            {"from": old, "to": new, "policy": policy, "differences": rates[policy] - undisturbed[new][policy]}
            for policy in policies
        ]
    return pd.DataFrame(rows)


def table(rows: pd.DataFrame) -> str:
    """Return what each policy needed, least, mean and most. A shift without a recovered window needed more than all."""
    lines = [
        "| requests needed | min | mean | max | gap at the first request (points) |",
        "| --- | --- | --- | --- | --- |",
    ]
    for policy, differences in rows.groupby("policy", sort=False)["differences"]:
        last = len(differences.iloc[0]) - WINDOW
        needed = [last + 1 if (count := requests_needed(each)) is None else count for each in differences]
        mean, most = f"{np.mean(needed).round(1):g}", f"{max(needed)}"
        if max(needed) > last:
            mean, most = f"at least {mean}", f"over {last}"
        first = 100 * np.mean([each[0] for each in differences])
        lines.append(f"| {policy} | {min(needed)} | {mean} | {most} | {first:+.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(shifts(Trace.read(sys.argv[1], ["token_id"]))))
