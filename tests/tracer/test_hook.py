"""What the hook makes of layers' choices: passes, weights, gate probabilities, lookahead, and what it refuses."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.architectures import COMMON, tiny_model
from tests.support.routing_oracle import IDS, observed, probabilities, run
from tracer.hook import ExpertsHook
from tracer.observed import Wanted
from traces import InputError

BATCH = torch.cat([IDS, torch.cat([torch.zeros_like(IDS[:, :4]), IDS[:, :6] + 1], 1)])
MASK = (torch.arange(10) >= torch.tensor([[0], [4]])).long()


def refused(model: nn.Module, **wanted: Any) -> str:
    with pytest.raises(InputError) as error, ExpertsHook(model, Wanted(**wanted)) as hook:
        hook.probe()
    return str(error.value)


class FewExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return hidden


class Odd(nn.Module):
    """A model that calls its experts as it likes."""

    def __init__(self, calls: list[int]):
        super().__init__()
        self.calls = calls
        self.layers = nn.ModuleList(FewExperts() for _ in calls)
        self.towers = nn.ModuleList(FewExperts() for _ in range(2))
        self.weight = nn.Parameter(torch.zeros(1))
        self.index: Sequence[Sequence[float]] = [[3, 1]] * len(calls)
        self.weights = [1.0, 1.0]
        self.order: Sequence[int] = range(len(calls))

    def forward(self, input_ids: Tensor) -> None:
        hidden = torch.zeros(input_ids.numel(), 3)
        for layer in self.order:
            index = torch.tensor([self.index[layer]]).expand(input_ids.numel(), -1)
            weights = torch.tensor([self.weights[: index.shape[1]]]).expand(index.shape)
            for _ in range(self.calls[layer]):
                self.layers[layer](hidden, weights=weights, index=index)


@contextmanager
def probed(model: nn.Module, **wanted: Any) -> Iterator[ExpertsHook]:
    with ExpertsHook(model, Wanted(**wanted)) as hook:
        hook.probe()
        yield hook


def test_weights_that_are_not_finite_are_refused() -> None:
    model = Odd([1, 1])
    model.weights = [float("nan"), 1.0]
    assert "layers.0 weighs its experts with values that are not finite" in refused(model)


class TestPasses:
    def test_each_forward_pass_is_one_record(self) -> None:
        with probed(Odd([1, 1])) as hook:
            hook.model(IDS)
            hook.model(IDS[:, :1])
            assert [seen.ids.tolist() for seen in hook.passes] == [[[[3, 1]] * 2] * 10, [[[3, 1]] * 2]]
            assert all(seen.ids.dtype == np.int32 and seen.stack == 0 for seen in hook.passes)
            for seen in hook.passes:
                assert (seen.weights, seen.scores, seen.lookahead) == (None, None, None)
            hook.clear()
            assert not hook.passes

    def test_ids_beyond_the_experts_are_not_routed_and_an_expert_without_weight_is(self) -> None:
        model = Odd([1])
        model.index, model.weights = [[7, 1, -1, 4, 2, 0]], [0.4, 0.3, 0.1, 0.1, 0.1, 0.0]
        with probed(model, weights=True) as hook:
            model(IDS)
            assert hook.passes[0].ids[0].tolist() == [[1, 2, 0, -1, -1, -1]]
            assert hook.passes[0].weights is not None
            assert hook.passes[0].weights[0, 0].astype(float).round(2).tolist() == [0.3, 0.1, 0, 0, 0, 0]

    def test_layers_of_smaller_k_are_filled_up(self) -> None:
        model = Odd([1, 1])
        model.index = [[2], [3, 1]]
        with probed(model, weights=True) as hook:
            model(IDS)
            assert hook.top_k == 2
            assert hook.passes[0].ids[0].tolist() == [[2, -1], [3, 1]]
            assert hook.passes[0].weights is not None
            assert hook.passes[0].weights[0].tolist() == [[1, 0], [1, 1]]

    def test_ids_alone_take_one_hook_a_layer(self) -> None:
        model = tiny_model("mixtral")
        with probed(model) as hook:
            hooks = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())
            assert hooks == len(hook.sites) + 1

    def test_what_an_interrupted_pass_left_is_forgotten(self) -> None:
        model = Odd([1, 1])
        with probed(model) as hook:
            model.order = [0, 9]
            with pytest.raises(IndexError):
                model(IDS)
            model.order = [0, 1]
            hook.clear()
            model(IDS)
            assert len(hook.passes) == 1

    def test_weights_are_those_of_the_experts_and_sorted(self) -> None:
        model = tiny_model("mixtral")
        given: list[tuple[Tensor, Tensor]] = []
        for layer in model.model.layers:
            layer.mlp.experts.register_forward_pre_hook(lambda _, args: given.append(args[1:]))
        _, passes = observed(model, wanted=("weights",))
        weights = passes[0].weights
        assert weights is not None
        for layer, (index, weight) in enumerate(given[-3:]):
            for token in range(10):
                pairs = sorted(zip(weight[token].half().tolist(), index[token].tolist(), strict=True), reverse=True)
                assert list(zip(weights[token, layer].tolist(), passes[0].ids[token, layer], strict=True)) == pairs


class TestLayers:
    def test_they_are_listed_in_the_order_of_execution(self) -> None:
        model = Odd([1, 1, 1])
        model.order = [2, 0, 1]
        with probed(model) as hook:
            assert hook.names == ["layers.2", "layers.0", "layers.1"]
            assert hook.modules == [model.layers[2], model.layers[0], model.layers[1]]
            assert (hook.experts, hook.top_k, hook.stacks) == (4, 2, 1)
            model.order = [0, 1, 2]
            with pytest.raises(InputError, match="Odd run in an order that changes"):
                model(IDS)

    def test_those_that_text_never_reaches_are_left_out_with_a_note(self) -> None:
        with probed(Odd([1, 1])) as hook:
            assert hook.names == ["layers.0", "layers.1"]
            assert hook.notes == ["not recorded, because text does not run through them: towers.*"]

    @pytest.mark.parametrize("times", [0, 2])
    def test_one_that_is_not_called_exactly_once_is_named(self, times: int) -> None:
        assert f"layers.1 was called {times} times in one forward pass" in refused(Odd([1, times, 1]))

    def test_a_model_without_any_is_refused(self) -> None:
        assert "LlamaForCausalLM has no routed experts" in refused(LlamaForCausalLM(LlamaConfig(**COMMON)))

    def test_hooks_are_gone_afterwards_also_when_entering_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = tiny_model("mixtral")
        monkeypatch.setattr("tracer.hook.partial", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ExpertsHook(model, Wanted(lookahead=(1,), scores=1)).__enter__()
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


class TestScores:
    def recorded(self, architecture: str, router: str) -> tuple[Any, Tensor, list[Tensor]]:
        """The model, probabilities [T, L, E] as recorded, and what entered each router, [T, H]."""
        model = tiny_model(architecture)
        inputs: list[Tensor] = []
        for name, module in model.named_modules():
            if name.endswith(router):
                module.register_forward_pre_hook(lambda _, args: inputs.append(args[0].reshape(-1, args[0].shape[-1])))
        hook, passes = observed(model, wanted=("scores",))
        return model, torch.tensor(probabilities(passes[0], hook.experts)).float(), inputs[-len(hook.names) :]

    @pytest.mark.parametrize(
        ("architecture", "router", "transform"),
        [
            ("mixtral", "mlp.gate", lambda logits: logits.softmax(-1)),
            ("olmoe", "mlp.gate", lambda logits: logits.softmax(-1)),
            ("deepseek_v3", "mlp.gate", lambda logits: logits.sigmoid()),  # without the correction bias
            ("deepseek_v4", "mlp.gate", lambda logits: nn.functional.softplus(logits).sqrt()),
            ("llama4", "feed_forward.router", lambda logits: logits.sigmoid()),
        ],
    )
    def test_they_are_what_the_router_computes(self, architecture: str, router: str, transform: Any) -> None:
        model, probs, inputs = self.recorded(architecture, router)
        routers = [module for name, module in model.named_modules() if name.endswith(router)]
        assert probs.shape == (10, len(routers), 8)
        for layer, (module, states) in enumerate(zip(routers, inputs, strict=True)):
            assert torch.allclose(probs[:, layer], transform(states @ module.weight.T), atol=1e-3)

    def test_of_product_keys_they_cover_all_pairs(self) -> None:
        model, probs, inputs = self.recorded("doge", "router_gate")
        keys = (inputs[0] @ model.model.layers[0].mlp.router_gate.weight.T).view(2, 10, 2)
        pairs = torch.stack([keys[0, :, i] + keys[1, :, j] for i in (0, 1) for j in (0, 1)], -1).softmax(-1)
        assert torch.allclose(probs[:, 0, :4], pairs, atol=1e-3)
        assert (probs[:, :, 4:] < 1e-30).all()

    def test_identity_experts_have_no_column(self) -> None:
        _, probs, _ = self.recorded("longcat_flash", "mlp.router")
        assert probs.shape[-1] == 8
        assert (probs.sum(-1) < 0.999).any()

    def test_weights_that_no_probabilities_explain_are_refused_with_the_layers_name(self) -> None:
        model = tiny_model("gemma4")
        torch.nn.init.uniform_(model.model.layers[1].router.per_expert_scale, 0.5, 2.0)
        assert "gate probabilities of model.layers.1.experts cannot be recorded" in refused(model, scores=1)

    def test_a_layer_without_a_router_is_refused(self) -> None:
        assert "gate probabilities of layers.0 cannot be recorded" in refused(Odd([1, 1]), scores=1)


def softmax_router(gate: Any, states: Tensor, n: int = 2) -> Any:
    return (states @ gate.weight.T).topk(n).indices


def biased_router(router: Any, states: Tensor, n: int = 2) -> Any:
    return (states @ router.weight.T + router.bias).topk(n).indices


def grouped_router(gate: Any, states: Tensor, n: int = 2) -> Any:
    scores = (states @ gate.weight.T).sigmoid() + gate.e_score_correction_bias
    of_groups = scores.view(-1, 4, 2)
    best = of_groups.sum(-1).topk(2).indices
    allowed = torch.zeros(len(scores), 4, dtype=torch.bool).scatter_(1, best, True)
    return scores.masked_fill(~allowed.repeat_interleave(2, 1), -torch.inf).topk(n).indices


class TestLookahead:
    @pytest.mark.parametrize(
        ("architecture", "block", "router", "choose"),
        [
            ("mixtral", "mlp", "gate", softmax_router),
            ("olmoe", "mlp", "gate", softmax_router),
            ("deepseek_v3", "mlp", "gate", grouped_router),
            ("gpt_oss", "mlp", "router", biased_router),
            ("llama4", "feed_forward", "router", softmax_router),
        ],
    )
    def test_it_is_the_choice_for_what_entered_the_block_before(
        self, architecture: str, block: str, router: str, choose: Any
    ) -> None:
        model = tiny_model(architecture)
        blocks = [getattr(layer, block) for layer in model.model.layers]
        blocks = [module for module in blocks if hasattr(module, router)]
        entered: list[Tensor] = []
        for module in blocks:
            module.register_forward_pre_hook(lambda _, args: entered.append(args[0].reshape(-1, args[0].shape[-1])))
        _, passes = observed(model, BATCH, ("lookahead",), attention_mask=MASK)
        ahead, entered = passes[0].lookahead, entered[-len(blocks) :]
        assert ahead is not None
        assert passes[0].lookahead_scores is not None
        assert ahead.shape == passes[0].lookahead_scores.shape == (20, len(blocks), 3, 4)
        for layer in range(len(blocks)):
            for far in (1, 2, 3):
                if far > layer:
                    assert (ahead[:, layer, far - 1] == -1).all()
                    continue
                for n in (2, 4):  # the choice stands in front of the further picks
                    chosen = choose(getattr(blocks[layer], router), entered[layer - far], n).sort(-1).values
                    assert np.sort(ahead[:, layer, far - 1, :n], -1).tolist() == chosen.tolist()
        assert (np.sort(ahead[:, 1:, 0, :2], -1) != np.sort(passes[0].ids[:, 1:], -1)).any()

    @pytest.mark.parametrize(("architecture", "scores"), [("gemma4", "proj"), ("jetmoe", "layer")])
    def test_where_attention_is_in_the_block_only_the_router_is_tried(self, architecture: str, scores: str) -> None:
        model = tiny_model(architecture)
        routers: Any = [site.router for site in observed(model)[0].sites]
        entered: list[Tensor] = []
        logits: list[Tensor] = []
        for router in routers:
            router.register_forward_pre_hook(lambda _, args: entered.append(args[0]))
            getattr(router, scores).register_forward_hook(lambda _, args, output: logits.append(output))
        ahead = observed(model, wanted=("lookahead",))[1][0].lookahead
        assert ahead is not None
        before = entered[-len(routers) :]
        for layer in range(1, len(routers)):
            with torch.no_grad():
                routers[layer](before[layer - 1])
            for n in (2, 4):
                chosen = logits[-1].topk(n).indices.sort(-1).values
                assert np.sort(ahead[:, layer, 0, :n], -1).tolist() == chosen.tolist()

    def test_words_decide_where_the_router_hashes_them(self) -> None:
        model = tiny_model("deepseek_v4", mlp_layer_types=["hash_moe"] * 3)
        _, passes = observed(model, wanted=("lookahead",))
        assert passes[0].lookahead is not None
        picks = np.sort(passes[0].lookahead[:, 1:, 0, :2], -1)
        assert picks.tolist() == np.sort(passes[0].ids[:, 1:], -1).tolist()

    def test_the_first_layer_of_each_pass_has_none(self) -> None:
        with probed(tiny_model("mixtral"), lookahead=(1,)) as hook:
            for _ in range(2):
                run(hook.model)
            first, second = (seen.lookahead for seen in hook.passes)
        assert first is not None
        assert second is not None
        assert (first[:, 0] == -1).all()
        assert np.array_equal(first, second)

    def test_tries_draw_no_random_numbers_and_are_not_calls(self) -> None:
        model = tiny_model("mixtral")
        calls = []

        def drawing() -> None:
            torch.rand(1)

        for layer in model.model.layers:
            layer.mlp.gate.register_forward_pre_hook(lambda *_: drawing())
            layer.mlp.experts.register_forward_hook(lambda *_: calls.append(1))
        with probed(model, lookahead=(1,)) as hook:
            calls.clear()
            torch.manual_seed(5)
            run(model)
            drawn = torch.rand(1)
            assert len(calls) == len(hook.names)
        torch.manual_seed(5)
        run(model)
        assert torch.equal(torch.rand(1), drawn)

    def test_a_layer_without_a_router_is_refused(self) -> None:
        assert "lookahead of layers.0 cannot be recorded" in refused(Odd([1, 1]), lookahead=(1,))

    def test_a_router_that_chooses_anew_each_time_is_refused(self) -> None:
        model = tiny_model("mixtral")
        gate = model.model.layers[1].mlp.gate
        flips = iter([1.0, 1.0, -1.0] * 9)
        gate.register_forward_pre_hook(lambda _, args: (args[0] * next(flips),))
        assert "lookahead of model.layers.1.mlp.experts cannot be recorded" in refused(model, lookahead=(1,))
