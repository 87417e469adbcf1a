"""Models counted from their configs: against transformers' own model and cache, and against published numbers."""

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.integrations import finegrained_fp8
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.utils.quantization_config import FineGrainedFP8Config

from tests.support.architectures import names, tiny_model
from tests.support.profiles import QWEN3
from traces import InputError
from traces.models.meta import counted
from traces.models.precision import Precision, Weight, precision_of
from traces.models.profile import ModelProfile, model, written
from traces.models.sites import find_sites
from traces.models.weights import Weights

BASE: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
    "torch_dtype": "bfloat16",
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_experts_per_tok": 2,
}
NEMOTRON = {**BASE, "model_type": "nemotron_h", "n_routed_experts": 4, "mlp_hidden_act": "relu2"}
NANO = {
    **NEMOTRON,
    "num_hidden_layers": 52,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "hidden_size": 2688,
    "vocab_size": 131072,
    "num_attention_heads": 32,
    "head_dim": 128,
    "intermediate_size": 1856,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "mamba_num_heads": 64,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
}
KIMI = {**BASE, "model_type": "kimi_linear", "num_experts": 4, "num_experts_per_token": 2, "first_k_dense_replace": 0}
MUSE = {**BASE, "model_type": "muse_spark_text", "num_local_experts": 4, "num_hidden_layers": 2}
STEP = {**BASE, "model_type": "step3p5", "moe_num_experts": 4, "moe_top_k": 2, "intermediate_size": 512}
MIMO = {**BASE, "model_type": "mimo_v2_flash", "n_routed_experts": 4}
FLASH: dict[str, Any] = {
    "torch_dtype": "bfloat16",
    "num_experts_per_tok": 2,
    "model_type": "deepseek_v4",
    "num_hidden_layers": 43,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "q_lora_rank": 1024,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "vocab_size": 129280,
    "expert_dtype": "fp4",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
ERNIE = {
    **BASE,
    "model_type": "ernie4_5_moe_vl",
    "num_hidden_layers": 4,
    "intermediate_size": 512,
    "moe_num_experts": [8, 8],
    "moe_intermediate_size": [128, 64],
    "moe_k": 2,
    "moe_layer_start_index": [1, 1],
    "moe_layer_end_index": [3, 3],
    "moe_layer_interval": 1,
    "moe_num_shared_experts": 2,
}


def read(config: dict[str, Any]) -> ModelProfile:
    return counted(config, "x", precision_of(config))


@pytest.mark.parametrize(
    ("config", "layers", "experts", "expert_bytes"),
    [
        pytest.param({**NEMOTRON, "hybrid_override_pattern": "EE"}, 2, 4, 2 * 256 * 128 * 2, id="without a gate"),
        pytest.param({**NEMOTRON, "hybrid_override_pattern": "MEM*ME"}, 2, 4, 2 * 256 * 128 * 2, id="pattern"),
        pytest.param(
            {**NEMOTRON, "layers_block_type": ["mamba", "moe", "mamba", "attention", "mamba", "moe"]},
            *(2, 4, 2 * 256 * 128 * 2),
            id="blocks",
        ),
        pytest.param(NANO, 23, 128, 2 * 2688 * 1856 * 2, id="nemotron 3 nano"),
        pytest.param(
            {**NEMOTRON, "hybrid_override_pattern": "EE", "moe_latent_size": 64}, 2, 4, 2 * 64 * 128 * 2, id="latent"
        ),
        pytest.param(
            {**KIMI, "num_hidden_layers": 2, "routed_expert_hidden_size": 128}, 2, 4, 3 * 128 * 128 * 2, id="kimi k3"
        ),
        pytest.param({**MUSE, "moe_hidden_size": 128}, 2, 4, 3 * 128 * 128 * 2, id="muse"),
        pytest.param(
            {**STEP, "num_hidden_layers": 5, "moe_layers_enum": "2,3,4"}, 3, 4, 3 * 256 * 128 * 2, id="enumerated"
        ),
        pytest.param(
            {**MIMO, "num_hidden_layers": 5, "moe_layer_freq": [0, 0, 1, 1, 1]}, 3, 4, 3 * 256 * 128 * 2, id="flags"
        ),
        pytest.param(ERNIE, 3, 8, 3 * 256 * 128 * 2, id="of text and images"),
        pytest.param(FLASH, 43, 256, 3 * 4096 * 2048 * 17 // 32, id="fp4 experts"),
    ],
)
def test_experts_are_as_many_and_as_large_as_the_authors_words_say(
    config: dict[str, Any], layers: int, experts: int, expert_bytes: int
) -> None:
    found = read(config)
    assert (found.moe_layers, found.experts, found.expert_bytes) == (layers, experts, expert_bytes)


def test_a_published_model_has_the_parameters_of_its_card() -> None:
    assert read(NANO).parameters == pytest.approx(31.6e9, rel=0.001)


KINDS = [*["full_attention"], *["sliding_attention"] * 3] * 2
WINDOWS = {**STEP, "num_hidden_layers": 8, "layer_types": KINDS, "sliding_window": 512}


# Every architecture


class Read(TorchDispatchMode):
    """Notes the memory of all tensors that operations are given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [each for each in tree_leaves((args, kwargs or {})) if isinstance(each, Tensor)]
        self.seen.update(each.untyped_storage().data_ptr() for each in given)
        return operation(*args, **(kwargs or {}))


def run(made: Any, tokens: int) -> Any:
    ids = torch.arange(tokens)[None] % 250 + 5
    with torch.no_grad():
        if made.config.is_encoder_decoder:  # Switch Transformers' own call has the encoder use a cache
            return made(encoder_outputs=made.get_encoder()(ids), decoder_input_ids=ids, use_cache=True)
        return made(input_ids=ids, use_cache=True)


def held(cache: Any) -> Iterator[Tensor]:
    """All tensors of a cache; of values that are keys, none."""
    both = hasattr(cache, "cross_attention_cache")
    parts = [cache.self_attention_cache, cache.cross_attention_cache] if both else [cache]
    for layer in chain.from_iterable(part.layers for part in parts):
        own: list[Tensor] = []
        for value in vars(layer).values():
            for each in value.values() if isinstance(value, dict) else [value]:
                if isinstance(each, Tensor) and each.dim() and not any(torch.equal(each, other) for other in own):
                    own.append(each)
        yield from own


def answering(architecture: str) -> Any:
    """A tiny model as users load it, and its config as they read it."""
    made = tiny_model(architecture)
    return type(made)._from_config(made.config, dtype=torch.bfloat16).eval(), json.loads(
        json.dumps(made.config.to_dict())
    )


REFUSED = {
    "diffusion_gemma": "it denoises blocks of tokens",
    "openai_privacy_filter": "OpenAIPrivacyFilterModel keeps no cache: it does not answer",
}


FAULTS = {
    "inkling2_loop": "message_input.query is read by no pass of text",
}
"""What the reader gets wrong; whoever mends it takes the line away."""


ANSWERING = [
    pytest.param(name, marks=pytest.mark.xfail(reason=FAULTS[name], strict=True)) if name in FAULTS else name
    for name in sorted(set(names()) - set(REFUSED))
]


@pytest.mark.parametrize("architecture", ANSWERING)
def test_a_profile_is_what_the_model_has_reads_and_keeps(architecture: str) -> None:
    """Parameters in all, routed, and never read in a pass; numbers in the cache by token, by window and at all."""
    made, config = answering(architecture)
    found = counted(config, architecture, Precision(16))
    with Read() as reading:
        short = run(made, 128)
    sites = [site for site in find_sites(made) if "vision" not in site.name]
    routed = {id(each): each.numel() for site in sites for each in site.weights}
    beyond = sum(each[site.experts :].numel() for site in sites for each in site.weights if each.dim() > 2)
    idle = [
        each.numel()
        for each in made.parameters()
        if id(each) not in routed and each.untyped_storage().data_ptr() not in reading.seen
    ]
    experts = found.experts * sum(map(found.bytes_of, range(found.moe_layers))) // 2
    assert experts == sum(routed.values()) - beyond
    assert found.unused_parameters == sum(idle) + beyond
    assert experts + found.dense_bytes / 2 + found.unused_parameters == sum(each.numel() for each in made.parameters())

    pairs = list(zip(*(held(each.past_key_values) for each in (short, run(made, 256))), strict=True))
    grown = sum(after.numel() - before.numel() for before, after in pairs)
    assert sum(kind.kept(256) - kind.kept(128) for kind in found.order) == grown
    fixed = sum(after.nbytes for before, after in pairs if after.numel() == before.numel())
    window = 2 * sum(kind.windowed for kind in found.order)  # the cache keeps a window less the token that comes
    states = sum(kind.state + 2 * kind.windowed * kind.window for kind in found.order)
    assert 0 <= states - fixed <= window


@pytest.mark.parametrize("architecture", REFUSED)
def test_what_does_not_answer_is_refused(architecture: str) -> None:
    with pytest.raises(InputError, match=REFUSED[architecture]):
        counted(tiny_model(architecture).config.to_dict(), architecture, Precision(16))


# Precision

EXPERT = Weight(("model.layers.3.mlp.experts.{}.down_proj",), "expert", 8, 8)
ATTENTION = Weight(("model.layers.3.self_attn.q_proj",), "linear", 1)


def groups(**weights: Any) -> dict[str, Any]:
    of_all = {"targets": ["Linear"], "weights": weights}
    return {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"group_0": of_all}}}


def method(name: str, **more: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": name, **more}}


GRADES = {"bits": 4, "group_size": 64, "model.layers.3.self_attn.q_proj": {"bits": 8, "group_size": 32}}


@pytest.mark.parametrize(
    ("stated", "expert", "attention"),  # bits; a group's scale, and its zero point, over its size
    [
        ({}, 16, 16),
        ({"torch_dtype": "float32"}, 32, 32),
        (method("gptq", bits=8, group_size=-1), 8, 8),
        (method("gptq", bits=4, group_size=128), 4 + 20 / 128, 4 + 20 / 128),
        (method("awq", bits=4, group_size=64, modules_to_not_convert=["self_attn"]), 4 + 20 / 64, 16),
        (method("bitsandbytes", load_in_8bit=True, load_in_4bit=False), 8, 8),
        (method("bitsandbytes", load_in_8bit=False, load_in_4bit=True), 4.5, 4.5),
        (groups(num_bits=8, type="int"), 8, 8),
        (groups(num_bits=4, type="int", group_size=32), 4.5, 4.5),
        (groups(num_bits=4, type="int", group_size=128), 4.125, 4.125),
        (groups(num_bits=4, type="int", group_size=128, symmetric=False), 4 + 20 / 128, 4 + 20 / 128),
        (groups(num_bits=4, type="float", group_size=16), 4.5, 4.5),
        (method("modelopt", quant_algo="NVFP4", ignore=["*self_attn*", "lm_head"]), 4.5, 16),
        (method("modelopt", quant_algo="FP8", exclude_modules=["model.layers.*"]), 16, 16),
        (method("mxfp4"), 4.25, 16),
        (method("fp8", weight_block_size=[128, 128]), 8, 8),
        ({**method("fp8"), "expert_dtype": "fp4"}, 4.25, 8),
        ({"quantization": {"bits": 4, "group_size": 64}}, 4.5, 4.5),
        ({"quantization": GRADES}, 4.5, 9),
        ({"quantization": {**GRADES, "model.layers.3.self_attn.q_proj": False}}, 4.5, 16),
        ({"quantization": {"bits": 4, "group_size": 32, "mode": "mxfp4"}}, 4.25, 4.25),
        (method("exl3", bits=3.07), 3.07, 3.07),
    ],
)
def test_bits_are_those_that_are_stated_with_their_scales(
    stated: dict[str, Any], expert: float, attention: float
) -> None:
    found = precision_of({"torch_dtype": "bfloat16", **stated})
    assert (found.bits(EXPERT), found.bits(ATTENTION)) == (expert, attention)


LAYER = "model.layers.3"
WEIGHTS = {
    "gate": Weight(
        ("model.layers.3.mlp.experts.{}.gate_proj", "model.layers.3.mlp.switch_mlp.gate_proj"), "expert", 1, 4
    ),
    "down": Weight(("model.layers.3.mlp.experts.{}.down_proj",), "expert", 1, 4),
    "attention": Weight(("model.layers.3.self_attn.q_proj",), "linear", 1),
    "other layer": Weight(("model.layers.31.self_attn.q_proj",), "linear", 1),
    "router": Weight(("model.layers.3.mlp.gate",), "router", 1),
    "head": Weight(("lm_head",), "head", 1),
    "embedding": Weight(("model.embed_tokens",), "embedding", 1),
}
INT4, FP8 = {"num_bits": 4, "type": "int", "group_size": 32}, {"num_bits": 8, "type": "float"}


def mixed(groups: dict[str, dict[str, Any]], **more: Any) -> dict[str, Any]:
    tables = {name: {"targets": [name], "weights": weights} for name, weights in groups.items()}
    return method("compressed-tensors", config_groups=tables, **more)


def torchao(kind: str, **data: Any) -> dict[str, Any]:
    return {"_type": kind, "_data": data}


@pytest.mark.parametrize(
    ("stated", "bits"),
    [
        (
            method("gptq", bits=4, group_size=32, dynamic={r"+:.*down_proj": {"bits": 8}, r"-:.*attn": {}}),
            [4.625, 8.75, 16],
        ),
        (method("gptq", bits=8, group_size=-1, lm_head=True), [8, 8, 8, 8, 16, 8]),
        (method("gptq", bits=8, group_size=-1, modules_in_block_to_quantize=[["self_attn.q_proj"]]), [16, 16, 8]),
        (method("auto-round", bits=4, group_size=-1, extra_config={"layers.3.self_attn": {"bits": 8}}), [4, 4, 8, 4]),
        (
            method("auto-round", bits=4, group_size=-1, extra_config={r"layers\.3.*experts\.0": {"bits": 8}}),
            [5, 5, 4, 4],
        ),
        (method("auto-round", bits=4, group_size=-1, block_name_to_quantize="model.layers.3"), [4, 4, 4, 16]),
        (method("auto-round", bits=4, data_type="nv_fp", group_size=16), [4.5, 4.5]),
        (mixed({r"re:.*down_proj$": INT4, r"re:.*gate_proj$": FP8}), [8, 4.5, 16]),
        (mixed({"Linear": FP8}, ignore=["re:.*layers\\.3\\."]), [16, 16, 16, 8, 16, 8, 16]),
        (mixed({"Linear": FP8}, ignore=["model.layers.3.self_attn.q_proj", "lm_head"]), [8, 8, 16, 8, 16, 16]),
        (mixed({"model.layers.3.self_attn.q_proj": INT4}, fmt="e4m3"), [8, 8, 4.5, 8, 16, 16]),
        (method("modelopt", quant_algo="NVFP4", ignore=["model.layers.3.*", "lm_head"]), [16, 16, 16, 4.5]),
        (method("modelopt", quantized_layers={"model.layers.3.mlp.experts": {"quant_algo": "W4A16"}}), [4, 4, 16]),
        (method("fp8", moe_quant_algo="NVFP4", modules_to_not_convert=["self_attn"]), [4.5, 4.5, 16]),
        (method("mxfp8", quant_algo="MIXED_PRECISION", moe_quant_algo="NVFP4"), [4.5, 4.5, 8.25]),
        (method("fp8", expert_dtype="fp4"), [4.25, 4.25, 8, 8, 16, 16, 16]),
        (
            method("bitsandbytes", load_in_4bit=True, llm_int8_skip_modules=["self_attn"]),
            [4.5, 4.5, 16, 16, 16, 4.5, 16],
        ),
        (method("torchao", quant_type={"default": torchao("Int8WeightOnlyConfig")}), [8, 8, 8, 8, 16, 16, 16]),
        (
            method(
                "torchao",
                quant_type={
                    "default": torchao(
                        "FqnToConfig",
                        fqn_to_config={
                            "re:.*experts.*": torchao("Int4WeightOnlyConfig", group_size=32),
                            "_default": None,
                        },
                    )
                },
            ),
            [5, 5, 16],
        ),
        (
            method(
                "quark",
                global_quant_config={"weight": {"dtype": "fp4", "group_size": 32}, "input_tensors": {"dtype": "int8"}},
                layer_quant_config={"*self_attn*": {"weight": {"dtype": "fp8_e4m3"}}},
                exclude=["lm_head"],
            ),
            [4.25, 4.25, 8, 8, 16, 16],
        ),
        (method("hqq", quant_config={"self_attn.q_proj": {"nbits": 4, "group_size": 64}}), [16, 16, 4.25]),
        (method("exl3", bits=3.07, head_bits=6), [3.07, 3.07, 3.07, 3.07, 16, 6, 16]),
        (
            {"quantization": {"bits": 4, "model.layers.3.mlp.switch_mlp.gate_proj": {"bits": 8}, "lm_head": False}},
            [8.5, 4.5, 4.5, 4.5, 4.5, 16, 4.5],
        ),
    ],
)
def test_bits_are_those_of_each_module(stated: dict[str, Any], bits: list[float]) -> None:
    found = precision_of({"torch_dtype": "bfloat16", **stated})
    assert [found.bits(weight) for weight in WEIGHTS.values()][: len(bits)] == bits
    assert found.notes == found.unmatched(name for weight in WEIGHTS.values() for name in weight.names) == []


@pytest.mark.parametrize(
    ("changed", "note"),
    [
        (method("fp8", modules_to_not_convert=["lm_head", "mlp.shared_expert"]), "not have: 'mlp.shared_expert'"),
        (method("fp8", modules_to_not_convert=["model.layers.48.mlp", "visual"]), ""),
        (mixed({"re:.*fc1$": INT4}), r"not have: 're:\.\*fc1\$'"),
        (method("gptq", bits=4, expert_bits=2), "quantization_config.expert_bits is not understood"),
        ({"moe_latent_size": 64}, "moe_latent_size: transformers .* reads no such key of a qwen3_moe"),
        ({"expert_hidden_dim": 768, "sinks": [5]}, ""),  # again what moe_intermediate_size says; no size
    ],
)
def test_what_is_not_understood_is_a_note(changed: dict[str, Any], note: str) -> None:
    notes = read({**QWEN3, **changed}).notes
    assert re.search(note, "; ".join(notes)) if note else not notes


APART = {"diffusion_gemma", "jetmoe", "nllb_moe", "switch_transformers"}
"""Architectures whose experts transformers' quantizer does not take out as one module."""


@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize("architecture", sorted(set(names()) - APART))
def test_linear_layers_are_those_that_transformers_quantises(architecture: str, lists: bool) -> None:
    made = deepcopy(tiny_model(architecture))
    modules = [
        (name, each) for name, each in made.named_modules() if not re.search(r"\.experts\.|vis|audio|projector", name)
    ]
    linear = {name: module.weight for name, module in modules if isinstance(module, nn.Linear)}
    sites = find_sites(made)
    routers = {weight for site in sites if site.router is not None for weight in site.router.parameters()}
    weights = Weights(made, sites, routers)
    listed = ["lm_head", *(weights.of[each][0].names[-1] for each in [*linear.values()][::3])] if lists else None
    found = precision_of({"dtype": "bfloat16", **method("fp8", modules_to_not_convert=listed)})
    ours = {name for name, weight in linear.items() if weight not in routers and weights.width([weight], found) == 1}
    with patch.object(finegrained_fp8, "use_experts_implementation", lambda **_: lambda **_: nn.Identity()):
        config = FineGrainedFP8Config(modules_to_not_convert=listed)
        FineGrainedFP8HfQuantizer(config)._process_model_before_weight_loading(made)
    theirs = {name for name in linear if isinstance(made.get_submodule(name), finegrained_fp8.FP8Linear)}
    assert ours == {name for name in theirs if linear[name] not in routers}


def test_modelopts_own_file_is_read_beside_a_config(tmp_path: Path) -> None:
    stated = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}}
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(stated))
    found = model(str(tmp_path))
    assert 48 * 128 * found.expert_bytes == 16_307_453_952
    assert found.dense_bytes_per_parameter == pytest.approx(4.5 / 8, rel=0.05)
    assert found.head_bytes_per_parameter == 2


def test_a_config_that_states_no_precision_is_not_bf16_without_a_word() -> None:
    assert precision_of({}).bits(EXPERT) == 16
    assert precision_of({}).notes == ["the config states no dtype and no quantisation: bf16 is assumed"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (method("vptq"), "'vptq': nothing says how many bits"),
        (method("modelopt", quant_algo="MAGIC"), "quant_algo 'MAGIC'"),
        ({"expert_dtype": "fp3"}, "expert_dtype 'fp3'"),
        ({"num_experts_per_tok": 200}, "top_k 200 is above 128 experts"),
        ({"num_experts": None}, "num_experts"),
        ({"vocab_size": None}, "vocab_size"),
        ({"model_type": "smallthinker"}, "model_type 'smallthinker' is not known to transformers"),
        ({"mlp_only_layers": [*range(48)]}, "no layer of Qwen3MoeForCausalLM has routed experts"),
        ({"model_type": None, "moe": {"num_experts": 8}}, r"Mistral's own format \(params.json\)"),
    ],
)
def test_a_config_that_cannot_be_used_says_why(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**QWEN3, **changed}))
    with pytest.raises(InputError, match=f"mine.json: .*{message}"):
        model(str(path))


@pytest.mark.parametrize("config", [NANO, FLASH, WINDOWS], ids=["nemotron", "deepseek", "step"])
def test_a_written_profile_is_the_counted_one(config: dict[str, Any], tmp_path: Path) -> None:
    found = read(config)
    (tmp_path / "x.toml").write_text(written(found, "# made by a test\n"))
    assert model(str(tmp_path / "x.toml")) == found
