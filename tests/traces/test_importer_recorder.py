"""SGLang's recorder and other counters: requests are rebuilt from forward passes, or the dump is refused."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.dumps import KNOWN, MAPPING, known, passes, same, stat, told
from traces import DECODE, PREFILL, InputError, Trace
from traces.importers import Options, import_dump
from traces.schema import AGGREGATE
from traces.writer import write_trace

MOE = Options(layer_map="1:")


def load(folder: Path, content: dict[str, Any], options: Options = MOE, meta: Any = None) -> tuple[Trace, list[str]]:
    (folder / "d.pt").touch()
    if meta:
        (folder / "d.json").write_text(json.dumps(meta))
    return import_dump(folder / "d.pt", folder / "d.json" if meta else None, options, load_pt=lambda _: content)


def refused(folder: Path, content: dict[str, Any], *parts: str, options: Options = MOE) -> None:
    with pytest.raises(InputError) as error:
        load(folder, content, options)
    for part in (*parts, "d.pt"):
        assert part in str(error.value)


def test_what_may_be_of_several_requests_is_refused(tmp_path: Path) -> None:
    """Of two in lockstep one ends first: positions alone do not tell which."""
    refused(tmp_path, passes(KNOWN, MAPPING, together=2), "may be of 2 requests", "concurrency")


def test_requests_are_rebuilt_from_the_passes(tmp_path: Path) -> None:
    trace = told(KNOWN)
    same(load(tmp_path, passes(trace, MAPPING, together=1), meta={"concurrency": 1})[0], trace)
    made, notes = load(tmp_path, passes(KNOWN, MAPPING, together=1), meta={"concurrency": 1})
    assert not notes
    same(made, KNOWN, steps=True)
    assert made.meta.layer_names == ("layers.1", "layers.2", "layers.3")
    write_trace(made, tmp_path / "t")
    same(Trace.read(tmp_path / "t"), KNOWN)


def ragged(cut: int = 3) -> dict[str, Any]:
    """Requests of one prefill pass with prompts of different lengths."""
    content = passes(KNOWN, MAPPING, together=3)
    prefill = content["records"][0]
    keep = [at for at in range(12) if not 4 <= at < 4 + cut and at != 8]
    prefill["topk_ids_of_layer"] = prefill["topk_ids_of_layer"][:, keep]
    prefill["positions"], prefill["extend_seq_lens"] = [0, 1, 2, 3, 0, 0, 1, 2], [4, 4 - cut, 3]
    prefill["input_ids"] = [0] * 8
    for record in content["records"][1:]:
        record["positions"] = [p - n for p, n in zip(record["positions"], (0, cut, 1), strict=False)]
    return content


def test_requests_in_one_batch_are_told_apart_by_their_positions(tmp_path: Path) -> None:
    made, notes = load(tmp_path, ragged())
    assert not notes
    assert made.requests["prompt_tokens"].tolist() == [4, 1, 3]
    assert made.requests["output_tokens"].tolist() == KNOWN.requests["output_tokens"].tolist()
    for i in range(3):
        mine, theirs = (trace.experts[trace.offsets[i] : trace.offsets[i + 1]] for trace in (made, KNOWN))
        decoded = int(KNOWN.requests["output_tokens"][i]) - 1
        assert np.array_equal(mine[-decoded:], theirs[-decoded:])


def test_chunks_and_cached_prefixes_are_said(tmp_path: Path) -> None:
    content = passes(KNOWN.head(1), MAPPING, together=1)
    first = content["records"][0]
    ids = first["topk_ids_of_layer"]
    parts = [(ids[:, :3], [0, 1, 2], 5), (ids[:, 3:], [3], 6)]
    content["records"][:1] = [
        first
        | {"topk_ids_of_layer": part, "positions": at, "extend_seq_lens": [len(at)], "forward_pass_id": number}
        | {"input_ids": first["input_ids"][: len(at)]}
        for part, at, number in parts
    ]
    made, notes = load(tmp_path, content)
    same(made, KNOWN.head(1))
    assert len(notes) == 1
    assert "chunks of one prompt" in notes[0]
    assert made.step.tolist() == [0, 0, 0, 1, 2, 3, 4, 5]
    del content["records"][0]
    made, notes = load(tmp_path, content)
    assert "prefix cache" in notes[0]
    assert (made.experts[:3] == made.sentinel).all()
    assert np.array_equal(made.experts[3:], KNOWN.experts[3:8])


def test_ranks_that_repeat_each_other_are_one(tmp_path: Path) -> None:
    content = {name: passes(KNOWN, MAPPING, together=1) for name in ("a.pt", "b.pt")}
    folder, meta = tmp_path / "ranks", tmp_path / "m.json"
    folder.mkdir()
    for name in content:
        (folder / name).touch()
    meta.write_text(json.dumps({"concurrency": 1}))
    made, notes = import_dump(folder, meta, MOE, load_pt=lambda path: content[path.name])
    same(made, KNOWN, steps=True)
    assert "1 of 2 files repeat" in notes[0]
    content["b.pt"] = passes(known(requests=2, prompt=6), MAPPING, together=1)
    made, notes = import_dump(folder, meta, MOE, load_pt=lambda path: content[path.name])
    assert made.requests["id"].tolist() == ["a-0", "a-1", "a-2", "b-0", "b-1"]
    assert "data-parallel" in notes[0]


def change(index: int, **fields: Any) -> dict[str, Any]:
    content = passes(KNOWN.head(1), MAPPING, together=1)
    content["records"][index].update(fields)
    return content


def ids(index: int, layer: int, token: int, values: list[int]) -> dict[str, Any]:
    content = passes(KNOWN.head(1), MAPPING, together=1)
    content["records"][index]["topk_ids_of_layer"][layer, token, : len(values)] = values
    return content


def test_the_dense_layer_of_a_recording_needs_a_layer_map(tmp_path: Path) -> None:
    content = passes(KNOWN.head(1), MAPPING, together=1)
    refused(tmp_path, content, "layer 0 routes nothing", "--layer-map", options=Options())


@pytest.mark.parametrize(
    "content",
    [
        ids(1, 1, 0, [3, 3]),
        change(0, topk_ids_of_layer=np.zeros((4, 4, 8), np.float32)),
        change(0, positions=[[0], [1, 2]]),
        change(0, positions=[0, 1, 2]),
        change(0, positions=[0, 1, 3, 4]),
        change(0, extend_seq_lens=[3]),
        change(0, extend_seq_lens=None),
        change(0, forward_mode=3),
        change(1, positions=[9]),
        change(0, forward_pass_id=None),
        {"records": [{"forward_pass_id": 1}], "last_physical_to_logical_map": MAPPING},
        {"logical_count": np.ones((3, 8), np.float32)},
        {"logical_count": np.full((1, 3, 8), -1)},
        stat(KNOWN),
    ],
)
def test_a_damaged_recording_is_refused(tmp_path: Path, content: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError, LookupError)):
        load(tmp_path, content)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=6), st.data())
def test_requests_sent_one_at_a_time_come_back_whole(shapes: list[tuple[int, int]], data: st.DataObject) -> None:
    """Whatever their lengths; the oracle is the trace that the passes were made from."""
    prompt, output = (np.array(column) for column in zip(*shapes, strict=True))
    lengths = prompt + output
    whole = known(1, int(lengths.sum()) + 2, 2)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    position = np.concatenate([np.arange(n) for n in lengths])
    phase = np.concatenate([np.where(np.arange(n) < p, PREFILL, DECODE) for n, p in zip(lengths, prompt, strict=True)])
    mapping = data.draw(st.permutations(range(8)).map(lambda order: np.stack([order] * 4)))
    trace = replace(
        whole,
        requests=whole.requests.iloc[[0] * len(lengths)].assign(id=[str(i) for i in range(len(lengths))]),
        offsets=offsets,
        experts=whole.experts[: offsets[-1]],
        position=position,
        phase=phase.astype(np.uint8),
    )
    with tempfile.TemporaryDirectory() as folder:
        made, _ = load(
            Path(folder), passes(trace, mapping, together=1), meta={"concurrency": 1, "layer_names": ["a", "b", "c"]}
        )
    assert np.array_equal(made.offsets, offsets)
    assert np.array_equal(made.experts[..., : made.top_k], trace.experts[..., : made.top_k])
    assert np.array_equal(made.position, position)
    assert np.array_equal(made.phase, phase)


# ---- counts


def csv(path: Path, trace: Trace, counted: bool, header: bool, first: int = 1) -> Path:
    """llama.cpp's examples/moe-trace: a line for each choice of an expert."""
    lines = [f"{layer + first},{e}" for token in trace.experts for layer, ids in enumerate(token) for e in ids]
    if counted:
        lines = [f"{line},{lines.count(line)}" for line in sorted(set(lines))]
    if header:
        lines = ["layer,expert,count" if counted else "layer,expert", *lines]
    path.write_text("\n".join(lines) + "\n")
    return path


def holds_counts(made: Trace, trace: Trace, phase: int) -> None:
    assert made.meta.mode == AGGREGATE
    assert len(made.experts) == 0
    assert np.array_equal(made.eams(phase).sum(axis=0), (trace.eams(PREFILL) + trace.eams(DECODE)).sum(axis=0))
    assert not made.eams(1 - phase).any()
    assert made.requests["output_tokens"].tolist() == [0] * len(made.requests)
    assert made.requests["prompt_tokens"].isna().all()


def test_sglangs_counts_become_eams(tmp_path: Path) -> None:
    made, notes = load(tmp_path, stat(KNOWN), Options(layer_map="1:", top_k=2))
    holds_counts(made, KNOWN, DECODE)
    assert "no phase is stated" in notes[0]
    write_trace(made, tmp_path / "t")
    holds_counts(Trace.read(tmp_path / "t"), KNOWN, DECODE)
    holds_counts(load(tmp_path, stat(KNOWN), Options("prefill", layer_map="1:", top_k=2))[0], KNOWN, PREFILL)


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("header", [False, True])
def test_a_csv_of_choices_becomes_eams(tmp_path: Path, counted: bool, header: bool) -> None:
    made, notes = import_dump(csv(tmp_path / "a.csv", KNOWN, counted, header), options=Options("decode", top_k=2))
    holds_counts(made, KNOWN, DECODE)
    assert made.meta.layer_names == ("layers.1", "layers.2", "layers.3")
    assert "largest id: 8" in notes[0]
