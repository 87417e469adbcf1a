"""LRU at every cache size in one pass, against libcachesim's LRU at one size: at most 4 of its runs.

libcachesim (GPL, a test-only extra) reads the same accesses from its own binary format and runs them in C, no call
of Python for an access; of three sizes its mean counts. Belady at every size is shown beside it. Accesses are a
synthetic trace's of the shape of gpt-oss-20b (24 x 32, top-4) and of DeepSeek-V2-Lite (26 x 64, top-6).
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np

from policies.core.stack_distances import Ids, each_alone, lru_misses
from sim.analysis.curves import accesses, belady_misses, next_uses
from traces.synthetic import synthetic

SHAPES = {"24 x 32, top-4": (24, 32, 4), "26 x 64, top-6": (26, 64, 6)}
REQUESTS, TOKENS = 20, 500
SHARES = (0.10, 0.25, 0.50)
ROUNDS = 7
BOUND = 4

RECORD = np.dtype([("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])
"""libCacheSim's oracleGeneral."""


def seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def write_accesses(experts: Ids, file: Path) -> None:
    """In libcachesim's binary format, with the next use of each."""
    n, alone = len(experts), each_alone(experts)
    following = next_uses(experts.astype(np.int32), int(experts.max(initial=0)) + 1, alone)
    records = np.zeros(n, RECORD)
    records["time"], records["id"], records["size"] = np.arange(n), experts, 1
    records["next"] = np.where(following < n, following, -1)
    records.tofile(file)


def at_one_size(libcachesim: ModuleType, file: Path, slots: int, policy: str = "LRU") -> tuple[float, float]:
    """Seconds and miss ratio of one run of libcachesim's policy of that name."""
    reader = libcachesim.TraceReader(str(file), libcachesim.TraceType.ORACLE_GENERAL_TRACE)
    cache = getattr(libcachesim, policy)(slots)
    began = time.process_time()
    ratio, _ = cache.process_trace(reader)
    return time.process_time() - began, ratio


def measure(libcachesim: ModuleType, shape: str, experts: Ids, total: int) -> None:
    curve = lru_misses(experts, total)
    belady_misses(experts, total)
    sizes = [round(share * total) for share in SHARES]
    ours, belady, theirs = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "accesses.oracleGeneral.bin"
        write_accesses(experts, file)
        for _ in range(ROUNDS):
            ours.append(seconds(lambda: lru_misses(experts, total)))
            belady.append(seconds(lambda: belady_misses(experts, total)))
            runs = [at_one_size(libcachesim, file, slots) for slots in sizes]
            theirs.append(statistics.mean(took for took, _ in runs))
    for slots, (_, ratio) in zip(sizes, runs, strict=True):
        assert round(ratio * len(experts)) == curve[slots], (slots, ratio, curve[slots])
    lru_ratio, belady_ratio = (
        statistics.median(a / b for a, b in zip(some, theirs, strict=True)) for some in (ours, belady)
    )
    each = 1e9 / len(experts)
    print(
        f"curves {shape}: LRU at all {total} sizes in {lru_ratio:.2f} runs of libcachesim's LRU at one size (at most "
        f"{BOUND}), {statistics.median(ours) * each:.0f} against {statistics.median(theirs) * each:.0f} ns an access; "
        f"Belady at all sizes in {belady_ratio:.2f}"
    )


def main() -> None:
    try:
        import libcachesim
    except ImportError:
        print("curves: skipped, libcachesim (GPL, for tests only) is not installed: pip install -e '.[oracle]'")
        return
    for shape, (layers, experts, top_k) in SHAPES.items():
        trace = synthetic(REQUESTS, TOKENS, layers, experts, top_k, seed=1)
        used, _ = accesses(trace.steps(i) for i in range(REQUESTS))
        measure(libcachesim, shape, used, layers * experts)


if __name__ == "__main__":
    main()
