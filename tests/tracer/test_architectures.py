"""Every MoE architecture of transformers: what is recorded of a tiny model is what its experts compute."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.architectures import names, tiny_model
from tests.support.routing_oracle import IDS, asked, check, merged, observed, probabilities, run
from tracer.hook import ExpertsHook
from tracer.nllb import NOTE
from traces import InputError
from traces.models.architectures import ADAPTED
from traces.models.sites import Interface

RECORDED = sorted(set(names()) - {"diffusion_gemma"})  # by the hook; what does not answer has no recording

KNOWN = """
afmoe aria axk1 axk2 bailing_hybrid beam cohere2_moe dbrx deepseek_ocr2 deepseek_v2 deepseek_v3 deepseek_v32
deepseek_v4 diffusion_gemma doge dots1 dots3_note ernie4_5_moe ernie4_5_vl_moe exaone_moe flex_olmo flint gemma4
glm4_moe glm4_moe_lite glm4v_moe glm5_next glm_moe_dsa gpt_oss granitemoe granitemoe_swa granitemoehybrid
granitemoeshared hunyuan_v1_moe hy_v3 hy_v4 hy_v4_vl inkling inkling2 inkling2_loop jamba jetmoe kimi_linear
kolibri1 laguna lara_mini lfm2_moe llama4 longcat_flash mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl
mistral4 mistral_large4 mixtral muse_spark nemotron_h nllb_moe olmoe openai_privacy_filter phimoe qwen2_moe
qwen3_5_moe qwen3_moe qwen3_next qwen3_omni_moe qwen3_vl_moe qwen4_exp solar_open step3p7 switch_transformers
unlimited_ocr zaya
"""

PADDED = torch.cat([IDS, torch.cat([torch.zeros_like(IDS[:, :4]), IDS[:, :6] + 1], 1)])
MASK = (torch.arange(10) >= torch.tensor([[0], [4]])).long()


def test_every_architecture_of_the_installed_transformers_is_known() -> None:
    assert names() == KNOWN.split(), "try what is new by the tests below, then add it here"


@pytest.mark.parametrize("architecture", RECORDED)
def test_recorded_experts_are_those_whose_poisoned_weights_reach_the_token(architecture: str) -> None:
    seen = check(tiny_model(architecture))
    for layer in seen.swapaxes(0, 1):
        assert len(np.unique(np.sort(layer, -1), axis=0)) > 1, "the model routes all tokens alike: this shows nothing"


@pytest.mark.parametrize("architecture", RECORDED)
def test_observing_everything_changes_nothing(architecture: str) -> None:
    """Neither outputs nor buffers nor the random numbers drawn later."""
    model = tiny_model(architecture)
    wanted = [option for option in ("weights", "scores", "lookahead") if (architecture, option) not in CANNOT]
    state = torch.random.get_rng_state()
    with ExpertsHook(model) as hook:
        hook.probe()
        before = run(model)[0]
        plain = merged(hook.passes)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with ExpertsHook(model, asked(wanted)) as hook:
        hook.probe()
        assert torch.equal(run(model)[0], before)
        assert np.array_equal(merged(hook.passes), plain)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


CANNOT = {("phimoe", "scores")}
"""What is refused: SparseMixer's weights are no function of one distribution over all experts."""


@pytest.mark.parametrize("architecture", RECORDED)
def test_weights_are_gate_probabilities_up_to_one_factor_a_token(architecture: str) -> None:
    if (architecture, "scores") in CANNOT:
        pytest.skip("refused")
    hook, passes = observed(tiny_model(architecture), wanted=("weights", "scores"))
    for seen in passes:
        assert seen.weights is not None
        assert seen.scores is not None
        assert seen.scores.shape == (*seen.ids.shape[:2], hook.experts)
        weights, probs = seen.weights.astype(float), probabilities(seen, hook.experts)
        assert (np.diff(weights, axis=-1) <= 0).all()
        routed = seen.ids >= 0
        ratio = np.where(routed, weights / np.take_along_axis(probs, np.maximum(seen.ids, 0), -1).clip(1e-9), np.nan)
        for of_token in ratio[routed.sum(-1) > 1]:
            assert np.nanmax(of_token) < 1.02 * np.nanmin(of_token)


@pytest.mark.parametrize("architecture", sorted(set(RECORDED) - set(ADAPTED) - {"dbrx", "longcat_flash", "step3p7"}))
def test_every_implementation_of_the_experts_shows_the_same_routing(architecture: str) -> None:
    model, seen = tiny_model(architecture), []
    for implementation in ("eager", "batched_mm", "grouped_mm"):
        model.set_experts_implementation(implementation)
        seen.append(np.sort(merged(observed(model)[1]), axis=-1))
    assert np.array_equal(seen[0], seen[1])
    assert np.array_equal(seen[0], seen[2])


@pytest.mark.parametrize("architecture", ["mixtral", "deepseek_v3", "gpt_oss", "jetmoe", "llama4", "qwen3_next"])
def test_a_batch_padded_on_the_left_is_observed_row_by_row(architecture: str) -> None:
    model = tiny_model(architecture)
    both = check(model, PADDED, attention_mask=MASK).reshape(2, 10, -1)
    alone = merged(observed(model, PADDED[1:, 4:])[1]).reshape(6, -1)
    assert np.array_equal(both[1, 4:], alone)


@pytest.mark.parametrize(
    "architecture", ["mixtral", "deepseek_v3", "switch_transformers", "nllb_moe", "doge", "gemma4"]
)
def test_weights_on_disk_are_observed_like_those_in_memory(architecture: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    wanted = ("weights", "scores", "lookahead")
    _, at_hand = observed(tiny_model(architecture), wanted=wanted)
    model = tiny_model(architecture)
    accelerate.disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    hook, from_disk = observed(model, wanted=wanted)
    assert all(weight.is_meta for site in hook.sites for weight in site.weights)
    for one, other in zip(at_hand, from_disk, strict=True):
        for column in ("ids", *wanted):
            assert np.array_equal(getattr(one, column), getattr(other, column))


def test_adapters_are_used_where_the_list_says_so() -> None:
    adapted = {name for name in RECORDED if not all(type(s) is Interface for s in ExpertsHook(tiny_model(name)).sites)}
    assert adapted == set(ADAPTED)


def test_what_cannot_be_recorded_is_refused_with_the_layers_name() -> None:
    with pytest.raises(InputError, match=r"model\.\S*layers\.0\.experts \(\w+\) is not supported: "):
        ExpertsHook(tiny_model("diffusion_gemma"))


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [("switch_transformers", {"expert_capacity": 1}), ("nllb_moe", {"moe_eval_capacity_token_fraction": 0.1})],
)
def test_dropped_tokens_are_not_routed(architecture: str, changes: dict[str, Any]) -> None:
    seen = check(tiny_model(architecture, **changes))
    assert (seen == -1).all(-1).any(), "no token is dropped: this shows nothing"


@pytest.mark.parametrize("architecture", ["switch_transformers", "nllb_moe"])
def test_encoder_and_decoder_share_one_space_of_layers(architecture: str) -> None:
    model = tiny_model(architecture)
    hook, passes = observed(model, wanted=("weights", "scores", "lookahead"))
    assert hook.stacks == 2
    assert [seen.stack for seen in passes] == [0, 1]
    in_encoder = ["encoder." in name for name in hook.names]
    assert in_encoder == sorted(in_encoder, reverse=True)
    for seen, own in zip(passes, (np.array(in_encoder), ~np.array(in_encoder)), strict=True):
        assert (seen.ids[:, own] >= 0).any()
        assert (seen.ids[:, ~own] == -1).all()
        for column, empty in ((seen.weights, 0), (seen.scores, 0), (seen.lookahead, -1)):
            assert column is not None
            assert (column[:, ~own] == empty).all()
        assert seen.lookahead is not None
        first = int(np.flatnonzero(own)[0])
        assert (seen.lookahead[:, first] == -1).all()
        assert (seen.lookahead[:, own][:, 1:, 0] >= 0).any()


@pytest.mark.parametrize("architecture", ["switch_transformers", "nllb_moe"])
def test_generation_runs_the_encoder_once_and_then_the_decoder_alone(architecture: str) -> None:
    model = tiny_model(architecture)
    with ExpertsHook(model) as hook:
        hook.probe()
        model.generate(
            input_ids=IDS, max_new_tokens=4, min_new_tokens=4, do_sample=False, decoder_start_token_id=0, num_beams=1
        )
        assert [(seen.stack, len(seen.ids)) for seen in hook.passes] == [(0, 10), (1, 1), (1, 1), (1, 1), (1, 1)]


def test_attention_experts_of_jetmoe_are_layers_of_their_own() -> None:
    hook, _ = observed(tiny_model("jetmoe"))
    assert hook.names == [f"model.layers.{i}.{part}" for i in range(3) for part in ("self_attention.experts", "mlp")]


def test_vision_experts_that_text_never_reaches_are_left_out_with_a_note() -> None:
    hook, _ = observed(tiny_model("ernie4_5_vl_moe"))
    assert all("text_moe" in name for name in hook.names)
    assert len(hook.notes) == 1
    assert "layers.*.mlp.vision_moe.experts" in hook.notes[0]


def test_skipped_and_identity_experts_are_not_routed() -> None:
    for architecture in ("zaya", "longcat_flash"):
        ids = merged(observed(tiny_model(architecture), torch.arange(100, 164)[None])[1])
        assert (ids == -1).any(), f"no token of {architecture} skips: this shows nothing"
        assert ids.max() < 8


class TestNllb:
    def test_transformers_still_breaks_it(self) -> None:
        model = tiny_model("nllb_moe")
        called: set[int] = set()
        experts = model.model.encoder.layers[0].ffn.experts
        for number in range(8):
            experts[f"expert_{number}"].register_forward_pre_hook(lambda *_, number=number: called.add(number))
        run(model)
        assert called <= {0, 1}, (
            "transformers runs all experts of NLLB-MoE again: remove tracer/nllb.py, its use in tracer/hook.py, "
            "`mended` in tests/support/routing_oracle.py, and this test"
        )

    def test_while_recorded_each_token_is_the_weighted_sum_of_its_experts(self) -> None:
        model = tiny_model("nllb_moe")
        block = model.model.encoder.layers[0].ffn
        states = torch.randn(1, 7, 32)
        with ExpertsHook(model) as hook, torch.no_grad():
            assert hook.notes == [NOTE]
            mended = block(states)[0]
            combine = block.router(states[0], None)[1]
            each = torch.stack([block.experts[f"expert_{number}"](states[0]) for number in range(8)], 1)
            hook.clear()
        wanted = torch.einsum("te,teh->th", combine, each) * (1 - model.config.moe_token_dropout)
        assert torch.allclose(mended, wanted, atol=1e-6)
        with torch.no_grad():
            assert not torch.allclose(block(states)[0], wanted, atol=1e-3)
        assert "forward" not in vars(block.experts)
