"""A trace that is run from its files is the trace that is read whole."""

import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.ahead import with_lookahead
from tests.support.same import assert_same_shards, assert_same_steps
from tests.support.strategies import traces
from traces import InputError, Trace, blocks, demo_trace
from traces.reader import RUN, Files
from traces.schema import GROWING, REQUESTS, ROUTING
from traces.shards import Shards
from traces.synthetic import synthetic
from traces.writer import TraceWriter, write_trace


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """(thread, file) of each batch that is decoded from now on."""
    seen: list[tuple[int, str]] = []
    plain = Files.batches

    def batches(self: Files, columns: Any, size: int, file: int = 0, group: int = 0) -> Iterator[pa.Table]:
        for batch in plain(self, columns, size, file, group):
            seen.append((threading.get_ident(), self.where))
            yield batch

    monkeypatch.setattr(Files, "batches", batches)
    return seen


@settings(max_examples=30, deadline=None)
@given(traces(max_requests=7), st.data())
def test_a_trace_played_from_shards_is_the_trace_read_whole(trace: Trace, data: st.DataObject) -> None:
    integer = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    R = len(trace.requests)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as small:
        small.setattr("traces.writer.FILE_ROWS", integer(1, 20))
        small.setattr("traces.parquet.ROW_GROUP_BYTES", integer(1, 300))
        small.setattr("traces.writer.REQUEST_BYTES", integer(1, 5) * 8 * trace.layers * trace.num_experts)
        small.setattr("traces.blocks.BLOCK_BYTES", integer(1, 400))
        small.setattr("traces.blocks.SHARED_BYTES", integer(1, 400))
        small.setattr("traces.blocks.OWN_BYTES", integer(1, 400))
        path = Path(folder) / "trace"
        writer = TraceWriter(path, trace.meta)
        r = 0
        while r < R:  # requests of a batch interleave
            batch = np.arange(r, min(R, r + integer(1, 3)))
            writer.add(trace.select(batch))
            writer.flush()
            r = int(batch[-1]) + 1
        growing = data.draw(st.booleans())
        if not growing:
            writer.close()
        assert (path / GROWING).exists() == growing
        if not growing and data.draw(st.booleans()):  # killed before the last requests were listed
            listed = pq.read_table(path / REQUESTS)
            pq.write_table(listed.slice(0, integer(1, len(listed))), path / REQUESTS)
        for lookahead in (True, False):
            whole = Trace.read(path, [name for name in RUN if lookahead or not name.startswith("lookahead")])
            shards = Shards.open(path, lookahead)
            requests = data.draw(st.permutations(range(len(whole.requests))))
            assert_same_shards(whole, shards, [*requests, *range(len(whole.requests))])
            n = integer(1, len(whole.requests))
            chosen = np.sort(requests[:n])
            assert_same_shards(whole.head(n), shards.head(n))
            assert_same_shards(whole.select(chosen), shards.select(chosen))
            if whole.phases == "decode":
                with pytest.raises(InputError, match="holds no prefill"):
                    shards.as_decode()
            else:
                assert_same_shards(whole.as_decode(), shards.as_decode())
            if whole.phases == "prefill":
                with pytest.raises(InputError, match="decodes no token"):
                    shards.without_prompts()
            else:
                decoded = shards.without_prompts()
                assert_same_shards(whole.without_prompts(), decoded)
                assert_same_shards(whole.without_prompts().select(chosen), decoded.select(chosen))


def test_rows_may_lie_in_any_order_of_requests(tmp_path: Path) -> None:
    trace = synthetic(9, 5, 2, 6, 2, seed=0, prompt_tokens=3)
    write_trace(trace, tmp_path / "t")
    part = tmp_path / "t" / ROUTING / "part-00000.parquet"
    table = pq.read_table(part, partitioning=None)
    order = np.random.default_rng(0).permutation(9)
    request = table.column("request").to_numpy()
    rows = np.concatenate([np.flatnonzero(request == r) for r in order])
    mixed = np.sort(rows.reshape(3, -1), axis=1).ravel()  # three batches of three requests each
    for chosen in (rows, mixed):
        pq.write_table(table.take(pa.array(chosen)), part, row_group_size=7)
        assert_same_shards(Trace.read(tmp_path / "t"), Shards.open(tmp_path / "t"))


def test_a_large_row_group_is_gone_through_in_parts_each_decoded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decoded: list[tuple[int, str]]
) -> None:
    trace = synthetic(40, 10, 2, 6, 2, seed=0)
    write_trace(trace, tmp_path / "t")
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 30 * 17)
    monkeypatch.setattr(blocks, "SHARED_BYTES", 1)
    shards = Shards.open(tmp_path / "t")
    assert np.diff(shards._rows.starts).tolist() == [30] * 13 + [10]
    decoded.clear()
    assert_same_shards(trace_at(tmp_path / "t"), shards)
    assert len([where for _, where in decoded if where.endswith(ROUTING)]) == 14
    assert_same_shards(trace_at(tmp_path / "t"), shards, reversed(range(40)))


def trace_at(path: Path) -> Trace:
    return Trace.read(path, RUN)


def test_a_small_trace_is_decoded_once_whatever_is_asked_for(decoded: list[tuple[int, str]]) -> None:
    shards = Shards.open(demo_trace())
    decoded.clear()
    for requests in (range(64), reversed(range(64)), range(64)):
        for i in requests:
            shards.steps(i)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(shards.steps, range(64)))
    assert 1 <= len(decoded) == len(shards._rows) + len(shards._eams)


def regroup(path: Path, rows: int) -> None:
    """Let each row group have `rows` rows."""
    for part in (path / ROUTING).iterdir():
        pq.write_table(pq.read_table(part, partitioning=None), part, row_group_size=rows)


def small_blocks(path: Path, monkeypatch: pytest.MonkeyPatch, requests: int) -> Trace:
    """A trace of 8 tokens a request, four requests to a block, of which none is shared for long."""
    for limit in ("SHARED_BYTES", "OWN_BYTES"):
        monkeypatch.setattr(blocks, limit, 1)
    trace = synthetic(requests, 8, 2, 6, 2, seed=0)
    write_trace(trace, path)
    regroup(path, 32)
    return trace


def test_threads_at_different_places_do_not_take_away_each_others_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decoded: list[tuple[int, str]]
) -> None:
    trace = small_blocks(tmp_path / "t", monkeypatch, 64)
    shards = Shards.open(tmp_path / "t")
    together = threading.Barrier(4)
    decoded.clear()

    def play(start: int) -> None:
        for i in range(16):
            together.wait(60)
            assert_same_steps(shards.steps(start + i), trace.steps(start + i))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(play, (0, 16, 32, 48)))
    assert len([where for _, where in decoded if where.endswith(ROUTING)]) == 16 == len(shards._rows)


def test_threads_that_go_as_they_like_play_the_same_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = small_blocks(tmp_path / "t", monkeypatch, 64)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 10 * 17)
    shards = Shards.open(tmp_path / "t")

    def play(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for i in [*range(seed, 64), *rng.integers(0, 64, 64).tolist(), *reversed(range(64))]:
            assert_same_steps(shards.steps(i), trace.steps(i))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(play, range(6)))


def test_blocks_that_are_kept_stay_within_their_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(tmp_path / "t", monkeypatch, 64)
    size = 32 * 17
    monkeypatch.setattr(blocks, "SHARED_BYTES", 5 * size)
    monkeypatch.setattr(blocks, "OWN_BYTES", 2 * size)
    shards = Shards.open(tmp_path / "t")
    for i in range(64):
        shards.steps(i)
    held = shards._rows._slots.values()
    assert [slot.nbytes for slot in held] == [size] * 5


def test_of_a_request_spread_over_the_whole_trace_no_more_than_its_own_rows_are_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = small_blocks(tmp_path / "t", monkeypatch, 64)
    write_trace(replace(trace, step=np.tile(np.arange(8, dtype=np.uint32), 64)), tmp_path / "t", overwrite=True)
    regroup(tmp_path / "t", 32)
    made: list[weakref.ref[np.ndarray]] = []
    most = []

    def counted(rows: blocks.Arrays) -> blocks.Arrays:
        most.append(sum(each() is not None for each in made))
        rows = {name: array.copy() for name, array in rows.items()}
        made.append(weakref.ref(rows["experts"]))
        return rows

    monkeypatch.setattr("traces.shards.by_request", counted)
    shards = Shards.open(tmp_path / "t")
    assert_same_steps(shards.steps(5), trace.steps(5))
    assert len(most) > 8
    assert max(most) <= 3  # what is empty, the block before, and this one


PLAY_PICKLED = """
import hashlib, pickle, sys
shards = pickle.load(sys.stdin.buffer)
digest = hashlib.sha256()
for i in range(len(shards.requests)):
    digest.update(shards.steps(i).experts.tobytes())
print(shards.name, len(shards.requests), digest.hexdigest())
"""


def test_pickled_it_is_played_in_another_process(tmp_path: Path) -> None:
    import hashlib

    write_trace(synthetic(6, 5, 2, 6, 2, seed=0, prompt_tokens=3), tmp_path / "t")
    shards = Shards.open(tmp_path / "t").as_decode().head(5)
    shards.steps(0)  # a block is held, and a file is open
    digest = hashlib.sha256()
    for i in range(5):
        digest.update(shards.steps(i).experts.tobytes())
    command = [sys.executable, "-c", PLAY_PICKLED]
    done = subprocess.run(command, input=pickle.dumps(shards), capture_output=True, check=True, timeout=120)
    assert done.stdout.decode().strip() == f"t (prefill as decode) 5 {digest.hexdigest()}"


def test_a_trace_that_is_replaced_while_it_is_played_is_told(tmp_path: Path) -> None:
    write_trace(synthetic(6, 5, 2, 6, 2, seed=0), tmp_path / "t")
    shards = Shards.open(tmp_path / "t")
    other = synthetic(6, 4, 2, 6, 2, seed=0)
    write_trace(other, tmp_path / "t", overwrite=True)
    with pytest.raises(InputError, match="was changed while it was read"):
        shards.steps(0)
    shutil.rmtree(tmp_path / "t")
    with pytest.raises(InputError, match=r"part-00000\.parquet is damaged or cannot be read: .*No such file"):
        shards.steps(0)


def test_a_fingerprint_is_of_the_content_not_of_place_or_time(tmp_path: Path) -> None:
    trace = synthetic(6, 5, 2, 6, 2, seed=0)
    write_trace(trace, tmp_path / "t")
    shutil.copytree(tmp_path / "t", tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / REQUESTS).touch()
    write_trace(trace, tmp_path / "again")
    prints = {Shards.open(tmp_path / name).fingerprint for name in ("t", "elsewhere", "again")}
    assert len(prints) == 1
    assert Shards.open(tmp_path / "t").head(2).fingerprint in prints


def test_traces_that_differ_have_different_fingerprints(tmp_path: Path) -> None:
    trace = synthetic(6, 5, 2, 6, 2, seed=0, prompt_tokens=2)
    swapped = trace.experts.copy()
    swapped[7] = swapped[7, :, ::-1]
    others = [
        trace,
        trace.head(5),
        replace(trace, experts=swapped),
        replace(trace, requests=trace.requests.assign(task="another")),
        replace(trace, meta=replace(trace.meta, model="another")),
        with_lookahead(trace, trace.experts),
        synthetic(6, 5, 2, 6, 2, seed=1, prompt_tokens=2),
    ]
    for n, other in enumerate(others):
        write_trace(other, tmp_path / str(n))
    assert len({Shards.open(tmp_path / str(n)).fingerprint for n in range(len(others))}) == len(others)
