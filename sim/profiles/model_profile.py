"""The shape of a model, as one TOML profile: what time and bytes follow from.

A trace's model name chooses it; sizes that the trace itself states make one up where no profile is known.
Figures of all shipped models: the configurations that their authors published.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from sim import profiles
from sim.profiles import Count, NotNegative, Positive, Size, transformers_config
from traces.errors import InputError, located, refuse
from traces.files import expanded
from traces.schema import TraceMeta
from traces.typed import typed

MOST_LAYERS = 100_000
"""No model has so many; each is looked at."""

WEIGHTS = (".gguf", ".safetensors")
"""Files that state sizes of experts (`sim.profiles.expert_sizes`), and not all that a profile needs."""


@dataclass(frozen=True)
class ModelProfile:
    """An MoE transformer: an encoder's MoE layers, if any, before its decoder's."""

    name: str
    hub_ids: tuple[str, ...]
    moe_layers: Annotated[int, Meta(ge=1, le=MOST_LAYERS)]
    experts: Count
    top_k: Count
    hidden_size: Count
    expert_intermediate_size: Count
    expert_bytes_per_parameter: Positive
    heads: Count
    head_size: Count
    vocabulary: Count
    dense_bytes_per_parameter: Positive
    expert_matrices: Count = 3  # gate, up and down; 2 without a gate
    encoder_moe_layers: Size = 0
    kv_heads: Size = 0  # 0: as many as heads
    kv_latent_size: Size = 0  # MLA; 0: keys and values by head
    rope_head_size: Size = 0  # MLA: beside head_size
    query_latent_size: Size = 0  # MLA whose queries pass a latent too; 0: they do not
    sliding_window: Size = 0  # of the layers that `window_of` names; 0: none
    full_attention_every: Count = 2  # MoE layers, of each so many the last; the others have the window
    shared_intermediate_size: Size = 0  # of all shared experts
    dense_intermediate_size: Size = 0  # of a layer without experts
    dense_matrices: Count = 3
    leading_dense_layers: Size = 0
    dense_layers_before_each: Size = 0  # each MoE layer
    dense_sliding_window: Size = 0  # of those before each MoE layer; 0: none
    trailing_dense_layers: Size = 0
    layer_expert_bytes: tuple[Count, ...] = ()  # of an expert of each MoE layer; empty: all as the shape says
    kv_bytes_per_value: NotNegative = 0  # 0: as the dense weights
    stated_dense_bytes: Size = 0  # of what a token reads beside routed experts and head; 0: as the shape says
    stated_head_bytes: Size = 0  # of the vocabulary matmul; 0: as the shape says

    @property
    def expert_parameters(self) -> int:
        return self.expert_matrices * self.hidden_size * self.expert_intermediate_size

    @property
    def expert_bytes(self) -> int:
        """Bytes of one routed expert, as it crosses the link; of the largest, where layers differ."""
        if self.layer_expert_bytes:
            return max(self.layer_expert_bytes)
        return round(self.expert_parameters * self.expert_bytes_per_parameter)

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
    def decode_layers(self) -> int:
        return self.moe_layers - self.encoder_moe_layers

    @property
    def token_bytes(self) -> int:
        """Bytes of the routed experts that one decoded token needs."""
        return self.top_k * sum(map(self.bytes_of, range(self.encoder_moe_layers, self.moe_layers)))

    @property
    def attention_parameters(self) -> int:
        query = self.hidden_size * self.heads * (self.head_size + self.rope_head_size)
        if self.query_latent_size:
            query = self.query_latent_size * (self.hidden_size + query // self.hidden_size)
        output = self.heads * self.head_size * self.hidden_size
        if self.kv_latent_size:
            down = self.hidden_size * (self.kv_latent_size + self.rope_head_size)
            up = self.kv_latent_size * self.heads * 2 * self.head_size
            return query + down + up + output
        return query + self.hidden_size * (self.kv_heads or self.heads) * 2 * self.head_size + output

    @property
    def kv_bytes(self) -> float:
        """Bytes that one token leaves in the KV cache of one layer."""
        latent = self.kv_latent_size + self.rope_head_size
        by_head = 2 * (self.kv_heads or self.heads) * self.head_size
        width = self.kv_bytes_per_value or self.dense_bytes_per_parameter
        return (latent if self.kv_latent_size else by_head) * width

    def window_of(self, layer: int) -> int:
        """Return the tokens that a token attends to in MoE layer `layer`, itself included; 0: all.

        Linear attention is a window of as many tokens as its state has bytes of keys and values.
        """
        return self.sliding_window if (layer + 1) % self.full_attention_every else 0

    @property
    def layers_without_experts(self) -> int:
        """Layers before, between and behind the MoE layers."""
        return self.leading_dense_layers + self.moe_layers * self.dense_layers_before_each + self.trailing_dense_layers

    def runs(self, layer: int, tokens: int, context: int) -> bool:
        """Return whether a step runs MoE layer `layer`: an encoder's run where all of the context is the step's."""
        return layer >= self.encoder_moe_layers or context <= tokens

    def windows_up_to(self, layer: int) -> list[int]:
        """Return the window, 0 for none, of each layer from behind the MoE layer before `layer` up to this."""
        leading = 0 if layer else self.leading_dense_layers
        return [0] * leading + [self.dense_sliding_window] * self.dense_layers_before_each + [self.window_of(layer)]

    def kv_cache_bytes(self, context: int) -> float:
        """Return the bytes of the KV cache of all layers; layers with a sliding window keep no more than that."""
        windows = [window for layer in range(self.moe_layers) for window in self.windows_up_to(layer)]
        kept = sum(min(context, window or context) for window in windows) + self.trailing_dense_layers * context
        return kept * self.kv_bytes

    @property
    def head_bytes(self) -> float:
        return self.stated_head_bytes or self.vocabulary * self.hidden_size * self.dense_bytes_per_parameter

    @property
    def dense_scale(self) -> float:
        """Stated bytes of the dense weights of all layers, over those that the shape gives."""
        shape = self._layers_parameters * self.dense_bytes_per_parameter
        return self.stated_dense_bytes / shape if self.stated_dense_bytes else 1.0

    @property
    def dense_layer_parameters(self) -> int:
        return self.dense_matrices * self.hidden_size * self.dense_intermediate_size

    @property
    def moe_layer_parameters(self) -> int:
        """Parameters of an MoE layer's router and shared experts."""
        return self.hidden_size * (self.experts + self.expert_matrices * self.shared_intermediate_size)

    @property
    def dense_bytes(self) -> float:
        """Bytes of everything but the routed experts: layers, embedding and vocabulary matmul."""
        layers = self._layers_parameters * self.dense_bytes_per_parameter * self.dense_scale
        return layers + 2 * self.head_bytes

    @property
    def _layers_parameters(self) -> int:
        """Parameters of all layers, without routed experts."""
        without = self.layers_without_experts
        parameters = self.moe_layers * self.moe_layer_parameters + without * self.dense_layer_parameters
        return parameters + (self.moe_layers + without) * self.attention_parameters

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, embedding and vocabulary matmul included."""
        experts = self.moe_layers * self.experts * self.expert_parameters
        return experts + self._layers_parameters + 2 * self.vocabulary * self.hidden_size

    def at(self, experts: float | None = None, dense: float | None = None) -> "ModelProfile":
        """Return the same model with so many bytes a parameter of experts and of all else; None: as they are."""
        quantised = dense is not None and dense < self.dense_bytes_per_parameter
        return replace(
            self,
            expert_bytes_per_parameter=experts or self.expert_bytes_per_parameter,
            layer_expert_bytes=() if experts else self.layer_expert_bytes,
            dense_bytes_per_parameter=dense or self.dense_bytes_per_parameter,
            kv_bytes_per_value=self.kv_bytes_per_value or (self.dense_bytes_per_parameter if quantised else 0),
        )


def model(text: str) -> ModelProfile:
    """Return the shipped profile of that name, or that of a TOML file or a transformers config at that path.

    Raise InputError where it cannot be used.
    """
    path = expanded(text)
    if text not in profiles.names("models") and path.exists() and transformers_config.is_config(path):
        return _possible(typed(ModelProfile, transformers_config.read(path), str(path)), path)
    path = profiles.find("models", "model", text)
    if path.suffix in WEIGHTS:
        raise InputError(
            f"{path} holds weights: name its transformers config (config.json or the folder that holds it), a "
            "profile in TOML, or a shipped model (moe-sim models lists them)"
        )
    return _possible(profiles.read(ModelProfile, path), path)


def _possible(model: ModelProfile, path: Path) -> ModelProfile:
    """Return a model that was read from a file. Raise InputError where its sizes do not go together."""
    sizes = len(model.layer_expert_bytes)
    with located(str(path)):
        refuse(
            (model.top_k > model.experts, f"top_k {model.top_k} is above {model.experts} experts"),
            (sizes not in (0, model.moe_layers), f"layer_expert_bytes has {sizes} sizes, not {model.moe_layers}"),
            (
                model.encoder_moe_layers >= model.moe_layers,
                "encoder_moe_layers leaves no MoE layer to the decoder",
            ),
        )
    return model


def known(name: str) -> ModelProfile | None:
    """Return the shipped profile of a model as a trace names it: organisation, case and variant do not matter."""
    wanted = _family(name)
    for shipped in map(model, profiles.names("models")):
        if wanted in {_family(shipped.name), *map(_family, shipped.hub_ids)}:
            return shipped
    return None


def of_trace(meta: TraceMeta, text: str | None = None) -> ModelProfile:
    """Return the profile that `text` names, else the trace, else a derived one. Raise InputError if they differ."""
    profile = model(text) if text else known(meta.model) or derived(meta)
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
    return profile


def derived(meta: TraceMeta) -> ModelProfile:
    """Return a profile from what the trace states; assumed are heads of 64, each with its keys and values."""
    if not (meta.hidden_size and meta.expert_intermediate_size and meta.expert_bytes):
        raise InputError(
            f"no model profile is known for {meta.model!r} and its trace states no sizes; choose one with "
            f"`model_profile`, a name or FILE.toml (shipped: {', '.join(profiles.names('models'))})"
        )
    parameters = 3 * meta.hidden_size * meta.expert_intermediate_size
    head_size = min(64, meta.hidden_size)
    return ModelProfile(
        name=meta.model,
        hub_ids=(),
        moe_layers=meta.layers,
        experts=meta.experts,
        top_k=meta.top_k,
        hidden_size=meta.hidden_size,
        expert_intermediate_size=meta.expert_intermediate_size,
        expert_bytes_per_parameter=meta.expert_bytes / parameters,
        heads=meta.hidden_size // head_size,
        head_size=head_size,
        vocabulary=32_000,
        dense_bytes_per_parameter=4.0 if meta.dtype and meta.dtype.endswith("32") else 2.0,
    )


def _family(name: str) -> str:
    """Return `deepseek-v2-lite` for `deepseek-ai/DeepSeek-V2-Lite-Chat`; versions and dates go too."""
    base = name.rstrip("/").rsplit("/", 1)[-1].lower()
    return re.sub(r"(-(chat|instruct|base|it|v\d+(\.\d+)?|\d{4}))+$", "", base)
