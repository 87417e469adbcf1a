"""The profile of a model from its config: counted on the model that transformers itself builds, without weights.

The model stands on torch's meta device, where tensors have a shape and no data. Its experts are those that
`traces.models.sites` finds; what a token leaves in the cache is what transformers' own cache grows by in a forward
pass.
"""

import inspect
import json
import logging
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import chain, takewhile
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING
from transformers.cache_utils import Cache
from transformers.models.auto import modeling_auto

from traces.errors import InputError
from traces.models.precision import Precision
from traces.models.profile import LayerKind, ModelProfile, described
from traces.models.sites import find_sites, k_of
from traces.models.weights import Weights

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

MTP = "num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "num_mtp_modules"
"""Keys for layers that predict further tokens."""

MLP = {"mlp", "feed_forward", "ffn", "ff", "block_sparse_moe", "DenseReluDense"}
"""Names of what all tokens take in a layer without experts."""


def counted(config: Mapping[str, Any], name: str, precision: Precision) -> ModelProfile:
    """Return the profile of a transformers config at a precision. Raises InputError where it cannot be counted."""
    config = _translated(config)
    silent = patch.object(logging.getLogger("transformers"), "handlers", [logging.NullHandler()])
    with warnings.catch_warnings(action="ignore"), silent:
        model, unread = _built(config)
        precision.notes += unread
        profile = _Counting(model, config.get(WIDTH, 0)).profile(name, precision)
    for key in ("moe_layer_freq", "is_moe_layer"):
        flags = config.get(key)
        if isinstance(flags, list) and (stated := sum(map(bool, flags))) != profile.moe_layers:
            version, built = transformers.__version__, profile.moe_layers
            raise InputError(f"{key} names {stated} layers with experts, transformers {version} builds {built}")
    ahead = (config.get(key) for key in MTP)
    return replace(profile, mtp_layers=next((count for count in ahead if isinstance(count, int)), 0))


def _translated(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config as transformers reads it, where authors use other words. Raise InputError for unknown models."""
    result: dict[str, Any] = json.loads(json.dumps(config), object_hook=_read)
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


def _read(table: dict[str, Any]) -> Any:
    """Return what transformers writes as {"__float__": "Infinity"}; other tables without the quantisation in them."""
    table.pop("quantization_config", None)
    return float(table["__float__"]) if set(table) == {"__float__"} else table


def _unread(config: Mapping[str, Any], model: Any, read: Any) -> Iterator[str]:
    """Yield a note of each key on which sizes may depend and that transformers' code does not read."""
    classes = {cls for each in (read, read.get_text_config(), *model.modules()) for cls in type(each).__mro__}
    modules = {cls.__module__ for cls in classes if re.match(r"transformers\.(models|config)", cls.__module__)}
    words = {word for module in modules for word in re.findall(r"\w+", inspect.getsource(import_module(module)))}
    inner = [value for key, value in config.items() if key.endswith(("text_config", "llm_config", "thinker_config"))]
    stated = [pair for table in (config, *inner) if isinstance(table, Mapping) for pair in table.items()]
    for key, value in stated:
        sizes = value if isinstance(value, list) else [value]
        if key in {*words, *FLAGS, WIDTH} or not SHAPE.search(key) or HARMLESS.search(key):
            continue
        if not all(isinstance(each, int) for each in sizes) or set(sizes) in ({0}, {1}, set()):
            continue
        elsewhere = [other for name, other in stated if name in words and _words(key) & _words(name)]
        if len(set(sizes)) > 1 or sizes[0] not in elsewhere:
            yield f"{key}: transformers {transformers.__version__} reads no such key of a {config['model_type']}"


def _words(key: str) -> set[str]:
    """Return the words of a key that say what it is of; a number of things is another key than the size of one."""
    words = set(key.replace("experts", "moe").replace("expert", "moe").split("_")) - {"size", "num"}
    return {f"num {word}" for word in words} if key.startswith(("num_", "n_")) else words


def _built(config: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Return the model on the meta device, and notes on its config. Raise InputError where transformers builds none."""
    kind, version = config["model_type"], transformers.__version__
    try:
        read = CONFIG_MAPPING[kind].from_dict(dict(config))
        text = read.get_text_config()
        _make_buildable(text)
    except Exception as error:  # of code that reads a foreign config
        raise InputError(f"transformers {version} reads no {kind} of it: {error}") from error
    failed: Exception | None = None
    for cls, of in _classes(config, read, text):
        try:
            with torch.device("meta"):
                model = cls._from_config(of, dtype=torch.bfloat16).eval()
        except Exception as error:  # of the model's own code
            failed = failed or error
        else:
            return model, list(_unread(config, model, read))
    raise InputError(f"transformers {version} builds no {kind} of it: {failed}") from failed


def _classes(config: Mapping[str, Any], read: Any, text: Any) -> Iterator[tuple[Any, Any]]:
    """Yield classes of models, each with its config: those that the config names or that fit it, then of its text."""
    named = [getattr(transformers, each, None) for each in config.get("architectures") or ()]
    mapped = [(cls, of) for of in (read, text) for mapping in CLASSES if (cls := mapping.get(type(of), None))]
    pairs = [(cls[0] if isinstance(cls, tuple) else cls, of) for cls, of in mapped]
    yield from ((cls, read) for cls in named if cls and isinstance(read, cls.config_class))
    yield from (pair for pair in pairs if isinstance(pair[1], pair[0].config_class))
    yield from pairs
    yield from ((cls, text) for cls in _text_models(text))


def _make_buildable(config: Any) -> None:
    """Change what keeps a model from being built or run, and no size."""
    if (config.pad_token_id or 0) >= config.vocab_size:
        config.pad_token_id = None
    if (heads := vars(config).get("num_attention_heads")) and vars(config).get("kv_lora_rank"):
        config.num_key_value_heads = heads  # all share one latent
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict) and rope.get("rope_type") in ("longrope", "dynamic"):
        rope["rope_type"] = "default"  # those look at the numbers of tokens
    groups = getattr(config, "n_group", None) or 1
    if (getattr(config, "n_routed_experts", None) or groups) % groups:
        config.n_group = config.topk_group = 1
    kinds = getattr(config, "layer_types", None)
    if kinds and "sliding_attention" not in kinds and getattr(config, "sliding_window", 1) is None:
        config.sliding_window = LONG  # of a mask that no layer takes


def _text_models(config: Any) -> Iterator[Any]:
    """Yield the class of a text model that no mapping of transformers names: the last one of its module."""
    module = import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    of_config = [cls for cls in vars(module).values() if getattr(cls, "config_class", None) is type(config)]
    yield next(cls for cls in reversed(of_config) if not cls.__name__.endswith("PreTrainedModel"))


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
        weight: Counter[str] = Counter()
        for site in sites:
            weight[_stack(site.name)] += _elements(site.weights)
        self.stacks = list(weight) if self.encoded else [max(weight, key=lambda stack: weight[stack])]
        self.sites = [site for site in sites if _stack(site.name) in self.stacks]
        self.routed = {each for site in self.sites for each in site.weights}
        self.routers = {each for site in self.sites if site.router is not None for each in site.router.parameters()}
        self.decoder: Any = model.get_submodule(self.stacks[-1])
        self.hidden: int = getattr(self.config, "hidden_size", 0) or self.config.d_model
        self.notes: list[str] = []  # what is not known of it
        self.chosen: set[int] = set()  # experts a token, as experts are called

    def profile(self, name: str, precision: Precision) -> ModelProfile:
        shapes = [site.shape(self.hidden) for site in self.sites]
        if self.width:
            shapes = [shape._replace(width=self.width) for shape in shapes]
        weights = Weights(self.model, self.sites, self.routers)
        widths = [weights.width(matrices(site.weights), precision) for site in self.sites]
        sizes = [round(shape.parameters * width) for shape, width in zip(shapes, widths, strict=True)]
        largest, expert_bytes = max(zip(shapes, widths, strict=True), key=lambda each: each[0].parameters * each[1])
        experts = max(site.experts for site in self.sites)
        if (top_k := self._top_k()) > experts:
            raise InputError(f"top_k {top_k} is above {experts} experts")
        kept, order, encoder = self._kept(), list[LayerKind](), 0
        for stack in self.stacks:
            layers: Any = self.model.get_submodule(stack)
            is_encoder = self.encoded and "encoder" in stack
            encoder = len(layers) if is_encoder else encoder
            for place, layer in enumerate(layers):
                order += self._kinds(f"{stack}.{place}", layer, LayerKind(0) if is_encoder else kept[place])
        ends, embedding, has_head = self._ends()
        routed = sum(site.experts * shape.parameters for site, shape in zip(self.sites, shapes, strict=True))
        read = sum(kind.parameters for kind in order) + routed + _elements(ends) + _elements(embedding)
        inside = [each for _, each in chain.from_iterable(map(self._beside, self.stacks))]
        dense, embedded = weights.width(inside, precision), weights.width(embedding, precision)
        head = weights.width(matrices(ends), precision) or precision.own / 8
        return ModelProfile(
            name=name,
            hub_ids=(),
            experts=experts,
            top_k=top_k,
            hidden_size=self.hidden,
            expert_bytes_per_parameter=expert_bytes,
            vocabulary=self.config.vocab_size,
            dense_bytes_per_parameter=dense,
            encoder_layers=encoder,
            layer_expert_bytes=tuple(sizes) if len(set(sizes)) > 1 else (),
            embedding_parameters=_elements(embedding),
            head_parameters=_elements(ends) + (0 if has_head else self.config.vocab_size * self.hidden),
            head_bytes_per_parameter=0 if head == dense else head,
            embedding_bytes_per_parameter=0 if embedded in (0, head) else embedded,
            precision=precision.name,
            notes=(*self.notes, *precision.notes, *precision.unmatched(weights.names)),
            unused_parameters=max(0, _elements(self.model.parameters()) - read),
            kv_bytes_per_value=4.0 if precision.own == 32 else 2.0,
            **largest.fields(self.hidden),
            **described(order),
            **self._attention(),
        )

    def _kinds(self, name: str, layer: nn.Module, kept: LayerKind) -> Iterator[LayerKind]:
        """Yield the kind of a layer, and of a second set of experts that of a layer of its own. kept: in the cache."""
        sites = [site for site in self.sites if site.name.startswith(f"{name}.")]
        parameters = mlp = shared = 0
        in_blocks = {each for site in sites if site.owner is not layer for each in site.owner.parameters()}
        for path, each in self._beside(name):
            parameters += each.numel()
            if "shared" in path or each in in_blocks - self.routers:
                shared += each.numel()
            elif each not in self.routers and MLP & set(path.split(".")):
                mlp += each.numel()
        shared = shared if sites else 0
        yield replace(kept, parameters=parameters, routed=bool(sites), mlp=mlp, shared=shared)
        for _ in sites[1:]:
            yield LayerKind(0, True, mixes=False)

    def _beside(self, name: str) -> list[tuple[str, Tensor]]:
        """Return the parameters of a module, with their names, without routed experts and what reads images."""
        named = self.model.get_submodule(name).named_parameters(prefix=name)
        return [(path, each) for path, each in named if each not in self.routed and "vision" not in path]

    def _ends(self) -> tuple[set[Tensor], set[Tensor], bool]:
        """Return the parameters around the layers, those of embeddings beside the head, and whether there is a head."""
        bases = {stack.rpartition(".")[0] for stack in self.stacks}
        inside, own = (
            {each for name in names for each in self.model.get_submodule(name).parameters()}
            for names in (self.stacks, bases)
        )
        tables = {module.weight for module in self.model.modules() if isinstance(module, nn.Embedding)}
        output = self.model.get_output_embeddings()
        head = set() if output is None else set(output.parameters())
        embedding = tables & (own | {self.model.get_input_embeddings().weight})
        return own - inside - tables | head, embedding - head - inside, output is not None

    def _top_k(self) -> int:
        """Return how many experts a token goes to, as experts are called, else as a router or the config says."""
        places = (place for site in self.sites for place in (site.router, site.module, site.owner))
        return max(self.chosen, default=0) or k_of(*places, self.config) or 1

    def _attention(self) -> dict[str, Any]:
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
        grouped, size = self._stated("num_key_value_heads"), self._stated("head_dim") or self.hidden // heads
        return {"heads": heads, "head_size": size, "kv_heads": 0 if grouped == heads else grouped}

    def _stated(self, key: str) -> int:
        """Return a number of the config; 0 where it states none. Where layers differ, that of the config itself."""
        value = vars(self.config).get(self.config.attribute_map.get(key, key))
        return value if isinstance(value, int) else 0

    def _kept(self) -> list[LayerKind]:
        """Return what each layer of the decoder keeps, by the caches of two passes of different length.

        Without data, layers that are alike do the same: the first runs, and the others return what it did.
        """
        alike, outputs = self._alike(), dict[int, Any]()

        def run(place: int, forward: Any, *args: Any, **options: Any) -> Any:
            if alike[place] == place:
                outputs[place] = forward(*args, **options)
            return outputs[alike[place]]

        for place, layer in enumerate(self.decoder):
            layer.forward = partial(run, place, layer.forward)
        for site in (site for site in self.sites if site.owner is not site.module):
            experts: Any = site.module
            experts.forward = self._routed
        try:
            short, long = self._caches(SHORT), self._caches(LONG)
        except InputError:
            raise
        except Exception:  # of the model's own code, on a device without data
            try:
                with self._filled({*alike}), patch.object(nn.functional, "linear", _no_product):
                    short, long = self._caches(SHORT, "cpu"), self._caches(LONG, "cpu")
            except Exception as error:
                return self._unknown((str(error).splitlines() or [type(error).__name__])[0])
        return [_grown(short[i], long[i]) for i in alike]

    def _unknown(self, reason: str) -> list[LayerKind]:
        """Return layers that keep what the config's heads say, with a note."""
        heads: dict[str, int] = self._attention()
        kv = heads.get("kv_latent_size", 0) + heads.get("rope_head_size", 0)
        kv = kv or 2 * (heads["kv_heads"] or heads["heads"]) * heads["head_size"]
        self.notes.append(
            f"the cache of {type(self.model).__name__} cannot be measured ({reason}): {kv} numbers a token and layer "
            "are assumed, as its config states heads"
        )
        return [LayerKind(0, kv=kv)] * len(self.decoder)

    @contextmanager
    def _filled(self, layers: set[int]) -> Iterator[None]:
        """Give zeros to what a pass reads, of these layers, and of routed experts only where they are not left out."""
        base = self.stacks[-1].rpartition(".")[0]
        idle = [f"{self.stacks[-1]}.{place}." for place in range(len(self.decoder)) if place not in layers]
        idle += [f"{site.name}." for site in self.sites if site.owner is not site.module]
        inside = ((f"{name}.", module) for name, module in self.model.named_modules() if name.startswith(base))
        modules = [module for name, module in inside if not any(map(name.startswith, idle))]
        before = [(dict(module._parameters), dict(module._buffers)) for module in modules]
        for module in modules:
            module._apply(_zeros, recurse=False)
        try:
            yield
        finally:
            for module, (parameters, buffers) in zip(modules, before, strict=True):
                module._parameters.update(parameters)
                module._buffers.update(buffers)

    def _alike(self) -> list[int]:
        """Return of each layer of the decoder the first that has its modules, shapes and settings, but its number."""
        count, seen, alike = len(self.decoder), dict[str, int](), list[int]()
        of_layers = [each for each in vars(self.config).values() if isinstance(each, list) and len(each) == count]
        for place, layer in enumerate(self.decoder):
            shapes = [(name, tuple(each.shape)) for name, each in layer.named_parameters()]
            settings = [
                (name, type(module).__name__, key, value)
                for name, module in layer.named_modules()
                for key, value in vars(module).items()
                if isinstance(value, int | float | str | None) and key not in ("layer_idx", "layer_number")
            ]
            alike.append(seen.setdefault(repr((shapes, settings, [each[place] for each in of_layers])), place))
        return alike

    def _caches(self, tokens: int, device: str = "meta") -> list[list[tuple[int, Tensor]]]:
        """Return the tensors that each layer keeps of a prompt, each with the window of its tokens, 0 for none."""
        same: set[int] = set()  # layers whose keys are their values
        update = Cache.update

        def noted(cache: Any, keys: Tensor, values: Tensor, layer: int, *rest: Any, **more: Any) -> Any:
            if keys is values:
                same.add(layer)
            return update(cache, keys, values, layer, *rest, **more)

        empty: dict[str, Any] = {
            "get_seq_length": lambda *_, **__: 0,
            "get_mask_sizes": lambda _, queries, *__, **___: (queries, 0),
        }
        with patch.multiple(Cache, update=noted, **empty), torch.no_grad(), torch.device(device):
            inputs = {"input_ids": torch.zeros(1, tokens, dtype=torch.int64)}
            if self.encoded:
                inputs["encoder_hidden_states"] = torch.zeros(1, tokens, self.hidden, dtype=torch.bfloat16)
            base = self.model.get_submodule(self.stacks[-1].rpartition(".")[0])
            cache = getattr(base(use_cache=True, **inputs), "past_key_values", None)
        if cache is None:
            raise InputError(f"{type(self.model).__name__} keeps no cache: it does not answer")
        parts = [cache.self_attention_cache, cache.cross_attention_cache] if self.encoded else [cache]
        each = max(1, len(parts[0].layers) // len(self.decoder))  # caches of a layer: LongCat's have two attentions
        kept: list[list[tuple[int, Tensor]]] = [[] for _ in self.decoder]
        for part in parts:
            for place, layer in enumerate(part.layers[: each * len(kept)]):
                kept[place // each] += _held(layer, place in same)
        return kept

    def _routed(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Stand in for a layer's experts, which cannot sort tokens without data."""
        index = next((each for each in args if isinstance(each, Tensor) and not each.is_floating_point()), None)
        if index is not None and index.dim() == 2:
            self.chosen.add(index.shape[-1])
        return torch.empty_like(hidden)


def _elements(tensors: Iterable[Tensor]) -> int:
    return sum(each.numel() for each in tensors)


def matrices(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return those that are no vectors, or vectors of all experts, where there are such."""
    every = list(tensors)
    most = max((each.dim() for each in every), default=0)
    return [each for each in every if each.dim() == most]


def _zeros(tensor: Tensor) -> Tensor:
    """Return zeros of the same type and shape, which take memory only where they are written."""
    return torch.from_numpy(np.zeros(tensor.nbytes, np.uint8)).view(tensor.dtype).view(tensor.shape)


def _no_product(values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Stand in for a matrix multiplication, whose values do not matter."""
    return values.new_zeros(*values.shape[:-1], weight.shape[0])


def _held(layer: Any, same: bool) -> Iterator[tuple[int, Tensor]]:
    """Yield what a layer's cache keeps; same: its keys are its values, and need not be kept twice."""
    window = getattr(layer, "sliding_window", None) or 0
    for name, value in vars(layer).items():
        for each in value.values() if isinstance(value, dict) else [value]:
            if isinstance(each, Tensor) and each.dim() and not (same and name == "values"):
                yield (window if name in ("keys", "values") and each.dim() > 2 else 0), each


def _grown(short: Sequence[tuple[int, Tensor]], long: Sequence[tuple[int, Tensor]]) -> LayerKind:
    """Return what a layer keeps, from its tensors after SHORT and after LONG tokens."""
    kv = windowed = 0.0
    state = 0
    for (window, before), (_, after) in zip(short, long, strict=True):
        grown = (after.numel() - before.numel()) / (LONG - SHORT)
        if window:
            windowed += after.numel() / after.shape[-2]
        elif grown:
            kv += grown
        else:
            state += after.nbytes
    window = max((window for window, _ in long), default=0)
    return LayerKind(0, kv=kv, window=window, windowed=windowed, mixes=any((kv, window, windowed, state)), state=state)
