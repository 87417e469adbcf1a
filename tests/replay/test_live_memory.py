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
from typing import Any, NamedTuple

import pytest
import torch
from openai import BadRequestError, OpenAI
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from sim.quantities import parse_bytes
from tests.support.tokenizer import byte_tokenizer

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


class Ended(NamedTuple):
    """What a command ended with, and said."""

    status: int
    out: str
    err: str


EACH = """
import io, json, os, sys
from contextlib import redirect_stderr, redirect_stdout
open(sys.argv[1], "w").write(str(os.getpid()))
from replay.commands import main
found = []
for asked in json.loads(sys.argv[2]):
    sys.argv = ["moe-replay", *asked]
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            main()
            status = 0
        except SystemExit as ended:
            status = int(ended.code or 0)
    found.append([status, out.getvalue(), err.getvalue()])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sparse checkpoint."""
    folder = tmp_path_factory.mktemp("sparse")
    assert sparse_checkpoint(folder) >= 3 * LIMIT
    assert sum(file.stat().st_blocks * 512 for file in folder.iterdir()) < LIMIT / 10
    return folder


@pytest.fixture(scope="module")
def ended(folder: Path) -> list[Ended]:
    """A command that generates, one that is refused, and one with the largest cache, in one process within LIMIT."""
    asked = ("--token-ids", "5,6,7,8,9,10", "--max-new-tokens", "6", "--print-token-ids", "--lanes", "2")
    generates = (*asked, "--policy", "lru", "--cache-size", "16")
    refused = ("--token-ids", "5", "--policy", "lru", "--cache-size", "100%")
    largest = (*asked, "--policy", "lru", "--cache-size", "max")
    commands = json.dumps([["generate", "--model", str(folder), *each] for each in (generates, refused, largest)])
    with limited() as group:
        done = subprocess.run(
            [sys.executable, "-c", EACH, group / "cgroup.procs", commands],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
    assert done.returncode == 0, done.stderr
    return [Ended(*each) for each in json.loads(done.stdout)]


def test_a_checkpoint_three_times_the_memory_limit_generates_within_what_is_stated(
    folder: Path, ended: list[Ended]
) -> None:
    done = ended[0]
    assert done.status == 0, done.err
    assert len(done.out.splitlines()[-1].split()) == 6
    told = re.search(r"memory: peak (\S+ \S+), stated (\S+ \S+) =", done.err)
    assert told, done.err
    peak, stated = (parse_bytes(each, "memory") for each in told.groups())
    assert peak <= stated < LIMIT
    assert (folder / "model.safetensors").stat().st_size >= 3 * stated


def test_a_cache_that_memory_does_not_hold_is_refused_in_one_line(ended: list[Ended]) -> None:
    assert ended[1].status == 2
    assert len(ended[1].err.splitlines()) == 1
    assert "choose a smaller --cache-size" in ended[1].err


def test_the_largest_cache_that_fits_generates_within_the_limit(ended: list[Ended]) -> None:
    done = ended[2]
    assert (done.status, done.out) == (0, ended[0].out), done.err
    stated = re.search(r"stated (\S+ \S+) =", done.err)
    assert stated
    assert LIMIT / 2 < parse_bytes(stated[1], "memory") < LIMIT


@pytest.mark.slow  # reads all experts for each prompt
def test_the_server_answers_what_memory_suffices_for_and_refuses_more(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    byte_tokenizer().save_pretrained(tmp_path)
    inside = (
        "import os, sys; open(sys.argv.pop(1), 'w').write(str(os.getpid())); from replay.commands import main; main()"
    )
    options = ("serve", "--model", tmp_path, "--policy", "lru", "--cache-size", "max", "--lanes", "1", "--port", "0")
    with limited() as group:
        words = [sys.executable, "-c", inside, str(group / "cgroup.procs"), *map(str, options)]
        with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, cwd=ROOT) as server:
            assert server.stderr
            stated = re.search(r"(http://\S+), a context of (\S+) tokens", server.stderr.readline())
            assert stated
            context = int(stated[2].replace(",", ""))
            with OpenAI(base_url=stated[1], api_key="none", max_retries=0, timeout=200) as client:
                asked: dict[str, Any] = {"model": tmp_path.name, "max_tokens": 4}
                for _ in range(3):
                    client.completions.create(**asked, prompt="x" * (context - 4))
                with pytest.raises(BadRequestError, match="more than the context"):
                    client.completions.create(**asked, prompt="x" * (context - 3))
            server.terminate()
            assert server.wait(20) == 0
    assert 1000 < context < 32_768
