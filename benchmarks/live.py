"""A live model with every expert in its cache, beside transformers alone: `python -m benchmarks live`.

Decoded tokens of models of random weights in bf16, in turns; the processor time of the thread that runs each, so that
what else the machine does counts less. `eager` goes through the experts one by one, as the cache does; `default` is
what transformers chooses.
"""

import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, OlmoeConfig, PreTrainedModel, Qwen3MoeConfig

from replay import load_model

TOKENS, ROUNDS = 24, 5

SHAPES: dict[str, Any] = {
    "olmoe, 8 layers of 64 experts of 1024 x 512, top-8": OlmoeConfig(
        hidden_size=1024, intermediate_size=512, num_hidden_layers=8, num_experts=64, num_experts_per_tok=8
    ),
    "qwen3-moe, 2 layers of 128 experts of 2048 x 768, top-8": Qwen3MoeConfig(
        hidden_size=2048, moe_intermediate_size=768, num_hidden_layers=2, num_experts=128, num_experts_per_tok=8
    ),
}


def main() -> None:
    """Print the speed of a token against transformers' own: 1 is as fast."""
    torch.set_num_threads(1)
    for name, config in SHAPES.items():
        config.vocab_size, config.pad_token_id, config.eos_token_id = 4096, None, None
        torch.manual_seed(0)
        whole: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        with tempfile.TemporaryDirectory() as folder:
            whole.save_pretrained(folder)
            with load_model(Path(folder), policy="lru", cache_size="100%") as live:
                default = whole.get_experts_implementation()
                runs = {
                    "default": partial(_seconds, whole, default),
                    "eager": partial(_seconds, whole, "eager"),
                    "live": partial(_seconds, live),
                }
                took = {kind: median(values) for kind, values in zip(runs, _in_turns(runs), strict=True)}
        ratios = ", ".join(f"{took[kind] / took['live']:.2f} of {kind}" for kind in ("default", "eager"))
        print(f"live generation, all experts cached, {name}: {ratios} ({took['live'] * 1e3:.1f} ms a token)")


def _in_turns(runs: Mapping[str, Callable[[], float]]) -> list[list[float]]:
    """Return the values of each, the first round, which loads and records, left out."""
    rounds = [[run() for run in runs.values()] for _ in range(ROUNDS + 1)]
    return [list(values) for values in zip(*rounds[1:], strict=True)]


def _seconds(model: PreTrainedModel, implementation: Any = None) -> float:
    """Return the processor time of a decoded token."""
    if implementation:
        model.set_experts_implementation(implementation)
    ids = torch.arange(8)[None]
    began = time.thread_time()
    model.generate(ids, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
    return (time.thread_time() - began) / TOKENS


if __name__ == "__main__":
    main()
