"""Sizes of experts are read from files that the formats' own writers wrote."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.gguf_files import BYTES_OF_256, Gguf, write_tensors
from traces import InputError
from traces.models.expert_sizes import expert_bytes_by_layer
from traces.models.safetensors_files import INDEX


def write_gguf(path: Path, tensors: Gguf) -> Path:
    gguf = pytest.importorskip("gguf", reason="needs the package gguf")
    writer = gguf.GGUFWriter(path, "test")
    writer.add_block_count(2)
    write_tensors(writer, tensors)
    return path


@pytest.mark.parametrize("kind", BYTES_OF_256)
def test_a_gguf_expert_has_the_bytes_of_its_blocks(tmp_path: Path, kind: str) -> None:
    path = write_gguf(
        tmp_path / "a.gguf", {f"blk.0.ffn_{part}_exps.weight": ((5, 3, 512), kind) for part in ("gate_up", "down")}
    )
    assert expert_bytes_by_layer(path).tolist() == [2 * 3 * 2 * BYTES_OF_256[kind]]


def test_experts_of_their_own_tensors_in_a_gguf_file(tmp_path: Path) -> None:
    tensors: Gguf = {
        f"blk.{layer}.ffn_{part}.{expert}.weight": ((4, 256), "Q8_0" if layer else "Q5_K")
        for layer in range(2)
        for part in ("gate", "up", "down")
        for expert in range(8)
    }
    path = write_gguf(tmp_path / "a.gguf", tensors)
    assert expert_bytes_by_layer(path).tolist() == [3 * 4 * 176, 3 * 4 * 272]


def test_experts_of_a_safetensors_file_with_their_scales(tmp_path: Path) -> None:
    tensors = {"model.layers.0.mlp.gate_proj.weight": np.zeros((4, 8), np.uint8)}
    for layer in (1, 2, 10):
        prefix = f"model.layers.{layer}.mlp"
        tensors[f"{prefix}.gate.weight"] = np.zeros((3, 8), np.float32)
        tensors[f"{prefix}.shared_experts.up_proj.weight"] = np.zeros((4, 8), np.float32)
        for expert in range(3):
            for part in ("gate_proj", "up_proj", "down_proj"):
                tensors[f"{prefix}.experts.{expert}.{part}.weight"] = np.zeros((4, 8 * layer), np.uint8)
                tensors[f"{prefix}.experts.{expert}.{part}.weight_scale_inv"] = np.zeros((1, 1), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    assert expert_bytes_by_layer(tmp_path / "model.safetensors").tolist() == [3 * (32 * n + 4) for n in (1, 2, 10)]


E, H, INNER = 4, 32, 8


@pytest.mark.parametrize(
    "shapes",  # of matrices by the names of MLX, Step, Granite and JetMoE, DBRX
    [
        {f"mlp.switch_mlp.{part}_proj.weight": (E, INNER, H) for part in ("gate", "up", "down")},
        {f"moe.{part}_proj.weight": (E, INNER, H) for part in ("gate", "up", "down")},
        {"mlp.input_linear.weight": (E, 2 * INNER, H), "mlp.output_linear.weight": (E, H, INNER)},
        {f"ffn.experts.mlp.{part}": (E * INNER, H) for part in ("w1", "v1", "w2")},
        {f"any.{expert}.{part}.kernel": (INNER, H) for part in ("a", "b", "c") for expert in range(E)},
    ],
)
def test_experts_are_found_by_shape_and_count_whatever_their_names(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]]
) -> None:
    beside = {
        "mlp.gate.weight": (E, H),
        "mlp.shared_expert.up_proj.weight": (INNER, H),
        "self_attn.embed_q.weight": (E, 1, 2),
        "linear_attn.conv1d.weight": (64, 1, 4),
        "self_attn.q_proj.weight": (H, H),
    }
    tensors = {f"model.layers.{i}.{name}": shape for i in (1, 2) for name, shape in {**shapes, **beside}.items()}
    save_file({name: np.zeros(shape, np.float16) for name, shape in tensors.items()}, tmp_path / "a.safetensors")
    assert expert_bytes_by_layer(tmp_path / "a.safetensors", E).tolist() == [2 * 3 * INNER * H] * 2


def test_fused_mxfp4_experts_in_several_files_with_an_index(tmp_path: Path) -> None:
    prefix, weights = "model.layers.{}.mlp.experts.", {}
    for layer in range(2):
        name = f"model-{layer}.safetensors"
        tensors = {
            prefix.format(layer) + part: np.zeros(shape, kind)
            for part, shape, kind in (
                ("gate_up_proj_blocks", (4, 6, 2, 16), np.uint8),
                ("gate_up_proj_scales", (4, 6, 2), np.uint8),
                ("gate_up_proj_bias", (4, 6), np.float16),
                ("down_proj_blocks", (4, 8, 1, 16), np.uint8),
                ("down_proj_scales", (4, 8, 1), np.uint8),
                ("down_proj_bias", (4, 8), np.float16),
            )
        }
        save_file(tensors, tmp_path / name)
        weights.update(dict.fromkeys(tensors, name))
    save_file({"model.layers.9.mlp.experts.0.up": np.zeros(5, np.uint8)}, tmp_path / "not-of-it.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weights}))
    assert expert_bytes_by_layer(tmp_path).tolist() == [(192 + 12 + 12) + (128 + 8 + 16)] * 2
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(InputError):
        expert_bytes_by_layer(tmp_path)


def test_a_folder_without_an_index_and_an_encoder_before_its_decoder(tmp_path: Path) -> None:
    for side, width in (("decoder", 3), ("encoder", 7)):
        tensors = {
            f"{side}.block.{layer}.layer.1.mlp.experts.expert_{e}.wi.weight": np.zeros((2, width), np.float16)
            for layer in (1, 11, 3)
            for e in range(2)
        }
        save_file(tensors, tmp_path / f"{side}.safetensors")
    assert expert_bytes_by_layer(tmp_path).tolist() == [28] * 3 + [12] * 3


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.9])
@pytest.mark.parametrize("suffix", ["gguf", "safetensors"])
def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, suffix: str, share: float) -> None:
    path = tmp_path / f"a.{suffix}"
    if suffix == "gguf":
        write_gguf(path, {"blk.0.ffn_down_exps.weight": ((4, 2, 512), "Q6_K")})
    else:
        save_file({"model.layers.0.mlp.experts.up_proj": np.zeros((4, 64, 64), np.float32)}, path)
    assert expert_bytes_by_layer(path).size == 1
    held = path.read_bytes()
    path.write_bytes(held[: int(len(held) * share)])
    with pytest.raises(InputError):
        expert_bytes_by_layer(path)


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    save_file({"model.layers.0.mlp.up_proj.weight": np.zeros((4, 4), np.float32)}, tmp_path / "dense.safetensors")
    with pytest.raises(InputError, match="holds no tensors of experts"):
        expert_bytes_by_layer(tmp_path / "dense.safetensors")
    (tmp_path / "model.bin").write_bytes(b"PK")
    with pytest.raises(InputError, match=r"is neither \.gguf nor \.safetensors"):
        expert_bytes_by_layer(tmp_path / "model.bin")
