"""Tiny random models of some architectures with a tokenizer, ready to generate."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.tracer.architectures import tiny_model
from tests.tracer.tokenizer import byte_tokenizer
from tracer.cli import main
from tracer.models import LoadedModel

COMMON: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
"""The config of a small dense model."""

ARCHITECTURES = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "olmoe",
    "gpt_oss",
    "dbrx",
    "longcat_flash",
)
"""What most tests of recording go through; test_architectures.py hooks every one there is."""


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=ARCHITECTURES)
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return tiny(request.param)


def tiny(architecture: str, **changes: Any) -> LoadedModel:
    """A random model of an architecture, its tokens bytes."""
    return LoadedModel(architecture, tiny_model(architecture, **changes), byte_tokenizer())


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: int
    stdout: str
    stderr: str


Run = Callable[..., Ended]


@pytest.fixture
def moe_trace(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command in this process."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["moe-trace", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        status = ended.value.code
        assert isinstance(status, int)
        return Ended(status, *capsys.readouterr())

    return run
