"""Other tools' arrays come in whole, or not at all."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from traces.errors import InputError
from traces.importers import Options, import_dump
from traces.steps import DECODE, PREFILL
from traces.trace import Trace
from traces.writer import write_trace

SHARED = Path(__file__).parents[2].parent / "shared" / "traces"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason=f"real traces are not at {SHARED}")

EXPERTS = np.array([[[0, 1], [2, 3]], [[1, 0], [3, 4]], [[4, 1], [0, 2]]], np.int16)  # [3, 2, 2]
META = {"model": "some/model", "moe_layers": 2, "experts": 5, "top_k": 2, "phase": "decode, greedy"}


def dump(folder: Path, meta: dict[str, Any] | None = None, **arrays: Any) -> tuple[Path, Path]:
    arrays = {"experts": EXPERTS, "offsets": np.array([0, 2, 3])} | arrays
    np.savez(folder / "x.npz", **{name: array for name, array in arrays.items() if array is not None})
    (folder / "x.json").write_text(json.dumps(META | (meta or {})))
    return folder / "x.npz", folder / "x.json"


def refuses(folder: Path, *parts: str, meta: dict[str, Any] | None = None, **arrays: Any) -> None:
    with pytest.raises(InputError) as error:
        import_dump(*dump(folder, meta, **arrays))
    for part in parts:
        assert part in str(error.value)


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


def test_a_key_in_another_case_is_noted(tmp_path: Path) -> None:
    _, told = dump(tmp_path, {"EXPERT_BYTES": 7, "Model": "other/model", "licence": "MIT"})
    _, notes = import_dump(tmp_path / "x.npz", told)
    assert notes == [f"{told}: {key} was ignored: write {key.lower()}" for key in ("EXPERT_BYTES", "Model")]


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


def test_minus_one_is_not_routed(tmp_path: Path) -> None:
    experts = EXPERTS.copy()
    experts[0] = -1
    trace, _ = import_dump(*dump(tmp_path, experts=experts))
    assert (trace.experts[0] == trace.sentinel).all()
    assert trace.steps(0).experts.size == 4


def changed(row: int, layer: int, ids: list[int]) -> np.ndarray:
    experts = EXPERTS.copy()
    experts[row, layer] = ids
    return experts


@pytest.mark.parametrize(
    ("arrays", "parts"),
    [
        ({"experts": changed(2, 1, [0, 5])}, ["row 2 (request 1)", "MoE layer 1", "5 is no id of 5 experts"]),
        ({"experts": changed(0, 1, [-2, 1])}, ["row 0", "-2 is no id"]),
        ({"experts": changed(1, 0, [3, 3])}, ["row 1 (request 0)", "MoE layer 0", "repeated"]),
        ({"experts": np.where(EXPERTS == 4, 255, EXPERTS).astype(np.uint8)}, ["row 1", "255 is no id"]),
        ({"experts": EXPERTS * 0}, ["all expert ids are 0"]),
        ({"experts": EXPERTS.astype(np.float32)}, ["float32", "integers are needed"]),
        ({"experts": EXPERTS[0]}, ["shape (2, 2)"]),
        ({"experts": EXPERTS[:0], "offsets": np.array([0, 0])}, ["empty"]),
        ({"experts": None}, ["no array 'experts'"]),
        ({"offsets": None}, ["no array 'offsets'"]),
        ({"offsets": np.array([0, 2, 4])}, ["from 0 to 4", "3 tokens"]),
        ({"offsets": np.array([1, 2, 3])}, ["from 1 to 3"]),
        ({"offsets": np.array([0, 2, 1, 3])}, ["must rise", "request 1"]),
        ({"offsets": np.array([0, 0, 3])}, ["must rise", "request 0"]),
        ({"offsets": np.array([0, 2**63 - 1, -2, 3])}, ["must rise", "number 1 is 9223372036854775807"]),
        ({"offsets": np.array([0])}, ["requests + 1"]),
        ({"weights": np.ones((3, 2, 1), np.float16)}, ["weights is float16 (3, 2, 1)"]),
    ],
)
def test_arrays_that_no_model_routed_are_refused(tmp_path: Path, arrays: Any, parts: list[str]) -> None:
    refuses(tmp_path, "x.npz", *parts, **arrays)


@pytest.mark.parametrize(
    ("meta", "parts"),
    [
        ({"moe_layers": 3}, ["moe_layers 3", "have 2"]),
        ({"top_k": 1}, ["top_k 1", "have 2"]),
        ({"experts": "five"}, ["experts is 'five'"]),
        ({"experts": 10**9}, ["1000000000 experts"]),
        ({"requests": 3}, ["3 requests", "holds 2"]),
        ({"requests": [{}]}, ["1 requests", "holds 2"]),
        ({"requests": [{"routed_tokens": 5}, {}]}, ["request 0", "5 routed_tokens"]),
        ({"requests": [1, 2]}, ["list objects"]),
        ({"phase": "both"}, ["'both' is neither"]),
        ({"hidden_size": -1}, ["hidden_size is -1"]),
        ({"layer_names": ["a"]}, ["1 layer names"]),
        ({"requests": [{"id": "a"}, {"id": "a"}]}, ["'a' occurs twice"]),
        ({"requests": [{"id": 1}, {}]}, ["'1' occurs twice"]),
        ({"start": 2}, ["of no server", "leave `start` out"]),
        ({"requests": [{}, {"start": 2}]}, ["of no server", "leave `start` out"]),
    ],
)
def test_a_json_that_disagrees_with_the_arrays_is_refused(tmp_path: Path, meta: Any, parts: list[str]) -> None:
    refuses(tmp_path, *parts, meta=meta)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("requests", value) for value in ("abc", 2.5, True, 10**15)),
        ("requests", {}),
        *((key, "a") for key in ("moe_layers", "top_k", "first_moe_layer", "hidden_size", "expert_bytes")),
        *((key, 2.0) for key in ("moe_layers", "top_k", "experts", "expert_intermediate_size")),
        *((key, 5) for key in ("model", "phase", "dtype", "revision", "layer_names")),
        *((key, [1]) for key in ("model", "revision", "layer_names", "dataset")),
        ("expert_bytes", -4),
        ("model", "half a character: \ud800"),
    ],
)
def test_a_fact_of_the_wrong_kind_is_named(tmp_path: Path, key: str, value: Any) -> None:
    refuses(tmp_path, "x.json", key, meta={key: value})


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("prompt_tokens", value) for value in (-5, 2.5, "x", 2**40, True)),
        *(("arrival_ns", value) for value in (-5, 2.5, "q", 2**70)),
        ("routed_tokens", "x"),
        ("id", {}),
        ("task", [1]),
        ("id", "\ud800"),
    ],
)
def test_a_fact_of_a_request_of_the_wrong_kind_is_named(tmp_path: Path, phase: str, key: str, value: Any) -> None:
    refuses(tmp_path, "x.json", f"request 1: {key}", meta={"phase": phase, "requests": [{}, {key: value}]})


def test_an_arrival_beyond_what_a_float_holds_is_kept(tmp_path: Path) -> None:
    trace, _ = import_dump(*dump(tmp_path, {"requests": [{"arrival_ns": 2**53 + 1}, {}]}))
    assert trace.requests["arrival_ns"][0] == 2**53 + 1


@pytest.mark.parametrize("content", [b"\x93NUMPY", b"{}", b"[" * 9])
def test_a_file_of_another_kind_is_no_npz(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.npz").write_bytes(content)
    with pytest.raises(InputError, match=r"is no \.npz"):
        import_dump(tmp_path / "x.npz")


def test_one_array_is_no_npz(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", EXPERTS)
    with pytest.raises(InputError, match=r"is no \.npz"):
        import_dump(tmp_path / "x.npy", format="npz")


def test_a_key_that_a_json_holds_twice_is_refused(tmp_path: Path) -> None:
    file, meta = dump(tmp_path)
    meta.write_text('{"experts": 5, "requests": [{"id": "a", "id": "b"}]}')
    with pytest.raises(InputError, match=r"x\.json is no JSON: the key 'id' is there twice"):
        import_dump(file, meta)


def test_counts_have_no_token_ids(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("layer,expert,count\n0,0,2\n0,1,2\n")
    with pytest.raises(InputError, match="which have no tokens: leave --token-ids out"):
        import_dump(tmp_path / "x.csv", options=Options(top_k=2, token_ids=tmp_path / "t.npy"))


def test_an_npy_has_its_offsets_beside_it_or_in_the_json(tmp_path: Path) -> None:
    whole, _ = import_dump(*dump(tmp_path))
    np.save(tmp_path / "y.npy", EXPERTS)
    with pytest.raises(InputError, match="where the prompt ends"):  # taken as one request of vLLM's
        import_dump(tmp_path / "y.npy")
    with pytest.raises(InputError, match=r"no offsets for .*y\.npy"):
        import_dump(tmp_path / "y.npy", format="npy")
    np.save(tmp_path / "y.offsets.npy", np.array([0, 2, 3]))
    beside, _ = import_dump(tmp_path / "y.npy", tmp_path / "x.json")
    np.save(tmp_path / "y.offsets.npy", np.array([0, 2, 4]))
    with pytest.raises(InputError, match=r"y\.npy: offsets run from 0 to 4"):
        import_dump(tmp_path / "y.npy")
    (tmp_path / "z.json").write_text(json.dumps({**META, "offsets": [0, 2, 3]}))
    told, _ = import_dump(tmp_path / "y.npy", tmp_path / "z.json")
    for made in (beside, told):
        assert np.array_equal(made.experts, whole.experts)
        assert np.array_equal(made.offsets, whole.offsets)
    (tmp_path / "z.json").write_text(json.dumps({**META, "offsets": [0, 2.5, 3]}))
    with pytest.raises(InputError, match=r"z\.json: offsets is 2\.5"):
        import_dump(tmp_path / "y.npy", tmp_path / "z.json")


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
    np.save(tmp_path / "t.npy", ids[:2])
    with pytest.raises(InputError, match=r"t\.npy: token_id has 2 values for 3 tokens"):
        import_dump(*files, Options(token_ids=tmp_path / "t.npy"))
    with pytest.raises(InputError, match="has no array 'token_ids'"):
        import_dump(*files, Options(token_ids=files[0]))
    with pytest.raises(InputError, match="holds token ids itself"):
        import_dump(*dump(tmp_path, token_id=ids), Options(token_ids=tmp_path / "t.npz"))


@pytest.mark.parametrize(
    ("arrays", "parts"),
    [
        ({"phase": np.array([0, 1, 2])}, ["row 2: phase is 2"]),
        ({"step": np.array([1, 0, 2])}, ["row 1 (request 0): step 0 does not follow step 1"]),
        ({"weights": np.full(EXPERTS.shape, np.nan)}, ["row 0 of weights holds no number"]),
        ({"weights": np.full(EXPERTS.shape, 1e9)}, ["row 0 of weights holds no number, or one that float16 cannot"]),
        ({"experts": np.full(EXPERTS.shape, 2**64 - 1, np.uint64)}, ["row 0 of experts holds 18446744073709551615"]),
        ({"phase": np.array([1, 0, 1])}, ["request 0 are out of order"]),
        ({"phase": np.array([0, 1])}, ["phase has 2 values for 3 tokens"]),
        ({"position": np.array([3, 3, 0])}, ["request 0 are out of order"]),
        ({"position": np.array([0.0, 1.0, 2.0])}, ["position has the type float64"]),
        ({"step": np.array([0, -1, 2])}, ["row 1: step is -1"]),
    ],
)
def test_columns_of_tokens_that_no_model_made_are_refused(tmp_path: Path, arrays: Any, parts: list[str]) -> None:
    refuses(tmp_path, "x.npz", *parts, **arrays)


def test_the_phases_of_an_npz_are_kept_and_need_no_option(tmp_path: Path) -> None:
    files = dump(tmp_path, phase=np.array([0, 1, 1]))
    made, _ = import_dump(*files)
    assert made.phase.tolist() == [0, 1, 1]
    assert made.requests["output_tokens"].tolist() == [2, 2]
    with pytest.raises(InputError, match="leave --phase out"):
        import_dump(*files, Options(phase="decode"))


def test_damage_within_a_compressed_array_is_told(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "x.npz", experts=np.arange(600).reshape(100, 2, 3), offsets=np.array([0, 100]))
    content = bytearray((tmp_path / "x.npz").read_bytes())
    refused = 0
    for at in range(30, 300):
        content[at] ^= 0xFF
        (tmp_path / "y.npz").write_bytes(content)
        content[at] ^= 0xFF
        try:
            import_dump(tmp_path / "y.npz")
        except InputError:
            refused += 1
    assert refused > 200


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    file, meta = dump(tmp_path)
    with pytest.raises(InputError, match="no file"):
        import_dump(tmp_path / "none.npz")
    with pytest.raises(InputError, match="no file"):
        import_dump(file, tmp_path / "none.json")
    meta.write_text("{")
    with pytest.raises(InputError, match="is no JSON"):
        import_dump(file, meta)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(InputError, match="damaged"):
        import_dump(file)
    file.write_bytes(b"")
    with pytest.raises(InputError, match="damaged"):
        import_dump(file)


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


@needs_shared
def test_a_real_dump_comes_in_without_json() -> None:
    trace, assumed = import_dump(SHARED / "mixtral-8x7b.npz")
    assert (len(trace.requests), trace.layers, trace.num_experts, trace.top_k) == (4, 32, 8, 2)
    assert len(assumed) == 2


def test_a_layer_of_the_map_that_routes_nothing_is_refused(tmp_path: Path) -> None:
    experts = EXPERTS.copy()
    experts[:, 1] = -1
    with pytest.raises(InputError, match=r"layer 1 routes nothing in any row; leave it out of --layer-map"):
        import_dump(*dump(tmp_path, experts=experts), Options(layer_map="0-1"))


def test_two_layers_of_one_name_are_refused(tmp_path: Path) -> None:
    refuses(tmp_path, "two MoE layers have the same name", meta={"layer_names": ["a", "a"]})
