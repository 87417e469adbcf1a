"""A saved collection decides as the one that learned it in place."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from policies.core.policy import Shape
from policies.core.spec import parse
from policies.eamc.build import build, predictor_of
from policies.eamc.file import SavedEamc
from tests.support.slow_eamc import events
from traces import DECODE, PREFILL, InputError, Trace
from traces.schema import AGGREGATE
from traces.synthetic import synthetic

POLICIES = [
    "eamc:capacity=6",
    "eamc:capacity=6:replacement=least-used:matches=2",
    "eamc:capacity=6:replacement=fifo:split=false",
    "eamc-v1:capacity=6",
    "eamc-code:capacity=6",
]


def made(seed: int = 3) -> Trace:
    return synthetic(30, 4, layers=4, experts=8, top_k=2, seed=seed, prompt_tokens=5)


def written(predictor, file: Path, trace: str = "somewhere") -> str:
    with file.open("wb") as out:
        predictor.saved(trace).write(out)
    return str(file)


def decided(policy, shape: Shape, heard) -> list[tuple[list[float], list[int], list[float]]]:
    """Scores and proposals at every event; it learns as it goes."""
    keeper, prefetcher = policy
    seen: list[tuple[list[float], list[int], list[float]]] = []
    for _, request in heard:
        for event in request:
            keeper.observe(event)
            ids, priorities = prefetcher.propose(event)
            seen.append((keeper.keep[0].tolist(), ids.tolist(), priorities.tolist()))
        keeper.end_request(0)
    return seen


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("first", [9, 15])  # with k-means some wait after 9, none after 12; 15: some again
def test_a_saved_and_loaded_collection_decides_as_the_one_that_learned_it_in_place(policy, first, tmp_path):
    trace = made()
    shape, requests = Shape(4, 8), [trace.steps(i) for i in range(30)]
    in_place = parse(policy).build(shape)
    decided(in_place, shape, events(requests[:first], 4))
    file = written(build(trace.head(first), policy), tmp_path / "x.npz")
    loaded = parse(f"{policy}:collection={file}").build(shape)
    later = list(events(requests[first:], 4, first=first))
    assert decided(loaded, shape, later) == decided(in_place, shape, later)
    assert decided(parse(policy).build(shape), shape, later) != decided(in_place, shape, later), "it matters"


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_read_is_what_was_written(policy, tmp_path):
    predictor = build(made().head(27), policy)
    ours = predictor.saved("a trace")
    theirs = SavedEamc.read(written(predictor, tmp_path / "x.npz", "a trace"))
    assert (theirs.shape, theirs.options, theirs.trace) == (ours.shape, ours.options, ours.trace)
    for one, other in zip(ours.parts, theirs.parts, strict=True):
        for name, array in vars(one).items():
            assert np.array_equal(array, vars(other)[name])
    assert all(len(part.eams) for part in theirs.parts)
    assert ("least-used" in policy or "code" in policy) == any(part.uses.any() for part in theirs.parts)
    assert ("v1" in policy) == any(len(part.waiting) for part in theirs.parts)


def test_the_eams_of_a_trace_are_learned_in_order():
    trace = made()
    saved = build(trace, "eamc:capacity=30").saved("x")
    for phase, part in zip((PREFILL, DECODE), saved.parts, strict=True):
        assert np.array_equal(part.eams, trace.eams(phase))
    merged = build(trace, "eamc:split=false").saved("x").parts
    assert np.array_equal(merged[0].eams, trace.eams(PREFILL) + trace.eams(DECODE))


def test_eams_without_sequences_will_do():
    trace = made()
    counted = np.stack([trace.eams(phase).reshape(30, -1) for phase in (PREFILL, DECODE)]).astype(np.uint32)
    bare = replace(trace.select(np.arange(0)), requests=trace.requests, meta=replace(trace.meta, mode=AGGREGATE))
    aggregate = replace(bare, aggregate=counted, offsets=np.zeros(31, np.int64))
    for policy in ("eamc:capacity=7", "eamc-v1:capacity=7"):
        ours, theirs = build(aggregate, policy).saved("x"), build(trace, policy).saved("x")
        for one, other in zip(ours.parts, theirs.parts, strict=True):
            assert np.array_equal(one.eams, other.eams)
            assert len(one.eams) == 7
    oldest_go = build(aggregate, "eamc:capacity=7:replacement=least-used").saved("x")
    assert np.array_equal(oldest_go.parts[1].eams, trace.eams(DECODE)[23:])


def test_a_prefetcher_alone_has_a_collection_too_and_lru_has_none():
    assert predictor_of("lru+eamc:capacity=3", Shape(2, 2)).options.capacity == 3
    with pytest.raises(InputError, match="lru learns no EAMs: name eamc"):
        predictor_of("lru", Shape(2, 2))


def test_two_files_of_one_trace_are_equal_to_the_byte(tmp_path):
    one, other = (Path(written(build(made(), "eamc"), tmp_path / name)).read_bytes() for name in ("a", "b"))
    assert one == other


@pytest.mark.parametrize(
    ("policy", "shape", "says"),
    [
        ("eamc:capacity=5", (4, 8), "x.npz holds 6 EAMs, more than capacity=5: say capacity=6"),
        ("eamc", (4, 9), "x.npz holds EAMs of 4 x 8 experts, not of 4 x 9"),
    ],
)
def test_a_collection_that_does_not_fit_is_told_in_one_line(policy, shape, says, tmp_path):
    file = written(build(made(), "eamc:capacity=6"), tmp_path / "x.npz")
    with pytest.raises(InputError) as caught:
        parse(f"{policy}:collection={file}").require(Shape(*shape))
    assert says in str(caught.value)
    assert file in str(caught.value)
