"""Tiny random models on disk, for live generation, and what the unmodified model makes of them."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from replay.live.memory import kv_name_in
from tests.support.architectures import tiny_model

NEW_TOKENS = 24


def saved(folder: Path, architecture: str, dtype: str = "float32", shard_size: str = "20KB", **changes: Any) -> Path:
    """Save a tiny model, in several shards; return its folder."""
    model = tiny_model(architecture, **changes).to(getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size=shard_size)
    return folder


def whole_model(folder: Path | str, dtype: str = "auto") -> Any:
    """Return the unmodified model, which computes its experts one by one."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager").eval()


def prompt(tokens: int, vocabulary: int = 250, seed: int = 3) -> Tensor:
    return torch.randint(5, vocabulary, (1, tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: Any, ids: Tensor, new_tokens: int = NEW_TOKENS) -> list[Tensor]:
    """Return the logits of a prefill and of greedy tokens after it."""
    out = model(input_ids=ids, use_cache=True)
    found, name = [out.logits], kv_name_in(model)
    for _ in range(new_tokens):
        token = found[-1][:, -1:].argmax(-1)
        out = model(input_ids=token, use_cache=True, **{name: out[name]})
        found.append(out.logits)
    return found
