"""The real peer, on tiny models of each family: the same shapes as the profile, weights that are offloaded."""

from contextlib import contextmanager

import pytest
import torch

from benchmarks.checks.peers import FAMILIES, accelerate_offload, build
from tests.support.profiles import HALF, plain
from traces import InputError
from traces.models.profile import model


def small(name: str):
    of, more = model(name), {"hidden_size": 64, "experts": 4, "expert_intermediate_size": 32, "vocabulary": 128, **HALF}
    if of.kv_latent_size:
        sizes = {"kv_latent_size": 16, "rope_head_size": 8, "mlp": 96, "shared": 64}
        return plain(name, "1 dense", "2 moe", **more, **sizes)
    return plain(name, "2 moe", kv_heads=2 if of.kv_heads else 0, **more)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_accelerate_decodes_a_model_of_the_profiles_shape_with_its_weights_offloaded(name):
    profile = small(name)
    found = accelerate_offload(profile, torch.device("cpu"), tokens=2, context=5)
    assert len(found.tpot_ms) == 2
    experts = profile.moe_layers * profile.experts * profile.expert_bytes
    assert found.weight_bytes == pytest.approx(experts + profile.dense_bytes, rel=0.02)


def test_accelerate_offloads_to_a_disk_and_decodes_within_what_it_is_given(tmp_path):
    entered = []

    @contextmanager
    def within():
        entered.append(sorted(path.suffix for path in tmp_path.rglob("*.*")))
        yield

    found = accelerate_offload(
        small("olmoe-1b-7b"), torch.device("cpu"), tokens=1, context=3, folder=tmp_path / "files", within=within()
    )
    assert len(found.tpot_ms) == 1
    assert ".dat" in entered[0]


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_parameters_are_random_and_rotary_frequencies_are_those_of_a_model_made_the_usual_way(name):
    from transformers import AutoModelForCausalLM

    made = build(small(name))
    usual = AutoModelForCausalLM.from_config(made.config)
    theirs = dict(usual.named_buffers())
    assert theirs
    for key, value in made.named_buffers():
        torch.testing.assert_close(value, theirs[key])
    assert all(parameter.ne(0).float().mean() > 0.9 for parameter in made.parameters())


def test_no_two_experts_are_alike_and_some_are_chosen_more_often():
    weights = build(small("olmoe-1b-7b")).state_dict()
    experts = torch.cat([weight.flatten(1) for name, weight in weights.items() if name.endswith("experts.down_proj")])
    assert len(experts.unique(dim=0)) == len(experts) == 8
    lengths = torch.cat(
        [weight.float().norm(dim=1) for name, weight in weights.items() if name.endswith("gate.weight")]
    )
    assert lengths.max() > 2 * lengths.min()


def test_a_family_that_is_not_in_the_table_is_refused():
    with pytest.raises(InputError, match="arctic"):
        build(model("arctic"))
