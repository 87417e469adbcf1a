"""What experts do with one token is computed without the module's code, where that gives the same bits."""

from typing import Any

import pytest
import torch

from replay.live.experts import TRIALS, Direct
from replay.live.opening import attach
from tests.support.architectures import tiny_model

ARCHITECTURES = ("olmoe", "aria", "gpt_oss", "nemotron_h", "muse_spark", "deepseek_v3")
"""Plain experts, transposed ones, with biases, without a gate, with a norm behind, of a hub's code."""


def directs(model: Any) -> list[Direct]:
    """What a few single tokens have tried."""
    with torch.inference_mode():
        for token in range(2 * TRIALS):
            model(input_ids=torch.tensor([[token]]))
    return [direct for layer in model.expert_cache._layers for direct in layer._directs.values()]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_form_of_experts_is_computed_directly(architecture: str) -> None:
    found = directs(attach(tiny_model(architecture).eval(), "lru", "30%"))
    assert found
    assert all(direct.fits and direct.is_tried for direct in found)


@pytest.mark.parametrize(("name", "stated"), [("has_bias", True), ("_apply_gate", lambda values: values[:, :16])])
def test_experts_that_do_not_what_they_state_are_computed_by_their_own_code(name: str, stated: Any) -> None:
    """They state a bias that is not there, or a gate that they do not use."""
    model = tiny_model("olmoe").eval()
    with torch.inference_mode():
        wanted = model(input_ids=torch.tensor([[3]])).logits
    for layer in model.model.layers:
        setattr(layer.mlp.experts, name, stated)
    found = directs(attach(model, "lru", "30%"))
    assert found
    assert not any(direct.fits for direct in found)
    with torch.inference_mode():
        assert torch.equal(model(input_ids=torch.tensor([[3]])).logits, wanted)
