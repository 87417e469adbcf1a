"""A real peer: accelerate's offload of a transformers model of the same shape, decoding on the same machine.

Everything stays in ordinary host memory, or in files on a disk, as users have it; before each module runs, accelerate
copies its weights to the device, all experts of a layer at once, and drops them after. Weights are random: speed
depends on shapes alone.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch

from replay.live.memory import kv_name_in
from traces.errors import InputError, unknown
from traces.models.profile import ModelProfile

BLOCK = 1 << 20
"""Random numbers that weights are filled with again and again: drawing billions takes minutes."""


class Decoded(NamedTuple):
    """What a peer took: ms of each token, warm-up left out."""

    version: str
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
            "n_shared_experts": of.kinds["moe"].shared // of.expert_parameters,
            "moe_intermediate_size": of.expert_intermediate_size,
            "intermediate_size": of.kinds["dense"].mlp // (3 * of.hidden_size),
            "first_k_dense_replace": of.places[0],
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
    """Return the transformers model of that shape in host memory, with random weights.

    Raise InputError for a family that is not in the table.
    """
    import accelerate
    import transformers

    if profile.name not in FAMILIES:
        raise unknown("model for accelerate", profile.name, FAMILIES)
    kind, own = FAMILIES[profile.name]
    config = transformers.AutoConfig.for_model(
        kind,
        hidden_size=profile.hidden_size,
        num_hidden_layers=len(profile.order),
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
            flat = torch.empty(parameter.numel(), dtype=dtype)
            for first in range(0, len(flat), BLOCK):
                flat[first : first + BLOCK] = block[: len(flat) - first]
            filled = torch.nn.Parameter(flat.view(parameter.shape), requires_grad=False)
            module.register_parameter(name, filled)
    return model.eval()


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
    memory. Raise InputError where memory does not suffice.
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
            return Decoded(accelerate.__version__, decode_ms(model, device, tokens, context), weight_bytes)
    except (torch.OutOfMemoryError, MemoryError):
        raise InputError(f"out of memory: accelerate's offload of {profile.name}") from None


def decode_ms(model: Any, device: torch.device, tokens: int, context: int) -> tuple[float, ...]:
    """Decode `tokens` tokens after one for warm-up, behind a prompt of `context` tokens; return the ms of each."""
    synchronize: Callable[[], object] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    took, name = list[float](), kv_name_in(model)
    with torch.inference_mode():
        prompt = torch.randint(model.config.vocab_size, (1, context), generator=torch.Generator().manual_seed(1))
        answer = model(input_ids=prompt.to(device), use_cache=True)
        for _ in range(tokens + 1):
            chosen = answer.logits[:, -1:].argmax(-1)
            synchronize()
            began = time.perf_counter()
            answer = model(input_ids=chosen, use_cache=True, **{name: answer[name]})
            synchronize()
            took.append((time.perf_counter() - began) * 1e3)
        if not bool(answer.logits.isfinite().all()):
            raise InputError("the model computed numbers that are not finite: its times are worth nothing")
    return tuple(took[1:])
