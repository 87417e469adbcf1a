"""The shape of a model, as one TOML profile: what time and bytes follow from.

A trace's model name chooses it; sizes that the trace itself states make one up where no profile is known. Shipped
profiles are what `moe-trace profile` writes of the configurations that the models' authors published.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, cached_property, lru_cache
from itertools import groupby
from os.path import exists  # of any name, however long
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from msgspec import Meta

import traces.models as models
from traces.errors import InputError, located, unknown
from traces.facts import parse_json
from traces.files import expanded
from traces.location import is_url
from traces.models.names import WHOLE, bytes_per_parameter, canonical, family, parted
from traces.models.precision import precision_of
from traces.schema import TraceMeta
from traces.shipped import Shipped

MODELS = Shipped(Path(__file__).parent / "shipped", "model")

USUAL = {
    "gpt-oss": "gpt-oss-20b",
    "llama4": "llama-4-scout",
    "mixtral": "mixtral-8x7b",
    "qwen3-coder": "qwen3-30b-a3b",
}
"""What Ollama runs under a name that leaves the size open (tags of its library, 2026)."""

MOST = 10**15
"""Of any number: beyond, times leave the range of a clock of 64 bits, and nothing is so large."""

MOST_LAYERS = 100_000
"""No model has so many; each is looked at."""

Positive = Annotated[float, Meta(gt=0, le=MOST)]
NotNegative = Annotated[float, Meta(ge=0, le=MOST)]
Count = Annotated[int, Meta(ge=1, le=MOST)]
Size = Annotated[int, Meta(ge=0, le=MOST)]
"""0 where there is none."""


@dataclass(frozen=True)
class LayerKind:
    """What a token reads and leaves behind in a layer of one kind, routed experts aside."""

    parameters: Size  # read for each token: what mixes tokens, norms, router, MLP, shared experts
    routed: bool = False  # whether the layer ends in routed experts
    mlp: Size = 0  # of the parameters, those of an MLP that all tokens take
    shared: Size = 0  # of the parameters, those of shared experts
    kv: NotNegative = 0  # values that a token leaves in the cache
    window: Size = 0  # tokens, the last ones, that leave more
    windowed: NotNegative = 0  # values that each of those leaves
    mixes: bool = True  # whether tokens are mixed in it, by attention or otherwise
    state: Size = 0  # bytes of what does not grow with the context: of linear attention, Mamba, convolutions

    def kept(self, context: float, requests: int = 1) -> float:
        """Return the values in the cache of requests that have `context` tokens together."""
        return self.kv * context + self.windowed * min(context, self.window * requests)

    def attended(self, before: float) -> float:
        """Return to how many of `before` tokens a token attends."""
        return before if self.kv else min(before, self.window)


class ExpertShape(NamedTuple):
    """One routed expert: `matrices` of `width` x `inner`, and `biases`, its parameters beside them."""

    width: int
    inner: int
    matrices: int
    biases: int

    @property
    def parameters(self) -> int:
        return self.matrices * self.width * self.inner + self.biases

    def fields(self, hidden_size: int) -> dict[str, Any]:
        """Return it as the fields of the profile of a model of that hidden size."""
        return {
            "expert_hidden_size": 0 if self.width == hidden_size else self.width,
            "expert_intermediate_size": self.inner,
            "expert_matrices": self.matrices,
            "expert_biases": self.biases,
        }


@dataclass(frozen=True)
class ModelProfile:
    """An MoE transformer: an encoder's layers, if any, before its decoder's."""

    name: str
    hub_ids: tuple[str, ...]
    experts: Count
    top_k: Count
    hidden_size: Count
    expert_intermediate_size: Count
    expert_bytes_per_parameter: Positive
    heads: Count
    head_size: Count
    vocabulary: Count
    dense_bytes_per_parameter: Positive
    layers: tuple[str, ...]  # in the order of execution, as in "3 dense", "58 moe"
    kinds: Mapping[str, LayerKind] = field(hash=False)
    encoder_layers: Size = 0  # of these, the first ones
    expert_hidden_size: Size = 0  # of what experts read and write; 0: hidden_size
    expert_matrices: Count = 3  # gate, up and down; 2 without a gate
    expert_biases: Size = 0  # parameters of one expert beside its matrices
    layer_expert_bytes: tuple[Count, ...] = ()  # of an expert of each MoE layer; empty: all as the shape says
    embedding_parameters: Size = 0  # of token embeddings that are not the head; a token reads one row
    head_parameters: Size = 0  # of the vocabulary matmul and what stands before it; 0: vocabulary x hidden_size
    head_bytes_per_parameter: NotNegative = 0  # 0: as of all that is dense
    embedding_bytes_per_parameter: NotNegative = 0  # 0: as of the head
    precision: str = ""  # of routed experts, as the model states it
    precisions: tuple[str, ...] = ()  # of routed experts in all published files; empty: the usual ones
    unused_parameters: Size = 0  # of what decoding never runs, such as an image encoder
    mtp_layers: Size = 0  # that predict further tokens, for speculation alone
    kv_bytes_per_value: Positive = 2.0
    kv_heads: Size = 0  # 0: as many as heads
    kv_latent_size: Size = 0  # MLA; 0: keys and values by head
    rope_head_size: Size = 0  # MLA: beside head_size
    query_latent_size: Size = 0  # MLA whose queries pass a latent too; 0: they do not
    notes: tuple[str, ...] = ()  # what was not understood of the config or file, so that sizes may be wrong

    def __post_init__(self) -> None:
        if self.top_k > self.experts:
            raise InputError(f"top_k {self.top_k} is above {self.experts} experts")
        if self.layer_expert_bytes and len(self.layer_expert_bytes) != self.moe_layers:
            sizes = len(self.layer_expert_bytes)
            raise InputError(f"layer_expert_bytes has {sizes} sizes for {self.moe_layers} MoE layers")
        if not self.decode_layers:
            raise InputError("layers: none of the decoder's has routed experts")

    @cached_property
    def order(self) -> tuple[LayerKind, ...]:
        """The kind of each layer. Raises InputError for a kind that is not described."""
        order: list[LayerKind] = []
        for run in self.layers:
            match = re.fullmatch(r"(\d{1,6}) (.+)", run)
            if match is None or len(order) + int(match[1]) > MOST_LAYERS:
                raise InputError(f"layers: expected a number and a kind, such as '3 dense', found {run!r}")
            if match[2] not in self.kinds:
                raise unknown("kind of layers", match[2], self.kinds)
            order += [self.kinds[match[2]]] * int(match[1])
        return tuple(order)

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Which layers have routed experts, int[L]."""
        return tuple(place for place, kind in enumerate(self.order) if kind.routed)

    @cached_property
    def moe_layers(self) -> int:
        return len(self.places)

    @cached_property
    def encoder_moe_layers(self) -> int:
        return sum(place < self.encoder_layers for place in self.places)

    @property
    def decode_layers(self) -> int:
        """MoE layers that a decoded token passes."""
        return self.moe_layers - self.encoder_moe_layers

    def stretch(self, layer: int) -> Sequence[LayerKind]:
        """Return the layers from behind the MoE layer before `layer` up to this; of L, those behind the last one."""
        first = self.places[layer - 1] + 1 if layer else 0
        last = self.places[layer] + 1 if layer < self.moe_layers else len(self.order)
        return self.order[first:last]

    def cut(self, moe_layers: int) -> "ModelProfile":
        """Return the model of its first `moe_layers` MoE layers, those before and between them, and the last ones."""
        names = [name for run in self.layers for name in [run.split(" ", 1)[1]] * int(run.split(" ", 1)[0])]
        kept = names[: self.places[moe_layers - 1] + 1] + names[self.places[-1] + 1 :]
        sizes = self.layer_expert_bytes[:moe_layers]
        return replace(self, layers=tuple(f"1 {name}" for name in kept), layer_expert_bytes=sizes)

    @property
    def routed_size(self) -> int:
        """The width of what experts read and write."""
        return self.expert_hidden_size or self.hidden_size

    @property
    def expert_parameters(self) -> int:
        return self.expert_matrices * self.routed_size * self.expert_intermediate_size + self.expert_biases

    @property
    def expert_bytes(self) -> int:
        """Bytes of one routed expert, as it crosses the link; of the largest, where layers differ."""
        alike = round(self.expert_parameters * self.expert_bytes_per_parameter)
        return max(self.layer_expert_bytes, default=alike)

    @property
    def expert_width(self) -> float:
        """Bytes of a parameter of a routed expert; of the largest, where layers differ."""
        if self.layer_expert_bytes:
            return self.expert_bytes / self.expert_parameters
        return self.expert_bytes_per_parameter

    @property
    def differing_bytes(self) -> tuple[int, ...]:
        """Bytes of an expert of each MoE layer, where they differ (rule 19); empty where all are of one size."""
        return self.layer_expert_bytes if len(set(self.layer_expert_bytes)) > 1 else ()

    def bytes_of(self, layer: int) -> int:
        return self.layer_expert_bytes[layer] if self.layer_expert_bytes else self.expert_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of the routed experts that one decoded token needs."""
        return self.top_k * sum(map(self.bytes_of, range(self.encoder_moe_layers, self.moe_layers)))

    def runs(self, layer: int, tokens: int, context: int) -> bool:
        """Return whether a step runs MoE layer `layer`: an encoder's run where all of the context is the step's."""
        return layer >= self.encoder_moe_layers or context <= tokens

    def kv_cache_bytes(self, context: int) -> float:
        """Return the bytes that all layers keep of `context` tokens: keys and values, and states."""
        return sum(kind.kept(context) * self.kv_bytes_per_value + kind.state for kind in self.order)

    @property
    def head_weights(self) -> int:
        """Parameters of the vocabulary matmul and what stands before it."""
        return self.head_parameters or self.vocabulary * self.hidden_size

    @property
    def head_bytes(self) -> float:
        return self.head_weights * (self.head_bytes_per_parameter or self.dense_bytes_per_parameter)

    @property
    def layers_parameters(self) -> int:
        """Parameters of all layers, without routed experts."""
        return sum(kind.parameters for kind in self.order)

    @property
    def dense_bytes(self) -> float:
        """Bytes of everything but the routed experts: layers, embedding and vocabulary matmul."""
        head = self.head_bytes_per_parameter or self.dense_bytes_per_parameter
        embedding = self.embedding_parameters * (self.embedding_bytes_per_parameter or head)
        return self.layers_parameters * self.dense_bytes_per_parameter + embedding + self.head_bytes

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, embedding and vocabulary matmul included."""
        experts = self.moe_layers * self.experts * self.expert_parameters
        return experts + self.layers_parameters + self.embedding_parameters + self.head_weights

    def at(self, experts: float | None = None, dense: float | None = None) -> "ModelProfile":
        """Return the same model with so many bytes a parameter of experts and of all else; None: as they are."""
        return replace(
            self,
            expert_bytes_per_parameter=experts or self.expert_bytes_per_parameter,
            layer_expert_bytes=() if experts else self.layer_expert_bytes,
            precision="" if experts else self.precision,
            dense_bytes_per_parameter=dense or self.dense_bytes_per_parameter,
            head_bytes_per_parameter=0 if dense else self.head_bytes_per_parameter,
            embedding_bytes_per_parameter=0 if dense else self.embedding_bytes_per_parameter,
        )

    def at_precision(self, name: str) -> "ModelProfile":
        """Return the model at a precision of precisions.toml; experts whose files all have one stay. InputError."""
        each, name = bytes_per_parameter(name), canonical(name)
        dense = each if name.startswith(WHOLE) else None
        if self.precisions and name not in self.precisions:
            return self.at(dense=dense)
        return replace(self.at(each, dense), precision=name)

    def holding(self, layers_bytes: float = 0, head_bytes: float = 0) -> "ModelProfile":
        """Return it with so many bytes of all layers but experts, and of the head and embedding; 0: as now."""
        dense, head = self.dense_bytes_per_parameter, self.head_bytes / self.head_weights
        return replace(
            self,
            dense_bytes_per_parameter=layers_bytes / self.layers_parameters if layers_bytes else dense,
            head_bytes_per_parameter=head_bytes / self.head_weights if head_bytes else head,
        )


def is_gguf_file(text: str) -> bool:
    """Return whether it is a GGUF file that can be read, and not the name of one elsewhere."""
    return text.endswith(".gguf") and (is_url(text) or exists(expanded(text)))


def model(text: str) -> ModelProfile:
    """Return the shipped profile of that name (`known`), or that of a TOML file, a transformers config or a GGUF file.

    A GGUF file may be at a URL; of a split model any is named. Raise InputError where it cannot be used.
    """
    if is_gguf_file(text):
        return models.of_gguf(text)
    path = expanded(text)
    if text not in MODELS.names():
        if not exists(path) and (same := known(text)):
            return same
        if text.endswith(".gguf"):
            return models.of_gguf(text)
        if exists(path) and (path.suffix == ".json" or (path / "config.json").is_file()):
            return of_config(path)
    path = MODELS.find(text)
    if path.suffix == ".safetensors":
        raise InputError(f"{path} holds weights: name its config.json, a profile, or one of `moe-sim models`")
    return MODELS.read(ModelProfile, path)


def of_config(path: Path) -> ModelProfile:
    """Return the profile of a transformers config, a file or the one in a folder. Raise InputError, naming the file."""
    file = path / "config.json" if path.is_dir() else path
    return _of_config(file.absolute(), file.stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _of_config(file: Path, _: int) -> ModelProfile:
    """Return the same of a file as it is at one time: a plan reads it for each of its runs."""
    name = file.parent.resolve().name if file.name == "config.json" else file.stem
    beside = file.with_name("hf_quant_config.json")
    with located(str(file)):
        config = parse_json(file.read_bytes(), "a transformers config")
        stated = (
            parse_json(beside.read_bytes(), beside.name) if file.name == "config.json" and beside.is_file() else None
        )
        precision = precision_of(config, stated)
        return models.counted(config, name, precision)


@cache
def shipped() -> tuple[ModelProfile, ...]:
    """Return the profiles that come with the package, by name."""
    return tuple(map(model, MODELS.names()))


@lru_cache(256)
def known(name: str) -> ModelProfile | None:
    """Return the shipped profile of a model by the name that a person, a trace or a file has for it; None: none.

    Owner, case and variant do not matter. Bytes are of the precision that the name says, else as published.
    """
    stem, precision = parted(name)
    wanted = (family(name), family(stem), family(stem.partition("_")[2]))
    named = (each for one in filter(None, wanted) for each in shipped() if one in _families(each))
    profile = next(named, None) or _short(stem)
    if profile and precision and bytes_per_parameter(precision) != profile.expert_bytes_per_parameter:
        return profile.at_precision(precision)
    return profile


def of_trace(meta: TraceMeta, text: str | None = None) -> ModelProfile:
    """Return the profile that `text` names, else the trace, else a derived one. Raise InputError if they differ.

    What the trace states counts: its engine's top-k may be lower than the model's, and experts have its bytes, unless
    `text` is a file that states their sizes, or a model of another shape, which stands in for the trace's.
    """
    profile = model(text) if text else known(meta.model) or derived(meta)
    profile = replace(profile, top_k=min(profile.top_k, meta.top_k))
    for what, ours, theirs in (
        ("MoE layers", profile.moe_layers, meta.layers),
        ("experts a layer", profile.experts, meta.experts),
        ("top-k", profile.top_k, meta.top_k),
    ):
        if ours != theirs:
            raise InputError(
                f"the model profile {profile.name} has {ours} {what}, the trace of {meta.model} "
                f"has {theirs}; choose another with `model_profile`"
            )
    in_file = text and (is_gguf_file(text) or profile.layer_expert_bytes)
    return profile if in_file else _as_recorded(profile, meta)


def _as_recorded(profile: ModelProfile, meta: TraceMeta) -> ModelProfile:
    """Return the model with experts as large as its trace states, and all else at as many bits if that is published."""
    shape = profile.hidden_size, profile.expert_intermediate_size
    stated = meta.hidden_size or shape[0], meta.expert_intermediate_size or shape[1]
    size, sizes = meta.largest_expert_bytes, meta.layer_expert_bytes or (profile.expert_bytes,)
    if not size or stated != shape or {size, *sizes} == {profile.expert_bytes}:
        return profile
    width = size / profile.expert_parameters
    alike = profile.dense_bytes_per_parameter == profile.expert_bytes_per_parameter
    return replace(profile.at(width, width if alike else None), layer_expert_bytes=meta.layer_expert_bytes)


def not_stated(meta: TraceMeta) -> list[str]:
    """Return the facts that a profile is derived from and that a trace does not state."""
    facts = {"expert_bytes": meta.largest_expert_bytes}
    facts |= {name: getattr(meta, name) for name in ("hidden_size", "expert_intermediate_size")}
    return [name for name, value in facts.items() if not value]


def derived(meta: TraceMeta) -> ModelProfile:
    """Return a profile from what the trace states; assumed are heads of 64, each with its keys and values."""
    size, H, inner = meta.largest_expert_bytes, meta.hidden_size, meta.expert_intermediate_size
    if not (size and H and inner):
        raise InputError(
            f"no model profile is known for {meta.model!r}, and its trace does not state "
            f"{', '.join(not_stated(meta))}; choose one with "
            f"`model_profile`, a name or FILE.toml (shipped: {', '.join(MODELS.names())})"
        )
    width = meta.expert_hidden_size or H
    parameters = meta.expert_matrices * width * inner
    head_size = min(64, H)
    heads = H // head_size
    values = 2 * heads * head_size
    return ModelProfile(
        name=meta.model,
        hub_ids=(),
        experts=meta.experts,
        top_k=meta.top_k,
        hidden_size=H,
        expert_hidden_size=0 if width == H else width,
        expert_intermediate_size=inner,
        expert_matrices=meta.expert_matrices,
        expert_bytes_per_parameter=size / parameters,
        layer_expert_bytes=meta.layer_expert_bytes,
        heads=heads,
        head_size=head_size,
        vocabulary=32_000,
        embedding_parameters=32_000 * H,
        dense_bytes_per_parameter=(dense := 4.0 if meta.dtype and meta.dtype.endswith("32") else 2.0),
        kv_bytes_per_value=dense,
        layers=(f"{meta.layers} moe",),
        kinds={"moe": LayerKind(parameters=2 * H * values + H * meta.experts, routed=True, kv=values)},
    )


def written(profile: ModelProfile, comment: str) -> str:
    """Return a profile as TOML; what is as a profile without the key would have it is left out."""
    import tomli_w  # which a machine that only runs models does without

    lacking = {each.name: each.default for each in fields(ModelProfile)}
    table = {key: value for key, value in asdict(profile).items() if key != "name" and value != lacking[key]}
    kind = {each.name: each.default for each in fields(LayerKind)}
    table["kinds"] = {
        name: {key: value for key, value in of.items() if value != kind[key]} for name, of in table["kinds"].items()
    }
    return comment + tomli_w.dumps(table)


def described(order: Sequence[LayerKind]) -> dict[str, Any]:
    """Return the kinds of layers in the order of execution as the fields `layers` and `kinds`, each kind named."""
    names = dict[LayerKind, str]()
    for kind in order:
        if kind not in names:
            parts = ["moe" if kind.routed else "dense" if kind.mlp else "mixer"]
            parts += ["window"] * bool(kind.window) + ["state"] * bool(kind.state and not kind.kv)
            name = "-".join(parts)
            alike = sum(each.rstrip("0123456789") == name for each in names.values())
            names[kind] = f"{name}{alike + 1 if alike else ''}"
    runs = groupby(map(names.__getitem__, order))
    return {
        "layers": tuple(f"{len(list(run))} {name}" for name, run in runs),
        "kinds": {name: kind for kind, name in names.items()},
    }


def _families(shipped: ModelProfile) -> set[str]:
    names = (shipped.name, *shipped.hub_ids)
    return {family(each) for name in names for each in (name, parted(name)[0])}


def _short(text: str) -> ModelProfile | None:
    """Return the one shipped profile that is named so but for sizes, as `olmoe` is, or the USUAL one."""
    if text in USUAL:
        return model(USUAL[text])
    wanted = re.compile(re.escape(family(text)) + r"([\dx.]+b)*(a[\d.]+b)?")
    begun = [each for each in shipped() if any(map(wanted.fullmatch, _families(each)))]
    return begun[0] if len(begun) == 1 else None
