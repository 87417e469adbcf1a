"""Generating with the recorder against the same generate() without it, on a model of 26 MoE layers.

Ratios of processor time, of decoding at batch 1 and 8 and of a prefill of 1,024 tokens, with ids alone and with
weights too; and the hook's own time, on layers that do nothing but be called.
"""

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, OlmoeConfig, OlmoeForCausalLM

from tracer.hook import ExpertsHook

LAYERS, EXPERTS, TOP_K = 26, 16, 4
TOKENS = 12
PREFILL = 1024
RUNS = 9
BOUNDS = {"ids": 1.03, "ids and weights": 1.06}
PASSES = 200


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
            num_experts=EXPERTS,
            num_experts_per_tok=TOP_K,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
    ).eval()


def seconds(model: OlmoeForCausalLM, ids: Tensor, new: int, hook: ExpertsHook | None) -> float:
    """Processor seconds of one generate()."""
    config = GenerationConfig(max_new_tokens=new, do_sample=False, pad_token_id=0)
    with torch.inference_mode():
        start = time.process_time()
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
        took = time.process_time() - start
    if hook:
        assert sum(len(part.ids) for part in hook.passes) == ids.numel() + len(ids) * (new - 1)
        hook.clear()
    return took


def ratio(model: OlmoeForCausalLM, ids: Tensor, new: int, weights: bool, runs: int) -> tuple[float, float]:
    """Median time with the recorder, and without it; runs alternate."""
    bare, recorded = [], []
    for _ in range(runs):
        bare.append(seconds(model, ids, new, None))
        with ExpertsHook(model, weights=weights) as hook:
            hook.probe()
            hook.clear()
            recorded.append(seconds(model, ids, new, hook))
    return median(recorded), median(bare)


class IdleExperts(nn.Module):
    """Experts that compute nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return hidden


class Idle(nn.Module):
    """A model whose layers are called and do nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(IdleExperts() for _ in range(LAYERS))
        self.embedding = nn.Embedding(8, 1)

    def forward(self, input_ids: Tensor) -> None:
        tokens = input_ids.numel()
        hidden = torch.zeros(tokens, 1)
        index = torch.arange(TOP_K).expand(tokens, TOP_K)
        weights = torch.rand(tokens, TOP_K) + 0.1
        for layer in self.layers:
            layer(hidden, index, weights)


def timed(play: Callable[[], object]) -> float:
    start = time.process_time()
    for _ in range(PASSES):
        play()
    return (time.process_time() - start) / PASSES


def hook_alone(tokens: int, weights: bool) -> float:
    """Seconds that the recorder adds to a forward pass of idle layers."""
    model, ids = Idle(), torch.zeros((1, tokens), dtype=torch.long)
    bare, hooked = [], []
    for _ in range(5):
        bare.append(timed(lambda: model(ids)))
        with ExpertsHook(model, weights=weights) as hook:
            hook.probe()
            hooked.append(timed(lambda: (model(ids), hook.clear())))
    return median(hooked) - median(bare)


def main() -> None:
    torch.set_num_threads(1)  # whose processor time no other process changes
    model = make_model()
    cases = {
        "decode at batch 1": (torch.full((1, 4), 7), TOKENS, RUNS),
        "decode at batch 8": (torch.arange(32).reshape(8, 4), TOKENS, RUNS),
        f"prefill of {PREFILL:,}": (torch.arange(PREFILL)[None] % 1000, 1, 5),
    }
    for what, weights in (("ids", False), ("ids and weights", True)):
        for case, (ids, new, runs) in cases.items():
            ours, bare = ratio(model, ids, new, weights, runs)
            print(
                f"record {what}, {case}: {ours / bare:.3f} times without (at most {BOUNDS[what]}); "
                f"{ours / new * 1e3:.1f} ms against {bare / new * 1e3:.1f} ms a step, {LAYERS} layers"
            )
        for tokens in (1, 8, PREFILL):
            alone = hook_alone(tokens, weights) / LAYERS
            print(f"  the hook alone, {tokens:,} tokens: {alone * 1e6:.1f} us a layer")


if __name__ == "__main__":
    main()
