"""The general factors of the back-test chosen again, each machine left out in turn: `python -m benchmarks.factors`.

Over static splits, whose time is a sum: the rows that ship, and of both blind tests those of quality A and B. Factors
start from round figures and descend, one at a time, to the least mean of |log(predicted / measured)|, machines with
equal weights. Some minutes on two cores; it writes nothing.
"""

from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.backtest import DATA, file
from sim.prediction import table
from sim.prediction.case import Case
from sim.prediction.errors import class_of, of_rows
from sim.prediction.tables import FACTORS
from sim.prediction.timing import Runtime

Factor = tuple[str, ...]

CHOSEN: dict[Factor, tuple[float, float, float]] = {
    ("gpu", "hbm", "kernels_of_read"): (0.5, 0.3, 0.9),
    ("gpu", "hbm", "launch_us"): (1.6, 0.8, 4),
    ("gpu", "amd", "kernels_of_read"): (0.8, 0.4, 0.95),
    ("gpu", "amd", "launch_us"): (5, 0.8, 8),
    ("gpu", "apple_m1", "kernels_of_read"): (0.8, 0.6, 0.95),
    ("gpu", "apple_m1", "launch_us"): (10, 0.8, 15),
    ("gpu_kv_cache",): (1.8, 0.8, 4),
    ("kernels", "latent"): (30, 1, 70),
    ("kernels", "state"): (15, 1, 60),
    ("hop_us",): (50, 20, 150),
    ("cpu_us_per_layer",): (100, 10, 250),
    ("barrier_us_per_thread",): (0.05, 0, 0.2),
    ("host_experts_of_stream",): (1.0, 0.7, 1.25),
    ("host_stream_of_peak",): (0.8, 0.6, 0.95),
    ("cpu", "desktop", "threads"): (16, 4, 64),
    ("cpu", "desktop", "gflop_per_s_per_thread"): (20, 8, 80),
    ("cpu", "server", "threads"): (32, 10, 128),
    ("cpu", "server", "gflop_per_s_per_thread"): (20, 8, 80),
}
"""Where each begins, and between what it is searched. Kernels of GPUs with GDDR are those measured on an A10."""

UNSEEN = ("unseen", "unseen_2")
"""Groups of rows that were predicted before any factor was chosen with them."""

ROUNDS, STEP, MOST = 4, 0.25, 0.7
"""Of the descent; the first step; an error above which no more counts, as of a row that is another run."""

AT_MOST = 10
"""Rows of one machine that factors are chosen with."""


class Split(NamedTuple):
    machine: str
    case: Case


def splits() -> list[Split]:
    paths = [*file.shipped(), *(DATA / f"{name}.toml" for name in UNSEEN)]
    rows = [row for path in paths for row in file.read(path) if path.parent != DATA or row.quality in ("A", "B")]
    cases = [Case(row) for row in rows if row.timed and row.machine and not row.unsimulated]
    static = [case for case in cases if case.static and case.row.setting.cpu_layers < 0]
    return [Split(case.row.machine.title or case.row.machine.name, case) for case in static if case.row.machine]


def ratio(case: Case) -> float:
    """Return predicted over measured speed, by the sum that a static split is."""
    case.__dict__.pop("hardware", None)
    setting, profile, own = case.row.setting, case.profile, case.hardware
    assert own
    timing = Runtime(own, profile, setting.all_on == "cpu" or not own.memory_bandwidth_gb_per_s)
    layers, k, context = profile.moe_layers, profile.top_k, setting.context or FACTORS.context
    host = 0 if setting.all_on else setting.host_layers
    host = round(setting.host_share * layers) if host < 0 else host
    ns = timing.head_ns(1)
    for layer in range(layers):
        ns += timing.dense_ns(layer, 1, context) + timing.combine_ns(1)
        ns += timing.hop_ns + k * timing.host_ns(1, layer) if layer < host else k * timing.expert_ns(1, layer)
    speed = 1e9 / ns
    return speed / case.row.measured if case.row.metric == "speed" else speed * case.row.measured


def held(factor: Factor) -> Any:
    """Return what a factor is a field of."""
    return reduce(getattr, factor[:-1], FACTORS)


def loss(some: list[Split]) -> float:
    sizes = Counter(each.machine for each in some)
    errors = [min(abs(np.log(ratio(each.case))), MOST) for each in some]
    weights = [sizes[each.machine] ** -0.5 for each in some]
    return float(np.average(errors, weights=weights))


def choose(some: list[Split]) -> None:
    """Set the factors in memory to those that fit best."""
    for factor, (start, _, _) in CHOSEN.items():
        setattr(held(factor), factor[-1], start)
    best, steps = loss(some), dict.fromkeys(CHOSEN, STEP)
    for _ in range(ROUNDS):
        for factor, (_, low, high) in CHOSEN.items():
            where, key = held(factor), factor[-1]
            before = getattr(where, key)
            for step in (steps[factor], -steps[factor]):
                setattr(where, key, min(max(before * (1 + step), low), high))
                if (now := loss(some)) < best - 1e-5:
                    best = now
                    break
                setattr(where, key, before)
            else:
                steps[factor] /= 2


def inside(every: list[Split], ratios: NDArray[np.float64]) -> float:
    """Return the share of machines whose speed lies in the interval that the other machines' errors give."""
    held = defaultdict[str, list[bool]](list)
    for each, ratio in zip(every, ratios.tolist(), strict=True):
        machine, kind = each.case.row.machine, class_of(each.case)
        interval = of_rows(kind, [row for row in table("errors")[kind] if machine and row["machine"] != machine.name])
        held[each.machine].append(interval.low <= 1 / ratio <= interval.high)
    return float(np.mean([np.mean(each) for each in held.values()]))


def summed_up(name: str, every: list[Split], ratios: NDArray[np.float64]) -> str:
    by_machine = defaultdict[str, list[float]](list)
    for each, value in zip(every, ratios.tolist(), strict=True):
        by_machine[each.machine].append(abs(value - 1))
    medians = [float(np.median(each)) for each in by_machine.values()]
    bias = np.exp(np.log(ratios).mean()) - 1
    return (
        f"{name}: median {np.median(np.abs(ratios - 1)):.1%} of {len(ratios)} splits, bias {bias:+.1%}; "
        f"of {len(medians)} machines, each by its median, {np.median(medians):.1%}, "
        f"{inside(every, ratios):.0%} in the others' interval"
    )


def without(machine: str) -> dict[int, float]:
    """Return the ratios of the rows of a machine, by place, with factors that were chosen without it."""
    every = splits()
    names, left = [each.machine for each in every], []
    for place, each in enumerate(every):
        alike = names.count(each.machine) // AT_MOST + 1
        left += [each] if names[:place].count(each.machine) % alike == 0 else []
    choose([each for each in left if each.machine != machine])
    return {place: ratio(each.case) for place, each in enumerate(every) if each.machine == machine}


def main() -> None:
    every = splits()
    with ProcessPoolExecutor() as pool:
        found = pool.map(without, sorted({each.machine for each in every}))
        left_out = {place: value for ratios in found for place, value in ratios.items()}
    for name, is_new in (("rows that ship", False), ("blind tests", True)):
        places = [place for place, each in enumerate(every) if is_new == each.case.row.group.startswith("unseen")]
        some = [every[place] for place in places]
        print(summed_up(f"{name}, in view", some, np.array([ratio(each.case) for each in some])))
        print(summed_up(f"{name}, left out", some, np.array([left_out[place] for place in places])))


if __name__ == "__main__":
    main()
