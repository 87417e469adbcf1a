"""The profile of a model from its GGUF files: shapes and bytes of its tensors, and its keys; no weights are read.

What a token leaves in the cache, and the states of Mamba and linear attention, are sized as llama.cpp sizes them
(src/llama-hparams.cpp): keys and values of 16 bits, states in float32. Layers for multi-token prediction, which
decoding does not run, count as unused.
"""

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain
from math import prod
from pathlib import PurePath
from typing import Any, NamedTuple

from traces.errors import InputError, located
from traces.files import expanded
from traces.location import is_url
from traces.models import gguf_files
from traces.models.expert_sizes import GGUF_NAME, bytes_by_layer
from traces.models.gguf_files import SPLIT, GgufFile
from traces.models.profile import ExpertShape, LayerKind, ModelProfile, described
from traces.models.safetensors_files import StoredTensor

BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
MLP = re.compile(r"ffn_(gate|up|down)\.")


class Windows(NamedTuple):
    """Which layers of an architecture keep all tokens: the last one of each period, or the first."""

    period: int
    first: bool = False
    tokens: int = 0  # that the others keep, unless the file states it


WINDOWS = {
    "afmoe": Windows(4),
    "cohere2moe": Windows(4, first=True),
    "exaone-moe": Windows(4),
    "gpt-oss": Windows(2),
    "llama4": Windows(4, tokens=8192),
    "mellum": Windows(4),
    "phimoe": Windows(1),
    "smallthinker": Windows(4, first=True),
}
"""What llama.cpp knows by itself, where files need not state it.

From load_arch_hparams in its src/models/*.cpp; b11549 allocates caches of as many layers for tiny files of these.
"""

MIXERS = ("attn_", "ssm_", "shortconv.", "time_mix_")
"""What names of weights begin with that mix tokens."""

Tensors = dict[str, StoredTensor]


def of_gguf(path: str) -> ModelProfile:
    """Return the profile of a GGUF file or its URL; of a split model any of its files. Raise InputError, naming it."""
    place = path if is_url(path) else str(expanded(path).absolute())
    return _of_gguf(place, os.stat(place).st_mtime_ns if os.path.exists(place) else 0)


@lru_cache(maxsize=8)
def _of_gguf(place: str, _: int) -> ModelProfile:
    """Return the same of a file as it is at one time: a plan reads it for each of its runs."""
    name = PurePath(split[1] + ".gguf" if (split := SPLIT.fullmatch(place)) else place).stem
    return of_file(gguf_files.read(place), name, place)


def of_file(file: GgufFile, name: str, place: str = "") -> ModelProfile:
    """Return the profile of what was read of a file. Raise InputError, naming its place."""
    with located(place or name):
        return _Model(file).profile(name, place or name)


class _Model:
    """The tensors of a file by block, and how its keys are read."""

    def __init__(self, file: GgufFile) -> None:
        self.keys, self.key = file.keys, file.key
        self.architecture = str(file.keys.get("general.architecture"))
        self.rest: Tensors = {}  # of no block
        self.blocks: dict[int, Tensors] = defaultdict(dict)
        for tensor in file.tensors:
            match = BLOCK.fullmatch(tensor.name)
            (self.blocks[int(match[1])] if match else self.rest)[match[2] if match else tensor.name] = tensor
        count, ahead = self.number("block_count"), self.number("nextn_predict_layers", 0)
        beyond = {place for place, block in self.blocks.items() if any(name.startswith("nextn.") for name in block)}
        if not beyond and len(self.blocks) == count:
            beyond = set(range(count - ahead, count))
        self.ahead = len(beyond)
        self.unused = [tensor for place in beyond for tensor in self.blocks.pop(place).values()]
        self.cached = max(self.blocks, default=0) + 1 - self.number("attention.shared_kv_layers", 0)

    def number(self, name: str, otherwise: int | None = None, place: int | None = None) -> int:
        """Return a whole number of the file's architecture; of a list that of layer `place`, or the greatest."""
        value = self.key(name, otherwise)
        if isinstance(value, list) and value:
            value = max(value) if place is None else value[place % len(value)]
        if not isinstance(value, int):
            stated = "is not stated" if value is None else f"is {value!r}, not a whole number"
            raise InputError(f"{self.architecture}.{name} {stated}")
        return value

    def profile(self, name: str, path: str) -> ModelProfile:
        order = list[LayerKind]()
        experts, dense = list[list[StoredTensor]](), list[StoredTensor]()
        for place, block in sorted(self.blocks.items()):
            routed = [tensor for tensor in block.values() if GGUF_NAME.match(tensor.name)]
            own = {key: tensor for key, tensor in block.items() if not GGUF_NAME.match(tensor.name)}
            experts += [routed] if routed else []
            dense += own.values()
            order.append(self._kind(place, own, bool(routed)))
        count, used = self.number("expert_count"), self.number("expert_used_count")
        sizes = bytes_by_layer(list(chain(*experts)), path, count).tolist()
        shape = _shape(experts[sizes.index(max(sizes))], count)
        token = self.rest.pop("token_embd.weight", None)
        if token is None:
            raise InputError("it holds no token_embd.weight")
        head = [self.rest.pop(key) for key in list(self.rest) if key.startswith("output")]
        embedding = [self.rest.pop(key) for key in list(self.rest) if "token_embd" in key] + [token]
        if not any(tensor.name == "output.weight" for tensor in head):  # tied: one matrix is both
            head.append(embedding.pop())
        hidden = self.number("embedding_length")
        return ModelProfile(
            name=name,
            hub_ids=(),
            experts=count,
            top_k=used,
            hidden_size=hidden,
            expert_bytes_per_parameter=_width(list(chain(*experts))),
            vocabulary=token.shape[0],
            dense_bytes_per_parameter=_width(dense),
            layer_expert_bytes=tuple(sizes) if len(set(sizes)) > 1 else (),
            embedding_parameters=_elements(embedding),
            head_parameters=_elements(head),
            head_bytes_per_parameter=_width(head),
            embedding_bytes_per_parameter=_width(embedding),
            precision=_precision(self.keys.get("general.file_type")),
            mtp_layers=self.ahead,
            unused_parameters=_elements([*self.unused, *self.rest.values()]),
            notes=tuple(self._notes()),
            **shape.fields(hidden),
            **described(order),
            **self._attention(),
        )

    def _kind(self, place: int, block: Tensors, routed: bool) -> LayerKind:
        """Return what a block is, of its tensors but routed experts."""
        kv, state, window = self._kv(place, block), self._state(block), self._window(place)
        return LayerKind(
            parameters=_elements(block.values()),
            routed=routed,
            mlp=_elements(tensor for name, tensor in block.items() if MLP.match(name)),
            shared=_elements(tensor for name, tensor in block.items() if "_shexp" in name) if routed else 0,
            kv=0 if window else kv,
            window=window if kv else 0,
            windowed=kv if window else 0,
            mixes=_mixes(block),
            state=state,
        )

    def _kv(self, place: int, block: Tensors) -> int:
        """Return the values that a token leaves in the cache of a block."""
        if place >= self.cached:  # it takes those of a layer before
            return 0
        index = _rows(block, "indexer.attn_k")  # of sparse attention
        if "attn_kv_a_mqa.weight" in block:
            return self.number("attention.kv_lora_rank") + self.number("rope.dimension_count") + index
        if "attn_k.weight" in block and "ssm_conv1d_k.weight" not in block:
            keys = _rows(block, "attn_k")
            return keys + (_rows(block, "attn_v") or keys) + index
        if "attn_qkv.weight" in block and not any(name.startswith("ssm_") for name in block):
            heads = self.number("attention.head_count", place=place)
            kv_heads = self.number("attention.head_count_kv", heads, place)
            size = self.number("embedding_length") // heads
            suffix = "_swa" if self._window(place) else ""
            sizes = [
                self.number(f"{key}{suffix}", self.number(key, size, place), place)
                for key in ("attention.key_length", "attention.value_length")
            ]
            return kv_heads * sum(sizes) + index
        return 0

    def _state(self, block: Tensors) -> int:
        """Return the bytes of a block's convolution and recurrent state."""
        if any(name.startswith("shortconv.") for name in block):
            return 4 * self.number("embedding_length") * (self.number("shortconv.l_cache") - 1)
        if not any(name.startswith("ssm_") for name in block):
            return 0
        kernel = self.number("ssm.conv_kernel") - 1
        if "ssm_conv1d_k.weight" in block:  # Kimi's delta attention
            heads, size = self.number("attention.head_count"), self.number("kda.head_dim")
            return 4 * heads * size * (3 * kernel + size)
        inner, size = self.number("ssm.inner_size"), self.number("ssm.state_size")
        return 4 * (kernel * (inner + 2 * self.number("ssm.group_count", 0) * size) + size * inner)

    def _window(self, place: int) -> int:
        """Return how many tokens a block's attention reaches back; 0: all."""
        known = WINDOWS.get(self.architecture, Windows(1))
        window = self.number("attention.sliding_window", known.tokens)
        pattern = self.key("attention.sliding_window_pattern", known.period)
        if isinstance(pattern, list) and pattern:
            return window if pattern[place % len(pattern)] else 0
        whole = 0 if known.first else -1
        return window if isinstance(pattern, int) and (not pattern or (place - whole) % pattern) else 0

    def _notes(self) -> Iterator[str]:
        """Yield where the cache is not known to be as counted."""
        pattern = self.key("attention.sliding_window_pattern", WINDOWS.get(self.architecture))
        if self.number("attention.sliding_window", 0) and pattern is None:
            yield (
                f"{self.architecture}.attention.sliding_window is stated, and not of which layers: all are taken as "
                "keeping every token"
            )
        odd = [
            place
            for place, block in self.blocks.items()
            if place < self.cached and _mixes(block) and not (self._kv(place, block) or self._state(block))
        ]
        if odd:
            blocks = f"{len(odd)} block(s), the first being blk.{odd[0]},"
            yield f"{blocks} have attention of an unknown kind: what it keeps counts as 0"

    def _attention(self) -> dict[str, Any]:
        """Return the heads, as the keys state them."""
        heads = self.number("attention.head_count")
        if latent := self.number("attention.kv_lora_rank", 0):
            return {
                "heads": heads,
                "head_size": self.number("attention.value_length_mla", self.number("attention.value_length", 0)),
                "kv_latent_size": latent,
                "rope_head_size": self.number("rope.dimension_count"),
                "query_latent_size": self.number("attention.q_lora_rank", 0),
            }
        grouped = self.number("attention.head_count_kv", heads)
        size = self.number("attention.key_length", self.number("embedding_length") // heads)
        return {"heads": heads, "head_size": size, "kv_heads": 0 if grouped == heads else grouped}


def _shape(layer: list[StoredTensor], experts: int) -> ExpertShape:
    weights = [tensor for tensor in layer if tensor.name.endswith(".weight")]
    down = next((tensor for tensor in weights if "ffn_down" in tensor.name), None)
    if down is None:
        raise InputError(f"the experts of {layer[0].name} have no ffn_down")
    width, inner = down.shape[-2:]
    matrices = _elements(weights) // experts // (width * inner)
    return ExpertShape(width, inner, matrices, _elements(layer) // experts - matrices * width * inner)


def _rows(block: Tensors, name: str) -> int:
    weight = block.get(f"{name}.weight")
    return weight.shape[0] if weight else 0


def _elements(tensors: Iterable[StoredTensor]) -> int:
    return sum(prod(tensor.shape) for tensor in tensors)


def _width(tensors: list[StoredTensor]) -> float:
    """Return the bytes of a parameter; 0 where there is none."""
    return sum(tensor.size for tensor in tensors) / max(1, _elements(tensors))


def _mixes(block: Tensors) -> bool:
    """Return whether a block has weights that mix tokens."""
    return any(name.startswith(MIXERS) and len(tensor.shape) > 1 for name, tensor in block.items())


def _precision(stated: Any) -> str:
    """Return the name of a `general.file_type`, such as q4_k_m; mixed: it is not known."""
    from gguf import LlamaFileType  # an extra

    try:
        name = LlamaFileType(stated & ~LlamaFileType.GUESSED).name
    except (TypeError, ValueError):
        return "mixed"
    return name.lower().removeprefix("mostly_").removeprefix("all_").removesuffix("_moe")
