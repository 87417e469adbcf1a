"""Joined and cut traces hold the requests that were asked for, unchanged."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.same import assert_same
from tests.support.strategies import traces
from traces import InputError, Trace
from traces.edit import Source, join
from traces.reader import EXTRA
from traces.synthetic import synthetic
from traces.trace import concatenate
from traces.writer import write_trace


def made(folder: Path, name: str, seed: int, **changes: Any) -> Path:
    trace = synthetic(6, 4, 2, 8, 2, seed=seed, prompt_tokens=2)
    requests = trace.requests.assign(id=[f"{name}{r}" for r in range(6)])
    write_trace(replace(trace, requests=requests, meta=replace(trace.meta, **changes)), folder / name)
    return folder / name


@settings(max_examples=20, deadline=None)
@given(traces(), st.data())
def test_what_is_kept_is_what_was_there(trace: Trace, data: st.DataObject) -> None:
    keep = np.array(data.draw(st.lists(st.booleans(), min_size=len(trace.requests), max_size=len(trace.requests))))
    with tempfile.TemporaryDirectory() as folder:
        write_trace(trace, Path(folder) / "a")
        source = Source.open(Path(folder) / "a").only(keep)
        if not keep.any():
            with pytest.raises(InputError, match="is chosen: nothing was written"):
                join([source], Path(folder) / "b")
            assert not (Path(folder) / "b").exists()
            return
        join([source], Path(folder) / "b")
        assert_same(trace.select(np.flatnonzero(keep)), Trace.read(Path(folder) / "b", EXTRA), EXTRA)


def test_joined_traces_are_one_after_the_other_and_so_are_their_steps(tmp_path: Path) -> None:
    a, b = made(tmp_path, "a", 0), made(tmp_path, "b", 1)
    join([Source.open(a), Source.open(b)], tmp_path / "c")
    first, second = Trace.read(a), Trace.read(b)
    later = replace(second, step=second.step + first.step.max() + 1)
    assert_same(concatenate([first, later]), Trace.read(tmp_path / "c"))


def test_steps_beyond_what_a_trace_can_number_are_refused(tmp_path: Path) -> None:
    a, trace = made(tmp_path, "a", 0), synthetic(2, 4, 2, 8, 2, seed=1, prompt_tokens=2)
    late = trace.step + np.uint32(2**32 - 1 - trace.step.max())
    write_trace(replace(trace, step=late), tmp_path / "late")
    with pytest.raises(InputError, match="above 2"):
        join([Source.open(a), Source.open(tmp_path / "late")], tmp_path / "c", prefix=True)
    join([Source.open(tmp_path / "late"), Source.open(tmp_path / "late")][:1], tmp_path / "d")


def test_a_trace_twice_needs_other_ids(tmp_path: Path) -> None:
    a = Source.open(made(tmp_path, "a", 0))
    b = Source.open(made(tmp_path, "b", 1))
    again = replace(b, labels=a.labels)
    with pytest.raises(InputError, match=r"id 'a0' would occur twice; --prefix-ids"):
        join([a, again], tmp_path / "c")
    with pytest.raises(InputError, match="id 'a/a0' would occur twice; give each trace once"):
        join([a, a], tmp_path / "c", prefix=True)
    join([a, again], tmp_path / "c", prefix=True)
    assert Trace.read(tmp_path / "c").requests["id"].tolist()[5:7] == ["a/a5", "b/a0"]


def test_traces_of_different_models_are_not_joined(tmp_path: Path) -> None:
    a, b = made(tmp_path, "a", 0), made(tmp_path, "b", 1, model="other")
    with pytest.raises(InputError, match=r"b and .*a cannot be joined: model is 'other', there 'synthetic'"):
        join([Source.open(a), Source.open(b)], tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_what_traces_differ_in_is_left_out(tmp_path: Path) -> None:
    a = made(tmp_path, "a", 0, settings={"seed": 1, "batch_size": 2}, mode="generate", hidden_size=4)
    b = made(tmp_path, "b", 1, settings={"seed": 2, "batch_size": 2}, mode="teacher-forced")
    trace = Trace.read(a, EXTRA)
    write_trace(replace(trace, weights=np.ones(trace.experts.shape, np.float16)), a, overwrite=True)
    join([Source.open(a), Source.open(b)], tmp_path / "c")
    joined = Trace.read(tmp_path / "c", EXTRA)
    assert joined.meta.settings == {"batch_size": 2}
    assert (joined.meta.mode, joined.meta.hidden_size, joined.weights) == ("mixed", None, None)


def test_a_sample_repeats_nothing_keeps_the_order_and_follows_the_seed(tmp_path: Path) -> None:
    source = Source.open(made(tmp_path, "a", 0))
    drawn = [np.flatnonzero(source.sampled(3, seed).keep).tolist() for seed in (0, 0, 1, 2, 3)]
    assert drawn[0] == drawn[1]
    assert len({tuple(one) for one in drawn}) > 1
    assert all(len(set(one)) == 3 for one in drawn)
    tasks = source.labels["task"]
    each = source.sampled(1, 0, by="task")
    assert sorted(tasks[each.keep]) == sorted(set(tasks))
    with pytest.raises(InputError, match="holds 6 requests; 7 cannot be drawn"):
        source.sampled(7, 0)


def test_a_trace_is_not_written_over_itself(tmp_path: Path) -> None:
    a = made(tmp_path, "a", 0)
    with pytest.raises(InputError, match="is read and cannot be written at the same time"):
        join([Source.open(a)], a, overwrite=True)
    assert len(Trace.read(a).requests) == 6
