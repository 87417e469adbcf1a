"""When two traces, or a trace and its shards, are the same."""

from collections.abc import Iterable
from dataclasses import fields

import numpy as np
import pandas as pd

from traces import Trace
from traces.shards import Shards
from traces.steps import RequestSteps

ARRAYS = ("offsets", "experts", "phase", "position", "step")


def assert_same(a: Trace, b: Trace, columns: Iterable[str] = ()) -> None:
    """The same metadata, requests and rows; of optional `columns` too."""
    assert a.meta == b.meta
    pd.testing.assert_frame_equal(
        a.requests.reset_index(drop=True), b.requests.reset_index(drop=True), check_dtype=False
    )
    for name in (*ARRAYS, *columns):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


def assert_same_steps(one: RequestSteps, other: RequestSteps) -> None:
    for field in fields(RequestSteps):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if field.name == "lookahead" and a is not None:
            assert (a.layers, a.depth) == (b.layers, b.depth)
            for name in ("offsets", "experts", "counts", "scores"):
                np.testing.assert_array_equal(getattr(a, name), getattr(b, name), name)
        elif field.name == "choices" and a is not None:
            for each in fields(a):
                np.testing.assert_array_equal(getattr(a, each.name), getattr(b, each.name), each.name)
        else:
            np.testing.assert_array_equal(a, b, field.name)
            assert getattr(a, "dtype", None) == getattr(b, "dtype", None)


def assert_same_shards(whole: Trace, shards: Shards, order: Iterable[int] | None = None) -> None:
    for name in ("name", "meta", "layers", "num_experts", "top_k", "phases", "has_lookahead", "has_drafts"):
        assert getattr(whole, name) == getattr(shards, name), name
    pd.testing.assert_frame_equal(whole.requests, shards.requests)
    np.testing.assert_array_equal(whole.offsets, shards.offsets)
    np.testing.assert_array_equal(whole.prompts, shards.prompts)
    for i in order or range(len(whole.requests)):
        assert_same_steps(whole.steps(i), shards.steps(i))
