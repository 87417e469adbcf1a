"""Decoding with the recorder against decoding without it, on a model of 26 MoE layers at batch 1.

Experts are of a size that takes a step some tens of milliseconds; a larger model hides the recorder better.
"""

import time
from statistics import median

import numpy as np
import torch
from transformers import OlmoeConfig, OlmoeForCausalLM

from tracer.hook import ExpertsHook

LAYERS = 26
TOKENS = 16
RUNS = 15
BOUND = 1.05


def make_model() -> OlmoeForCausalLM:
    torch.manual_seed(0)
    return OlmoeForCausalLM(
        OlmoeConfig(
            vocab_size=1000,
            hidden_size=512,
            intermediate_size=384,
            num_hidden_layers=LAYERS,
            num_attention_heads=8,
            num_key_value_heads=8,
            num_experts=16,
            num_experts_per_tok=4,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
    ).eval()


def decode(model: OlmoeForCausalLM, hook: ExpertsHook | None) -> float:
    """Processor seconds per token, a prefill of four tokens left out."""
    ids = torch.tensor([[1, 2, 3, 4]])
    taken = []
    with torch.inference_mode():
        out = model(input_ids=ids, use_cache=True)
        if hook:
            hook.discard()
        start = time.process_time()
        for _ in range(TOKENS):
            out = model(input_ids=out.logits[:, -1:].argmax(-1), past_key_values=out.past_key_values, use_cache=True)
            if hook:
                taken.append(hook.take(weights=False))
    assert not hook or np.concatenate([ids for ids, _ in taken]).shape == (TOKENS, LAYERS, 4)
    return (time.process_time() - start) / TOKENS


def main() -> None:
    torch.set_num_threads(1)  # whose processor time no other process changes
    model = make_model()
    hook = ExpertsHook(model)
    with hook:
        hook.probe()
    bare, recorded = [], []
    for _ in range(RUNS):
        bare.append(decode(model, None))
        with hook:
            recorded.append(decode(model, hook))
    ratio = median(recorded) / median(bare)
    print(
        f"record: {ratio:.3f} times a decode without the recorder (at most {BOUND}); "
        f"{median(recorded) * 1e3:.1f} ms against {median(bare) * 1e3:.1f} ms a token, {LAYERS} layers"
    )


if __name__ == "__main__":
    main()
