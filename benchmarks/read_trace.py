"""Reading a trace, validation included, against a bare `pyarrow.parquet.read_table` of its routing files.

The trace has the size of a real one: 409 requests, 123,000 tokens, 24 layers x 32 experts, top-4.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pyarrow.parquet as pq

from traces.schema import ROUTING
from traces.synthetic import synthetic
from traces.trace import Trace
from traces.writer import write_trace

RUNS = 15
BOUND = 1.5


def seconds(play: Callable[[], object]) -> float:
    start = time.perf_counter()
    play()
    return time.perf_counter() - start


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        write_trace(synthetic(409, 301, 24, 32, 4, seed=0), path)
        Trace.read(path)
        pairs = [
            (seconds(lambda: Trace.read(path)), seconds(lambda: pq.read_table(path / ROUTING))) for _ in range(RUNS)
        ]
    ours, bare = (median(column) for column in zip(*pairs, strict=True))
    print(
        f"read a trace: {ours / bare:.2f} times a bare read_table (at most {BOUND}); "
        f"{ours * 1e3:.0f} ms against {bare * 1e3:.0f} ms for 123,109 tokens"
    )


if __name__ == "__main__":
    main()
