"""A checkpoint several times larger than the memory that there is generates, within the memory that is stated."""

import contextlib
import json
import os
import re
import struct
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from sim.quantities import parse_bytes

LIMIT = 1 << 30
ROOT = Path(__file__).parents[2]
GROUPS = {
    Path("/sys/fs/cgroup/memory"): "memory.limit_in_bytes",  # v1
    Path("/sys/fs/cgroup"): "memory.max",  # v2
}


def sparse_checkpoint(folder: Path) -> int:
    """Save a model whose experts are holes in its file, so that it takes no room; return the file's size."""
    config_class: Any = Qwen3MoeConfig
    config = config_class(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=512,
        moe_intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=72,
        num_experts_per_tok=4,
        decoder_sparse_step=1,
    )
    config.head_dim = 64
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config)
    header: dict[str, object] = {}
    content: dict[int, bytes] = {}
    at = 0
    for name, weight in model.named_parameters():
        if "experts." in name:
            place, rows = name.split("experts.")[0] + "experts", weight.shape[1] * weight.shape[2] * 4
            matrices = {"gate_up_proj": ["gate_proj", "up_proj"], "down_proj": ["down_proj"]}[name.split(".")[-1]]
            shape = [weight.shape[1] // len(matrices), weight.shape[2]]
            part = rows // len(matrices)
            for expert in range(weight.shape[0]):
                for matrix in matrices:
                    entry = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + part]}
                    header[f"{place}.{expert}.{matrix}.weight"] = entry
                    at += part
        else:
            content[at] = (torch.randn(weight.shape) * 0.05).numpy().tobytes()
            header[name] = {"dtype": "F32", "shape": list(weight.shape), "data_offsets": [at, at + weight.nbytes]}
            at += weight.nbytes
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for offset, written in content.items():
            file.seek(8 + len(text) + offset)
            file.write(written)
        file.truncate(8 + len(text) + at)
    return at


@contextlib.contextmanager
def limited() -> Iterator[Path]:
    """A control group with a limit of memory; skips where there are no rights to make one."""
    for root, limit in GROUPS.items():
        group = root / f"moe-expert-cache-{uuid.uuid4().hex}"
        try:
            if not any(root.glob("memory.*")):
                continue
            group.mkdir()
            (group / limit).write_text(str(LIMIT))
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()
            continue
        try:
            yield group
        finally:
            group.rmdir()
        return
    pytest.skip("no rights to make a control group with a limit of memory")


def generate(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, within LIMIT."""
    enter = "import os, sys; open(sys.argv.pop(1), 'w').write(str(os.getpid()))"
    program = f"{enter}; from replay.cli import main; main()"
    with limited() as group:
        return subprocess.run(
            [sys.executable, "-c", program, group / "cgroup.procs", "generate", "--model", folder, *arguments],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )


def test_a_checkpoint_three_times_the_memory_limit_generates_within_what_is_stated(tmp_path: Path) -> None:
    size = sparse_checkpoint(tmp_path)
    assert size >= 3 * LIMIT
    assert sum(file.stat().st_blocks * 512 for file in tmp_path.iterdir()) < LIMIT / 10
    asked = ("--token-ids", "5,6,7,8,9,10", "--max-new-tokens", "6", "--print-token-ids", "--lanes", "2")
    done = generate(tmp_path, *asked, "--policy", "lru", "--cache-size", "16")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()[-1].split()) == 6
    told = re.search(r"memory: peak (\S+ \S+), stated (\S+ \S+) =", done.stderr)
    assert told, done.stderr
    peak, stated = (parse_bytes(each, "memory") for each in told.groups())
    assert peak <= stated < LIMIT
    assert size >= 3 * stated


def test_a_cache_that_memory_does_not_hold_is_refused_in_one_line(tmp_path: Path) -> None:
    sparse_checkpoint(tmp_path)
    done = generate(tmp_path, "--token-ids", "5", "--policy", "lru", "--cache-size", "100%")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "choose a smaller --cache-size" in done.stderr
