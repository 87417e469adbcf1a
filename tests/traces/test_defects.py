"""Each made defect of a recorder is found, named and placed; a healthy trace has none; what can be fixed is."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from traces import DECODE, PREFILL, InputError, Trace, demo_trace
from traces.defects import CHECKS, Finding, Routing, find
from traces.importers import Options, Source, read_dump
from traces.synthetic import synthetic
from traces.writer import write_traces

SHARED = Path(__file__).parents[2].parent / "shared" / "traces"
REAL = ("gpt-oss-20b-decode", "deepseek-v2-lite-prefill", "mixtral-8x7b")


def healthy(E: int = 32, k: int = 4) -> Routing:
    """Twelve requests of a prompt of 20 and 20 decoded tokens, six layers."""
    return Routing.of(synthetic(12, 21, 6, E, k, seed=2, prompt_tokens=20))


@cache
def real(name: str) -> Routing:
    if not SHARED.is_dir():
        pytest.skip(f"real traces are not at {SHARED}")
    with np.load(SHARED / f"{name}.npz") as held:
        experts, offsets = held["experts"].astype(np.int32), held["offsets"].astype(np.int64)
    offsets = offsets[:41]
    experts = experts[: offsets[-1]]
    E = int(experts.max()) + 1
    phase = np.full(len(experts), DECODE if "decode" in name else PREFILL, np.uint8)
    return Routing(experts, offsets, [str(r) for r in range(len(offsets) - 1)], phase, None, E, experts.shape[2])


def strided(held: Routing) -> Routing:
    """The prompt of the third request is the ranking of its first tokens, cut into rows."""
    experts = held.experts.copy()
    a, b = int(held.offsets[2]), int(held.offsets[3])
    phase = held.phase.copy() if held.phase is not None else np.zeros(len(experts), np.uint8)
    n, rng = min(b - a, 40), np.random.default_rng(0)
    for layer in range(experts.shape[1]):
        ranking = np.concatenate([rng.permutation(held.E or 1) for _ in range(40)])
        experts[a : a + n, layer] = ranking[: n * experts.shape[2]].reshape(n, -1)
    return replace(held, experts=experts, phase=phase)


def block(held: Routing) -> Routing:
    experts = np.concatenate([np.repeat(held.experts[:1] * 0 + np.arange(held.experts.shape[2]), 100, 0), held.experts])
    offsets = held.offsets + 100
    offsets[0] = 0
    phase = None if held.phase is None else np.concatenate([np.repeat(held.phase[:1], 100), held.phase])
    return replace(held, experts=experts, offsets=offsets, phase=phase)


def filled(held: Routing) -> Routing:
    experts = held.experts.copy()
    experts[::3, :, -2:] = 255
    return replace(held, experts=experts, E=None if (held.E or 0) < 128 else held.E)


def repeats(held: Routing) -> Routing:
    experts = held.experts.copy()
    experts[5, 1, 1] = experts[5, 1, 0]
    return replace(held, experts=experts)


def lowered(held: Routing) -> Routing:
    return replace(held, experts=held.experts[..., :-1])


def restarted(held: Routing) -> Routing:
    return replace(held, restarts=np.array([int(held.offsets[1]) + 4, int(held.offsets[1]) + 9]))


def ascending(held: Routing) -> Routing:
    return replace(held, experts=np.sort(held.experts, axis=2))


def cut_off(held: Routing) -> Routing:
    experts = held.experts.copy()
    experts[-3:, 2:] = -1
    return replace(held, experts=experts)


def last_only(held: Routing) -> Routing:
    experts, phase = held.experts.copy(), np.full(len(held.experts), PREFILL, np.uint8)
    last = np.isin(np.arange(1, len(experts) + 1), held.offsets)
    experts[~last, -1] = -1
    return replace(held, experts=experts, phase=phase)


def one_rank(held: Routing) -> Routing:
    return replace(held, experts=np.where(held.experts < (held.E or 0) // 2, held.experts, -1))


def two_ranks(held: Routing) -> Routing:
    low = held.experts < (held.E or 0) // 2
    experts = np.concatenate([np.where(low, held.experts, -1), np.where(low, -1, held.experts)])
    offsets = np.concatenate([held.offsets, held.offsets[1:] + held.offsets[-1]])
    names = [f"rank0-{name}" for name in held.requests] + [f"rank1-{name}" for name in held.requests]
    phase = None if held.phase is None else np.tile(held.phase, 2)
    return replace(held, experts=experts, offsets=offsets, requests=names, phase=phase)


def copies(held: Routing) -> Routing:
    experts = held.experts.copy()
    experts[:, -1] = experts[:, 0]
    return replace(held, experts=experts)


def dense(held: Routing) -> Routing:
    experts = held.experts.copy()
    experts[:, 0] = 0
    return replace(held, experts=experts)


DEFECTS: dict[Callable[[Routing], Routing], str] = {
    strided: "strided rows",
    block: "constant block",
    filled: "fill values and repeats",
    repeats: "fill values and repeats",
    lowered: "lowered top-k",
    restarted: "restarted index",
    ascending: "sorted ids",
    cut_off: "uneven layers",
    last_only: "last token only",
    one_rank: "parts of ranks",
    two_ranks: "parts of ranks",
    copies: "equal layers",
    dense: "dense layer",
}


BESIDE: dict[Callable[[Routing], Routing], set[str]] = {
    strided: {"fill values and repeats"},  # where k does not divide E, a row holds the ends of two rankings
    filled: {"lowered top-k"},
    lowered: {"sorted ids"},  # DeepSeek's ids ascend but for the last
    one_rank: {"lowered top-k", "uneven layers"},
    two_ranks: {"lowered top-k", "uneven layers"},
}
"""What a made defect brings with it."""


def named(held: Routing) -> dict[str, Finding]:
    return {finding.name: finding for finding in find(held)[0]}


@pytest.mark.parametrize("make", DEFECTS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("source", ["made", *REAL])
def test_a_made_defect_is_found_and_named(make: Callable[[Routing], Routing], source: str) -> None:
    held = healthy() if source == "made" else real(source)
    assert not named(held)
    found = named(make(held))
    assert DEFECTS[make] in found
    assert found.keys() <= {DEFECTS[make], *BESIDE.get(make, ())}


@pytest.mark.parametrize("make", [strided, block, filled, repeats, restarted, cut_off, two_ranks])
def test_a_fix_leaves_no_such_defect(make: Callable[[Routing], Routing]) -> None:
    made = make(healthy())
    _, fixed = find(made, fix=True)
    assert DEFECTS[make] not in named(fixed)
    if make is block:
        assert np.array_equal(fixed.experts, healthy().experts)
        assert np.array_equal(fixed.offsets, healthy().offsets)
    if make is two_ranks:
        assert np.array_equal(np.sort(fixed.experts, axis=2), np.sort(healthy().experts, axis=2))
    if make is restarted:
        assert len(fixed.requests) == 14


def test_ids_that_are_sorted_are_ordered_by_their_weights() -> None:
    held = healthy()
    order = np.argsort(held.experts, axis=2)
    weights = np.broadcast_to(np.linspace(0.9, 0.1, 4), held.experts.shape)
    made = replace(
        held, experts=np.take_along_axis(held.experts, order, 2), weights=np.take_along_axis(weights, order, 2)
    )
    assert np.array_equal(find(made, fix=True)[1].experts, held.experts)


@pytest.mark.parametrize("kind", [np.int8, np.int16, np.int32, np.int64])
def test_sorted_ids_are_found_beside_slots_that_chose_nothing(kind: type[np.signedinteger]) -> None:
    experts = ascending(healthy()).experts.astype(kind)
    experts[::2, :, -1] = -1
    assert "sorted ids" in named(replace(healthy(), experts=experts))


def test_the_finding_names_rows_and_layer() -> None:
    found = named(repeats(healthy()))["fill values and repeats"]
    assert "request '0', row 5, layer 1" in str(found)
    assert str(found).endswith("--fix does it")
    assert "rows 0 to 99" in str(named(block(healthy()))["constant block"])
    assert "request '2', rows 0 to 39" in str(named(strided(healthy()))["strided rows"])


def test_every_check_has_a_made_example() -> None:
    assert len({*DEFECTS.values()}) == len(CHECKS)


def test_the_shipped_trace_and_the_real_ones_have_no_defect(tmp_path: Path) -> None:
    assert not named(Routing.of(Trace.read(demo_trace())))
    for name in REAL if SHARED.is_dir() else ():
        meta = SHARED / f"{name}.json"
        source = Source.of(SHARED / f"{name}.npz", meta if meta.is_file() else None, Options(), None)
        list(read_dump(source))
        assert not source.findings


def test_import_refuses_repeats_and_fixes_them_when_told_to(tmp_path: Path) -> None:
    held = repeats(healthy())
    assert held.phase is not None
    np.savez(tmp_path / "x.npz", experts=held.experts.astype(np.int16), offsets=held.offsets, phase=held.phase)
    (tmp_path / "x.json").write_text(json.dumps({"experts": 32, "top_k": 4}))
    with pytest.raises(InputError, match=r"row 5, layer 1 .* a repeated expert .* --fix"):
        list(read_dump(Source.of(tmp_path / "x.npz", tmp_path / "x.json", Options(), None)))
    source = Source.of(tmp_path / "x.npz", tmp_path / "x.json", Options(fix=True), None)
    write_traces(read_dump(source), tmp_path / "t")
    trace = Trace.read(tmp_path / "t")
    assert trace.experts[5, 1].tolist() == [held.experts[5, 1, 0], trace.sentinel, *held.experts[5, 1, 2:]]
    assert [finding.name for finding in source.findings] == ["fill values and repeats"]


def test_a_phase_that_is_stated_beside_a_dump_counts(tmp_path: Path) -> None:
    prompts = last_only(healthy())
    np.savez(tmp_path / "x.npz", experts=prompts.experts.astype(np.int16), offsets=prompts.offsets)
    source = Source.of(tmp_path / "x.npz", None, Options(phase="prefill", experts=32), None)
    list(read_dump(source))
    assert [finding.name for finding in source.findings] == ["last token only"]
