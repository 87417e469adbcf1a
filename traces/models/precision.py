"""How many bits a model's parameters take, module by module, from every place where a checkpoint states it.

That is `quantization_config` in config.json (of transformers' methods, compressed-tensors, modelopt), modelopt's own
hf_quant_config.json, MLX's `quantization`, and `expert_dtype`. Scales count: a group of g weights with a scale of s
bits takes s / g bits a weight more.
"""

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from functools import cached_property
from typing import Any

from traces.errors import InputError

DTYPES = {"float32": 32, "float": 32, "float16": 16, "half": 16, "bfloat16": 16, "float8_e4m3fn": 8}
EXPERT_DTYPES = {"fp4": 4.25, "mxfp4": 4.25, "nvfp4": 4.5, "fp8": 8.0, "int8": 8.0, **DTYPES}
OF_8_BITS = "fp8 fbgemm_fp8 eetq fp8_pb_wo fp8_per_channel_per_token int8_sq w8a8_sq_per_channel"
OF_NVFP4 = "nvfp4 w4a16_nvfp4 nvfp4_awq"
NAMED = {**dict.fromkeys(OF_8_BITS.split(), 8.0), **dict.fromkeys(OF_NVFP4.split(), 4.5), "mxfp8": 8.25, "mxfp4": 4.25}
"""Bits where the name of a method or algorithm says all."""

ZERO_POINTS = ("awq", "gptq", "auto-round", "autoround", "auto_round", "intel/auto-round")
"""Methods whose files have zero points always."""

SKIPPED = ("ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers", "llm_int8_skip_modules")
"""Keys under which methods list modules that stay as they are."""

SPELLINGS = (
    *((".mlp.", ".ffn."), (".mlp.", ".block_sparse_moe."), (".mlp.", ".feed_forward."), (".mlp.", ".mixer.")),
    *((".self_attn.", ".attn."), (".mlp.experts.0.down_proj", ".block_sparse_moe.experts.0.w2")),
)
"""Names of the same part in transformers and in published checkpoints."""

ELSEWHERE = re.compile(r"mtp|nextn|vis|talker|audio")
"""What names of modules begin with that a decoded token does not pass."""


@dataclass
class Precision:
    """Bits a weight of each module: `rules` map names, globs or regular expressions to bits, the first that fits."""

    own: float  # of what is not quantised
    default: float  # of what is quantised, and no rule names
    rules: list[tuple[str, float]] = field(default_factory=list)
    experts: float | None = None  # of routed experts, whatever the rules say
    name: str = ""  # of what experts are in, as people call it; empty: as its bits say

    def bits(self, module: str) -> float:
        """Return the bits a weight of a module, named as in `model.named_modules()`."""
        if self.experts is not None and ".experts." in module:
            return self.experts
        names = [_tail(module)]
        names += [names[0].replace(ours, theirs) for ours, theirs in SPELLINGS if ours in names[0]]
        parents = [".".join(name.split(".")[:end]) for name in names for end in range(name.count(".") + 1, 0, -1)]
        exact, patterns = self._by_kind
        for name in (*parents, *module.split(".")):
            if name in exact:
                return exact[name]
        return next((bits for matches, bits in patterns if any(map(matches, parents))), self.default)

    @cached_property
    def _by_kind(self) -> tuple[dict[str, float], list[tuple[Callable[[str], Any], float]]]:
        """The rules by name, of two of one name the first, and those that are patterns."""
        names = {name for name, _ in self.rules if not (name.startswith("re:") or "*" in name)}
        exact = {_tail(name): bits for name, bits in reversed(self.rules) if name in names}
        return exact, [(_matcher(name), bits) for name, bits in self.rules if name not in names]


def precision_of(config: Mapping[str, Any], beside: Mapping[str, Any] | None = None) -> Precision:
    """Return the precision that a config states; beside: the content of hf_quant_config.json, if that is there.

    Raises InputError for a method of unknown bits. A config that states nothing is taken as bf16, with a warning.
    """
    places = [config, *(config[key] for key in ("text_config", "llm_config", "thinker_config") if key in config)]
    dtype = next((place[key] for place in places for key in ("dtype", "torch_dtype") if place.get(key)), None)
    own = DTYPES.get(str(dtype).removeprefix("torch."), 16)
    stated = (place.get(key) for key in ("quantization_config", "compression_config") for place in places)
    quantised = next((each for each in stated if isinstance(each, Mapping)), None)
    if beside and quantised is None:
        quantised = beside.get("quantization", beside)
    found = Precision(own, own)
    if isinstance(config.get("quantization"), Mapping):
        found = _mlx(config["quantization"], own)
    elif quantised:
        found = _scheme(quantised, own)
    elif dtype is None:
        warnings.warn("the config states no dtype and no quantisation: bf16 is assumed", stacklevel=2)
    named = next((place["expert_dtype"] for place in places if place.get("expert_dtype")), None)
    if named and not (quantised and ("quantized_layers" in quantised or "config_groups" in quantised)):
        found.experts = EXPERT_DTYPES.get(str(named).lower().removeprefix("torch."))
        found.name = "mxfp4" if named == "fp4" else str(named)
        if found.experts is None:
            raise InputError(f"expert_dtype {named!r}: known are {', '.join(EXPERT_DTYPES)}")
    return found


def _scheme(stated: Mapping[str, Any], own: float) -> Precision:
    """Return what a `quantization_config` says."""
    named, groups = stated.get("quantized_layers"), stated.get("config_groups")
    rest = 8.0 if groups and not named and stated.get("fmt") else own
    skipped = [(str(name), rest) for key in SKIPPED for name in stated.get(key) or () if not ELSEWHERE.match(str(name))]
    if named:
        rules = [(name, _algorithm(each)) for name, each in named.items()]
        experts = (str(each["quant_algo"]) for name, each in named.items() if ".experts" in name)
        return Precision(own, own, [*rules, *skipped], name=next(experts, "").lower().removeprefix("w4a16_"))
    if groups:
        targets = [
            (target, _group(group.get("weights") or {}, own))
            for group in groups.values()
            for target in group.get("targets") or ["Linear"]
        ]
        floats: dict[Any, str] = {(4, 16): "nvfp4", (4, 32): "mxfp4", (8, None): "fp8"}
        weights = next(iter(groups.values())).get("weights") or {}
        bits = weights.get("num_bits")
        name = floats.get((bits, weights.get("group_size")), "") if weights.get("type") == "float" else f"int{bits}"
        default = dict(targets).get("Linear", rest)
        return Precision(own, default, [*skipped, *targets], name=name if len(groups) == 1 else "")
    method = str(stated.get("quant_method") or "").lower()
    algorithm = str(stated.get("quant_algo") or "").lower()
    bits = _algorithm(stated) if algorithm else _method(stated, method)
    if stated.get("quant_method") == "mxfp4":  # of transformers: routed experts alone
        return Precision(own, own, experts=bits, name="mxfp4")
    name = algorithm or method
    return Precision(own, bits, skipped, name=name if name in ("nvfp4", "mxfp4", "fp8", "awq", "gptq") else "")


def _algorithm(stated: Mapping[str, Any]) -> float:
    """Return the bits of modelopt's algorithm."""
    name = str(stated["quant_algo"]).lower()
    if name in NAMED:
        return NAMED[name]
    if bits := re.match(r"(?:int|w)(\d)", name):
        return _grouped(int(bits[1]), stated.get("group_size"), 16)
    raise InputError(f"quant_algo {stated['quant_algo']!r}: nothing says how many bits it has")


def _group(weights: Mapping[str, Any], own: float) -> float:
    """Return the bits of a group of compressed-tensors: floats of 4 bits have scales of 8, whole numbers of 16."""
    bits = weights.get("num_bits")
    if not bits:
        return own
    scale = 8 if weights.get("type") == "float" and bits == 4 else 16
    zero = bits if weights.get("symmetric") is False else 0
    return _grouped(bits, weights.get("group_size"), scale + zero)


def _method(stated: Mapping[str, Any], name: str) -> float:
    """Return the bits of a method of transformers."""
    inner = stated.get("quant_config") or {}
    inner = inner.get("weight_quant_params") or inner  # HQQ
    bits = stated.get("bits") or stated.get("w_bit") or inner.get("nbits")
    group = stated.get("group_size") or stated.get("q_group_size") or inner.get("group_size")
    if stated.get("load_in_8bit"):
        return 8.0
    if stated.get("load_in_4bit"):  # a scale of 32 bits for 64, or of 8 with one of 32 for 256 of them
        return 4 + (8 / 64 + 32 / (64 * 256) if stated.get("bnb_4bit_use_double_quant") else 32 / 64)
    if name in NAMED and not bits:
        return NAMED[name]
    if name.startswith("exl") and bits:  # the mean over a file, scales included
        return float(bits)
    if not bits:  # quanto, torchao and the like say it in a word, such as int4 or int4_weight_only
        words = " ".join(str(stated.get(key)).lower() for key in ("weights", "weights_dtype", "quant_type"))
        word = re.search(r"(?:int|float|fp)(\d+)", words)
        if not word:
            raise InputError(f"quantization_config: nothing says how many bits {name!r} has")
        bits = int(word[1])
    if name in ZERO_POINTS:
        return _grouped(bits, group, 16 + bits)
    return _grouped(bits, group or (None if bits >= 8 else 64), 16)


def _mlx(stated: Mapping[str, Any], own: float) -> Precision:
    """Return what MLX says: of all layers, and of some by name, which may stay as they are (false)."""

    def bits(of: Mapping[str, Any]) -> float:
        return NAMED.get(of.get("mode", "affine")) or _grouped(of["bits"], of.get("group_size", 64), 32)

    rules = [(name, bits({**stated, **each})) for name, each in stated.items() if isinstance(each, Mapping)]
    rules += [(name, own) for name, each in stated.items() if each is False]
    mode = stated.get("mode", "affine")
    return Precision(own, bits(stated), rules, name=mode if mode in NAMED else f"mlx {stated['bits']} bits")


def _grouped(bits: float, group: int | None, beside: float) -> float:
    """Return the bits of a weight whose group of so many has `beside` more; without a group a row has them."""
    return bits + (beside / group if group and group > 0 else 0.0)


def _tail(name: str) -> str:
    """Return a module's name from the list of layers on, as prefixes differ among checkpoints."""
    place = name.rfind("layers.")
    return name[place:] if place >= 0 else name.rpartition(".")[2] if name.endswith("lm_head") else name


def _matcher(name: str) -> Callable[[str], Any]:
    """Return a test of module names: does the pattern match the module, or one that contains it?"""
    matches = re.compile(name[3:] if name.startswith("re:") else translate(_tail(name))).match
    return lambda tail: matches(tail) or matches(f"{tail}.") or matches(f"model.{tail}")
