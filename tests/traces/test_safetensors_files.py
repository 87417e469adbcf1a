"""Headers of safetensors files: what the format's own writer writes is read."""

import json
import struct
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from traces.models.safetensors_files import files_of, header_of, tensors_of


def written(path: Path, *entries: dict[str, Any], data: int = 8) -> Path:
    """A file of tensors called a, b, ..., each U8 [4] unless `entries` say otherwise, with `data` bytes behind them."""
    plain = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
    header = json.dumps({"abcd"[i]: {**plain, **entry} for i, entry in enumerate(entries)}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(data))
    return path


def test_tensors_are_found_where_the_formats_own_writer_puts_them(tmp_path: Path) -> None:
    rng, path = np.random.default_rng(0), tmp_path / "a.safetensors"
    held = {
        f"t{i}": rng.integers(0, 100, shape).astype(dtype)
        for i, (shape, dtype) in enumerate([((3, 5), "f2"), ((), "f8"), ((7,), "u1"), ((2, 0, 3), "i4")])
    }
    save_file(held, path, metadata={"format": "np"})
    content = path.read_bytes()
    found = {tensor.name: tensor for tensor in tensors_of(path)}
    for name, array in held.items():
        tensor = found[name]
        assert tensor.shape == array.shape
        assert tensor.size == prod(array.shape) * array.itemsize
        assert content[tensor.begin : tensor.begin + tensor.size] == array.tobytes()
    assert header_of(path)[0]["__metadata__"] == {"format": "np"}


def test_a_type_that_is_not_known_is_taken_with_its_bytes(tmp_path: Path) -> None:
    found = tensors_of(written(tmp_path / "a.safetensors", {"dtype": "F4", "shape": [8]}))
    assert [(tensor.dtype, tensor.size) for tensor in found] == [("F4", 4)]


def test_files_beside_a_whole_model_are_not_of_it(tmp_path: Path) -> None:
    for name in ("adapter_model", "model", "model_old"):
        written(tmp_path / f"{name}.safetensors", {})
    assert [file.name for file in files_of(tmp_path)] == ["model.safetensors"]
