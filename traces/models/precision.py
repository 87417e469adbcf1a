"""How many bits a model's weights take, module by module, from every place where a checkpoint states it.

That is `quantization_config` in config.json (of transformers' methods, compressed-tensors, modelopt), modelopt's own
hf_quant_config.json, MLX's `quantization`, and `expert_dtype`. Scales count: a group of g weights with a scale of s
bits takes s / g bits a weight more. What names no module, and what was not read, is in `notes`.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from functools import cached_property
from typing import Any, NamedTuple

from traces.errors import InputError

DTYPES = {"float32": 32, "float": 32, "float16": 16, "half": 16, "bfloat16": 16, "float8_e4m3fn": 8}
FP4 = {"fp4": 4.25, "mxfp4": 4.25, "nvfp4": 4.5}
OF_8_BITS = "fp8 fp8_e4m3 fbgemm_fp8 eetq fp8_pb_wo fp8_per_channel_per_token int8_sq w8a8_sq_per_channel"
OF_NVFP4 = "nvfp4 w4a16_nvfp4 nvfp4_awq fouroversix"
NAMED = {**dict.fromkeys(OF_8_BITS.split(), 8.0), **dict.fromkeys(OF_NVFP4.split(), 4.5), "mxfp8": 8.25, "mxfp4": 4.25}
"""Bits where the name of a method or algorithm says all."""

ZERO_POINTS = ("awq", "gptq", "auto-round", "autoround", "auto_round", "intel/auto-round")
"""Methods whose files have zero points always, and that quantise layers alone."""

SKIPPED = (
    *("ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers", "llm_int8_skip_modules"),
    *("exclude", "skip_modules", "linear_weights_not_to_quantize"),
)
"""Keys under which methods list modules that stay as they are."""

TABLES = ("quantized_layers", "dynamic", "extra_config", "module_quant_configs", "layer_quant_config")
"""Keys under which methods say of modules by name what differs: modelopt, GPTQ, AutoRound, Gemma, Quark."""

ONLY = ("modules_in_block_to_quantize", "inside_layer_modules", "block_name_to_quantize", "to_quant_block_names")
"""Keys of GPTQ and AutoRound that list what is quantised."""

LISTED = ("bitsandbytes", "quanto", "eetq", "hqq", "higgs", "fbgemm_fp8", "torchao", "quark", "compressed-tensors")
"""Methods that quantise the head too, where a list of what is left out is there and does not name it."""

FORMAT = (
    *("quant_method", "quant_algo", "algorithm", "mode", "bits", "num_bits", "w_bit", "nbits", "weight_bits"),
    *("group_size", "q_group_size", "block_size", "symmetric", "type", "data_type", "weights", "weights_dtype"),
    *("weight_dtype", "dtype", "forward_dtype", "quant_type", "quant_type_kwargs", "load_in_4bit", "load_in_8bit"),
    *("bnb_4bit_use_double_quant", "head_bits", "lm_head", "quant_lm_head", "weight_block_size", "quant_config"),
    *("scale_fmt", "fmt", "config_groups", "global_quant_config", "modules_to_convert", "quantize_embeddings"),
    *("include_input_output_embeddings", "expert_dtype", "moe_quant_algo", "moe_quant_format", "nbits_per_codebook"),
    *("num_codebooks", "in_group_size", "quantization", "sym", "zero_point", "packing_format", "weight"),
)
"""Keys that are read, or that say again what is read."""

SIZES = re.compile(r"bit|dtype|group|algo|quant|weight|module|layer|block|expert|moe|head|embed|ignore|exclude|skip")
HARMLESS = re.compile(
    r"act|^input|output|^kv|cache|version|_format$|bnb_4bit_(quant_type|compute|quant_storage)|llm_int8_(thr|en|has)"
    r"|iters|enable|damp|seq|samples|status|global_compression|sparsity|^scale|dequant|kernel|static_groups|block_dim"
)
"""Of keys that are not read: on which of them sizes may depend."""

ELSEWHERE = re.compile(r"mtp|nextn|(^|[._*])(vis|vit|talker|audio|image|mm_|multi_modal|eagle|draft)|projector")
"""Names of modules that a decoded token does not pass, or that are not built."""

BEFORE = re.compile(r"^(?:(?:model|language_model|text_model|thinker|backbone|transformer|llm|decoder_model)\.)+")
"""What names have before `layers`, in which checkpoints and models differ."""


class Weight(NamedTuple):
    """A parameter of a model, or the part of it that is published apart."""

    names: tuple[str, ...]  # of its module, in the model and as published; {} for the number of an expert
    kind: str  # expert, linear, head, embedding, router or other
    count: int  # numbers, of all experts
    experts: int = 1


class Entries:
    """What a checkpoint says of modules by name, each with its bits: names, globs and regular expressions."""

    def __init__(self, entries: Iterable[tuple[str, float]]) -> None:
        self.exact: dict[str, float] = {}
        self.patterns: list[tuple[str, Callable[[str], Any], float]] = []
        for text, bits in entries:
            if re.fullmatch(r"[\w.\-/]+", text):
                self.exact.setdefault(BEFORE.sub("", text.strip(".").removesuffix(".weight")), bits)
            else:
                self.patterns.append((text, _matcher(text), bits))

    def bits(self, names: Iterable[str]) -> float | None:
        """Return the bits of the longest name that fits, else of the first pattern; None: nothing fits."""
        parts = sorted({part for name in names for part in _parts(name)}, key=len, reverse=True)
        if self.exact and (name := next((part for part in parts if part in self.exact), None)):
            return self.exact[name]
        spelled = [spelled for name in names for spelled in _spelled(name)] if self.patterns else []
        return next((bits for _, matches, bits in self.patterns if any(map(matches, spelled))), None)

    def unmatched(self, names: Iterable[str]) -> Iterator[str]:
        """Yield the entries that fit none of a model's names."""
        numbers = [int(number) for name in names for number in re.findall(r"layers\.(\d+)", name)]
        parts = {part for name in names for part in _parts(name)}
        for text in self.exact:
            beyond = any(int(number) > max(numbers, default=0) for number in re.findall(r"layers\.(\d+)", text))
            if not beyond and re.sub(r"experts\.\d+", "experts.{}", text) not in parts:
                yield text
        spelled = {spelled for name in names for spelled in _spelled(name.format(0))} if self.patterns else set()
        yield from (text for text, matches, _ in self.patterns if not any(map(matches, spelled)))

    @property
    def tells_experts_apart(self) -> bool:
        return any(re.search(r"experts\W*\d", text) for text in (*self.exact, *(text for text, *_ in self.patterns)))


@dataclass
class Precision:
    """Bits of each weight: of modules that are named, and by kind of all others."""

    own: float  # of what is not quantised
    kinds: Mapping[str, float] = field(default_factory=dict)  # of what is quantised, and that nothing names
    skipped: list[str] = field(default_factory=list)  # names of what is left as it is
    rules: list[tuple[str, float]] = field(default_factory=list)
    only: list[str] = field(default_factory=list)  # names of what alone is quantised; empty: all
    rest: float = 0  # of linear layers that are left as they are; 0: as of all that is not quantised
    name: str = ""  # of what experts are in, as people call it; empty: as its bits say
    notes: list[str] = field(default_factory=list)  # what was not understood

    @cached_property
    def _entries(self) -> tuple[Entries, Entries, Entries]:
        each = ([(name, 0.0) for name in self.skipped], self.rules, [(name, 0.0) for name in self.only])
        return Entries(each[0]), Entries(each[1]), Entries(each[2])

    def bits(self, weight: Weight) -> float:
        """Return the bits a number of a weight; of experts that differ the mean."""
        apart = weight.kind == "expert" and any(each.tells_experts_apart for each in self._entries)
        count = weight.experts if apart else 1
        return sum(self._bits([name.format(i) for name in weight.names], weight.kind) for i in range(count)) / count

    def _bits(self, names: list[str], kind: str) -> float:
        skipped, rules, only = self._entries
        if kind == "other":
            return self.own
        if skipped.bits(names) is not None:
            return self.rest if self.rest and kind in ("linear", "expert") else self.own
        if (bits := rules.bits(names)) is not None:
            return bits
        if self.only and only.bits(names) is None:
            return self.own
        return self.kinds.get(kind, self.own)

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """Return a note of entries that name no module of a model of these names, if there are such."""
        known = list(dict.fromkeys(names))
        texts = [text for each in self._entries for text in each.unmatched(known) if not ELSEWHERE.search(text)]
        more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
        shown = ", ".join(map(repr, texts[:3]))
        return [f"its quantisation names modules that the model does not have: {shown}{more}"] if texts else []


def precision_of(config: Mapping[str, Any], beside: Mapping[str, Any] | None = None) -> Precision:
    """Return the precision that a config states; beside: the content of hf_quant_config.json, if that is there.

    Raises InputError for a method of unknown bits. A config that states nothing is taken as bf16, with a note.
    """
    places = [config, *(config[key] for key in ("text_config", "llm_config", "thinker_config") if config.get(key))]
    dtype = next((place[key] for place in places for key in ("dtype", "torch_dtype") if place.get(key)), None)
    own = DTYPES.get(str(dtype).removeprefix("torch."), 16)
    stated = (place.get(key) for key in ("quantization_config", "compression_config") for place in places)
    quantised = next((each for each in stated if isinstance(each, Mapping)), None)
    if beside and quantised is None:
        quantised = beside.get("quantization", beside)
    if isinstance(config.get("quantization"), Mapping):
        return _mlx(config["quantization"], own)
    found = _scheme(quantised, own) if quantised else Precision(own)
    if not quantised and dtype is None:
        found.notes.append("the config states no dtype and no quantisation: bf16 is assumed")
    inside = quantised or {}
    algorithm = inside.get("moe_quant_algo") or inside.get("expert_dtype")
    named = algorithm or next((place["expert_dtype"] for place in places if place.get("expert_dtype")), None)
    if named and not ("quantized_layers" in inside or "config_groups" in inside):
        name = str(named).lower().removeprefix("torch.")
        known = {**DTYPES, **NAMED, **FP4}
        if name not in known and not re.match(r"(int|w)\d", name):
            raise InputError(f"{'moe_quant_algo' if algorithm else 'expert_dtype'} {named!r}: its bits are not known")
        bits = known.get(name) or _format({**inside, "quant_algo": name}, "modelopt", own)
        found.kinds = {**found.kinds, "expert": bits}
        found.name = "mxfp4" if name == "fp4" else name
    return found


def _scheme(stated: Mapping[str, Any], own: float) -> Precision:
    """Return what a `quantization_config` says."""
    method = str(stated.get("quant_method") or "").lower()
    groups, rest = stated.get("config_groups"), 0.0
    listed = [str(name) for key in SKIPPED for name in stated.get(key) or ()]
    rules = [rule for key in TABLES for rule in _rules(stated.get(key) or {}, stated, method, own)]
    only = [stated[key] for key in ONLY if stated.get(key)]
    inner = (stated.get("quant_config") or {}).items()  # of HQQ
    tags = [(name, _format(each, method, own)) for name, each in inner if each and not name.endswith("_params")]
    named, rules = stated.get("quantized_layers") or tags, [*rules, *tags]
    if groups:
        rest = 8.0 if stated.get("fmt") else own
        targets = [
            (str(target), _group(group, own)) for group in groups.values() for target in group.get("targets") or ()
        ]
        rules += [target for target in targets if target[0] != "Linear"]
        bits = dict(targets).get("Linear", rest)
    elif named or (method == "mxfp4" and stated.get("quant_algo") is None):
        bits = own
    else:
        bits = _default(stated, method, own)
    kinds = {"expert": bits, "linear": bits}
    if method == "mxfp4" and not groups:  # of transformers: routed experts alone
        kinds = {"expert": NAMED["mxfp4"]}
    if (groups and any(target == "Linear" for target, _ in targets)) or (listed and method in LISTED):
        kinds["head"] = bits
    if stated.get("lm_head") or stated.get("quant_lm_head"):
        kinds["head"] = bits
    if stated.get("head_bits"):
        kinds["head"] = float(stated["head_bits"])
    if stated.get("include_input_output_embeddings") or stated.get("quantize_embeddings"):
        kinds |= {"head": bits, "embedding": bits}
    rules += [(str(name), bits) for name in stated.get("modules_to_convert") or ()]
    fqn = _torchao(stated).get("fqn_to_config") or _torchao(stated).get("module_fqn_to_config") or {}
    rules += [(name, _fqn_bits(each, own)) for name, each in fqn.items() if name != "_default"]
    return Precision(
        own,
        kinds,
        listed,
        rules,
        [str(name) for each in only for name in _flat(each)],
        rest=rest if rest != own else 0.0,
        name=_called(stated, method, groups),
        notes=[*_unread(stated, FORMAT)],
    )


def _default(stated: Mapping[str, Any], method: str, own: float) -> float:
    """Return the bits of what a method quantises and no rule names. Raise InputError where nothing says them."""
    if str(stated.get("quant_algo")).upper() == "MIXED_PRECISION":
        return NAMED.get(method) or own
    fqn = _torchao(stated).get("fqn_to_config") or _torchao(stated).get("module_fqn_to_config")
    if fqn:
        return _fqn_bits(fqn.get("_default"), own)
    return _format(stated, method, own)


def _rules(table: Mapping[str, Any], stated: Mapping[str, Any], method: str, own: float) -> Iterator[tuple[str, float]]:
    """Yield what a table says of modules; a module has what the table does not say from what holds for all."""
    for name, each in table.items():
        if each is None or name.startswith("-:"):
            bits = own
        else:
            general = {key: value for key, value in stated.items() if key in ("bits", "group_size", "data_type")}
            bits = _format({**general, **each}, method, own)
        if method == "gptq":
            yield f"re:{name.lstrip('+-').removeprefix(':')}", bits
        elif re.search(r"[\\(|^$+\[]|\.\*", name) and not name.startswith("re:"):
            yield f"re:.*(?:{name})", bits
        else:
            yield name, bits


def _group(group: Mapping[str, Any], own: float) -> float:
    weights = group.get("weights")
    return _format(weights, "compressed-tensors", own) if weights and weights.get("num_bits") else own


def _torchao(stated: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the data of torchao's default config."""
    kind = stated.get("quant_type")
    data = (kind.get("default") or kind).get("_data") if isinstance(kind, Mapping) else None
    return data if isinstance(data, Mapping) else {}


def _fqn_bits(config: Any, own: float) -> float:
    return _format({"quant_type": config}, "torchao", own) if config else own


def _format(stated: Mapping[str, Any], method: str, own: float) -> float:
    """Return the bits of one format, as any method states it. Raise InputError where nothing says them."""
    if stated.get("load_in_8bit"):
        return 8.0
    if stated.get("load_in_4bit"):  # a scale of 32 bits for 64, or of 8 with one of 32 for 256 of them
        return 4 + (8 / 64 + 32 / (64 * 256) if stated.get("bnb_4bit_use_double_quant") else 32 / 64)
    flat = dict(_leaves(stated))
    word = str(flat.get("quant_algo") or flat.get("mode") or "").lower()
    bits = next((flat[key] for key in ("bits", "num_bits", "w_bit", "nbits", "weight_bits") if flat.get(key)), None)
    if flat.get("nbits_per_codebook"):  # AQLM
        return float(flat["nbits_per_codebook"] * flat["num_codebooks"] / flat["in_group_size"])
    if named := NAMED.get(word) or (not bits and NAMED.get(method)):
        return _blocks(stated, named)
    if method.startswith("exl") and bits:  # the mean over a file, scales included
        return float(bits)
    bits = bits or _number(flat, word)
    if not bits:
        what = f"quant_algo {stated['quant_algo']!r}" if word else f"quantization_config: {method or 'it'!r}"
        raise InputError(f"{what}: nothing says how many bits it has")
    if bits >= 16:
        return own
    group = next((flat[key] for key in ("group_size", "q_group_size", "block_size") if flat.get(key)), None)
    kind = " ".join(str(flat.get(key)).lower() for key in ("type", "data_type", "dtype", "weight_dtype"))
    return _grouped(bits, *_scales(bits, group, kind, word, method, flat))


def _scales(
    bits: float, group: Any, kind: str, word: str, method: str, flat: Mapping[str, Any]
) -> tuple[int | None, float]:
    """Return the weights of a group, None where a row is one, and the bits that are stored beside a group."""
    if bits == 4 and re.search(r"fp|float", kind) and not flat.get("_type"):
        return group or (16 if "nv" in kind else 32), 8
    if method in ("", "mlx", "metal") and not word.startswith(("int", "w")):
        return group or 64, 32
    if method == "torchao":
        usual = None if bits >= 8 else 32 if "int8dynamic" in str(flat.get("_type")).lower() else 128
        return group or usual, 32
    if method in ZERO_POINTS:
        return group, 16 + bits
    if method == "compressed-tensors":
        return group, 16 + (bits if flat.get("symmetric") is False else 0)
    return group or (None if bits >= 8 or word else 64), 16


def _blocks(stated: Mapping[str, Any], bits: float) -> float:
    """Return the bits of 8-bit floats with a scale for each part of a row; blocks of rows and columns take nothing."""
    block = stated.get("weight_block_size") or (0, 0)
    return _grouped(bits, block[1], 8 if stated.get("scale_fmt") == "ue8m0" else 32) if block[0] == 1 else bits


def _number(flat: Mapping[str, Any], word: str) -> float | None:
    """Return the bits that a word says, such as int4, int8_dynamic_activation_int4_weight or torchao's classes."""
    keys = ("_type", "_data", "quant_type", "weights", "weights_dtype", "weight_dtype", "dtype", "forward_dtype")
    words = [word, *(str(flat.get(key) or "").lower() for key in keys)]
    for text in words:
        if text in FP4 and text != "fp4":
            return FP4[text]
    for pattern in (r"(?:int|float|fp|^w)(\d+)_?weight", r"^w(\d+)", r"(?:int|float|fp)_?(\d+)"):
        if match := next(filter(None, (re.search(pattern, text) for text in words)), None):
            return int(match[1])
    return None


def _leaves(stated: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what a format says at any depth, but of other modules and of activations; what is outermost comes last."""
    for key, value in stated.items():
        if isinstance(value, Mapping) and key not in TABLES and not re.match(r"input|output|act|kv|bias", key):
            yield from _leaves(value)
    yield from ((key, value) for key, value in stated.items() if not isinstance(value, Mapping))


def _mlx(stated: Mapping[str, Any], own: float) -> Precision:
    """Return what MLX says: of all layers, and of some by name, which may stay as they are (false)."""

    def bits(of: Mapping[str, Any]) -> float:
        return _format({key: value for key, value in of.items() if not isinstance(value, Mapping)}, "mlx", own)

    rules = [(name, bits({**stated, **each})) for name, each in stated.items() if isinstance(each, Mapping)]
    rules += [(name, own) for name, each in stated.items() if each is False]
    rules += [(name, bits(stated)) for name, each in stated.items() if each is True]
    mode = stated.get("mode", "affine")
    kinds = dict.fromkeys(("expert", "linear", "router", "head", "embedding"), bits(stated))
    name = mode if mode in NAMED else f"mlx {stated['bits']} bits"
    known = (*FORMAT, *(name for name, each in stated.items() if isinstance(each, Mapping | bool)))
    return Precision(own, kinds, rules=rules, name=name, notes=[*_unread(stated, known)])


def _called(stated: Mapping[str, Any], method: str, groups: Any) -> str:
    """Return what people call the format of experts; empty where its bits say it."""
    if named := stated.get("quantized_layers"):
        algorithms = (str(each.get("quant_algo")) for name, each in named.items() if ".experts" in name)
        return next(algorithms, "").lower().removeprefix("w4a16_")
    if groups:
        weights = next(iter(groups.values())).get("weights") or {}
        floats: dict[Any, str] = {(4, 16): "nvfp4", (4, 32): "mxfp4", (8, None): "fp8"}
        bits = weights.get("num_bits")
        name = floats.get((bits, weights.get("group_size")), "") if weights.get("type") == "float" else f"int{bits}"
        return name if len(groups) == 1 else ""
    name = str(stated.get("quant_algo") or method).lower()
    return name if name in ("nvfp4", "mxfp4", "fp8", "awq", "gptq") else ""


def _unread(stated: Mapping[str, Any], known: Iterable[str]) -> Iterator[str]:
    """Yield a note of each key on which sizes may depend and that is not read."""
    read = {*known, *SKIPPED, *TABLES, *ONLY}
    for key, value in stated.items():
        if value and key not in read and SIZES.search(key.lower()) and not HARMLESS.search(key.lower()):
            yield f"quantization_config.{key} is not understood and not read"


def _grouped(bits: float, group: int | None, beside: float) -> float:
    """Return the bits of a weight whose group of so many has `beside` more; without a group a row has them."""
    return bits + (beside / group if group and group > 0 else 0.0)


def _flat(value: Any) -> Iterator[str]:
    """Yield the names in a list, a list of lists or a text with commas."""
    if isinstance(value, str):
        yield from filter(None, map(str.strip, value.split(",")))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _flat(each)


def _parts(name: str) -> Iterator[str]:
    """Yield what stands between dots of a name, one part or several."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        yield from (".".join(parts[start : start + length]) for start in range(len(parts) - length + 1))


def _spelled(name: str) -> Iterator[str]:
    """Yield a module's name and those of the modules that contain it, as checkpoints begin them."""
    bare = BEFORE.sub("", name)
    for whole in dict.fromkeys((name, bare, f"model.{bare}")):
        ends = (place for place, letter in enumerate(f"{whole}.") if letter == ".")
        yield from (whole[:end] for end in ends)


def _matcher(text: str) -> Callable[[str], Any]:
    """Return a test of module names of a pattern: a regular expression behind `re:` or by its letters, else a glob."""
    if text.startswith("re:"):
        return re.compile(text[3:]).match
    if re.search(r"[\\(|^$+]", text) or text.startswith(".*"):
        return re.compile(rf"(?:{text})(?:(?<=\.)|(?=\.|$))").match
    return re.compile(translate(text.removesuffix(".*"))).match
