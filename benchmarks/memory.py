"""Memory while a recording grows: what the process holds after each batch, recorder, model and all.

`python -m benchmarks.memory --plot FILE.png` draws it.
"""

import argparse
import ctypes
import os
import tempfile
from pathlib import Path

import torch
from transformers import OlmoeConfig, OlmoeForCausalLM

from tracer import demo
from tracer.answers import LoadedModel
from tracer.loading import Loading
from tracer.models import load_model
from tracer.prompts import Prompt
from tracer.record import FORCED, Options, record

LAYERS, EXPERTS, TOP_K = 26, 64, 6
REQUESTS, TOKENS, BATCH = 512, 1024, 8
BOUND_MB = 16
"""What memory may grow by; a trace in memory would take 156 bytes a token and more."""


def make_model() -> LoadedModel:
    torch.manual_seed(0)
    shipped = load_model(str(demo.MODEL), Loading(device="cpu"))
    config = OlmoeConfig(
        vocab_size=len(shipped.tokenizer),
        hidden_size=8,
        intermediate_size=4,
        num_hidden_layers=LAYERS,
        num_attention_heads=1,
        num_key_value_heads=1,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        max_position_embeddings=2 * TOKENS,
    )
    return LoadedModel("tiny", OlmoeForCausalLM(config).eval(), shipped.tokenizer)


def resident_mb() -> float:
    """What this process holds in memory (Linux, glibc), without what its allocator keeps for later."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def held() -> list[float]:
    """MB after each batch."""
    made, answer = [], "a heron " * TOKENS
    prompts = [Prompt(str(i), "", "", ("a",), (answer,)) for i in range(REQUESTS)]
    with tempfile.TemporaryDirectory() as folder:
        options = Options(mode=FORCED, batch_size=BATCH, max_new_tokens=TOKENS)
        record(make_model(), prompts, Path(folder) / "t", options, on_done=lambda _: made.append(resident_mb()))
    return made[1:]


def main(plot: Path | None = None) -> None:
    torch.set_num_threads(1)
    megabytes = held()
    half = len(megabytes) // 2
    first, second = max(megabytes[:half]), max(megabytes[half:])
    print(
        f"record {REQUESTS * TOKENS:,} tokens x {LAYERS} layers x {TOP_K}: at most {first:.0f} MB resident in the "
        f"first half, {second:.0f} MB in the second (at most {BOUND_MB} more)"
    )
    if plot:
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
        axes.plot([(i + 1) * BATCH * TOKENS / 1e3 for i in range(len(megabytes))], megabytes)
        axes.set(xlabel="thousand tokens recorded", ylabel="MB resident", ylim=(0, None))
        axes.set_title(f"recording {LAYERS} layers x top-{TOP_K}, batches of {BATCH} x {TOKENS} tokens")
        figure.savefig(plot, dpi=120)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--plot", type=Path)
    main(parser.parse_args().plot)
