"""Other tools' arrays come in whole, or not at all."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from traces import DECODE, PREFILL, InputError, Trace
from traces.importers import Options, Source, import_dump, plain, read_dump
from traces.writer import write_trace, write_traces

SHARED = Path(__file__).parents[2].parent / "shared" / "traces"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason=f"real traces are not at {SHARED}")

EXPERTS = np.array([[[0, 1], [2, 3]], [[1, 0], [3, 4]], [[4, 1], [0, 2]]], np.int16)  # [3, 2, 2]
META = {"model": "some/model", "moe_layers": 2, "experts": 5, "top_k": 2, "phase": "decode, greedy"}


def dump(folder: Path, meta: dict[str, Any] | None = None, **arrays: Any) -> tuple[Path, Path]:
    arrays = {"experts": EXPERTS, "offsets": np.array([0, 2, 3])} | arrays
    np.savez(folder / "x.npz", **{name: array for name, array in arrays.items() if array is not None})
    (folder / "x.json").write_text(json.dumps(META | (meta or {})))
    return folder / "x.npz", folder / "x.json"


def test_what_the_json_says_is_kept(tmp_path: Path) -> None:
    requests = [{"dataset": "d", "category": "c", "prompt_tokens": 7}, {"task": "t", "prompt_tokens": 2}]
    sizes = {"hidden_size": 10, "expert_intermediate_size": 20, "first_moe_layer": 1, "requests": requests}
    trace, assumed = import_dump(*dump(tmp_path, sizes, weights=np.ones(EXPERTS.shape, np.float32)))
    assert not assumed
    assert (trace.meta.model, trace.num_experts, trace.meta.mode) == ("some/model", 5, "import")
    assert trace.meta.expert_bytes == 3 * 10 * 20 * 2
    assert trace.meta.layer_names == ("layers.1", "layers.2")
    assert trace.requests["dataset"].tolist() == ["d", ""]
    assert trace.requests["task"].tolist() == ["c", "t"]
    assert trace.phases == "decode"
    assert trace.position.tolist() == [7, 8, 2]
    assert trace.steps(1).context.tolist() == [3]
    assert trace.weights is not None
    write_trace(trace, tmp_path / "t")
    assert np.array_equal(Trace.read(tmp_path / "t").experts, EXPERTS)


def test_a_prefill_is_one_step_of_all_its_tokens(tmp_path: Path) -> None:
    trace, _ = import_dump(*dump(tmp_path, {"phase": "prefill, token order"}))
    assert trace.phases == "prefill"
    assert trace.requests["prompt_tokens"].tolist() == [2, 1]
    assert trace.steps(0).tokens.tolist() == [2]
    assert import_dump(*dump(tmp_path), Options(phase="prefill"))[0].phases == "prefill"


def test_without_json_what_is_assumed_is_said(tmp_path: Path) -> None:
    file, _ = dump(tmp_path)
    trace, assumed = import_dump(file)
    assert (trace.num_experts, trace.phases, len(assumed)) == (5, "decode", 2)
    trace, assumed = import_dump(file, None, Options(phase="prefill", experts=8))
    assert (trace.num_experts, trace.phases, assumed) == (8, "prefill", [])


@pytest.mark.parametrize(
    "meta",
    [
        {"moe_layers": 3},
        {"top_k": 1},
        {"experts": 4},
        {"experts": "five"},
        {"requests": 3},
        {"requests": [{}]},
        {"requests": [{"output_tokens": 5}, {}]},
        {"requests": [{"prompt_tokens": 2.5}, {}]},
        {"requests": [{"id": "a"}, {"id": "a"}]},
        {"phase": "both"},
        {"layer_names": ["a"]},
        {"start": 2},
        {"requests": [{}, {"start": 2}]},
    ],
)
def test_a_json_that_disagrees_with_the_arrays_is_refused(tmp_path: Path, meta: Any) -> None:
    with pytest.raises(InputError):
        import_dump(*dump(tmp_path, meta))


def changed(row: int, layer: int, ids: list[int]) -> np.ndarray:
    experts = EXPERTS.copy()
    experts[row, layer] = ids
    return experts


@pytest.mark.parametrize(
    "arrays",
    [
        {"experts": changed(2, 1, [0, 5])},
        {"experts": changed(0, 1, [-2, 1])},
        {"experts": changed(1, 0, [3, 3])},
        {"experts": np.where(EXPERTS == 4, 255, EXPERTS).astype(np.uint8)},
        {"experts": EXPERTS * 0},
        {"experts": EXPERTS.astype(np.float32)},
        {"experts": EXPERTS[0]},
        {"offsets": np.array([0, 2, 4])},
        {"offsets": np.array([1, 2, 3])},
        {"offsets": np.array([0, 2, 1, 3])},
        {"weights": np.ones((3, 2, 1), np.float16)},
        {"phase": np.array([0, 1, 2])},
        {"phase": np.array([1, 0, 1])},
        {"phase": np.array([0, 1])},
        {"step": np.array([1, 0, 2])},
        {"step": np.array([0, -1, 2])},
    ],
)
def test_arrays_that_no_model_routed_are_refused(tmp_path: Path, arrays: Any) -> None:
    with pytest.raises((ValueError, KeyError)):
        import_dump(*dump(tmp_path, **arrays))


def test_an_npy_has_its_offsets_beside_it_or_in_the_json(tmp_path: Path) -> None:
    whole, _ = import_dump(*dump(tmp_path))
    np.save(tmp_path / "y.npy", EXPERTS)
    with pytest.raises(InputError, match="does not say where the prompt ends"):  # taken as one request of vLLM's
        import_dump(tmp_path / "y.npy")
    np.save(tmp_path / "y.offsets.npy", np.array([0, 2, 3]))
    beside, _ = import_dump(tmp_path / "y.npy", tmp_path / "x.json")
    (tmp_path / "z.json").write_text(json.dumps({**META, "offsets": [0, 2, 3]}))
    stated, _ = import_dump(tmp_path / "y.npy", tmp_path / "z.json")
    for made in (beside, stated):
        assert np.array_equal(made.experts, whole.experts)
        assert np.array_equal(made.offsets, whole.offsets)


@pytest.mark.parametrize("case", ["ids from 1", "ids through all layers", "all experts have weights", "E is not known"])
def test_a_large_file_gives_the_same_trace_in_parts(case: str, tmp_path: Path, monkeypatch: Any) -> None:
    rng = np.random.default_rng(1)
    ids = rng.random((90, 2, 8)).argsort(axis=2).astype(np.uint8)
    arrays = {"offsets": np.array([0, 0, 41, 44, 70, 90]), "token_id": np.arange(90), "weights": rng.random(ids.shape)}
    if case != "all experts have weights":
        ids, arrays["weights"] = ids[..., :3], arrays["weights"][..., :3]
    first = {"ids from 1": 1, "ids through all layers": 8 * np.arange(2)[:, None]}.get(case, 0)
    arrays["experts"] = ids + np.asarray(first, np.uint8)
    files = dump(tmp_path, {"experts": None if case == "E is not known" else 8, "top_k": 3}, **arrays)
    np.save(tmp_path / "y.npy", arrays["experts"])
    np.save(tmp_path / "y.offsets.npy", arrays["offsets"])
    for file in files[0], tmp_path / "y.npy":
        if file.suffix == ".npy" and case == "all experts have weights":
            continue
        monkeypatch.setattr(plain, "PART", 2**24)
        whole, assumed = import_dump(file, files[1])
        monkeypatch.setattr(plain, "PART", 60)
        monkeypatch.setattr("traces.arrays.LARGE", 0)
        source = Source.of(file, files[1], Options(token_ids=tmp_path / "few.npy"), None)
        np.save(tmp_path / "few.npy", np.arange(90))
        parts = list(read_dump(source))
        assert (len(parts), list(dict.fromkeys(source.notes))) == (5, assumed)
        write_traces(iter(parts), tmp_path / "t", overwrite=True)
        made = Trace.read(tmp_path / "t", ["token_id", *(["weights"] if file.suffix == ".npz" else [])])
        assert (made.meta, made.requests.to_dict("list")) == (whole.meta, whole.requests.to_dict("list"))
        for name in ("experts", "offsets", "position", "step", "phase", "weights"):
            np.testing.assert_array_equal(getattr(made, name), getattr(whole, name), name)
        assert made.token_id is not None
        assert made.token_id.tolist() == list(range(90))


def test_token_ids_may_lie_in_a_file_of_their_own(tmp_path: Path) -> None:
    files, ids = dump(tmp_path), np.array([5, -1, 200_000], np.int32)
    np.savez(tmp_path / "t.npz", token_ids=ids, prompt_ids=ids)
    np.save(tmp_path / "t.npy", ids)
    for name in ("t.npz", "t.npy"):
        made, _ = import_dump(*files, Options(token_ids=tmp_path / name))
        write_trace(made, tmp_path / "trace", overwrite=True)
        read = Trace.read(tmp_path / "trace", ["token_id"])
        assert [read.steps(i).token_ids.tolist() for i in range(2)] == [[5, -1], [200_000]]  # type: ignore[union-attr]
        assert Trace.read(tmp_path / "trace").steps(0).token_ids is None
    np.save(tmp_path / "few.npy", ids[:2])
    with pytest.raises(InputError):
        import_dump(*files, Options(token_ids=tmp_path / "few.npy"))


def test_the_phases_of_an_npz_are_kept_and_need_no_option(tmp_path: Path) -> None:
    files = dump(tmp_path, phase=np.array([0, 1, 1]))
    made, _ = import_dump(*files)
    assert made.phase.tolist() == [0, 1, 1]
    assert made.requests["output_tokens"].tolist() == [2, 2]
    with pytest.raises(InputError):
        import_dump(*files, Options(phase="decode"))


@needs_shared
@pytest.mark.parametrize(
    ("name", "requests", "tokens", "shape", "phase", "expert_bytes"),
    [
        ("gpt-oss-20b-decode", 409, 123_413, (24, 32, 4), DECODE, 49_766_400),
        ("deepseek-v2-lite-prefill", 500, 49_648, (26, 64, 6), PREFILL, 17_301_504),
    ],
)
def test_real_dumps_come_in_whole(
    name: str, requests: int, tokens: int, shape: tuple[int, ...], phase: int, expert_bytes: int, tmp_path: Path
) -> None:
    made, assumed = import_dump(SHARED / f"{name}.npz", SHARED / f"{name}.json")
    write_trace(made, tmp_path / name)
    trace = Trace.read(tmp_path / name)
    assert not assumed
    assert (len(trace.requests), len(trace.experts)) == (requests, tokens)
    assert (trace.layers, trace.num_experts, trace.top_k) == shape
    assert trace.meta.expert_bytes == expert_bytes
    assert (trace.phase == phase).all()
    with np.load(SHARED / f"{name}.npz") as arrays:
        assert np.array_equal(trace.experts, arrays["experts"])
