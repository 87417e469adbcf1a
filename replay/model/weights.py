"""Real weights from a safetensors checkpoint, read tensor by tensor as they are asked for.

The tensors' names tell which layers have experts, and which matrix is which: those of Mixtral, Qwen2-MoE, Qwen3-MoE,
OLMoE, DeepSeek-V2, Switch, NLLB, as published and as transformers 5 stacks them, and gpt-oss in bf16. Biases of gpt-oss
and NLLB are not computed, nor gpt-oss's clamp; they lie behind the matrices where the profile counts their bytes.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from traces.errors import InputError
from traces.models.profile import ModelProfile
from traces.models.safetensors_files import files_of

DTYPES = ("F64", "F32", "F16", "BF16")
"""What can be converted, as safetensors names it."""

_EXPERT = re.compile(r"(?P<place>.+)\.experts\.(?P<prefix>expert_)?\d+\.(?P<matrix>\w+)\.weight")
_STACKED = re.compile(r"(?P<place>.+)\.experts\.gate_up_proj")

_MATRICES = (  # gate, up and down, or up and down, as a family names them
    ("gate_proj", "up_proj", "down_proj"),  # Qwen, OLMoE, DeepSeek
    ("w1", "w3", "w2"),  # Mixtral
    ("wi", "wo"),  # Switch
    ("fc1", "fc2"),  # NLLB
)
_DENSE = {  # as `replay.model.dense` names it -> as families do
    "router": ("mlp.gate", "block_sparse_moe.gate", "mlp.router"),
    "shared": ("mlp.shared_experts", "mlp.shared_expert"),
}


def stored_dtype(profile: ModelProfile) -> torch.dtype | None:
    """Return the type of an expert's matrices, perhaps with biases; None: they are packed, or of several sizes."""
    for dtype in () if profile.differing_bytes else (torch.float32, torch.bfloat16):
        if dtype.itemsize <= profile.expert_bytes / profile.expert_parameters < dtype.itemsize * 1.05:
            return dtype
    return None


class Checkpoint:
    """A folder with model.safetensors, or with several files and their index. InputError where it cannot be used."""

    def __init__(self, folder: Path, profile: ModelProfile) -> None:
        self.folder, self.profile = folder, profile
        dtype = stored_dtype(profile)
        if dtype is None:
            raise InputError(
                f"`weights` fills experts of float32 and bfloat16, and those of {profile.name} are packed, so their "
                "bytes are moved but not multiplied: leave it out, or name a profile in bfloat16 (`model_profile`)"
            )
        self._dtype = dtype
        self._files = _open(folder)
        places: set[str] = set()
        matrices: set[str] = set()
        self._prefix = ""  # of an expert's number
        for name in self._files:
            if match := _EXPERT.fullmatch(name) or _STACKED.fullmatch(name):
                places.add(match["place"])
                if match.re is _EXPERT:
                    matrices.add(match["matrix"])
                    self._prefix = match["prefix"] or ""
        self._places = sorted(places, key=_execution_order)
        self._matrices = next((known for known in _MATRICES if matrices >= set(known)), None)
        self._require(matrices)

    def fill(self, expert: int, target: NDArray[np.uint8]) -> None:
        """Write expert `layer * E + e` in the layout of `Network.weights`. target: uint8[expert_bytes]."""
        layer, number = divmod(expert, self.profile.experts)
        place = f"{self._places[layer]}.experts"
        usable = len(target) // self._dtype.itemsize * self._dtype.itemsize
        rest = torch.from_numpy(target[:usable]).view(self._dtype)
        for piece in self._named(place, number) if self._matrices else self._stacked(place, number):
            if piece.numel() > len(rest):
                return  # biases that the profile does not count
            rest[: piece.numel()].view(piece.shape).copy_(piece)
            rest = rest[piece.numel() :]

    def dense(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        """Return what `replay.model.dense` names so; None where the checkpoint has no such tensor in that shape."""
        root = self._places[0].split(".layers.")[0]
        names = [f"{root}.{name}"]
        for ours, theirs in _DENSE.items():
            if f".{ours}" in name:
                names = [f"{root}.{name.replace(f'.{ours}', f'.{their}')}" for their in theirs]
        if name == "lm_head":
            names = [name, f"{root}.embed_tokens"]  # the embedding's, where both are one
        for full in (f"{each}.weight" for each in names):
            if full in self._files and tuple(self._files[full].get_slice(full).get_shape()) == shape:
                return self._read(full, shape)
        return None

    def _named(self, place: str, number: int) -> Iterator[torch.Tensor]:
        """Yield matrices with names of their own, then their biases."""
        H, I = self.profile.routed_size, self.profile.expert_intermediate_size  # noqa: E741  the field's name
        assert self._matrices
        *first, last = [f"{place}.{self._prefix}{number}.{matrix}" for matrix in self._matrices]
        for name in first:
            yield self._read(f"{name}.weight", (I, H))
        yield self._read(f"{last}.weight", (H, I))
        for name, size in [*((name, I) for name in first), (last, H)]:
            if f"{name}.bias" in self._files:
                yield self._read(f"{name}.bias", (size,))

    def _stacked(self, place: str, number: int) -> Iterator[torch.Tensor]:
        """Yield rows of stacked tensors. gpt-oss's, which have biases, are transposed, gate and up by turns."""
        H, I, E = self.profile.routed_size, self.profile.expert_intermediate_size, self.profile.experts  # noqa: E741
        first, down = f"{place}.gate_up_proj", f"{place}.down_proj"
        if f"{first}_bias" not in self._files:
            yield self._read(first, (E, 2 * I, H), number)
            yield self._read(down, (E, H, I), number)
            return
        both = self._read(first, (E, H, 2 * I), number)
        yield both[:, ::2].T
        yield both[:, 1::2].T
        yield self._read(down, (E, I, H), number).T
        both = self._read(f"{first}_bias", (E, 2 * I), number)
        yield both[::2]
        yield both[1::2]
        yield self._read(f"{down}_bias", (E, H), number)

    def _read(self, name: str, shape: tuple[int, ...], row: int | None = None) -> torch.Tensor:
        """Return the tensor, or one row of its first axis."""
        if name not in self._files:
            raise self._error(f"there is no tensor {name}")
        tensor = self._files[name].get_slice(name)
        stored, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
        if stored != shape:
            raise self._error(f"{name} is {list(stored)}, in the model profile {self.profile.name} it is {list(shape)}")
        if dtype not in DTYPES:
            raise self._error(f"{name} is {dtype}: quantised weights are not read; take them in bf16")
        read: torch.Tensor = tensor[:] if row is None else tensor[row]
        return read

    def _require(self, matrices: set[str]) -> None:
        """Raise InputError unless there are the profile's layers of experts, of a known family and so many matrices."""
        profile, layers = self.profile, len(self._places)
        if not layers or (matrices and not self._matrices):
            quantised = [name for name in self._files if "experts" in name and not name.endswith(("weight", "bias"))]
            raise self._error(
                f"{quantised[0]}: quantised experts are not read; take them in bf16"
                if quantised
                else "no experts by a name that is known: see replay/model/weights.py"
            )
        if layers != profile.moe_layers:
            raise self._error(f"{layers} layers have experts, in the model profile {profile.name} {profile.moe_layers}")
        if len(self._matrices or _MATRICES[0]) != profile.expert_matrices:
            raise self._error(f"an expert has not {profile.expert_matrices} matrices, as in the profile {profile.name}")

    def _error(self, text: str) -> InputError:
        return InputError(f"--weights {self.folder}: {text}")


def _open(folder: Path) -> dict[str, Any]:
    """Return every tensor's name and the open file that holds it; nothing is read but headers."""
    try:
        opened: list[Any] = [safe_open(file, "pt") for file in files_of(folder)]
    except (InputError, OSError, SafetensorError) as error:
        raise InputError(f"--weights {folder} cannot be read: {error}") from error
    return {name: file for file in opened for name in file.keys()}  # noqa: SIM118  no mapping


def _execution_order(place: str) -> tuple[bool, int]:
    """Return a sort key: an encoder's layers before its decoder's, then by number."""
    number = re.search(r"\.(\d+)(\.|$)", place)
    return "decoder" in place.split("."), int(number[1]) if number else 0
