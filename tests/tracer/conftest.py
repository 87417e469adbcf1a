"""Tiny random models of some architectures with a tokenizer, ready to generate."""

import pytest
import torch

from tests.support.architectures import tiny
from tests.support.command import Run, run
from tracer.answers import LoadedModel
from tracer.commands import main

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


@pytest.fixture
def moe_trace(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `moe-trace` in this process."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return lambda *arguments: run(main, *arguments)
