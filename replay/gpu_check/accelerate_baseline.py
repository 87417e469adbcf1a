"""A real peer: accelerate's offload of a transformers model of the same shape, decoding on the same machine.

Everything stays in ordinary host memory, or in files on a disk, as users have it; before each module runs, accelerate
copies its weights to the device, all experts of a layer at once, and drops them after. Weights are random: speed
depends on shapes alone.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from replay import kv_cache
from sim.profiles.model_profile import ModelProfile
from traces.errors import InputError, unknown

BLOCK = 1 << 20
"""Random numbers that weights are filled with again and again: drawing billions takes minutes."""


@dataclass(frozen=True)
class Decoded:
    """What a peer took: ms for each token, warm-up left out."""

    peer: str
    version: str
    model: str
    tpot_ms: tuple[float, ...]
    weight_bytes: int


FAMILIES: dict[str, tuple[str, Callable[[ModelProfile], dict[str, Any]]]] = {
    "olmoe-1b-7b": (
        "olmoe",
        lambda of: {"num_experts": of.experts, "intermediate_size": of.expert_intermediate_size},
    ),
    "qwen3-30b-a3b": (
        "qwen3_moe",
        lambda of: {
            "num_experts": of.experts,
            "moe_intermediate_size": of.expert_intermediate_size,
            "head_dim": of.head_size,
        },
    ),
    "mixtral-8x7b": (
        "mixtral",
        lambda of: {"num_local_experts": of.experts, "intermediate_size": of.expert_intermediate_size},
    ),
    "deepseek-v2-lite": (
        "deepseek_v2",
        lambda of: {
            "n_routed_experts": of.experts,
            "n_shared_experts": of.shared_intermediate_size // of.expert_intermediate_size,
            "moe_intermediate_size": of.expert_intermediate_size,
            "intermediate_size": of.dense_intermediate_size,
            "first_k_dense_replace": of.leading_dense_layers,
            "kv_lora_rank": of.kv_latent_size,
            "q_lora_rank": None,
            "qk_nope_head_dim": of.head_size,
            "qk_rope_head_dim": of.rope_head_size,
            "v_head_dim": of.head_size,
        },
    ),
}
"""Model profile -> transformers' model type, and what its config names differently from others'."""


def build(profile: ModelProfile) -> Any:
    """The transformers model of that shape in host memory, random weights. InputError for a family not in the table."""
    try:
        import accelerate
    except ModuleNotFoundError:
        raise InputError("the peer needs accelerate: pip install accelerate") from None
    import transformers

    if profile.name not in FAMILIES:
        raise unknown("model for accelerate", profile.name, FAMILIES)
    kind, own = FAMILIES[profile.name]
    config = transformers.AutoConfig.for_model(
        kind,
        hidden_size=profile.hidden_size,
        num_hidden_layers=profile.moe_layers + profile.leading_dense_layers,
        num_attention_heads=profile.heads,
        num_key_value_heads=profile.kv_heads or profile.heads,
        num_experts_per_tok=profile.top_k,
        vocab_size=profile.vocabulary,
        **own(profile),
    )
    dtype = torch.bfloat16 if profile.dense_bytes_per_parameter < 4 else torch.float32
    from_config: Callable[..., Any] = transformers.AutoModelForCausalLM.from_config
    with accelerate.init_empty_weights(include_buffers=False):
        model = from_config(config, dtype=dtype)
    block = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(dtype)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, torch.nn.Parameter(_filled(parameter, block), requires_grad=False))
    return model.eval()


def _filled(parameter: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """In memory, of the parameter's shape, with the numbers of the block again and again."""
    flat = torch.empty(parameter.numel(), dtype=parameter.dtype)
    whole = flat[: len(flat) // len(block) * len(block)].view(-1, len(block))
    whole.copy_(block.expand_as(whole))
    flat[whole.numel() :] = block[: len(flat) - whole.numel()]
    return flat.view(parameter.shape)


def accelerate_offload(
    profile: ModelProfile,
    device: torch.device,
    tokens: int,
    context: int = 64,
    folder: Path | None = None,
    within: AbstractContextManager[None] | None = None,
) -> Decoded:
    """Decode `tokens` tokens after one for warm-up, behind a prompt of `context` tokens, with `accelerate.cpu_offload`.

    folder: with `accelerate.disk_offload` to files there instead. within: what it decodes in, such as a limit of
    memory. InputError where accelerate is missing or memory does not suffice.
    """
    try:
        model = build(profile)
        import accelerate

        weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
        if folder:
            accelerate.disk_offload(model, str(folder), execution_device=device)
        else:
            accelerate.cpu_offload(model, execution_device=device)
        with within or nullcontext():
            took = decode_ms(model, device, tokens, context)
        return Decoded("accelerate", accelerate.__version__, profile.name, took, weight_bytes)
    except (torch.OutOfMemoryError, MemoryError):
        raise InputError(f"out of memory: accelerate's offload of {profile.name}") from None


def decode_ms(model: Any, device: torch.device, tokens: int, context: int) -> tuple[float, ...]:
    """Decode `tokens` tokens after one for warm-up, behind a prompt of `context` tokens; return the ms of each."""
    vocabulary = model.config.vocab_size
    took, name = list[float](), kv_cache.name_in(model)
    with torch.inference_mode():
        prompt = torch.randint(vocabulary, (1, context), generator=torch.Generator().manual_seed(1)).to(device)
        answer = model(input_ids=prompt, use_cache=True)
        for _ in range(tokens + 1):
            chosen = answer.logits[:, -1:].argmax(-1)
            _synchronize(device)
            began = time.perf_counter()
            answer = model(input_ids=chosen, use_cache=True, **{name: answer[name]})
            _synchronize(device)
            took.append((time.perf_counter() - began) * 1e3)
        if not bool(answer.logits.isfinite().all()):
            raise InputError("the model computed numbers that are not finite: its times are worth nothing")
    return tuple(took[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
