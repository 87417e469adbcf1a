"""A live model under a rule that bends its routing (rule 22), and what that costs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from replay import load_model
from tests.support.command import Run
from tests.support.live_models import prompt, saved, whole_model
from traces import InputError

ARCHITECTURES = ("olmoe", "gpt_oss", "deepseek_v3", "qwen3_moe", "mixtral")
BATCH = {
    "input_ids": torch.cat([prompt(9, seed=1), prompt(9, seed=2)]),
    "attention_mask": torch.tensor([[1] * 9, [0] * 4 + [1] * 5]),
}


@pytest.fixture(autouse=True)
def _small() -> None:
    torch.set_num_threads(1)


def generated(model: Any, **settings: Any) -> torch.Tensor:
    settings = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0, **settings}
    return torch.stack(model.generate(output_logits=True, return_dict_in_generate=True, **settings).logits)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_threshold_or_bonus_of_0_gives_the_whole_model_to_the_bit(architecture: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", architecture)
    expected = generated(whole_model(folder), **BATCH)
    for routing in ("drop:below=0", "substitute:bonus=0"):
        with load_model(folder, "lru", "25%", routing=routing, lanes=1) as model:
            assert torch.equal(generated(model, **BATCH), expected)
            row = model.expert_cache.report().row
            assert (row["routing"], row["lost_weight"], row["changed_choices"]) == (None, 0, 0)


def only_the_best(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    hidden, index, weights = args
    return hidden, index, weights * (weights == weights.max(-1, keepdim=True).values)


def test_a_token_without_a_cache_computes_its_best_expert_alone_where_all_others_are_dropped(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "qwen3_moe")
    whole, ids = whole_model(folder), prompt(1, seed=3)
    for module in whole.modules():
        if type(module).__name__.endswith("Experts"):
            module.register_forward_pre_hook(only_the_best)
    with load_model(folder, "lru", "1", routing="drop:below=1", lanes=1) as model:
        assert torch.equal(generated(model, input_ids=ids), generated(whole, input_ids=ids))
        trace, row = model.expert_cache.trace, model.expert_cache.report().row
    k = trace.top_k
    assert row["routing"] == "drop:below=1"
    assert row["changed_choices"] == (k - 1) / k
    assert ((trace.experts != trace.sentinel).sum(-1) == 1).all()
    assert trace.meta.settings["routing"] == "drop:below=1"


def test_a_great_bonus_fetches_nothing_after_the_first_token(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "olmoe")
    with load_model(folder, "lru", "50%", routing="substitute:bonus=9", lanes=1) as model:
        generated(model, input_ids=prompt(1, seed=3))
        trace, counted = model.expert_cache.trace, model.expert_cache.counters
    assert counted["misses"] == trace.layers * trace.top_k
    assert (np.sort(trace.experts) == np.sort(trace.experts[:1])).all()


@pytest.mark.parametrize("architecture", ["olmoe", "deepseek_v3"])
def test_a_committed_choice_is_the_one_that_the_lookahead_names(architecture: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", architecture)
    with load_model(folder, "lru", "50%", routing="commit:layers=1", lanes=1) as model:
        generated(model, **BATCH)
        trace = model.expert_cache.trace
    assert trace.lookahead is not None
    assert (np.sort(trace.experts[:, 1:]) == np.sort(trace.lookahead[:, 1:, 0])).all()


def test_what_is_no_rule_is_refused() -> None:
    with pytest.raises(InputError, match="known: commit, drop, substitute"):
        load_model(routing="skip")


def test_the_price_of_a_rule_is_measured_on_a_text(command: Run) -> None:
    options = ("--policy", "lru", "--cache-size", "25%", "--tokens", "40", "--threads", "1", "--lanes", "1")
    rules = "drop:below=0,drop:below=1/k"
    done = command("quality", "--routing", rules, *options, "--json")
    free, dear = json.loads(done.stdout)
    assert free["perplexity"] == free["perplexity_whole"] == dear["perplexity_whole"]
    assert (free["kl"], free["agreement"], free["lost_weight"]) == (0, 1, 0)
    assert dear["fetches"] < dear["fetches_whole"]
    assert dear["perplexity_more_low"] < dear["perplexity_more"] < dear["perplexity_more_high"]
    assert 0 < dear["kl_low"] < dear["kl"] < dear["kl_high"]
