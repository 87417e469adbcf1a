"""Tiny random models on disk, for live generation, and what the unmodified model makes of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from replay.live.memory import kv_name_in
from tests.support.architectures import tiny_model
from tracer.models import find_model

NEW_TOKENS = 24


def saved(folder: Path, architecture: str, dtype: str = "float32", shard_size: str = "20KB", **changes: Any) -> Path:
    """Save a tiny model, in several shards; return its folder."""
    model = tiny_model(architecture, **changes).to(getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size=shard_size)
    return folder


def saved_in_few_bits(folder: Path, architecture: str, **changes: Any) -> Path:
    """Save a tiny model with experts in MXFP4 (gpt_oss), else with experts and attention in fp8, scaled by blocks."""
    saved(folder, architecture, "bfloat16", "1GB", **changes)
    (file,), drawn = folder.glob("*.safetensors"), torch.Generator().manual_seed(7)
    tensors: dict[str, Tensor] = {}
    for name, weight in load_file(file).items():
        if architecture == "gpt_oss" and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            count, inputs, outputs = weight.shape
            grid = count, outputs, inputs // 32
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (*grid, 16), generator=drawn, dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(123, 126, grid, generator=drawn, dtype=torch.uint8)
        elif architecture != "gpt_oss" and _is_fp8(name, weight):
            scales = torch.rand(weight.shape[0] // 16, weight.shape[1] // 16, generator=drawn) * 0.01 + 0.001
            wide = weight.float() / scales.repeat_interleave(16, 0).repeat_interleave(16, 1)
            tensors[name], tensors[f"{name}_scale_inv"] = wide.clamp(-448, 448).to(torch.float8_e4m3fn), scales
        else:
            tensors[name] = weight
    save_file(tensors, file, {"format": "pt"})
    said: dict[str, Any] = {"quant_method": "mxfp4"}
    if architecture != "gpt_oss":
        said = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    return folder


def saved_in_int4(folder: Path, architecture: str, **changes: Any) -> Path:
    """Save a tiny model with experts and attention in 4 bits, as compressed-tensors packs them; skip without it."""
    packing: Any = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    saved(folder, architecture, "bfloat16", "1GB", **changes)
    (file,), drawn = folder.glob("*.safetensors"), torch.Generator().manual_seed(7)
    tensors: dict[str, Tensor] = {}
    for name, weight in load_file(file).items():
        if not (name.endswith("_proj.weight") and (".self_attn." in name or ".experts." in name)):
            tensors[name] = weight
            continue
        rows, columns = weight.shape
        numbers = torch.randint(-8, 8, (rows, columns), generator=drawn, dtype=torch.int8)
        tensors[f"{name}_packed"] = packing.pack_to_int32(numbers, 4)
        tensors[f"{name}_scale"] = (torch.rand(rows, columns // 16, generator=drawn) * 0.05 + 0.01).bfloat16()
        tensors[f"{name}_shape"] = torch.tensor(weight.shape)
    save_file(tensors, file, {"format": "pt"})
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16}
    said = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:.*gate$"],
        "dequantize": True,  # the whole model
    }
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    return folder


def _is_fp8(name: str, weight: Tensor) -> bool:
    return (".self_attn." in name or ".experts." in name) and [size % 16 for size in weight.shape] == [0, 0]


def whole_model(folder: Path | str, dtype: str = "auto") -> Any:
    """Return the unmodified model, which computes its experts one by one."""
    auto = find_model(str(folder), needs_tokenizer=False).auto
    return auto.from_pretrained(folder, dtype=dtype, experts_implementation="eager").eval()


def prompt(tokens: int, vocabulary: int = 250, seed: int = 3) -> Tensor:
    return torch.randint(5, vocabulary, (1, tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: Any, ids: Tensor, new_tokens: int = NEW_TOKENS) -> list[Tensor]:
    """Return the logits of a prefill and of greedy tokens after it."""
    out = model(input_ids=ids, use_cache=True)
    found, name = [out.logits], kv_name_in(model)
    for _ in range(new_tokens):
        token = found[-1][:, -1:].argmax(-1)
        out = model(input_ids=token, use_cache=True, **{name: out[name]})
        found.append(out.logits)
    return found
