"""Every family's weights against the transformers model that saved them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from replay.model.dense import GroupedQueryAttention, LatentAttention, Source
from replay.model.network import Network, expert_output
from replay.model.weights import Checkpoint
from tests.support.profiles import plain
from traces import InputError
from traces.models.profile import ModelProfile

CPU = torch.device("cpu")
H, I, E, K, LAYERS, VOCABULARY = 32, 24, 4, 2, 3, 64  # noqa: E741  the field's name

TINY: dict[str, Any] = {
    "experts": E,
    "hidden_size": H,
    "expert_intermediate_size": I,
    "head_size": 8,
    "vocabulary": VOCABULARY,
}
BASE = plain("tiny", f"{LAYERS} moe", **TINY)
COMMON = {
    "hidden_size": H,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "num_experts_per_tok": K,
    "tie_word_embeddings": False,
}
GROUPS = {"num_key_value_heads": 2}
QWEN = {"num_experts": E, "moe_intermediate_size": I, "intermediate_size": 40, **GROUPS}


@dataclass(frozen=True)
class Family:
    """A transformers model, tiny, and what the profile says of it."""

    name: str
    config: dict[str, Any]
    profile: dict[str, Any]
    loaded: float  # of the dense parameters, at least

    def model(self) -> Any:
        torch.manual_seed(1)
        made = getattr(transformers, self.name)._from_config(
            getattr(transformers, self.name).config_class(**self.config), attn_implementation="eager"
        )
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                parameter.normal_(std=0.3)
                if name.endswith(("bias", "sinks")):
                    parameter.zero_()
        return made.eval()


FAMILIES = [
    Family(
        "MixtralForCausalLM", COMMON | GROUPS | {"intermediate_size": I, "num_local_experts": E}, {"kv_heads": 2}, 1
    ),
    Family(
        "Qwen2MoeForCausalLM",
        COMMON | QWEN | {"shared_expert_intermediate_size": 20},
        {"kv_heads": 2, "shared": 20},
        1,
    ),
    Family("Qwen3MoeForCausalLM", COMMON | QWEN | {"head_dim": 16}, {"kv_heads": 2, "head_size": 16}, 1),
    Family("OlmoeForCausalLM", COMMON | {"intermediate_size": I, "num_experts": E}, {}, 1),
    Family(
        "DeepseekV2ForCausalLM",
        COMMON
        | {
            "num_hidden_layers": LAYERS + 1,
            "first_k_dense_replace": 1,
            "n_routed_experts": E,
            "n_shared_experts": 2,
            "moe_intermediate_size": I,
            "intermediate_size": 40,
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 12,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "qk_rope_head_dim": 4,
            "topk_method": "greedy",
            "n_group": None,
            "topk_group": None,
        },
        {
            "kv_latent_size": 12,
            "rope_head_size": 4,
            "layers": ("1 dense", f"{LAYERS} moe"),
            "shared": 2 * I,
            "mlp": 40,
        },
        1,
    ),
    Family(
        "GptOssForCausalLM",
        COMMON
        | GROUPS
        | {"intermediate_size": I, "num_local_experts": E, "head_dim": 8, "sliding_window": 5}
        | {"swiglu_alpha": 1.0, "swiglu_limit": float("inf")},
        {"kv_heads": 2, "layers": ("1 moe-window", "1 moe", "1 moe-window"), "window": 5},
        1,
    ),
    Family(
        "SwitchTransformersForConditionalGeneration",
        {"d_model": H, "d_ff": I, "d_kv": 8, "num_heads": 4, "num_experts": E, "vocab_size": VOCABULARY}
        | {"num_layers": 4, "num_sparse_encoder_layers": 2, "num_decoder_layers": 2, "num_sparse_decoder_layers": 1},
        {"expert_matrices": 2, "encoder_layers": 2, "top_k": 1},
        0,
    ),
    Family(
        "NllbMoeForConditionalGeneration",
        {"d_model": H, "encoder_ffn_dim": I, "decoder_ffn_dim": I, "num_experts": E, "vocab_size": VOCABULARY}
        | {"encoder_layers": 4, "encoder_sparse_step": 2, "decoder_layers": 2, "decoder_sparse_step": 2}
        | {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 32},
        {"expert_matrices": 2, "encoder_layers": 2},
        0,
    ),
]
BY_NAME = {family.name: family for family in FAMILIES}


def named(part: str) -> Family:
    (found,) = [family for name, family in BY_NAME.items() if name.startswith(part)]
    return found


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def profile_of(family: Family) -> ModelProfile:
    given = {**TINY, **family.profile}
    return plain("tiny", *given.pop("layers", (f"{LAYERS} moe",)), **given)


def experts_of(model: nn.Module) -> list[Any]:
    return [module for name, module in model.named_modules() if name.endswith(".experts")]


def output_of(module: Any, expert: int, tokens: torch.Tensor) -> Any:
    """What the family's own code gives for every token through one expert."""
    if isinstance(module, nn.ModuleDict):
        return module[f"expert_{expert}"](tokens)
    if hasattr(module, "gate_up_proj_bias"):
        module.gate_up_proj_bias[:, 1::2] = -1  # gpt-oss: (up + 1) * glu
    chosen = torch.full((len(tokens), 1), expert)
    return module(tokens, chosen, torch.ones(len(tokens), 1))


def save_whole(model: transformers.PreTrainedModel, folder: Path) -> None:
    model.save_pretrained(folder)


def save_in_shards(model: transformers.PreTrainedModel, folder: Path) -> None:
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2


def save_stacked(model: nn.Module, folder: Path) -> None:
    """As transformers 5 has it in memory, under its own names."""
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}, folder / "model.safetensors"
    )


def filled(checkpoint: Checkpoint, profile: ModelProfile, expert: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    buffer = np.full(profile.expert_bytes, 0xFF, np.uint8)  # NaN, in any dtype
    checkpoint.fill(expert, buffer)
    return buffer


@pytest.mark.parametrize("save", [save_whole, save_in_shards, save_stacked])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_expert_computes_what_the_model_computes(
    family: Family, save: Callable[[nn.Module, Path], None], tmp_path: Path
) -> None:
    model, profile = family.model(), profile_of(family)
    save(model, tmp_path)
    checkpoint = Checkpoint(tmp_path, profile)
    network = Network(profile, CPU, 1, 1, seed=0, dense="none")
    tokens = torch.randn(5, H)
    modules = experts_of(model)
    assert len(modules) == LAYERS
    for layer, module in enumerate(modules):
        for expert in range(E):
            weights = network.weights(torch.from_numpy(filled(checkpoint, profile, layer * E + expert)))
            got = expert_output(weights, tokens, profile.expert_matrices)
            expected = output_of(module, expert, tokens)
            assert expected.abs().max() > 0.1
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_dense_weights_are_taken_where_names_and_shapes_agree(family: Family, tmp_path: Path) -> None:
    """An encoder-decoder's are left random."""
    profile = profile_of(family)
    save_whole(family.model(), tmp_path)
    network = Network(profile, CPU, 8, 8, seed=0, loaded=Checkpoint(tmp_path, profile))
    assert network.loaded_share == family.loaded
    other = Network(
        replace(profile, vocabulary=VOCABULARY + 1), CPU, 8, 8, seed=0, loaded=Checkpoint(tmp_path, profile)
    )
    if family.loaded:
        missing = 2 * (VOCABULARY + 1) * H
        assert other.loaded_share == pytest.approx(1 - missing / other.parameters)


def attend(attention: GroupedQueryAttention | LatentAttention, tokens: torch.Tensor, chunks: list[int]) -> torch.Tensor:
    """Tokens in steps of those lengths, one behind the other."""
    outputs, done = [], 0
    for length in chunks:
        step = tokens[done : done + length]
        done += length
        residual = torch.zeros_like(step)
        attention.add(residual, step, done)
        outputs.append(residual)
    return torch.cat(outputs)


def causal_mask(n: int, window: int | None = None) -> torch.Tensor:
    distance = torch.arange(n)[:, None] - torch.arange(n)
    seen = (distance >= 0) & (distance < (window or n))
    return torch.zeros(1, 1, n, n).masked_fill(~seen, torch.finfo(torch.float32).min)


def unrotated(config: Any, n: int) -> Any:
    """Position embeddings that leave queries and keys as they are."""
    if config.model_type == "deepseek_v2":
        return torch.ones(1, n, config.qk_rope_head_dim // 2, dtype=torch.complex64)
    width = config.head_dim // 2 if config.model_type == "gpt_oss" else config.hidden_size // config.num_attention_heads
    return torch.ones(1, n, width), torch.zeros(1, n, width)


@pytest.mark.parametrize("chunks", [[23], [20, 1, 1, 1], [1] * 23], ids=["prefill", "then-decode", "decode"])
@pytest.mark.parametrize(
    ("part", "layer"), [("Mixtral", 1), ("GptOss", 0), ("GptOss", 1), ("DeepseekV2", 0), ("DeepseekV2", 2)]
)
def test_attention_is_the_models_but_for_rotation(part: str, layer: int, chunks: list[int], tmp_path: Path) -> None:
    """Grouped heads, a sliding window in even layers, latents both plain and absorbed."""
    family, n = named(part), sum(chunks)
    profile, model = profile_of(family), family.model()
    window = profile.order[layer].window
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.fill_(-1e4)  # nobody looks there
    save_whole(model, tmp_path)
    tokens = torch.randn(n, H)
    theirs = model.model.layers[layer].self_attn
    expected = theirs(
        hidden_states=tokens[None],
        position_embeddings=unrotated(model.config, n),
        attention_mask=causal_mask(n, window),
    )[0][0]
    source = Source(CPU, torch.float32, seed=0, loaded=Checkpoint(tmp_path, profile))
    name = f"layers.{layer}.self_attn"
    ours = (
        LatentAttention(profile, source, name, 64)
        if profile.kv_latent_size
        else GroupedQueryAttention(profile, source, name, 64, window)
    )
    torch.testing.assert_close(attend(ours, tokens, chunks), expected, rtol=1e-4, atol=1e-5)


def test_the_shipped_demo_model_loads_whole() -> None:
    folder = Path(__file__).parents[2] / "tracer/demo/model"
    profile = plain(
        "demo",
        "10 moe",
        experts=32,
        top_k=4,
        hidden_size=128,
        expert_intermediate_size=32,
        head_size=32,
        vocabulary=4096,
        expert_bytes_per_parameter=2.0,
        dense_bytes_per_parameter=2.0,
    )
    checkpoint = Checkpoint(folder, profile)
    network = Network(profile, CPU, 8, 8, seed=0, loaded=checkpoint)
    assert network.loaded_share == 1.0
    stored = load_file(folder / "model.safetensors")
    first, down = network.weights(torch.from_numpy(filled(checkpoint, profile, 7 * 32 + 5)))
    place = "model.layers.7.mlp.experts.5"
    assert torch.equal(first[:32], stored[f"{place}.gate_proj.weight"])
    assert torch.equal(first[32:], stored[f"{place}.up_proj.weight"])
    assert torch.equal(down, stored[f"{place}.down_proj.weight"])


def test_weights_are_converted_to_the_profiles_dtype(tmp_path: Path) -> None:
    family = named("Mixtral")
    profile = replace(profile_of(family), expert_bytes_per_parameter=2.0)
    model = family.model()
    save_whole(model.to(torch.float16), tmp_path)
    network = Network(profile, CPU, 1, 1, seed=0, dense="none")
    first, _ = network.weights(torch.from_numpy(filled(Checkpoint(tmp_path, profile), profile, 0)))
    assert first.dtype is torch.bfloat16
    assert torch.equal(first, experts_of(model)[0].gate_up_proj[0].bfloat16())


def test_biases_lie_behind_the_matrices_where_the_profile_counts_them(tmp_path: Path) -> None:
    family = named("GptOss")
    parameters = BASE.expert_parameters + 2 * I + H
    profile = replace(profile_of(family), expert_bytes_per_parameter=4.0 * parameters / BASE.expert_parameters)
    assert profile.expert_bytes == 4 * parameters
    model = family.model()
    module = experts_of(model)[1]
    module.gate_up_proj_bias.normal_()
    module.down_proj_bias.normal_()
    save_whole(model, tmp_path)
    behind = filled(Checkpoint(tmp_path, profile), profile, E + 3).view(np.float32)[BASE.expert_parameters :]
    both = module.gate_up_proj_bias[3]
    np.testing.assert_array_equal(behind, torch.cat([both[::2], both[1::2], module.down_proj_bias[3]]).numpy())


Tensors = dict[str, torch.Tensor]
FIRST = "model.layers.0.block_sparse_moe.experts.0.w1.weight"


def without(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name != FIRST}


@pytest.mark.parametrize(
    "change",
    [
        without,
        lambda tensors: tensors | {FIRST: torch.zeros(I, H + 1)},
        lambda tensors: tensors | {FIRST: torch.zeros(I, H, dtype=torch.int8)},
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(change: Callable[[Tensors], Tensors], tmp_path: Path) -> None:
    family = named("Mixtral")
    save_whole(family.model(), tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(change(load_file(file)), file)
    with pytest.raises(InputError, match=f"--weights {tmp_path}: "):
        filled(Checkpoint(tmp_path, profile_of(family)), BASE, 0)
