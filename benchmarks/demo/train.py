"""Train the shipped model: `python -m benchmarks.demo.train TEXT --out FOLDER` (an hour and a half on two cores).

`--architecture mixtral` trains one of another architecture on the same text, for finding 13.

TEXT is a folder with the files of DOMAINS, each a domain of its own. Every batch holds as much of one domain as
of another, and the load-balancing loss (Fedus et al., arXiv 2101.03961, equation 4) is taken over the whole
batch in each layer, so that experts must be used evenly over all text, but may prefer a domain. Interrupted,
the same command continues from its last checkpoint.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.olmoe.modeling_olmoe import load_balancing_loss_func

DOMAINS = {
    "web": "c4.txt",
    "code": "github_oss_with_stack.txt",
    "wikipedia": "wikipedia.txt",
    "math": "gsm8k_train.jsonl",
}
END = "<|end|>"
HELD_OUT = 0.05
"""The share of each domain, at its end, that neither the tokenizer nor the model is trained on."""

SEED = 20240124
VOCABULARY = 4096
LENGTH = 512
ROWS_PER_DOMAIN = 2
PEAK, WARM_UP, DECAY = 3e-3, 100, 0.1
"""Learning rate at its highest, steps until there (then a cosine to a tenth of it), and weight decay."""

BALANCE = 0.01
"""Weight of the load-balancing loss, as in OLMoE (arXiv 2409.02060, section 3)."""

REQUESTS, PROMPT_LENGTH = 64, 400
"""Held-out requests of a domain, and the length of their prompts in characters."""


def read_domains(folder: Path) -> dict[str, list[str]]:
    """The documents of each domain, in order."""
    documents = {}
    for domain, file in DOMAINS.items():
        text = (folder / file).read_text(encoding="utf-8")
        if file.endswith(".jsonl"):
            rows = [json.loads(line) for line in text.splitlines()]
            documents[domain] = [f"{row['question']}\n{row['answer']}" for row in rows]
        elif domain == "web":
            documents[domain] = [line for line in text.split("\n") if line.strip()]
        elif domain == "wikipedia":
            documents[domain] = ["# " + article for article in text.removeprefix("# ").split("\n# ")]
        else:
            documents[domain] = [text]
    return documents


def split(documents: dict[str, list[str]]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """What to train on, and what to hold out: the end of each domain, by characters."""
    train: dict[str, list[str]] = {}
    held: dict[str, list[str]] = {}
    for domain, texts in documents.items():
        cut = int(sum(map(len, texts)) * (1 - HELD_OUT))
        train[domain], held[domain], seen = [], [], 0
        for text in texts:
            inside = max(0, min(len(text), cut - seen))
            for part, into in ((text[:inside], train[domain]), (text[inside:], held[domain])):
                if part:
                    into.append(part)
            seen += len(text)
    return train, held


def make_tokenizer(texts: dict[str, list[str]]) -> Any:
    """A byte-level BPE of VOCABULARY tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for domain in texts.values() for text in domain), trainer)
    fast: Any = PreTrainedTokenizerFast  # untyped
    return fast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


def make_model(architecture: str) -> PreTrainedModel:
    """An OLMoE of 10 MoE layers x 32 experts, top-4, or a Mixtral of 8 x 16, top-2: 5.2 and 4.2 million parameters."""
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    if architecture == "mixtral":
        experts = {"intermediate_size": 64, "num_hidden_layers": 8, "num_local_experts": 16, "num_experts_per_tok": 2}
        return MixtralForCausalLM(MixtralConfig(**common, **experts))
    experts = {"intermediate_size": 32, "num_hidden_layers": 10, "num_experts": 32, "num_experts_per_tok": 4}
    return OlmoeForCausalLM(OlmoeConfig(**common, **experts))


def streams(tokenizer: Any, texts: dict[str, list[str]]) -> dict[str, NDArray[np.int32]]:
    """Each domain as one row of tokens, its documents ended by END."""
    end = tokenizer.eos_token_id
    return {
        domain: np.concatenate([np.array([*ids, end], np.int32) for ids in tokenizer(parts)["input_ids"]])
        for domain, parts in texts.items()
    }


def losses(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy per token (in nats) and the load-balancing loss, 1 where experts are used evenly.

    ids: [rows, LENGTH + 1].
    """
    out = model(input_ids=ids[:, :-1], output_router_logits=True, use_cache=False)
    text = cross_entropy(out.logits.flatten(0, 1), ids[:, 1:].flatten())
    config = model.config
    each: Any = load_balancing_loss_func  # of one layer at a time: over all at once, layers could make up for others
    balance = torch.stack([each((row,), config.num_experts, config.num_experts_per_tok) for row in out.router_logits])
    return text, balance.mean() / config.num_experts_per_tok


def rate(step: int, steps: int) -> float:
    """The learning rate of a step."""
    if step < WARM_UP:
        return PEAK * (step + 1) / WARM_UP
    done = (step - WARM_UP) / max(steps - WARM_UP, 1)
    return PEAK * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def evaluate(model: Any, held: dict[str, NDArray[np.int32]], rows: int = 32) -> dict[str, float]:
    """Cross-entropy per held-out token of each domain, over up to `rows` windows."""
    found = {}
    model.eval()
    for domain, stream in held.items():
        starts = range(0, min(len(stream) - LENGTH - 1, rows * LENGTH), LENGTH)
        with torch.inference_mode():
            parts = [losses(model, _windows(stream, [start]))[0].item() for start in starts]
        found[domain] = float(np.mean(parts))
    model.train()
    return found


def unigram(train: dict[str, NDArray[np.int32]], held: dict[str, NDArray[np.int32]]) -> dict[str, float]:
    """Cross-entropy per held-out token of each domain under the frequencies of that domain's own tokens (plus one)."""
    found = {}
    for domain, stream in held.items():
        counts = np.bincount(train[domain], minlength=VOCABULARY) + 1.0
        found[domain] = float(-np.log(counts / counts.sum())[stream].mean())
    return found


def train(text: Path, out: Path, architecture: str, steps: int, device: str) -> None:
    """Train, or continue training, and write the model, its tokenizer, its loss curve and held-out prompts to `out`."""
    torch.manual_seed(SEED)
    parts, held_parts = split(read_domains(text))
    tokenizer = make_tokenizer(parts)
    data, held = streams(tokenizer, parts), streams(tokenizer, held_parts)
    model: Any = make_model(architecture)
    model.to(device)
    model.set_experts_implementation("grouped_mm")
    kinds = [[p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() < 2]]
    optimizer = torch.optim.AdamW(
        [{"params": kinds[0], "weight_decay": DECAY}, {"params": kinds[1], "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    out.mkdir(parents=True, exist_ok=True)
    checkpoint, first, curve = out / "checkpoint.pt", 0, []
    if checkpoint.is_file():
        saved = torch.load(checkpoint, weights_only=True, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first, curve = saved["step"], saved["curve"]
    print(f"{model.num_parameters():,} parameters, {sum(map(len, data.values())):,} tokens, from step {first}")
    base = unigram(data, held)
    began = time.monotonic()
    for step in range(first, steps):
        rng = np.random.default_rng([SEED, step])
        ids = torch.cat(
            [_windows(s, rng.integers(0, len(s) - LENGTH - 1, ROWS_PER_DOMAIN).tolist()) for s in data.values()]
        )
        text_loss, balance = losses(model, ids.to(device))
        optimizer.zero_grad()
        (text_loss + BALANCE * balance).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        optimizer.step()
        if (step + 1) % 100 == 0 or step + 1 == steps:
            curve.append({"step": step + 1, "balance": balance.item(), "held_out": evaluate(model, held)})
            pace = (time.monotonic() - began) / (step + 1 - first)
            print(json.dumps(curve[-1] | {"train": text_loss.item(), "seconds": pace}), flush=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1, "curve": curve}
            torch.save(state, out / "checkpoint.tmp")
            (out / "checkpoint.tmp").replace(checkpoint)
    save(model, tokenizer, out)
    facts = {"tokens": {domain: len(stream) for domain, stream in data.items()}, "unigram": base, "curve": curve}
    (out / "training.json").write_text(json.dumps(facts, indent=1) + "\n")
    draw(base, curve, out / "loss.png")
    write_prompts(held_parts, out / "held-out.jsonl")


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write the model in bfloat16; it computes in float32, which routes alike on every machine."""
    tokenizer.save_pretrained(folder)
    model.to("cpu").bfloat16().save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": "float32"}, indent=2) + "\n")


def draw(base: dict[str, float], curve: list[dict[str, Any]], file: Path) -> None:
    """Plot the held-out loss of each domain, with that of its unigrams as a dashed line."""
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for domain, unigrams in base.items():
        (line,) = axes.plot([at["step"] for at in curve], [at["held_out"][domain] for at in curve], label=domain)
        axes.axhline(unigrams, color=line.get_color(), linestyle="--", linewidth=0.8)
    axes.set(xlabel=f"steps of {len(base) * ROWS_PER_DOMAIN * LENGTH:,} tokens", ylabel="held-out loss, nats per token")
    axes.legend(title="dashed: unigrams")
    figure.savefig(file, dpi=120)
    plt.close(figure)


def write_prompts(held: dict[str, list[str]], file: Path) -> None:
    """Write REQUESTS prompts of each domain from text that was held out, spread evenly over it."""
    with file.open("w", encoding="utf-8") as lines:
        for domain, parts in held.items():
            text = "\n".join(parts)
            for i in range(REQUESTS):
                start = i * (len(text) - PROMPT_LENGTH) // REQUESTS
                row = {"id": f"{domain}-{i}", "task": domain, "prompt": text[start : start + PROMPT_LENGTH].strip()}
                lines.write(json.dumps(row) + "\n")


def _windows(stream: NDArray[np.int32], starts: list[int]) -> Tensor:
    return torch.from_numpy(np.stack([stream[s : s + LENGTH + 1] for s in starts]).astype(np.int64))


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo.train", description=__doc__)
    parser.add_argument("text", type=Path, help=f"folder with {', '.join(DOMAINS.values())}")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model and the checkpoint")
    parser.add_argument("--architecture", choices=("olmoe", "mixtral"), default="olmoe")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--device", default="cpu")
    chosen = parser.parse_args()
    train(chosen.text, chosen.out, chosen.architecture, chosen.steps, chosen.device)


if __name__ == "__main__":
    main()
