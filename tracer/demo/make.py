"""Make the shipped model and the shipped trace afresh: `python -m tracer.demo.make`.

Weights are random from a fixed seed. They are scaled so that what a layer adds is as large as what it is
given and router logits spread over several units; with the usual tiny ones every token would route alike.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import OlmoeConfig, OlmoeForCausalLM, PreTrainedTokenizerFast

import traces
from tracer.demo import MODEL, NAME, PROMPTS
from tracer.models import Loading, load_model
from tracer.prompts import Columns, read_prompts
from tracer.record import Options, record

SEED = 20240124
END = "<|end|>"
ROUTER_SPREAD = 2.0
"""Standard deviation of the router's logits."""


def make_model(folder: Path) -> None:
    """Write an OLMoE of 8 layers x 32 experts, top-4, and a tokenizer that takes each byte for a token."""
    torch.manual_seed(SEED)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate([*alphabet, END])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast  # untyped
    fast(tokenizer_object=tokenizer, eos_token=END, pad_token=END).save_pretrained(folder)
    config = OlmoeConfig(
        vocab_size=len(alphabet) + 1,
        hidden_size=64,
        intermediate_size=16,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        max_position_embeddings=2048,
        eos_token_id=len(alphabet),
        pad_token_id=len(alphabet),
        bos_token_id=None,
    )
    model = OlmoeForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                inputs = 1 if "embed" in name else weight.shape[-1]
                spread = ROUTER_SPREAD if "gate.weight" in name else 1.0
                weight.normal_(0.0, spread * inputs**-0.5)
    half: Any = model.bfloat16()
    half.save_pretrained(folder)
    # Weights are stored in half the space; they compute in float32, which routes alike on every machine.
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": "float32"}, indent=2) + "\n")


def make_trace(folder: Path) -> None:
    """Record the shipped model over the shipped prompts."""
    loaded = load_model(str(MODEL), Loading(device="cpu"))
    prompts = read_prompts(PROMPTS, Columns(labels={"dataset": "demo"}))
    record(replace(loaded, name=NAME), prompts, folder, Options(), overwrite=True)


if __name__ == "__main__":
    make_model(MODEL)
    make_trace(traces.demo_trace())
