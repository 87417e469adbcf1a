"""The fields of a model profile from a transformers `config.json`, for models without a shipped profile.

The names of its keys differ by architecture: each size is looked up under all names that architectures of transformers
use. What a config does not state follows from its other sizes.
"""

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from traces.errors import InputError, located
from traces.facts import parse_json

Config = Mapping[str, Any]

LAYERS = ("num_hidden_layers", "n_layers", "num_layers", "num_decoder_layers")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
TOP_K = (
    *("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k", "top_k_experts"),
    *("num_selected_experts", "moe_router_topk", "top_k"),
)
EXPERT_SIZE = (
    *("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size", "ffn_hidden_size"),
    *("intermediate_size", "d_ff", "expert_dim"),
)
DENSE_SIZE = ("intermediate_size_mlp", "dense_intermediate_size", "intermediate_size", "ffn_dim")
HIDDEN = ("hidden_size", "d_model", "n_embd", "dim")
HEADS = ("num_attention_heads", "n_heads", "num_heads", "encoder_attention_heads")
KV_HEADS = ("num_key_value_heads", "kv_n_heads", "num_kv_heads")
MOE_STEP = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval", "expert_layer_period")
SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
SHARED_SIZE = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size")

BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "float8_e4m3fn": 1.0}
"""Of a parameter, by the config's data type."""

METHODS = {"mxfp4": 4.25, "nvfp4": 4.5, "fp8": 8.0, "fbgemm_fp8": 8.0, "eetq": 8.0}
"""Bits of an expert's parameter, by the config's quantisation method, where that alone says it."""

SCALES = 0.25
"""Bits of scales for a parameter of fewer than 8 bits."""

WHOLE = ("fp8", "fbgemm_fp8")
"""Methods that quantise the layers without experts too."""


def is_config(path: Path) -> bool:
    """Return whether this is a config file, or a folder that holds one."""
    return path.suffix == ".json" or (path / "config.json").is_file()


def read(path: Path) -> dict[str, Any]:
    """Return the fields of a profile by a config file, or the one in a folder. Raise InputError for what it lacks."""
    file = path / "config.json" if path.is_dir() else path
    name = file.parent.resolve().name if file.name == "config.json" else file.stem
    with located(str(file)):
        return fields_of(parse_json(file.read_text("utf-8"), "a transformers config"), name)


def fields_of(config: Config, name: str) -> dict[str, Any]:
    """Return the fields of a profile by a transformers config. Raise InputError, naming keys, for a missing size."""
    whole = config
    for inner in ("thinker_config", "text_config", "llm_config", "language_config"):
        if isinstance(config.get(inner), dict):
            config = {**config, **config[inner]}
    for inner in ("ffn_config", "attn_config"):  # DBRX
        if isinstance(config.get(inner), dict):
            config = {**config, **{key: value for key, value in config[inner].items() if key != "model_type"}}
    experts = _size(config, EXPERTS)
    layers, hidden = _size(config, LAYERS), _size(config, HIDDEN)
    heads = _size(config, HEADS)
    moe = _moe_layers(config, layers)
    leading, between, trailing = _dense_layers(moe)
    expert_size = _size(config, EXPERT_SIZE)
    dense_bytes, expert_bytes = _bytes(config, whole)
    latent = config.get("kv_lora_rank") or 0
    rope = (config.get("qk_rope_head_dim") or 0) if latent else 0
    kv_heads = _first(config, KV_HEADS) or 0
    head_size = (config.get("v_head_dim") if latent else config.get("head_dim")) or hidden // heads
    kv_values = latent + rope if latent else 2 * (kv_heads or heads) * head_size
    return {
        "name": name,
        "hub_ids": (),
        "moe_layers": sum(moe),
        "experts": experts,
        "top_k": _size(config, TOP_K),
        "hidden_size": hidden,
        "expert_intermediate_size": expert_size,
        "expert_bytes_per_parameter": expert_bytes,
        "heads": heads,
        "head_size": head_size,
        "vocabulary": _size(config, ("vocab_size",)),
        "dense_bytes_per_parameter": dense_bytes,
        "kv_heads": kv_heads,
        "kv_latent_size": latent,
        "rope_head_size": rope,
        "query_latent_size": (config.get("q_lora_rank") or 0) if latent else 0,
        **_windows(config, moe, heads, head_size, kv_values),
        "shared_intermediate_size": _shared(config, expert_size),
        "dense_intermediate_size": (_first(config, DENSE_SIZE) or 0) if leading + between + trailing else 0,
        "leading_dense_layers": leading,
        "dense_layers_before_each": between,
        "trailing_dense_layers": trailing,
        "kv_bytes_per_value": 2.0 if dense_bytes < 2 else 0.0,
    }


def _first(config: Config, names: Sequence[str]) -> int | None:
    """Return the first of these keys that is a number; of a list its largest one."""
    for name in names:
        value = config.get(name)
        if isinstance(value, list) and value and all(isinstance(each, int) for each in value):
            value = max(value)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _size(config: Config, names: Sequence[str]) -> int:
    size = _first(config, names)
    if size is None:
        what = "this is no Mixture-of-Experts model" if names is EXPERTS else f"expected {names[0]}"
        raise InputError(f"none of the keys {', '.join(names)} is there: {what}")
    return size


def _moe_layers(config: Config, layers: int) -> list[bool]:
    """Return which layers have experts. Raise InputError where none has."""
    kinds = config.get("mlp_layer_types")
    if kinds and len(kinds) == layers:
        moe = [kind == "sparse" for kind in kinds]
    elif isinstance(config.get("moe_layers"), list):  # Llama 4
        moe = [i in config["moe_layers"] for i in range(layers)]
    else:
        leading = config.get("first_k_dense_replace", config.get("moe_layer_start_index", 0)) or 0
        if isinstance(config.get("num_dense_layers"), int):
            leading = config["num_dense_layers"]
        last = config.get("moe_layer_end_index", -1)
        last = layers - 1 if not isinstance(last, int) or last < 0 else last
        step = _first(config, MOE_STEP) or 1
        place = config.get("expert_layer_offset", step - 1)  # Jamba states which of a period has experts
        dense = config.get("mlp_only_layers") or []
        moe = [int(leading) <= i <= last and i % step == place and i not in dense for i in range(layers)]
    if not any(moe):
        raise InputError("none of its layers has experts")
    return moe


def _dense_layers(moe: Sequence[bool]) -> tuple[int, int, int]:
    """Return the layers without experts before the first MoE layer, before each one, and after the last one."""
    places = [i for i, has_experts in enumerate(moe) if has_experts]
    leading, trailing = places[0], len(moe) - 1 - places[-1]
    inside = places[-1] - places[0] + 1 - len(places)
    each = round(inside / max(len(places) - 1, 1))
    return (leading - each if leading >= each else 0), each, trailing


def _bytes(config: Config, whole: Config) -> tuple[float, float]:
    """Return the bytes of a parameter of the dense part and of experts."""
    name = str(config.get("dtype") or config.get("torch_dtype") or whole.get("torch_dtype") or "bfloat16")
    dense = BYTES.get(name.removeprefix("torch."), 2.0)
    quantised = config.get("quantization_config") or whole.get("quantization_config")
    if not isinstance(quantised, dict):
        return dense, dense
    method = str(quantised.get("quant_method", ""))
    experts = (METHODS.get(method) or _stated_bits(quantised, method)) / 8
    return (experts if method in WHOLE else dense), experts


def _stated_bits(quantised: Config, method: str) -> float:
    """Return the bits that a quantisation states, with its scales. Raise InputError where it states none."""
    if quantised.get("load_in_8bit"):
        return 8.0
    if quantised.get("load_in_4bit"):
        return 4.5  # a scale of 32 bits for 64 parameters
    groups = quantised.get("config_groups") or {}
    stated = [quantised.get("bits"), *((group.get("weights") or {}).get("num_bits") for group in groups.values())]
    bits: int = max((each for each in stated if each), default=0)
    if not bits:
        raise InputError(f"quantization_config: nothing says how many bits {method!r} has: state its `bits`")
    return bits + (SCALES if bits < 8 else 0.0)


def _windows(config: Config, moe: Sequence[bool], heads: int, head_size: int, kv_values: int) -> dict[str, int]:
    """Return the window of MoE layers that keep no more than that, how often one that keeps all comes, and the window
    of the layers between them, where all have it.

    kv_values: that a token leaves in the KV cache of a layer, of 16 bits. The state of linear attention, of 32 bits,
    counts as a window of as many bytes.
    """
    kinds, window = config.get("layer_types"), config.get("sliding_window")
    chunk = _first(config, ("attention_chunk_size",))  # Llama 4
    if interval := _first(config, ("full_attention_interval",)):
        kinds = _repeated("linear_attention", interval, len(moe))
    elif chunk and not kinds:
        kinds = _repeated("chunked_attention", _first(config, ("no_rope_layer_interval",)) or 4, len(moe))
    if not isinstance(kinds, list) or len(kinds) != len(moe):
        return {}
    kinds = list(map(str, kinds))
    own = [kind for kind, has_experts in zip(kinds, moe, strict=True) if has_experts]
    bounded = {kind for kind in own if any(word in kind for word in ("sliding", "chunked", "linear"))}
    if len(bounded) != 1:
        return {}
    (kind,) = bounded
    if "linear" in kind:
        sides = (
            _first(config, (f"linear_{side}_head_dim", "linear_head_dim")) or head_size for side in ("key", "value")
        )
        state = (_first(config, ("linear_num_value_heads", "linear_num_heads")) or heads) * prod(sides)
        window = -(-2 * state // kv_values)
    elif "chunked" in kind:
        window = chunk
    every = _full_every([one != kind for one in own], [one != kind for one in kinds])
    if not isinstance(window, int) or every < 2:
        return {}
    leading, between, trailing = _dense_layers(moe)
    plain = [one for one, has_experts in zip(kinds, moe, strict=True) if not has_experts]
    all_have_it = between and set(plain[leading : len(plain) - trailing]) == {kind}
    return {
        "sliding_window": window,
        "full_attention_every": every,
        "dense_sliding_window": window if all_have_it else 0,
    }


def _repeated(kind: str, every: int, layers: int) -> list[str]:
    """Return the kinds of so many layers, of each `every` the last one with full attention."""
    return [kind if (i + 1) % every else "full_attention" for i in range(layers)]


def _full_every(own: Sequence[bool], all_layers: Sequence[bool]) -> int:
    """Return of how many MoE layers one keeps all: the last of each so many of these or of all layers, else rounded."""
    for full in (own, all_layers):
        every = full.index(True) + 1 if any(full) else len(full) + 1
        if list(full) == [(i + 1) % every == 0 for i in range(len(full))]:
            return every
    return round(len(own) / max(sum(own), 1))


def _shared(config: Config, expert_size: int) -> int:
    if stated := _first(config, SHARED_SIZE):
        return stated
    if config.get("model_type", "").startswith("llama4"):
        return expert_size
    return (_first(config, SHARED) or 0) * expert_size
