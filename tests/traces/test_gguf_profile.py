"""Profiles of GGUF files that the format's own writer wrote: bytes and parameters are those of their tensors."""

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from tests.support.gguf_files import BYTES_OF_256, Gguf, write_tensors
from traces import InputError
from traces.models.gguf_profile import of_gguf
from traces.models.profile import MODELS, model, written

gguf = pytest.importorskip("gguf", reason="needs the package gguf")

H, INNER, E, VOCABULARY = 512, 256, 6, 768
KEYS = {
    "block_count": 3,
    "embedding_length": H,
    "expert_count": E,
    "expert_used_count": 2,
    "attention.head_count": 8,
    "attention.head_count_kv": 2,
}
ENDS: Gguf = {
    "token_embd.weight": ((VOCABULARY, H), "Q4_K"),
    "output.weight": ((VOCABULARY, H), "Q6_K"),
    "output_norm.weight": ((H,), "F32"),
}
ATTENTION: Gguf = {
    "attn_norm.weight": ((H,), "F32"),
    "attn_q.weight": ((512, H), "Q4_K"),
    "attn_k.weight": ((128, H), "Q4_K"),
    "attn_v.weight": ((128, H), "Q6_K"),
    "attn_output.weight": ((H, 512), "Q4_K"),
}
DENSE: Gguf = {f"ffn_{part}.weight": ((1024, H), "Q4_K") for part in ("gate", "up")}
DENSE["ffn_down.weight"] = ((H, 1024), "Q4_K")


def routed(kind: str = "Q4_K", width: int = H, inner: int = INNER) -> Gguf:
    return {
        "ffn_gate_inp.weight": ((E, H), "F32"),
        "ffn_gate_exps.weight": ((E, inner, width), kind),
        "ffn_up_exps.weight": ((E, inner, width), kind),
        "ffn_down_exps.weight": ((E, width, inner), kind),
        "ffn_gate_inp_shexp.weight": ((256,), "F32"),
        "ffn_up_shexp.weight": ((256, H), "Q8_0"),
    }


def write(
    path: Path, blocks: list[Gguf], ends: Gguf = ENDS, file_type: int | None = 15, name: str = "test", **keys: Any
) -> Path:
    """Write a model of these blocks; name: of its architecture, keys: of that, with __ for a dot."""
    writer = gguf.GGUFWriter(path, name)
    if file_type is not None:
        writer.add_file_type(file_type)
    for key, value in {**KEYS, "block_count": len(blocks), **keys}.items():
        add = writer.add_array if isinstance(value, list) else writer.add_uint32
        add(f"{name}.{key.replace('__', '.')}", value)
    placed = {f"blk.{place}.{name}": each for place, block in enumerate(blocks) for name, each in block.items()}
    write_tensors(writer, ends | placed)
    return path


def bytes_of(*tables: Gguf) -> int:
    return sum(prod(shape) // 256 * BYTES_OF_256[kind] for table in tables for shape, kind in table.values())


def parameters_of(*tables: Gguf) -> int:
    return sum(prod(shape) for table in tables for shape, _ in table.values())


def without_experts(block: Gguf) -> Gguf:
    return {name: each for name, each in block.items() if "_exps" not in name}


def experts_of(block: Gguf) -> Gguf:
    return {name: each for name, each in block.items() if "_exps" in name}


@pytest.mark.parametrize(
    ("kind", "file_type", "name"),
    [
        *(("F16", 1, "f16"), ("Q8_0", 7, "q8_0"), ("Q4_K", 15, "q4_k_m"), ("MXFP4", 38, "mxfp4")),
        *(("IQ4_XS", 30, "iq4_xs"), ("Q4_K", 1024 + 15, "q4_k_m"), ("Q4_K", 999, "mixed"), ("Q4_K", None, "mixed")),
    ],
)
def test_bytes_and_parameters_are_those_of_the_tensors(
    tmp_path: Path, kind: str, file_type: int | None, name: str
) -> None:
    blocks = [ATTENTION | DENSE, ATTENTION | routed(kind), ATTENTION | routed(kind)]
    found = model(str(write(tmp_path / "tiny-9B.gguf", blocks, file_type=file_type, leading_dense_block_count=1)))
    assert (found.name, found.precision) == ("tiny-9B", name)
    assert (found.experts, found.top_k, found.hidden_size, found.vocabulary) == (E, 2, H, VOCABULARY)
    assert (found.expert_intermediate_size, found.expert_matrices, found.expert_biases) == (INNER, 3, 0)
    assert (found.heads, found.kv_heads, found.head_size) == (8, 2, 64)
    assert found.layers == ("1 dense", "2 moe")
    assert found.expert_bytes * E == bytes_of(experts_of(blocks[1]))
    assert found.parameters == parameters_of(ENDS, *blocks)
    assert found.dense_bytes == pytest.approx(bytes_of(ENDS, *map(without_experts, blocks)), rel=1e-12)
    assert found.head_bytes == pytest.approx(bytes_of(ENDS) - VOCABULARY * H // 256 * BYTES_OF_256["Q4_K"])
    assert found.kinds["moe"].shared == 256 + 256 * H
    assert found.kinds["dense"].mlp == parameters_of(DENSE)
    assert found.kv_cache_bytes(100) == 3 * 100 * 256 * 2
    (tmp_path / "same.toml").write_text(written(found, ""))
    assert MODELS.read(type(found), tmp_path / "same.toml") == replace(found, name="same")


def test_layers_of_several_types_have_their_own_sizes(tmp_path: Path) -> None:
    blocks = [ATTENTION | routed(kind) for kind in ("Q4_K", "Q6_K", "Q4_K")]
    found = of_gguf(str(write(tmp_path / "a.gguf", blocks)))
    assert [size * E for size in found.layer_expert_bytes] == [bytes_of(experts_of(block)) for block in blocks]
    of_all = bytes_of(*map(experts_of, blocks)) / parameters_of(*map(experts_of, blocks))
    assert found.expert_bytes_per_parameter == pytest.approx(of_all, rel=1e-12)


def test_a_split_model_is_read_from_any_of_its_files(tmp_path: Path) -> None:
    blocks = [ATTENTION | routed()] * 2
    whole = of_gguf(str(write(tmp_path / "m.gguf", blocks)))
    write(tmp_path / "m-00001-of-00002.gguf", blocks[:1], block_count=2)
    second = {f"blk.1.{name}": each for name, each in blocks[1].items()}
    write(tmp_path / "m-00002-of-00002.gguf", [], second)
    for file in ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf"):
        assert of_gguf(str(tmp_path / file)) == whole


@pytest.mark.parametrize("named", [True, False])
def test_layers_that_predict_several_tokens_are_unused(tmp_path: Path, named: bool) -> None:
    ahead = ATTENTION | routed("Q8_0") | ({"nextn.eh_proj.weight": ((H, 2 * H), "Q8_0")} if named else {})
    blocks = [ATTENTION | routed(), ATTENTION | routed(), ahead]
    found = of_gguf(str(write(tmp_path / "a.gguf", blocks, nextn_predict_layers=1)))
    assert (found.moe_layers, found.unused_parameters) == (2, parameters_of(ahead))
    assert found.parameters == parameters_of(ENDS, *blocks[:2])
    assert found.layer_expert_bytes == ()


def test_a_tensor_of_an_unknown_type_has_the_bytes_up_to_the_next_one(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", [ATTENTION | routed("IQ4_XS")])
    known = of_gguf(str(path))
    data = path.read_bytes()
    for part in ("gate", "up", "down"):
        name = f"blk.0.ffn_{part}_exps.weight".encode()
        start = data.index(name) + len(name) + 4 + 3 * 8  # behind the name: how many axes, their lengths, the type
        assert data[start] == gguf.GGMLQuantizationType.IQ4_XS
        data = data[:start] + bytes([157]) + data[start + 1 :]
    (tmp_path / "b.gguf").write_bytes(data)
    found = of_gguf(str(tmp_path / "b.gguf"))
    assert (found.expert_bytes, found.dense_bytes) == (known.expert_bytes, known.dense_bytes)


def test_a_tied_head_is_the_embedding_and_counts_once(tmp_path: Path) -> None:
    ends = {name: each for name, each in ENDS.items() if name != "output.weight"}
    block = ATTENTION | routed()
    found = of_gguf(str(write(tmp_path / "a.gguf", [block], ends)))
    assert (found.head_parameters, found.embedding_parameters) == (VOCABULARY * H + H, 0)
    assert found.dense_bytes == pytest.approx(bytes_of(ends, without_experts(block)), rel=1e-12)


def test_latent_attention_keeps_its_latent_and_latent_experts_their_width(tmp_path: Path) -> None:
    block: Gguf = {
        "attn_q_a.weight": ((256, H), "Q8_0"),
        "attn_kv_a_mqa.weight": ((256 + 64, H), "Q8_0"),
        "attn_k_b.weight": ((8, 64, 256), "F16"),
        **routed(width=256),
        "ffn_up_exps.bias": ((E, INNER), "F32"),
    }
    keys: dict[str, Any] = {"attention__kv_lora_rank": 256, "rope__dimension_count": 64, "attention__q_lora_rank": 256}
    found = of_gguf(str(write(tmp_path / "a.gguf", [block], attention__value_length_mla=128, **keys)))
    assert (found.kinds["moe"].kv, found.kv_latent_size, found.rope_head_size) == (320, 256, 64)
    assert (found.head_size, found.query_latent_size) == (128, 256)
    assert (found.expert_hidden_size, found.expert_matrices, found.expert_biases) == (256, 3, INNER)
    assert found.parameters == parameters_of(ENDS, block)


def test_windows_fused_attention_and_states_are_sized_as_llama_cpp_does(tmp_path: Path) -> None:
    fused: Gguf = {"attn_qkv.weight": ((768, H), "Q8_0")}
    mamba: Gguf = {"ssm_in.weight": ((1024, H), "Q8_0"), "ssm_conv1d.weight": ((256, 256), "F32")}
    short: Gguf = {"shortconv.in_proj.weight": ((1024, H), "Q8_0")}
    blocks = [each | routed() for each in (fused, fused, mamba | fused, short, {})]
    keys: dict[str, Any] = {
        "attention__head_count_kv": [2, 4, 0, 0, 0],
        "attention__key_length": 32,
        "attention__value_length": 64,
        "attention__sliding_window": 128,
        "attention__sliding_window_pattern": [True, False, False, False, False],
        "ssm__conv_kernel": 4,
        "ssm__inner_size": 256,
        "ssm__state_size": 16,
        "ssm__group_count": 2,
        "shortconv__l_cache": 3,
    }
    found = of_gguf(str(write(tmp_path / "a.gguf", blocks, **keys)))
    kept = [(kind.kv, kind.window, kind.windowed, kind.state, kind.mixes) for kind in found.order]
    state = 4 * (3 * (256 + 2 * 2 * 16) + 16 * 256)
    assert kept == [
        *((0, 128, 2 * 96, 0, True), (4 * 96, 0, 0, 0, True)),
        *((0, 0, 0, state, True), (0, 0, 0, 4 * 2 * H, True), (0, 0, 0, 0, False)),
    ]


@pytest.mark.parametrize(
    ("name", "keys", "windows"),
    [
        ("llama4", {}, [8192, 8192, 8192, 0, 8192]),
        ("llama4", {"attention__sliding_window": 0}, [0] * 5),
        ("smallthinker", {"attention__sliding_window": 64}, [0, 64, 64, 64, 0]),
        ("gpt-oss", {"attention__sliding_window": 64}, [64, 0, 64, 0, 64]),
        ("gpt-oss", {"attention__sliding_window": 64, "attention__sliding_window_pattern": 3}, [64, 64, 0, 64, 64]),
        ("phimoe", {"attention__sliding_window": 64}, [0] * 5),
        ("unheard-of", {"attention__sliding_window": 64}, [0] * 5),
    ],
)
def test_windows_that_files_do_not_state_are_those_of_llama_cpp(
    tmp_path: Path, name: str, keys: dict[str, Any], windows: list[int]
) -> None:
    found = of_gguf(str(write(tmp_path / "a.gguf", [ATTENTION | routed()] * 5, name=name, **keys)))
    assert [kind.window for kind in found.order] == windows
    assert bool(found.notes) == (name == "unheard-of")


def test_a_file_without_experts_or_with_another_number_of_them_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a\.gguf.*holds no tensors of experts"):
        of_gguf(str(write(tmp_path / "a.gguf", [ATTENTION | DENSE])))
    with pytest.raises(InputError, match=r"blk\.0 has 6 experts, not 7"):
        of_gguf(str(write(tmp_path / "b.gguf", [ATTENTION | routed()], expert_count=7)))
    with pytest.raises(InputError, match=r"no file at .*absent\.gguf"):
        model(str(tmp_path / "absent.gguf"))
