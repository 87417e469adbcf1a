"""A trace of 1 M tokens x 26 layers x top-6 of 64: its bytes a token, and reading it, validation included, against a
bare `pyarrow.parquet.read_table` of its routing files.

Its ids are drawn evenly, the worst case for a compressor.
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow.parquet as pq

from traces.schema import REQUESTS, ROUTING
from traces.synthetic import synthetic
from traces.trace import Trace
from traces.writer import TraceWriter

LAYERS, EXPERTS, TOP_K = 26, 64, 6
PIECES, REQUESTS_OF_A_PIECE, TOKENS_OF_A_REQUEST = 40, 40, 625
RUNS = 7
BOUND = 1.3
BYTES_BOUND = 125


def write(path: Path) -> int:
    """Write the trace piece by piece; returns its tokens."""
    rng = np.random.default_rng(0)
    tokens = REQUESTS_OF_A_PIECE * TOKENS_OF_A_REQUEST
    piece = synthetic(REQUESTS_OF_A_PIECE, 1, LAYERS, EXPERTS, TOP_K, seed=0, prompt_tokens=TOKENS_OF_A_REQUEST - 1)
    even = np.argsort(rng.random((tokens, LAYERS, EXPERTS), np.float32), -1)[..., :TOP_K].astype(np.uint8)
    with TraceWriter(path, piece.meta) as writer:
        for n in range(PIECES):
            ids = rng.permutation(EXPERTS).astype(np.uint8)[even]
            step = piece.step + np.uint32(n * (int(piece.step.max()) + 1))
            names = piece.requests.assign(id=[f"{n}-{i}" for i in range(REQUESTS_OF_A_PIECE)])
            token_id = rng.zipf(1.3, tokens).clip(0, 50_000).astype(np.int32)
            writer.add(replace(piece, experts=ids, step=step, requests=names, token_id=token_id))
    return tokens * PIECES


def seconds(play: Callable[[], object]) -> float:
    start = time.perf_counter()
    play()
    return time.perf_counter() - start


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        tokens = write(path)
        files = [path / REQUESTS, *(path / ROUTING).iterdir()]
        size = sum(file.stat().st_size for file in files) / tokens
        Trace.read(path)
        pairs = [
            (seconds(lambda: Trace.read(path)), seconds(lambda: pq.read_table(path / ROUTING))) for _ in range(RUNS)
        ]
    ours, bare = (median(column) for column in zip(*pairs, strict=True))
    print(
        f"a trace of {tokens:,} tokens x {LAYERS} layers x {TOP_K}: {size:.0f} bytes a token (at most {BYTES_BOUND}); "
        f"read in {ours / bare:.2f} times a bare read_table (at most {BOUND}), {ours:.2f} s against {bare:.2f} s"
    )


if __name__ == "__main__":
    main()
