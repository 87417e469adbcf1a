"""The sizes of a model's experts by layer, read from the headers of its files: quantised files mix formats.

Of rule 19. In GGUF files names say what is an expert's, in safetensors shapes and counts do. No weights are read.
Layers for multi-token prediction (MTP) do not count, nor do those of a second model in the files, such as one that
speaks.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from traces.errors import InputError, located, refuse
from traces.files import expanded
from traces.location import is_url
from traces.models import gguf_files
from traces.models.names import is_precision
from traces.models.safetensors_files import StoredTensor, files_of, tensors_of

if TYPE_CHECKING:
    from traces.models.profile import ModelProfile

GGUF_NAME = re.compile(r"(blk\.\d+)\.ffn_(?:gate|up|down|gate_up)(?:_exps|\.(\d+))(?:\.|$)")
"""Names of expert tensors in GGUF files: the layer, and the expert unless all are in one tensor."""

OF_ONE = re.compile(r"((.*\.\d+\.[^.]+)(?:\..*)?)\.(?:expert_)?(\d+)\..+")
"""Names of tensors with a number behind a layer's: the tensor up to it, the layer with its part, and the number."""

OF_ALL = re.compile(r"(.*\.\d+\.[^.]+)(?:\..+)?")
"""Names of tensors in a layer: the layer with its part."""

FEW = 0.02
"""Of the bytes of the largest set of tensors: what has less is no set of experts (convolutions, heads of attention)."""

MTP = re.compile(r"(.+?)\.(?:eh_proj|nextn)\.|(.*mtp\.layers\.\d+)\.")
"""Names of tensors that only layers for multi-token prediction have, of DeepSeek, GLM, Qwen and in GGUF files."""


@dataclass
class _Layer:
    """The expert tensors of a layer."""

    fused: list[StoredTensor] = field(default_factory=list)  # of all experts
    own: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # expert -> bytes of its own tensors

    def add(self, tensor: StoredTensor, expert: str | None) -> None:
        if expert is None:
            self.fused.append(tensor)
        else:
            self.own[expert] += tensor.size

    def merge(self, other: "_Layer") -> None:
        for expert, size in other.own.items():
            self.own[expert] += size

    @property
    def bytes(self) -> int:
        return sum(self.own.values()) + sum(tensor.size for tensor in self.fused)


def with_sizes_of(profile: "ModelProfile", path: str) -> "ModelProfile":
    """Return the model with the experts of these files, or at a named precision. Raise InputError for others."""
    if is_precision(path):
        if profile.precisions and path.lower() not in profile.precisions:
            raise InputError(f"all files of {profile.name} have experts at {', '.join(profile.precisions)}: not {path}")
        return profile.at_precision(path)
    sizes = tuple(expert_bytes_by_layer(path, profile.experts).tolist())
    if len(sizes) != profile.moe_layers:
        raise InputError(f"{path} has {len(sizes)} MoE layers, not {profile.moe_layers}")
    return replace(profile, layer_expert_bytes=sizes)


def expert_bytes_by_layer(path: Path | str, experts: int | None = None) -> NDArray[np.int64]:
    """Return the bytes of one expert of each MoE layer, int64[L], in the order of execution (encoder first).

    path: a .gguf file or its URL (any of a split model), a .safetensors file, or a folder of those. Matrices, biases
    and scales count; what a layer's experts share in one tensor is divided by their number, rounded up. Raises
    InputError for other formats, damage, a tensor in two files, no experts, unequal ones, or others than `experts`.
    """
    return bytes_by_layer(list(_tensors(str(path))), str(path), experts)


def bytes_by_layer(tensors: Sequence[StoredTensor], path: str, experts: int | None = None) -> NDArray[np.int64]:
    """Return the same of a model's tensors; path: what errors name."""
    beyond = {match[1] or match[2] for tensor in tensors if (match := MTP.match(tensor.name))}
    kept = [each for each in tensors if not any(f"{each.name}.".startswith(f"{name}.") for name in beyond)]
    named = [(match[1], match[2], each) for each in kept if (match := GGUF_NAME.match(each.name))]
    rows = [(each.name.partition(".experts.")[0], None, each) for each in kept if ".experts." in each.name]  # of DBRX
    layers = _layers(named) or _of_shapes(kept, experts) or _layers(rows)
    names = _of_one_model(layers)
    if not names:
        raise InputError(f"{path} holds no tensors of experts: is it an MoE model?")
    with located(path):
        return np.array([_expert_bytes(name, layers[name], experts) for name in sorted(names, key=_order)], np.int64)


def _layers(named: Iterable[tuple[str, str | None, StoredTensor]]) -> dict[str, _Layer]:
    """Return the layers of tensors, each with the names of its layer and of its expert, None: of all."""
    layers: dict[str, _Layer] = defaultdict(_Layer)
    for name, expert, tensor in named:
        layers[name].add(tensor, expert)
    return layers


def _of_shapes(tensors: Sequence[StoredTensor], experts: int | None) -> dict[str, _Layer]:
    """Return the layers with experts, by the largest sets of as many alike: in one tensor, or in as many."""
    sets: dict[str, dict[int, _Layer]] = defaultdict(lambda: defaultdict(_Layer))
    apart: dict[tuple[str, str], _Layer] = defaultdict(_Layer)
    alike = (each for each in tensors if len(each.shape) > 2 and min(each.shape) > 1)  # no convolutions
    stacked = {(_module(each.name), each.shape[0]) for each in alike}
    for tensor in tensors:
        if match := OF_ONE.fullmatch(tensor.name):
            apart[match[2], match[1]].add(tensor, match[3])
        elif (match := OF_ALL.fullmatch(tensor.name)) and (_module(tensor.name), *tensor.shape[:1]) in stacked:
            sets[match[1]][tensor.shape[0]].add(tensor, None)
    for (name, _), layer in apart.items():
        sets[name][len(layer.own)].merge(layer)
    most = max((layer.bytes for of in sets.values() for layer in of.values()), default=0)
    large = {name: {n: layer for n, layer in of.items() if layer.bytes >= FEW * most} for name, of in sets.items()}
    total: dict[int, int] = defaultdict(int)
    for count, layer in (each for of in large.values() for each in of.items()):
        total[count] += layer.bytes
    count = experts if experts in total else max(total, key=lambda each: total[each], default=0)
    parts = {re.sub(r"\d+", "N", name) for name, of in large.items() if count in of}
    found = {name: of for name, of in large.items() if of and re.sub(r"\d+", "N", name) in parts}
    return {name: of.get(count) or max(of.values(), key=lambda layer: layer.bytes) for name, of in found.items()}


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _of_one_model(layers: dict[str, _Layer]) -> list[str]:
    """Return the layers of an encoder and its decoder; where there is none, those of the model with most bytes."""
    stacks: dict[str, list[str]] = defaultdict(list)
    for name in layers:
        stacks[re.split(r"\.\d+", name, maxsplit=1)[0]].append(name)
    if not stacks or any("encoder" in stack for stack in stacks):
        return list(layers)
    return max(stacks.values(), key=lambda names: sum(layers[name].bytes for name in names))


def _expert_bytes(name: str, layer: _Layer, experts: int | None) -> int:
    """Return the bytes of one expert of a layer, which has so many if that is known."""
    counts = {tensor.shape[0] for tensor in layer.fused if len(tensor.shape) >= 3}
    if experts and layer.fused and not counts and all(tensor.shape[0] % experts == 0 for tensor in layer.fused):
        counts = {experts}
    counts |= {len(layer.own)} if layer.own else set()
    sizes = sorted(set(layer.own.values()))
    if len(counts) != 1 or 0 in counts or experts not in (None, *counts):
        numbers = " or ".join(map(str, sorted(counts))) or "an unclear number of"
        raise InputError(f"{name} has {numbers} experts, not {experts or 'one number of them'}")
    if len(sizes) > 1:
        raise InputError(f"the experts of {name} differ in size: {sizes[0]} to {sizes[-1]} bytes")
    shared = sum(tensor.size for tensor in layer.fused)
    return max(sizes, default=0) + -(-shared // counts.pop())


def _order(layer: str) -> tuple[bool, list[str]]:
    """Return a key that sorts layers by their numbers, the encoder's first."""
    return "encoder" not in layer, [part.zfill(20) if part.isdigit() else part for part in re.split(r"(\d+)", layer)]


def _tensors(path: str) -> Iterable[StoredTensor]:
    """Return all tensors of a model's files."""
    if path.endswith(".gguf"):
        return gguf_files.read(path if is_url(path) else str(expanded(path))).tensors
    place = expanded(path)
    if not place.is_dir() and place.suffix != ".safetensors":
        raise InputError(f"{path} is neither .gguf nor .safetensors: expert sizes are read from these two")
    files = files_of(place) if place.is_dir() else [place]
    refuse(*((not file.is_file(), f"no model file at {file}") for file in files))
    tensors: dict[str, StoredTensor] = {}
    for tensor in (tensor for file in files for tensor in tensors_of(file)):
        if tensors.setdefault(tensor.name, tensor) is not tensor:
            raise InputError(f"{tensor.name} is in two files of {path}: name the file of the model")
    return tensors.values()
