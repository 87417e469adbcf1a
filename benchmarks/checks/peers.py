"""Real peers that decode on the same machine: accelerate's offload of a transformers model, and llama.cpp's mmap.

With accelerate everything stays in ordinary host memory, or in files on a disk, as users have it; before each module
runs, its weights are copied to the device, all experts of a layer at once, and dropped after. llama.cpp maps a file of
the same weights, of which the system keeps what fits. Weights are random: speed depends on shapes alone.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
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


@contextmanager
def read_ahead_of(folder: Path, kib: int) -> Iterator[None]:
    """Let the system read so many KiB ahead on the disk of a folder. Raise InputError where it may not be set."""
    number = os.stat(folder).st_dev
    disk = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    setting = (disk if (disk / "queue").exists() else disk.parent) / "queue" / "read_ahead_kb"
    try:
        before = setting.read_text()
        setting.write_text(str(kib))
    except OSError as error:
        raise InputError(f"cannot set the read-ahead of {folder}: {error}") from error
    try:
        yield
    finally:
        setting.write_text(before)


def write_gguf(profile: ModelProfile, path: Path) -> None:
    """Write the weights of `build` as a GGUF file. Raise InputError for a model that is not of OLMoE's architecture."""
    import gguf

    model = build(profile)
    if model.config.model_type != "olmoe":
        raise InputError(f"llama.cpp is compared with OLMoE's shapes alone, not with {profile.name}'s")
    writer = gguf.GGUFWriter(path, "olmoe")
    writer.add_block_count(len(profile.order))
    writer.add_context_length(4096)
    writer.add_embedding_length(profile.hidden_size)
    writer.add_feed_forward_length(profile.expert_intermediate_size)
    writer.add_head_count(profile.heads)
    writer.add_head_count_kv(profile.kv_heads or profile.heads)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_expert_count(profile.experts)
    writer.add_expert_used_count(profile.top_k)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(profile.vocabulary)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.OLMOE, len(profile.order))
    parts = list[Any]()
    for name, weight in model.state_dict().items():
        begin, _, end = name.rpartition(".")
        split = (
            zip(("gate_proj", "up_proj"), weight.chunk(2, 1), strict=True) if end == "gate_up_proj" else [(end, weight)]
        )
        for part, values in split:
            known = names.get_name(f"{begin}.{part}".removesuffix(".weight"))
            plain = values.dim() == 1 or begin.endswith("mlp.gate") or values.dtype == torch.float32
            stored = values.float() if plain else values
            kind = gguf.GGMLQuantizationType.F32 if plain else gguf.GGMLQuantizationType.BF16
            writer.add_tensor_info(f"{known}.weight", values.shape, np.dtype(np.float32), stored.nbytes, kind)
            parts.append(stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for values in parts:  # of those that are views, one copy at a time
        writer.write_tensor_data(values.contiguous().view(torch.uint8).numpy())
    writer.close()


def llama_mmap(
    path: Path, prompt: Sequence[int], tokens: Sequence[int], threads: int, within: AbstractContextManager[None]
) -> Decoded:
    """Decode these tokens in llama.cpp behind a prompt, from a mapped file."""
    from traces.llama_library import library

    llama, took = library(), list[float]()
    with within:
        model = llama.load(path, n_gpu_layers=0, use_extra_bufts=False)
        size = 256 * -(-(len(prompt) + len(tokens)) // 256)
        context = llama.context(model, n_ctx=size, n_threads=threads, n_threads_batch=threads)
        for some in (prompt, *([token] for token in tokens)):
            began = time.perf_counter()
            if status := llama.decode(context, some):
                raise InputError(f"llama.cpp ran {len(some)} tokens with status {status}: {llama.errors[:1]}")
            took.append((time.perf_counter() - began) * 1e3)
        llama.llama_free(context)
        llama.llama_model_free(model)
    return Decoded(llama.tools["llama.cpp"], tuple(took[2:]), path.stat().st_size)
