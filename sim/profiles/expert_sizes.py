"""The sizes of a model's experts by layer, read from the headers of its files: quantised files mix formats.

Of rule 19. Formats: GGUF (github.com/ggml-org/ggml, docs/gguf.md; read by llama.cpp's own package `gguf`) and
safetensors (`sim.profiles.safetensors_files`). No weights are read.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sim.profiles.safetensors_files import StoredTensor, files_of, tensors_of
from traces.errors import InputError, located, refuse
from traces.files import expanded

GGUF_NAME = re.compile(r"(blk\.\d+)\.ffn_(?:gate|up|down|gate_up)(?:_exps|\.(\d+))(?:\.|$)")
"""Names of expert tensors in GGUF files: the layer, and the expert unless all are in one tensor."""

SAFETENSORS_NAME = re.compile(r"(.+)\.experts\.(?:(?:expert_)?(\d+)\.)?.+")
"""The same of transformers models."""

SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
"""Names of the files of a split GGUF model."""


@dataclass
class _Layer:
    """The expert tensors of a layer."""

    fused: list[StoredTensor] = field(default_factory=list)  # of all experts
    own: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # expert -> bytes of its own tensors


def expert_bytes_by_layer(path: Path | str, experts: int | None = None) -> NDArray[np.int64]:
    """Return the bytes of one expert of each MoE layer, int64[L], in the order of execution (encoder first).

    path: a .gguf file (of a split model any of its files), a .safetensors file, or a folder of safetensors files with
    or without an index. All tensors of an expert count: matrices, biases and scales. What all experts of a layer share
    in one tensor is divided by their number, rounded up. Raises InputError for a file of another format, a damaged or
    missing one, a tensor in two files, and where no experts are there, those of a layer differ in size or are not as
    many as `experts`.
    """
    path = expanded(path)
    layers: dict[str, _Layer] = defaultdict(_Layer)
    for tensor, match in _expert_tensors(path):
        layer, expert = layers[match[1]], match[2]
        if expert is None:
            layer.fused.append(tensor)
        else:
            layer.own[expert] += tensor.size
    if not layers:
        raise InputError(f"{path} holds no tensors of experts: is it an MoE model?")
    with located(str(path)):
        return np.array([_expert_bytes(name, layers[name], experts) for name in sorted(layers, key=_order)], np.int64)


def _expert_bytes(name: str, layer: _Layer, experts: int | None) -> int:
    """Return the bytes of one expert of a layer, which has so many if that is known."""
    counts = {tensor.shape[0] for tensor in layer.fused if len(tensor.shape) >= 3}
    counts |= {len(layer.own)} if layer.own else set()
    sizes = sorted(set(layer.own.values()))
    if len(counts) != 1 or 0 in counts or experts not in (None, *counts):
        numbers = " or ".join(map(str, sorted(counts))) or "no number of"
        raise InputError(f"{name} has {numbers} experts, not {experts or 'one number of them'}")
    if len(sizes) > 1:
        raise InputError(f"the experts of {name} differ in size: {sizes[0]} to {sizes[-1]} bytes")
    shared = sum(tensor.size for tensor in layer.fused)
    return max(sizes, default=0) + -(-shared // counts.pop())


def _order(layer: str) -> tuple[bool, list[str]]:
    """Return a key that sorts layers by their numbers, the encoder's first."""
    return "encoder" not in layer, [part.zfill(20) if part.isdigit() else part for part in re.split(r"(\d+)", layer)]


def _expert_tensors(path: Path) -> Iterator[tuple[StoredTensor, re.Match[str]]]:
    read: Callable[[Path], Iterable[StoredTensor]]
    if path.is_dir() or path.suffix == ".safetensors":
        files, name, read = files_of(path) if path.is_dir() else [path], SAFETENSORS_NAME, tensors_of
    elif path.suffix == ".gguf":
        split = SPLIT.fullmatch(path.name)
        parts = range(1, int(split[3]) + 1) if split else ()
        files = [path.with_name(f"{split[1]}-{i:05d}-of-{split[3]}.gguf") for i in parts if split] or [path]
        name, read = GGUF_NAME, _gguf
    else:
        raise InputError(f"{path} is neither .gguf nor .safetensors: expert sizes are read from these two")
    refuse(*((not file.is_file(), f"no model file at {file}") for file in files))
    file_of: dict[str, Path] = {}
    for file in files:
        for tensor in read(file):
            if match := name.match(tensor.name):
                if (first := file_of.setdefault(tensor.name, file)) is not file:
                    raise InputError(f"{tensor.name} is in {first} and in {file}: name the file of the model")
                yield tensor, match


def _gguf(file: Path) -> Iterator[StoredTensor]:
    from gguf import GGUFReader

    try:
        tensors = GGUFReader(file).tensors
    except (OSError, ValueError, LookupError, OverflowError, MemoryError, RecursionError) as error:
        raise InputError(f"{file} cannot be read as GGUF, it is damaged or cut off: {error}") from error
    for tensor in tensors:
        shape, kind = tuple(tensor.shape.tolist()[::-1]), tensor.tensor_type.name
        yield StoredTensor(tensor.name, kind, shape, int(tensor.data_offset), int(tensor.n_bytes))
