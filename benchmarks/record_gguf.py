"""Decoding in llama.cpp with its routing recorded against the same without: a file of OLMoE-1B-7B's shape in Q4_0.

Weights are random, 3.9 GB, in a temporary folder. Two contexts of one model take tokens in turns, on one thread, whose
processor time counts.
"""

import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np

from tracer.llama import GgufModel, GgufRunner
from tracer.loading import Loading
from traces.llama_library import EVAL

LAYERS, EXPERTS, TOP_K, HIDDEN, INNER, HEADS, VOCABULARY = 16, 64, 8, 2048, 1024, 16, 50304
TOKENS = 60


class Unobserved(GgufRunner):
    """The same without a callback."""

    def __init__(self, loaded: GgufModel) -> None:
        super().__init__(loaded, False, lambda rows: None)
        self._callback = EVAL()


def write(path: Path) -> None:
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "olmoe", use_temp_file=True)
    writer.add_block_count(LAYERS)
    writer.add_context_length(4096)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(TOP_K)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(VOCABULARY)

    def add(name: str, *shape: int) -> None:
        """Random numbers between the steps of blocks whose scale is 0.004: of a deviation of .018."""
        blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // 32, 18), np.uint8)
        blocks[..., :2] = np.frombuffer(np.float16(0.004).tobytes(), np.uint8)
        data = blocks.reshape(*shape[:-1], -1)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=gguf.GGMLQuantizationType.Q4_0)

    def add_plain(name: str, data: Any) -> None:
        writer.add_tensor(f"{name}.weight", data.astype(np.float32))

    add("token_embd", VOCABULARY, HIDDEN)
    add("output", VOCABULARY, HIDDEN)
    add_plain("output_norm", np.ones(HIDDEN))
    for layer in range(LAYERS):
        for part in ("q", "k", "v", "output"):
            add(f"blk.{layer}.attn_{part}", HIDDEN, HIDDEN)
        for part in ("attn_norm", "attn_q_norm", "attn_k_norm", "ffn_norm"):
            add_plain(f"blk.{layer}.{part}", np.ones(HIDDEN))
        add_plain(f"blk.{layer}.ffn_gate_inp", random.normal(0, 0.02, (EXPERTS, HIDDEN)))
        for part, shape in (("gate", (INNER, HIDDEN)), ("up", (INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
            add(f"blk.{layer}.ffn_{part}_exps", EXPERTS, *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def seconds(runner: GgufRunner, token: int) -> float:
    """Processor seconds of a token."""
    start = time.thread_time()
    runner.feed([token])
    return time.thread_time() - start


def main() -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        write(path)
        loaded = GgufModel(path, Loading(threads=1))
        with loaded.observed(True, False, False, lambda rows: None) as recorded:
            bare = Unobserved(loaded)
            for runner in (bare, recorded):
                runner.begin(TOKENS)
            tokens = np.random.default_rng(1).integers(0, VOCABULARY, TOKENS).tolist()
            pairs = [(seconds(bare, token), seconds(recorded, token)) for token in tokens][5:]
            bare.close()
    without, more = median(each for each, _ in pairs), median(ours - each for each, ours in pairs)
    print(
        f"record --gguf, {LAYERS} layers: {1 + more / without:.3f} times without; "
        f"{1 / (without + more):.2f} tokens/s against {1 / without:.2f}, {more / LAYERS * 1e6:.0f} us a layer"
    )


if __name__ == "__main__":
    main()
