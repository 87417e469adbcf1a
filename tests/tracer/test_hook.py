"""The hook sees what the experts compute, in every architecture, or refuses."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    JetMoeConfig,
    JetMoeForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    NllbMoeConfig,
    NllbMoeForConditionalGeneration,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
)

from tests.tracer.conftest import ARCHITECTURES, COMMON, tiny
from tracer.hook import ExpertsHook
from tracer.models import LoadedModel
from traces.errors import InputError

IDS = torch.tensor([[5, 9, 77, 31, 200, 9, 9, 120]])


def nan_rows(model: Any, experts: nn.Module, e: int, E: int) -> list[int]:
    """Which tokens expert e computes: those that turn NaN with its weights, at the output of its own module."""
    outputs: list[Tensor] = []
    handle = experts.register_forward_hook(lambda module, args, output: outputs.append(output))
    weights = [w if w.dim() == 3 else w.detach().view(E, -1) for w in experts.parameters()]
    saved = [weight[e].clone() for weight in weights]
    with torch.no_grad():
        for weight in weights:
            weight[e] = float("nan")
        model(input_ids=IDS)
        for weight, old in zip(weights, saved, strict=True):
            weight[e] = old
    handle.remove()
    return outputs[0].reshape(IDS.numel(), -1).isnan().any(-1).nonzero().ravel().tolist()


def test_recorded_experts_are_those_whose_nan_weights_reach_the_token(loaded: LoadedModel) -> None:
    model = loaded.model
    model.set_experts_implementation("eager")
    with ExpertsHook(model) as hook:
        hook.probe()
        with torch.no_grad():
            model(input_ids=IDS)
        ids, weights = hook.take(weights=True)
    assert ids.shape == (IDS.numel(), len(hook.modules), 2)
    for layer, experts in enumerate(hook.modules):
        for e in range(hook.experts):
            assert nan_rows(model, experts, e, hook.experts) == np.flatnonzero((ids[:, layer] == e).any(-1)).tolist()
    assert len(np.unique(ids)) > hook.top_k, "the model routes all tokens alike: the test shows nothing"
    assert weights is not None
    assert (np.diff(weights.astype(float), axis=-1) <= 0).all()


@pytest.mark.parametrize("loaded", sorted(set(ARCHITECTURES) - {"dbrx", "longcat_flash"}), indirect=True)
def test_every_implementation_of_the_experts_shows_the_same_routing(loaded: LoadedModel) -> None:
    seen = []
    for implementation in ("eager", "batched_mm", "grouped_mm"):
        loaded.model.set_experts_implementation(implementation)
        with ExpertsHook(loaded.model) as hook, torch.no_grad():
            hook.probe()
            loaded.model(input_ids=IDS)
            seen.append(np.sort(hook.take(weights=False)[0], axis=-1))
    assert np.array_equal(seen[0], seen[1])
    assert np.array_equal(seen[0], seen[2])


def test_experts_that_compute_nothing_are_not_routed() -> None:
    model = tiny("longcat_flash").model
    with ExpertsHook(model) as hook, torch.no_grad():
        hook.probe()
        model(input_ids=IDS)
        ids, _ = hook.take(weights=False)
    assert hook.experts == 8
    assert (ids == -1).any(), "no identity expert is chosen: the test shows nothing"
    assert (ids < 8).all()


def test_layers_are_listed_in_the_order_of_execution() -> None:
    model = tiny("deepseek_v2").model
    model.model.layers = nn.ModuleList(model.model.layers)
    with ExpertsHook(model) as hook:
        hook.probe()
    assert hook.names == ["model.layers.1.mlp.experts", "model.layers.2.mlp.experts"]
    assert (hook.experts, hook.top_k) == (8, 2)


def test_hooks_are_gone_afterwards() -> None:
    model = tiny("mixtral").model
    with ExpertsHook(model) as hook:
        hook.probe()
    assert not any(module._forward_pre_hooks for module in model.modules())


def refused(model: nn.Module) -> str:
    with pytest.raises(InputError) as error, ExpertsHook(model) as hook:
        hook.probe()
    return str(error.value)


def test_a_model_without_experts_is_refused() -> None:
    config = LlamaConfig(**{**COMMON, "num_experts_per_tok": 1})
    assert "LlamaForCausalLM has no routed experts" in refused(LlamaForCausalLM(config))


def test_models_that_route_in_another_way_are_refused() -> None:
    small = {"d_model": 16, "d_ff": 16, "d_kv": 8, "num_heads": 2, "num_layers": 2, "num_experts": 2, "vocab_size": 50}
    switch = SwitchTransformersForConditionalGeneration(
        SwitchTransformersConfig(**small, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1)
    )
    assert "encoder-decoder" in refused(switch)
    nllb = NllbMoeForConditionalGeneration(
        NllbMoeConfig(
            vocab_size=50,
            d_model=16,
            encoder_layers=2,
            decoder_layers=2,
            encoder_ffn_dim=16,
            decoder_ffn_dim=16,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            num_experts=2,
        )
    )
    assert "encoder-decoder" in refused(nllb)
    llama4 = Llama4ForCausalLM(
        Llama4TextConfig(
            **{
                **COMMON,
                "num_local_experts": 2,
                "intermediate_size_mlp": 16,
                "head_dim": 8,
                "num_experts_per_tok": 1,
                "interleave_moe_layer_step": 1,
            }
        )
    )
    assert "Llama4TextExperts" in refused(llama4)
    jetmoe = JetMoeForCausalLM(
        JetMoeConfig(
            vocab_size=50,
            hidden_size=16,
            num_hidden_layers=2,
            num_key_value_heads=1,
            kv_channels=8,
            intermediate_size=16,
            num_local_experts=2,
            num_experts_per_tok=2,
        )
    )
    assert "JetMoeParallelExperts" in refused(jetmoe)


class FewExperts(nn.Module):
    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return hidden


class Odd(nn.Module):
    """A model that calls its experts as it likes."""

    num_experts = 4

    def __init__(self, calls: list[int]):
        super().__init__()
        self.calls = calls
        self.layers = nn.ModuleList(FewExperts() for _ in calls)
        for layer in self.layers:
            layer.num_experts = 4
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, input_ids: Tensor) -> None:
        hidden = torch.zeros(input_ids.numel(), 3)
        index = torch.tensor([[3, 1]]).expand(input_ids.numel(), 2)
        for layer, times in zip(self.layers, self.calls, strict=True):
            for _ in range(times):
                layer(hidden, weights=torch.ones(index.shape), index=index)


def test_keyword_arguments_are_observed() -> None:
    with ExpertsHook(Odd([1, 1])) as hook:
        hook.probe()
        hook.model(input_ids=IDS)
        assert hook.take(weights=False)[0].tolist() == [[[3, 1]] * 2] * 8


@pytest.mark.parametrize("times", [0, 2])
def test_a_layer_that_is_not_called_exactly_once_is_named(times: int) -> None:
    text = refused(Odd([1, times, 1]))
    assert "layers.1 was called" in text
    assert f"{times} times" in text


def test_a_pass_that_skips_a_layer_later_is_an_error_too() -> None:
    model = Odd([1, 1])
    with ExpertsHook(model) as hook:
        hook.probe()
        model.calls = [1, 0]
        model(IDS)
        with pytest.raises(InputError, match=r"layers\.1 was called 0 times"):
            hook.take(weights=False)


def test_ids_beyond_the_experts_are_not_routed() -> None:
    model = Odd([1])
    model.layers[0].num_experts = 3
    with ExpertsHook(model) as hook:
        hook.probe()
        model(IDS)
        assert hook.take(weights=False)[0][0].tolist() == [[-1, 1]]
