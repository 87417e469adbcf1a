"""The profile of a model from its config: counted on the model that transformers itself builds, without weights.

The model stands on torch's meta device, where tensors have a shape and no data. Its experts are those that
`traces.models.sites` finds; what a token leaves in the cache is what transformers' own cache grows by in a forward
pass.
"""

import inspect
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from importlib import import_module
from itertools import groupby, takewhile
from math import prod
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING
from transformers.cache_utils import Cache
from transformers.models.auto import modeling_auto

from traces.errors import InputError
from traces.models.precision import Precision
from traces.models.profile import LayerKind, ModelProfile, named
from traces.models.sites import TOP_K, Site, find_sites

SHORT, LONG = 128, 256
"""Tokens of the two passes whose caches are compared: multiples of what architectures compress keys by."""

CLASSES = (
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    modeling_auto.MODEL_MAPPING,
)
"""Of an architecture, the first of these that it has is built."""

SAME = {"kimi_k2": "deepseek_v3", "ernie4_5_moe_vl": "ernie4_5_moe"}
"""Architectures as authors name them, of which transformers has the code, or the text model's, by another name."""

SHAPE = re.compile(r"(^|_)(experts?|moe|layers?|heads?|hidden|intermediate|windows?|latent|pattern|ratio|ratios)(_|$)")
"""Words in keys of a config on which sizes may depend."""

HARMLESS = re.compile(
    r"mtp|nextn|^(vision|image|video|audio|router|swa)_|max_window_layers|nope_layer_interval|sliding_windows"
)
"""Keys with such words that state nothing, or again what another key says; swa_: of MiMo, whose code has them."""

FLAGS = {
    "moe_layer_freq": ("mlp_layer_types", ("dense", "sparse")),
    "is_moe_layer": ("mlp_layer_types", ("dense", "sparse")),
    "hybrid_layer_pattern": ("layer_types", ("full_attention", "sliding_attention")),
}
"""Keys that say yes or no of each layer, and how transformers writes it."""

WIDTH = "routed_expert_hidden_size"
"""The key of Kimi-K3 for what its experts read and write, which transformers does not read."""

MLP = {"mlp", "feed_forward", "ffn", "ff", "block_sparse_moe", "DenseReluDense"}
"""Names of what all tokens take in a layer without experts."""


class ExpertShape(NamedTuple):
    """One routed expert: `matrices` of `width` x `inner`, and `biases`, its parameters beside them."""

    width: int
    inner: int
    matrices: int
    biases: int

    @property
    def parameters(self) -> int:
        return self.matrices * self.width * self.inner + self.biases


class Kept(NamedTuple):
    """What a layer keeps in the cache, as in `LayerKind`."""

    kv: float = 0.0
    window: int = 0
    windowed: float = 0.0
    state: int = 0


def counted(config: Mapping[str, Any], name: str, precision: Precision) -> ModelProfile:
    """Return the profile of the model of a transformers config, its weights at a precision.

    Raises InputError where transformers does not know the architecture, cannot build it or runs no experts in it.
    """
    config = _translated(config)
    with _quiet():
        profile = _Counting(_built(config), config.get(WIDTH, 0)).profile(name, precision)
    for key in ("moe_layer_freq", "is_moe_layer"):
        flags = config.get(key)
        if isinstance(flags, list) and (stated := sum(map(bool, flags))) != profile.moe_layers:
            version, built = transformers.__version__, profile.moe_layers
            raise InputError(f"{key} names {stated} layers with experts, transformers {version} builds {built}")
    return profile


def expert_shape(site: Site, hidden_size: int) -> ExpertShape:
    """Return the shape of one expert of a site, from the shapes of its weights [E, ...] or of each expert's own."""
    stacked = [tuple(weight.shape[1:]) for weight in site.weights if weight.dim() > 2]
    flat = [tuple(weight.shape) for weight in site.weights if weight.dim() <= 2]
    total = sum(map(prod, stacked)) + sum(map(prod, flat)) // site.experts
    matrices: list[tuple[int, ...]]
    if stacked:
        matrices = [shape for shape in stacked if min(shape) > 1]
    elif len(flat) < site.experts:  # tables of which a row is an expert's
        matrices = [(1, prod(shape) // site.experts) for shape in flat]
    else:
        matrices = list(filter(lambda shape: len(shape) == 2, flat))[: len(flat) // site.experts]
    common = set.intersection(*map(set, matrices))
    first = matrices[0][0 if getattr(site.module, "is_transposed", False) else -1]  # in [out, in], as nn.Linear has it
    width = hidden_size if hidden_size in common else first if first in common else max(common)
    inner = min(prod(shape) // width for shape in matrices)
    count = sum(map(prod, matrices)) // (width * inner)
    return ExpertShape(width, inner, count, total - count * width * inner)


def _translated(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config as transformers reads it, where authors use other words. Raise InputError for unknown models."""
    result: dict[str, Any] = json.loads(json.dumps(config), object_hook=_number)
    kind = config.get("model_type")
    if kind is None and "moe" in config:
        raise InputError("this is Mistral's own format (params.json): name the model's config.json")
    if kind == "ernie4_5_moe_vl":  # lists of what holds for text and for images
        result |= {key: value[0] for key, value in config.items() if key.startswith("moe_") and isinstance(value, list)}
    result["model_type"] = kind = SAME.get(str(kind), kind)
    if kind not in CONFIG_MAPPING:
        raise InputError(f"model_type {kind!r} is not known to transformers {transformers.__version__}")
    for key, (target, names) in FLAGS.items():
        if isinstance(result.get(key), list) and target not in result:
            result[target] = [names[bool(flag)] for flag in result[key]]
    return result


def _number(table: dict[str, Any]) -> Any:
    """Return what transformers writes as {"__float__": "Infinity"}; any other table as it is."""
    return float(table["__float__"]) if set(table) == {"__float__"} else table


def _require_read(config: Mapping[str, Any], read: Any) -> None:
    """Raise InputError for a key on which sizes may depend and that transformers' code does not read."""
    text = read.get_text_config()
    classes = {
        cls.__module__ for each in (read, text) for cls in type(each).__mro__ if "transformers" in cls.__module__
    }
    modules = [*classes, *(name.replace(".configuration_", ".modeling_") for name in classes if ".models." in name)]
    code = " ".join(map(inspect.getsource, map(import_module, modules)))
    inner = [value for key, value in config.items() if key.endswith(("text_config", "llm_config", "thinker_config"))]
    tables = [table for table in (config, *inner) if isinstance(table, Mapping)]
    is_read = {key: bool(re.search(rf"\b{re.escape(key)}\b", code)) for table in tables for key in table}
    said = [(set(key.split("_")), value) for table in tables for key, value in table.items() if is_read[key]]
    for key, value in [pair for table in tables for pair in table.items() if not is_read[pair[0]]]:
        sizes = value if isinstance(value, list) else [value]
        if key in FLAGS or key == WIDTH or not SHAPE.search(key) or HARMLESS.search(key):
            continue
        if (all(each in (0, 1) for each in sizes) and len(set(sizes)) <= 1) or not all(
            isinstance(x, int) for x in sizes
        ):
            continue
        again = set(key.split("_")) - {"num", "size"}
        if len(set(sizes)) > 1 or not any(other == sizes[0] and words & again for words, other in said):
            version = transformers.__version__
            raise InputError(f"{key}: transformers {version} reads no such key of a {config['model_type']}")


def _built(config: Mapping[str, Any]) -> Any:
    """Return the model on the meta device. Raise InputError, with the reason, where transformers does not build it."""
    kind, version = config["model_type"], transformers.__version__
    try:
        read = CONFIG_MAPPING[kind].from_dict(dict(config))
        text = read.get_text_config()
        _require_read(config, read)
        _mend(text)
        named = [getattr(transformers, each, None) for each in config.get("architectures") or ()]
        cls = next((each for each in [*named, *(each.get(type(read), None) for each in CLASSES)] if each), None)
        if isinstance(cls, tuple):
            cls = cls[0]
        if cls is None or not isinstance(read, cls.config_class):
            cls, read = _text_model(text), text
        with torch.device("meta"):
            return cls._from_config(read, dtype=torch.bfloat16).eval()
    except InputError:
        raise
    except Exception as error:  # of code that reads a foreign config
        raise InputError(f"transformers {version} builds no {kind} of it: {error}") from error


def _mend(config: Any) -> None:
    """Change what keeps a model from being built or run, and no size."""
    if (config.pad_token_id or 0) >= config.vocab_size:
        config.pad_token_id = None
    if getattr(config, "kv_lora_rank", None):  # all heads share one latent
        config.num_key_value_heads = config.num_attention_heads
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict) and rope.get("rope_type") in ("longrope", "dynamic"):
        rope["rope_type"] = "default"  # those look at the numbers of tokens
    groups = getattr(config, "n_group", None) or 1
    if (getattr(config, "n_routed_experts", None) or groups) % groups:
        config.n_group = config.topk_group = 1
    kinds = getattr(config, "layer_types", None)
    if kinds and "sliding_attention" not in kinds and getattr(config, "sliding_window", 1) is None:
        config.sliding_window = LONG  # of a mask that no layer takes


def _text_model(config: Any) -> Any:
    """Return the class of a text model that no mapping of transformers names: the last one of its module."""
    module = import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    of_config = [cls for cls in vars(module).values() if getattr(cls, "config_class", None) is type(config)]
    return next(cls for cls in reversed(of_config) if not cls.__name__.endswith("PreTrainedModel"))


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' own remarks from the terminal."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        transformers.logging.set_verbosity(level)


def _stack(name: str) -> str:
    """Return the list of layers that a module is in, such as model.layers."""
    return ".".join(takewhile(lambda part: not part.isdigit(), name.split(".")))


class _Counting:
    """A model on the meta device, split into layers."""

    def __init__(self, model: Any, width: int = 0) -> None:
        self.width = width  # of experts, where the config says so and the model does not
        self.model, self.config = model, model.config.get_text_config()
        self.encoded: bool = model.config.is_encoder_decoder
        sites = [site for site in find_sites(model) if "vision" not in site.name]
        if not sites:
            raise InputError(f"no layer of {type(model).__name__} has routed experts")
        weight = {_stack(site.name): 0 for site in sites}
        for site in sites:
            weight[_stack(site.name)] += sum(each.numel() for each in site.weights)
        self.stacks = list(weight) if self.encoded else [max(weight, key=lambda stack: weight[stack])]
        self.sites = [site for site in sites if _stack(site.name) in self.stacks]
        self.routed = {id(each) for site in self.sites for each in site.weights}
        self.hidden: int = getattr(self.config, "hidden_size", 0) or self.config.d_model
        self.chosen: set[int] = set()  # experts a token, as experts are called

    def profile(self, name: str, precision: Precision) -> ModelProfile:
        shapes = [expert_shape(site, self.hidden) for site in self.sites]
        if self.width:
            shapes = [shape._replace(width=self.width) for shape in shapes]
        widths = [precision.bits(f"{site.name}.0.down_proj") / 8 for site in self.sites]
        sizes = [round(shape.parameters * width) for shape, width in zip(shapes, widths, strict=True)]
        largest, expert_bytes = max(zip(shapes, widths, strict=True), key=lambda each: each[0].parameters * each[1])
        dense_bytes, head_bytes = self._dense_bytes(precision)
        experts = max(site.experts for site in self.sites)
        if (top_k := self._top_k()) > experts:
            raise InputError(f"top_k {top_k} is above {experts} experts")
        kept, kinds, order, encoder = self._kept(), dict[str, LayerKind](), list[str](), 0
        for stack in self.stacks:
            layers: Any = self.model.get_submodule(stack)
            is_encoder = self.encoded and "encoder" in stack
            if is_encoder:
                encoder = len(layers)
            own = [None] * len(layers) if is_encoder else kept
            for place, layer in enumerate(layers):
                for kind in self._kinds(f"{stack}.{place}", layer, own[place]):
                    order.append(named(kind, kinds))
        head, embedding, counted = self._ends()
        layers_parameters = sum(kinds[each].parameters for each in order)
        routed = sum(site.experts * shape.parameters for site, shape in zip(self.sites, shapes, strict=True))
        total = sum(each.numel() for each in self.model.parameters())
        return ModelProfile(
            name=name,
            hub_ids=(),
            experts=experts,
            top_k=self._top_k(),
            hidden_size=self.hidden,
            expert_intermediate_size=largest.inner,
            expert_bytes_per_parameter=expert_bytes,
            vocabulary=self.config.vocab_size,
            dense_bytes_per_parameter=dense_bytes,
            layers=tuple(f"{len(list(run))} {kind}" for kind, run in groupby(order)),
            kinds=kinds,
            encoder_layers=encoder,
            expert_hidden_size=0 if largest.width == self.hidden else largest.width,
            expert_matrices=largest.matrices,
            expert_biases=largest.biases,
            layer_expert_bytes=tuple(sizes) if len(set(sizes)) > 1 else (),
            embedding_parameters=embedding,
            head_parameters=head,
            head_bytes_per_parameter=0 if head_bytes == dense_bytes else head_bytes,
            precision=precision.name,
            unused_parameters=max(0, total - layers_parameters - routed - counted),
            kv_bytes_per_value=4.0 if precision.own == 32 else 2.0,
            **self._attention(),
        )

    def _kinds(self, name: str, layer: nn.Module, kept: Kept | None) -> Iterator[LayerKind]:
        """Yield the kind of a layer; where it has two sets of experts, of the second one a layer of its own.

        kept: what it keeps in the cache; None for an encoder's.
        """
        sites = [site for site in self.sites if site.name.startswith(f"{name}.")]
        parameters = mlp = shared = 0
        blocks = [site.owner for site in sites if site.owner is not layer]
        in_blocks = {id(each) for block in blocks for each in block.parameters()}
        routers = {id(each) for site in sites if site.router is not None for each in site.router.parameters()}
        for path, each in layer.named_parameters():
            if id(each) in self.routed or "vision" in path:
                continue
            parameters += each.numel()
            if "shared" in path or id(each) in in_blocks - routers:
                shared += each.numel()
            elif id(each) not in routers and MLP & set(path.split(".")):
                mlp += each.numel()
        mixes = kept is None or any(kept)
        yield LayerKind(parameters, bool(sites), mlp, shared if sites else 0, mixes=mixes, **(kept or Kept())._asdict())
        for _ in sites[1:]:
            yield LayerKind(0, True, mixes=False)

    def _dense_bytes(self, precision: Precision) -> tuple[float, float]:
        """Return the bytes a parameter of layers, routed experts aside, and of the head."""
        routers = {id(each) for site in self.sites if site.router is not None for each in site.router.parameters()}
        bits = total = 0.0
        for stack in self.stacks:
            for name, each in self.model.get_submodule(stack).named_parameters(prefix=stack):
                if id(each) not in self.routed and "vision" not in name:
                    plain = each.dim() < 2 or id(each) in routers
                    bits += each.numel() * (precision.own if plain else precision.bits(name.rpartition(".")[0]))
                    total += each.numel()
        return bits / total / 8, precision.bits("lm_head") / 8

    def _ends(self) -> tuple[int, int, int]:
        """Return the parameters of the head, of embeddings beside it, and of both together as the model has them."""
        bases = {stack.rpartition(".")[0] for stack in self.stacks}
        inside = {id(each) for stack in self.stacks for each in self.model.get_submodule(stack).parameters()}
        own = {id(each): each for base in bases for each in self.model.get_submodule(base).parameters()}
        tables = {
            id(module.weight): module.weight for module in self.model.modules() if isinstance(module, nn.Embedding)
        }
        output = self.model.get_output_embeddings()
        head = {id(each): each for each in output.parameters()} if output is not None else {}
        embedding = {key: each for key, each in own.items() if key in tables and key not in head}
        embedding |= {key: each for key, each in tables.items() if each is self.model.get_input_embeddings().weight}
        embedding = {key: each for key, each in embedding.items() if key not in head and key not in inside}
        ends = {key: each for key, each in own.items() if key not in inside and key not in tables} | head
        counted = sum(each.numel() for each in (embedding | ends).values())
        rows = sum(each.numel() for each in ends.values())
        if output is None:
            rows += self.config.vocab_size * self.hidden
        return rows, sum(each.numel() for each in embedding.values()), counted

    def _top_k(self) -> int:
        """Return how many experts a token goes to, as experts are called, else as a router or the config says."""
        if self.chosen:
            return max(self.chosen)
        places = [place for site in self.sites for place in (site.router, site.module, site.owner) if place is not None]
        named = [getattr(place, key, None) for place in [*places, self.config] for key in TOP_K]
        return next((int(each) for each in named if isinstance(each, int)), 1)

    def _attention(self) -> dict[str, int]:
        """Return the heads, as the config states them."""
        heads = self._stated("num_attention_heads") or self._stated("num_heads")
        if latent := self._stated("kv_lora_rank"):
            return {
                "heads": heads,
                "head_size": self._stated("v_head_dim"),
                "kv_latent_size": latent,
                "rope_head_size": self._stated("qk_rope_head_dim"),
                "query_latent_size": self._stated("q_lora_rank"),
            }
        grouped = self._stated("num_key_value_heads")
        return {
            "heads": heads,
            "head_size": self._stated("head_dim") or self.hidden // heads,
            "kv_heads": 0 if grouped == heads else grouped,
        }

    def _stated(self, key: str) -> int:
        """Return a number of the config; 0 where it states none. Where layers differ, that of the config itself."""
        value = vars(self.config).get(self.config.attribute_map.get(key, key))
        return value if isinstance(value, int) else 0

    def _kept(self) -> list[Kept]:
        """Return what each layer of the decoder keeps, by the caches of two passes of different length."""
        try:
            short, long = self._caches(SHORT), self._caches(LONG)
        except Exception as error:  # of the model's own code, on a device without data
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise InputError(f"the cache of {type(self.model).__name__} cannot be measured: {reason}") from error
        return [_grown(short[i], long[i]) for i in self.alike]

    def _caches(self, tokens: int) -> list[list[tuple[int, Tensor]]]:
        """Return the tensors that each layer keeps of a prompt, each with the window of its tokens, 0 for none."""
        ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
        same: set[int] = set()  # layers whose keys are their values
        update = Cache.update

        def noted(cache: Any, keys: Tensor, values: Tensor, layer: int, *rest: Any, **more: Any) -> Any:
            if keys is values:
                same.add(layer)
            return update(cache, keys, values, layer, *rest, **more)

        with ExitStack() as stack, torch.no_grad(), torch.device("meta"):
            stack.enter_context(patch.object(Cache, "update", noted))
            stack.enter_context(patch.object(Cache, "get_seq_length", lambda *_, **__: 0))
            stack.enter_context(patch.object(Cache, "get_mask_sizes", lambda _, queries, *__, **___: (queries, 0)))
            for site in self.sites:
                stack.enter_context(patch.object(site.module, "forward", self._routed))
            self._run_one_of_each(stack)
            encoded = (
                {"encoder_hidden_states": torch.zeros(1, tokens, self.hidden, dtype=torch.bfloat16)}
                if self.encoded
                else {}
            )
            decoder = self.model.get_submodule(self.stacks[-1].rpartition(".")[0])
            cache = decoder(input_ids=ids, use_cache=True, **encoded).past_key_values
        parts = [cache.self_attention_cache, cache.cross_attention_cache] if self.encoded else [cache]
        each = max(1, len(parts[0].layers) // len(self.alike))  # caches of a layer: LongCat's have two attentions
        return [
            [
                held
                for part in parts
                for j in range(i * each, i * each + each)
                for held in _held(part.layers[j : j + 1], j in same)
            ]
            for i in range(len(self.alike))
        ]

    def _run_one_of_each(self, stack: ExitStack) -> None:
        """Let layers that are alike return what the first of them did: without data, the results are the same."""
        outputs: dict[int, Any] = {}

        def first(place: int, forward: Any, *args: Any, **options: Any) -> Any:
            outputs[place] = forward(*args, **options)
            return outputs[place]

        for place, layer in enumerate(self.model.get_submodule(self.stacks[-1])):
            one = self.alike[place]
            forward = partial(first, place, layer.forward) if one == place else lambda *_, one=one, **__: outputs[one]
            stack.enter_context(patch.object(layer, "forward", forward))

    @cached_property
    def alike(self) -> list[int]:
        """Of each layer of the decoder, the first that has its shape and kind."""
        layers: Any = self.model.get_submodule(self.stacks[-1])
        of_layers = [each for each in vars(self.config).values() if isinstance(each, list) and len(each) == len(layers)]
        seen: dict[str, int] = {}
        return [
            seen.setdefault(repr((_described(layer), [each[i] for each in of_layers])), i)
            for i, layer in enumerate(layers)
        ]

    def _routed(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Stand in for a layer's experts, which need data to tell their tokens apart."""
        index = next((each for each in args if isinstance(each, Tensor) and not each.is_floating_point()), None)
        if index is not None and index.dim() == 2:
            self.chosen.add(index.shape[-1])
        return torch.empty_like(hidden)


def _described(layer: nn.Module) -> list[Any]:
    """Return all that tells a layer from others: modules, their plain settings but its number, shapes of weights."""
    shapes = [(name, tuple(each.shape)) for name, each in layer.named_parameters()]
    settings = [
        (name, type(module).__name__, key, value)
        for name, module in layer.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, int | float | str | None) and key not in ("layer_idx", "layer_number")
    ]
    return [shapes, settings]


def _held(layers: Sequence[Any], same: bool) -> Iterator[tuple[int, Tensor]]:
    """Yield what layers of a cache keep; same: keys are their values, and need not be kept twice."""
    for layer, name, value in ((each, *pair) for each in layers for pair in vars(each).items()):
        window = getattr(layer, "sliding_window", None) or 0
        for each in value.values() if isinstance(value, dict) else [value]:
            if isinstance(each, Tensor) and each.dim() and not (same and name == "values"):
                yield (window if name in ("keys", "values") and each.dim() > 2 else 0), each


def _grown(short: Sequence[tuple[int, Tensor]], long: Sequence[tuple[int, Tensor]]) -> Kept:
    """Return what a layer keeps, from its tensors after SHORT and after LONG tokens."""
    kv, windowed, state = 0.0, 0.0, 0
    for (window, before), (_, after) in zip(short, long, strict=True):
        grown = (after.numel() - before.numel()) / (LONG - SHORT)
        if window:
            windowed += after.numel() / after.shape[-2]
        elif grown:
            kv += grown
        else:
            state += after.nbytes
    return Kept(kv, max((window for window, _ in long), default=0), windowed, state)
