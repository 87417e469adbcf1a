"""Real peers that decode on the same machine: accelerate's offload of a transformers model, and llama.cpp's mmap.

With accelerate everything stays in ordinary host memory, or in files on a disk, as users have it; before each module
runs, its weights are copied to the device, all experts of a layer at once, and dropped after. llama.cpp maps a file of
the same weights, of which the system keeps what fits. Weights are random, and some experts of a layer are chosen more
often than others, as in trained models.
"""

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from replay.live.memory import kv_name_in
from replay.live.shards import open_shards
from tracer.loading import Loading
from traces.errors import InputError, unknown
from traces.models.profile import ModelProfile

BLOCK = 1 << 20
"""Weights are filled with windows of so many random numbers of twice as many: drawing billions takes minutes."""

ROUTER_SPREAD = 0.5
"""Of the logarithms of the lengths of a router's rows: how much more often some experts are chosen than others."""
OUTPUTS = ("o_proj", "down_proj")
"""Weights whose products layers add to the hidden state."""

EMBEDDING_SCALE = 80
"""Of embeddings over other weights: how much of a token's state is its own. With these two numbers a token of OLMoE's
shapes shares 27% of its experts with the token before it, as in a trace of DeepSeek-V2-Lite
(`sim/prediction/data/reuse.toml`: 26%, of Qwen3-30B-A3B 37%).
"""


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


def build(profile: ModelProfile, added: float = 1.0) -> Any:
    """Return the transformers model of that shape in host memory, with random weights.

    added: scale of what layers add to the hidden state: the less it is, the more of a layer's choices do the routers of
    the layers before it know. Raise InputError for a family that is not in the table.
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
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(2 * BLOCK, generator=generator).mul_(0.02).to(dtype)
    names = {module: name for name, module in model.named_modules()}
    for module in names:
        for name, parameter in list(module.named_parameters(recurse=False)):
            flat = torch.empty(parameter.numel(), dtype=dtype)
            for first in range(0, len(flat), BLOCK):
                window = numbers[int(torch.randint(BLOCK, (), generator=generator)) :]
                flat[first : first + BLOCK] = window[: min(BLOCK, len(flat) - first)]
            weight = flat.view(parameter.shape)
            if weight.dim() == 1:  # of a norm
                weight.fill_(1)
            elif isinstance(module, torch.nn.Embedding):
                weight *= EMBEDDING_SCALE
            elif any(output in f"{names[module]}.{name}" for output in OUTPUTS):
                weight *= added
            elif weight.shape == (profile.experts, profile.hidden_size):
                weight *= torch.randn(profile.experts, 1, generator=generator).mul_(ROUTER_SPREAD).exp_().to(dtype)
            module.register_parameter(name, torch.nn.Parameter(weight, requires_grad=False))
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


JOINED = {"gate_up_proj": ["gate_proj", "up_proj"]}
"""Parameters of transformers that are several of a GGUF file, one below the other in each expert's matrix."""


def write_gguf(profile: ModelProfile, checkpoint: Path, path: Path) -> None:
    """Write the weights of a checkpoint as a GGUF file. Raise InputError for another architecture than OLMoE's."""
    import gguf
    import transformers

    config = transformers.AutoConfig.from_pretrained(checkpoint)
    if config.model_type != "olmoe":
        raise InputError(f"llama.cpp is compared with OLMoE's shapes alone, not with {profile.name}'s")
    writer = gguf.GGUFWriter(path, "olmoe")
    writer.add_block_count(len(profile.order))
    writer.add_context_length(4096)
    writer.add_embedding_length(profile.hidden_size)
    writer.add_feed_forward_length(profile.expert_intermediate_size)
    writer.add_head_count(profile.heads)
    writer.add_head_count_kv(profile.kv_heads or profile.heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_expert_count(profile.experts)
    writer.add_expert_used_count(profile.top_k)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(profile.vocabulary)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.OLMOE, len(profile.order))
    shards, tensors = open_shards(sorted(checkpoint.glob("*.safetensors")))
    plain = {each.name for each in tensors.values() if len(each.shape) == 1 or each.dtype == torch.float32}
    plain |= {name for name in tensors if name.endswith("mlp.gate.weight")}
    for name, tensor in tensors.items():
        begin, _, end = name.rpartition(".")
        parts, shape = JOINED.get(end, [end]), list(tensor.shape)
        shape[-2:-1] = [size // len(parts) for size in shape[-2:-1]]
        width, kind = (4, gguf.GGMLQuantizationType.F32) if name in plain else (2, gguf.GGMLQuantizationType.BF16)
        for part in parts:
            known = names.get_name(f"{begin}.{part}".removesuffix(".weight"))
            writer.add_tensor_info(f"{known}.weight", shape, np.dtype(np.float32), width * prod(shape), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, tensor in tensors.items():
        values, joined = tensor[...], JOINED.get(name.rpartition(".")[2])
        for own in values.chunk(len(joined), 1) if joined else [values.float() if name in plain else values]:
            writer.write_tensor_data(own.contiguous().view(torch.uint8).numpy())
    writer.close()
    for shard in shards:
        shard.close()


def llama_mmap(
    path: Path, prompt: Sequence[int], tokens: Sequence[int], threads: int, within: AbstractContextManager[None]
) -> tuple[Decoded, NDArray[np.int32]]:
    """Decode these tokens in llama.cpp behind a prompt, from a mapped file. Return also what its routers chose.

    That is [tokens of prompt and answer, L, k]; reading it takes a millisecond a token.
    """
    from tracer.llama import GgufModel
    from tracer.observed import Wanted

    with within:
        took, chosen = list[float](), list[NDArray[np.int32]]()
        model = GgufModel(path, Loading(device="cpu", threads=threads))
        with model.observed(Wanted(), lambda tokens: None) as runner:
            runner.begin(len(prompt) + len(tokens))
            for some in ([*prompt], *([token] for token in tokens)):
                began = time.perf_counter()
                chosen.append(runner.feed(some).ids)
                took.append((time.perf_counter() - began) * 1e3)
        version = model.library.tools["llama.cpp"]
        del model, runner
        gc.collect()  # else the file stays mapped
    return Decoded(version, tuple(took[1:]), path.stat().st_size), np.concatenate(chosen)
