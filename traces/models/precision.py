"""How many bits a model's weights take, module by module, from every place where a checkpoint states it.

That is `quantization_config` in config.json (of transformers' methods, compressed-tensors, modelopt), modelopt's own
hf_quant_config.json, MLX's `quantization`, and `expert_dtype`. Scales count: a group of g weights with a scale of s
bits takes s / g bits a weight more. What names no module, and what was not read, is in `notes`.
"""

import re
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from traces.errors import InputError

DTYPES = {"float32": 32, "float": 32, "float16": 16, "half": 16, "bfloat16": 16, "float8_e4m3fn": 8}
KEYS: dict[str, Any] = tomllib.loads((Path(__file__).parent / "quantisations.toml").read_text("utf-8"))
NAMED: dict[str, float] = KEYS["named"]
READ = {key for kind in ("skipped", "tables", "only", "bits", "group", "words", "read") for key in KEYS[kind]}

ELSEWHERE = re.compile(
    r"mtp|nextn|(^|[._*])(vis|vit|talker|audio|image|mm_|multi_modal|eagle|draft|merger)|project(or|ion)"
)
"""Names of modules that a decoded token does not pass, or that are not built."""

OF_ONE = re.compile(r"(.*experts\.)(\d+)(\..*|)")
"""Names of an expert or of what is in it: what is before and behind its number."""

OF_MLX = "switch_mlp"
"""What MLX calls the experts of a layer."""

BEFORE = re.compile(r"^(?:(?:model|language_model|text_model|thinker|backbone|transformer|llm|decoder_model)\.)+")
"""What names have before `layers`, in which checkpoints and models differ."""


class Weight(NamedTuple):
    """A parameter of a model, or the part of it that is published apart."""

    names: tuple[str, ...]  # of its module, in the model and as published; {} for the number of an expert
    kind: str  # expert, linear, head, embedding, router or other
    size: int  # numbers, of all experts
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
        self.apart: dict[str, list[tuple[int, float]]] = defaultdict(list)  # by name, with {} for an expert's number
        for match in filter(None, map(OF_ONE.fullmatch, self.exact)):
            self.apart[f"{match[1]}{{}}{match[3]}"].append((int(match[2]), self.exact[match[0]]))
        for name, each in [*self.apart.items()]:
            if len(each) == max(each)[0] + 1 > 1 and len({bits for _, bits in each}) == 1:  # the same of all experts
                self.exact[name] = each[0][1]
                del self.apart[name]

    def bits(self, names: Iterable[str]) -> float | None:
        """Return the bits of the longest name that fits, else of the first pattern; None: nothing fits."""
        parts = sorted({part for name in names for part in _parts(name)}, key=len, reverse=True)
        if self.exact and (name := next((part for part in parts if part in self.exact), None)):
            return self.exact[name]
        mine = [name for name in names if OF_MLX not in name] if self.patterns else []  # which lists no patterns
        spelled = [spelled for name in mine for spelled in _spelled(name)]
        return next((bits for _, matches, bits in self.patterns if any(map(matches, spelled))), None)

    def unmatched(self, names: Iterable[str]) -> Iterator[str]:
        """Yield the entries that fit none of a model's names."""
        last = max((int(number) for name in names for number in re.findall(r"layers\.(\d+)", name)), default=0)
        parts = {part for name in names for part in _parts(name)}
        for text in self.exact:
            beyond = any(int(number) > last for number in re.findall(r"layers\.(\d+)", text))
            if not beyond and OF_ONE.sub(r"\1{}\3", text) not in parts:
                yield text
        spelled = {spelled for name in names for spelled in _spelled(name.format(0))} if self.patterns else set()
        yield from (text for text, matches, _ in self.patterns if not any(map(matches, spelled)))

    def has_own_bits_for(self, names: Iterable[str]) -> bool:
        """Return whether experts of these names, with {} for the number, may have bits of their own."""
        exact = self.apart and any(part in self.apart for name in names for part in _parts(name))
        return bool(exact) or any(re.search(r"experts\W*\d", text) for text, *_ in self.patterns)


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
        apart = weight.kind == "expert" and any(each.has_own_bits_for(weight.names) for each in self._entries)
        count = weight.experts if apart else 1
        named = ([each for name in weight.names for each in {name: 0, name.format(i): 0}] for i in range(count))
        return sum(self._bits(names, weight.kind) for names in named) / count

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
    quantised = [place.get(key) for key in ("quantization_config", "compression_config") for place in places]
    stated: Mapping[str, Any] = next((each for each in quantised if isinstance(each, Mapping)), {})
    stated = stated or (beside or {}).get("quantization", beside) or {}
    if isinstance(config.get("quantization"), Mapping):
        stated = {"quant_method": "mlx", **config["quantization"]}
    found = _scheme(stated, own) if stated else Precision(own)
    if not stated and dtype is None:
        found.notes.append("the config states no dtype and no quantisation: bf16 is assumed")
    inside = {key: stated[key] for key in ("moe_quant_algo", "expert_dtype") if stated.get(key)}
    key, named = next(iter(inside.items()), ("expert_dtype", None))
    named = named or next((place["expert_dtype"] for place in places if place.get("expert_dtype")), None)
    if named and not ("quantized_layers" in stated or "config_groups" in stated):
        name, known = str(named).lower().removeprefix("torch."), {**DTYPES, **NAMED, "fp4": NAMED["mxfp4"]}
        if name not in known and not re.match(r"(int|w)\d", name):
            raise InputError(f"{key} {named!r}: its bits are not known")
        bits = known.get(name) or _format({**stated, "quant_algo": name}, "modelopt", own)
        found.kinds = {**found.kinds, "expert": bits}
        found.name = "mxfp4" if name == "fp4" else name
    return found


def _scheme(stated: Mapping[str, Any], own: float) -> Precision:
    """Return what a `quantization_config` says."""
    method = str(stated.get("quant_method") or ("mlx" if "bits" in stated else "")).lower()
    listed = [str(name) for key in KEYS["skipped"] for name in stated.get(key) or ()]
    table, groups = list(_table(stated, method)), stated.get("config_groups")
    rules = [_rule(name, each, stated, method, own) for name, each in table]
    rest = 8.0 if groups and stated.get("fmt") else own
    if groups or (table and (stated.get("quantized_layers") or method == "hqq")):
        bits = dict(rules).get("Linear", rest)
    elif stated.get("quant_algo") == "MIXED_PRECISION" and (method in NAMED or stated.get("moe_quant_algo")):
        bits = NAMED.get(method) or own
    else:
        bits = dict(rules).get("_default") or _format(stated, method, own)
    kinds = {"expert": bits, "linear": bits}
    if method == "mxfp4" and not groups and "quant_algo" not in stated:  # of transformers: routed experts alone
        del kinds["linear"]
    head = stated.get("quant_lm_head") or stated.get("lm_head") or (listed and method in KEYS["listed"])
    if head or "Linear" in dict(rules):
        kinds["head"] = bits
    if stated.get("head_bits"):
        kinds["head"] = float(stated["head_bits"])
    if method == "mlx" or stated.get("include_input_output_embeddings") or stated.get("quantize_embeddings"):
        kinds |= {"head": bits, "embedding": bits} | ({"router": bits} if method == "mlx" else {})
    return Precision(
        own,
        kinds,
        listed,
        [rule for rule in rules if rule[0] not in ("Linear", "_default")]
        + [(str(name), bits) for name in stated.get("modules_to_convert") or ()],
        [name for key in KEYS["only"] for name in _flat(stated.get(key))],
        rest=rest if rest != own else 0.0,
        name=_called(stated, method, table),
        notes=[f"quantization_config.{key} is not understood and not read" for key in _unread(stated, dict(table))],
    )


def _unread(stated: Mapping[str, Any], table: Mapping[str, Any]) -> Iterator[str]:
    for key in (key for key, value in stated.items() if value and key not in READ and key not in table):
        if re.search(KEYS["sizes"], key) and not re.search(KEYS["harmless"], key):
            yield key


def _table(stated: Mapping[str, Any], method: str) -> Iterator[tuple[str, Any]]:
    """Yield what is said of modules by name: a format; nothing or false: they stay as they are."""
    for key in KEYS["tables"]:
        yield from (stated.get(key) or {}).items()
    for group in (stated.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        yield from ((target, weights if weights.get("num_bits") else None) for target in group.get("targets") or ())
    if method == "hqq":
        inner = (stated.get("quant_config") or {}).items()
        yield from ((name, each) for name, each in inner if each and not name.endswith("_params"))
    if method == "mlx":
        yield from ((name, each) for name, each in stated.items() if isinstance(each, Mapping | bool))
    flat = dict(_leaves({"quant_type": stated.get("quant_type")}, tables=True))
    yield from (flat.get("fqn_to_config") or flat.get("module_fqn_to_config") or {}).items()


def _rule(name: str, each: Any, stated: Mapping[str, Any], method: str, own: float) -> tuple[str, float]:
    """Return a line of a table as a name and its bits; what it does not say is as for all."""
    if each is None or each is False or name.startswith("-:"):
        bits = own
    else:
        general = {key: stated[key] for key in ("bits", "group_size", "data_type", "mode") if key in stated}
        own_format = {} if each is True else each
        bits = _format({**general, **own_format} if "config_groups" not in stated else own_format, method, own)
    if method == "gptq":
        return f"re:{name.lstrip('+-').removeprefix(':')}", bits
    searched = method in (*KEYS["in_blocks"], "gemma") and re.search(r"[\\(|^$+\[]|\.\*", name)
    return f"re:.*(?:{name})" if searched else name, bits


def _format(stated: Mapping[str, Any], method: str, own: float) -> float:
    """Return the bits of one format, as any method states it. Raise InputError where nothing says them."""
    if stated.get("load_in_8bit"):
        return 8.0
    if stated.get("load_in_4bit"):  # a scale of 32 bits for 64, or of 8 with one of 32 for 256 of them
        return 4 + (8 / 64 + 32 / (64 * 256) if stated.get("bnb_4bit_use_double_quant") else 32 / 64)
    flat = dict(_leaves(stated))
    word = str(flat.get("quant_algo") or flat.get("mode") or "").lower()
    bits = next((flat[key] for key in KEYS["bits"] if flat.get(key)), None)
    if named := NAMED.get(word) or (not bits and NAMED.get(method)):
        block = stated.get("weight_block_size") or (0, 0)  # of rows and columns; of a part of a row where it is (1, n)
        return named + ((8 if stated.get("scale_fmt") == "ue8m0" else 32) / block[1] if block[0] == 1 else 0)
    if method.startswith("exl") and bits:  # the mean over a file, scales included
        return float(bits)
    bits = bits or _number([word, *(str(flat.get(key) or "").lower() for key in KEYS["words"])])
    if not bits:
        what = f"quant_algo {flat.get('quant_algo', word)!r}" if word else f"quantization_config: {method or 'it'!r}"
        raise InputError(f"{what}: nothing says how many bits it has")
    if bits >= 16:
        return own
    kind = " ".join(str(flat.get(key)).lower() for key in ("type", "data_type", "dtype", "weight_dtype", "_type"))
    group = next((flat[key] for key in KEYS["group"] if flat.get(key)), None)
    usual, beside = _scales(bits, kind, word, method, flat.get("symmetric") is False)
    group = group or usual
    return bits + (beside / group if group and group > 0 else 0.0)


def _scales(bits: float, kind: str, word: str, method: str, shifted: bool) -> tuple[int, float]:
    """Return how many weights have a scale where that is not stated, 0: a row, and the bits beside each group."""
    if bits == 4 and re.search(r"fp|float", kind) and method != "torchao":
        return 16 if "nv" in kind else 32, 8
    if method in ("mlx", "metal"):
        return 64, 32
    if method == "torchao":
        return 0 if bits >= 8 else 32 if "int8dynamic" in kind else 128, 32
    if method in KEYS["in_blocks"]:
        return 0, 16 + bits
    if method == "compressed-tensors":
        return 0, 16 + bits * shifted
    return 0 if bits >= 8 or word else 64, 16


def _number(words: list[str]) -> float | None:
    """Return the bits that words say, such as int4, int8_dynamic_activation_int4_weight or torchao's classes."""
    for pattern in (r"(?:int|float|fp|^w)(\d+)_?weight", r"^w(\d+)", r"(?:int|float|fp)_?(\d+)"):
        if match := next(filter(None, (re.search(pattern, text) for text in words)), None):
            return int(match[1])
    return None


def _leaves(stated: Mapping[str, Any], tables: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield what a format says at any depth, but of other modules and of activations; what is outermost comes last."""
    for key, value in stated.items():
        if isinstance(value, Mapping) and key not in KEYS["tables"] and not re.match(r"input|output|act|kv|bias", key):
            yield from _leaves(value, tables)
    yield from ((key, value) for key, value in stated.items() if tables or not isinstance(value, Mapping))


def _called(stated: Mapping[str, Any], method: str, table: list[tuple[str, Any]]) -> str:
    """Return what people call the format of experts; empty where its bits say it."""
    if stated.get("quantized_layers"):
        algorithms = (str(each.get("quant_algo")) for name, each in table if ".experts" in name)
        return next(algorithms, "").lower().removeprefix("w4a16_")
    if groups := stated.get("config_groups"):
        weights = next(iter(groups.values())).get("weights") or {}
        floats: dict[Any, str] = {(4, 16): "nvfp4", (4, 32): "mxfp4", (8, None): "fp8"}
        bits = weights.get("num_bits")
        name = floats.get((bits, weights.get("group_size")), "") if weights.get("type") == "float" else f"int{bits}"
        return name if len(groups) == 1 else ""
    name = str(stated.get("quant_algo") or stated.get("mode") or method).lower()
    plain = f"mlx {stated.get('bits')} bits" if method == "mlx" else ""
    return name if name in ("nvfp4", "mxfp4", "fp8", "awq", "gptq") else plain


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
    if re.search(r"[\\(|^$+]", text) or text.startswith(".*"):  # as transformers reads it, up to a dot
        return re.compile(rf"(?:{text})(?:(?<=\.)|(?=\.|$))").match
    return re.compile(translate(text.removesuffix(".*"))).match
