from dataclasses import replace
from pathlib import Path

import pytest

from sim.catalogue.parts import GPUS
from sim.experiment import resolve
from sim.planner.resources import resources
from sim.profiles.hardware_profile import MACHINES, gpu_of, hardware
from traces import InputError
from traces.models.profile import MODELS, derived, model, of_trace
from traces.schema import TraceMeta

A5000 = MACHINES.find("a5000")


def meta(name, layers, experts, top_k, **sizes):
    names = tuple(f"layers.{i}" for i in range(layers))
    return TraceMeta(model=name, layers=layers, experts=experts, top_k=top_k, layer_names=names, **sizes)


@pytest.mark.parametrize("name", MACHINES.names())
def test_every_shipped_machine_is_plausible(name):
    machine = hardware(name)
    assert 10 <= machine.link_bandwidth_gb_per_s <= (450 if name == "gh200" else 64)  # NVLink-C2C
    assert 10 < machine.memory_bandwidth_gb_per_s / machine.link_bandwidth_gb_per_s < 90
    assert machine.name == name


@pytest.mark.parametrize("name", [name for name in MACHINES.names() if name != "demo"])  # which is no GPU to buy
def test_every_shipped_machine_is_known_by_name_and_title_to_all_commands(name):
    title = hardware(name).title
    assert gpu_of(name) == gpu_of(title)
    assert hardware(title) == hardware(name.upper()) == hardware(name)
    assert resolve("hardware", title) == name


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_of_the_catalogue_is_known_to_all_commands(name):
    """With its maker too: to those that take --hardware, to the planner's --gpu, and to rows of the back-test."""
    spelled = f"NVIDIA GeForce {name.lower()}"
    machine = hardware(name)
    assert gpu_of(spelled) == gpu_of(name) == GPUS[name]
    assert hardware(spelled) == machine
    assert resolve("hardware", spelled) == machine.name
    assert 0.8 < machine.memory_bandwidth_gb_per_s / GPUS[name].gb_per_s <= 1
    (planned,) = resources(gpu=spelled, host_memory="64GiB").gpus
    assert replace(planned, memory_gib=GPUS[name].memory_gib) == GPUS[name]


def test_a_machine_may_be_a_file(tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text(A5000.read_text().replace("= 24.0  # PCIe", "= 12.0  # PCIe"))
    assert hardware(str(mine)) == replace(hardware("a5000"), name="mine", link_bandwidth_gb_per_s=12.0)


def test_an_impossible_machine_is_refused_with_file_and_key(tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text(A5000.read_text().replace("memory_gib = 24.0", "memory_gib = 0.0"))
    with pytest.raises(InputError, match=r"mine\.toml: memory_gib = 0\.0"):
        hardware(str(mine))
    mine.write_text(A5000.read_text().replace("memory_gib = 24.0", "memory_gb = 24.0"))
    with pytest.raises(InputError, match=r"mine\.toml: unknown key 'memory_gb'; did you mean memory_gib"):
        hardware(str(mine))


def test_a_calibrations_facts_are_kept_and_change_nothing_else(tmp_path):
    mine = tmp_path / "mine.toml"
    facts = {"gpu": "none", "pinned_gb_per_s": [[65536, 4.5]], "noise": {"olmoe-1b-7b": 0.01}}
    told = 'gpu = "none"\npinned_gb_per_s = [[65536, 4.5]]\n[calibration.noise]\nolmoe-1b-7b = 0.01\n'
    mine.write_text(f"{A5000.read_text()}\n[calibration]\n{told}")
    assert hardware(str(mine)) == replace(hardware("a5000"), name="mine", calibration=facts)
    assert hash(hardware(str(mine))) == hash(replace(hardware("a5000"), name="mine"))


# Models: the paper's table, as derived from the shapes

PAPER = {  # MB an expert, GB a token, ms at 24 GB/s
    "deepseek-v2-lite": (17.30, 2.70, 112),
    "mixtral-8x7b": (352, 22.5, 940),
    "arctic": (209, 14.6, 610),
    "nllb-moe-54b": (134, 1.6, 67),
    "switch-large-128": (33.6, 0.40, 17),
    "qwen3-30b-a3b": (9.44, 3.62, 151),
    "gpt-oss-20b": (13.2, 1.27, 53),
    "gpt-oss-20b-bf16": (49.8, 4.78, 199),
    "olmoe-1b-7b": (12.6, 1.61, 67),
}


@pytest.mark.parametrize("name", PAPER)
def test_shapes_give_the_bytes_that_are_published(name):
    expert_mb, token_gb, token_ms = PAPER[name]
    profile = model(name)
    assert profile.expert_bytes / 1e6 == pytest.approx(expert_mb, rel=0.004)
    assert profile.token_bytes / 1e9 == pytest.approx(token_gb, rel=0.01)
    assert round(profile.token_bytes / 24e6) == token_ms


@pytest.mark.parametrize(
    ("name", "parameters"),  # in all, as their authors state them
    [
        ("deepseek-v2-lite", 15.7e9),
        ("mixtral-8x7b", 46.7e9),
        ("arctic", 480e9),
        ("qwen3-30b-a3b", 30.5e9),
        ("olmoe-1b-7b", 6.9e9),
        ("gpt-oss-20b", 20.9e9),
        ("gpt-oss-120b", 116.8e9),
        ("qwen3-235b-a22b", 235e9),
        ("qwen3-next-80b-a3b", 80e9),
        ("qwen3.6-35b-a3b", 35e9),
        ("qwen3.5-397b-a17b", 397e9),
        ("qwen2-57b-a14b", 57.4e9),
        ("qwen1.5-moe-a2.7b", 14.3e9),
        ("deepseek-v2", 236e9),
        ("deepseek-v3", 671e9),
        ("deepseek-v4-flash", 284e9),
        ("kimi-k2", 1.03e12),
        ("mixtral-8x22b", 140.6e9),
        ("glm-4.5", 355e9),
        ("glm-4.5-air", 106e9),
        ("phi-3.5-moe", 41.9e9),
        ("llama-4-scout", 109e9),
        ("llama-4-maverick", 400e9),
        ("dbrx", 132e9),
        ("minimax-m2", 230e9),
    ],
)
def test_shapes_give_the_parameters_that_are_published(name, parameters):
    assert model(name).parameters == pytest.approx(parameters, rel=0.02)


def test_a_profile_that_disagrees_with_the_trace_is_refused():
    with pytest.raises(InputError, match=r"olmoe-1b-7b has 16 MoE layers, the trace of allenai/.* has 4"):
        of_trace(meta("allenai/OLMoE-1B-7B-0924", 4, 64, 8))
    with pytest.raises(InputError):
        of_trace(meta("x", 16, 8, 2), "olmoe-1b-7b")
    with pytest.raises(InputError):
        of_trace(meta("x", 16, 64, 9), "olmoe-1b-7b")
    lowered = of_trace(meta("x", 16, 64, 6), "olmoe-1b-7b")
    assert lowered == replace(model("olmoe-1b-7b"), top_k=6), "as an engine was told to"


def test_a_quantised_file_by_its_name_has_the_bytes_that_its_trace_states():
    stated = meta("Qwen3-30B-A3B-Q4_K_M", 48, 128, 8, expert_bytes=3_059_712)
    profile, whole = of_trace(stated), model("qwen3-30b-a3b")
    assert (profile.name, profile.expert_bytes) == ("qwen3-30b-a3b", 3_059_712)
    assert profile.dense_bytes / whole.dense_bytes == pytest.approx(3_059_712 / whole.expert_bytes)
    assert of_trace(replace(stated, expert_bytes=None)).expert_bytes == round(9_437_184 * 4.85 / 16), "as its name says"


@pytest.mark.parametrize("sizes", [(), (2_654_208, 3_059_712) * 24])
@pytest.mark.parametrize("named", [None, "qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B-FP8", "copy.toml"])
def test_sizes_that_a_trace_states_count_under_any_profile_of_the_model(sizes, named, tmp_path):
    stated = meta("Qwen/Qwen3-30B-A3B", 48, 128, 8, expert_bytes=3_059_712, layer_expert_bytes=sizes)
    if named == "copy.toml":
        named = str(tmp_path / named)
        Path(named).write_text(MODELS.find("qwen3-30b-a3b").read_text())
    profile = of_trace(stated, named)
    assert (profile.expert_bytes, profile.layer_expert_bytes) == (3_059_712, sizes)
    assert profile.dense_bytes == of_trace(stated).dense_bytes
    sized = tmp_path / "sized.toml"
    sized.write_text(f"layer_expert_bytes = {[1000] * 48}\n{MODELS.find('qwen3-30b-a3b').read_text()}")
    assert of_trace(stated, str(sized)).expert_bytes == 1000, "that file states them by itself"
    other = of_trace(replace(stated, hidden_size=128, expert_intermediate_size=64), "qwen3-30b-a3b")
    assert other == model("qwen3-30b-a3b"), "which stands in for a model of another shape"


def test_what_is_not_an_expert_keeps_a_precision_of_its_own():
    traced = of_trace(meta("openai/gpt-oss-20b", 24, 32, 4, expert_bytes=49_766_400))
    assert (traced.expert_bytes, traced.dense_bytes) == (49_766_400, model("gpt-oss-20b").dense_bytes)


def test_an_unknown_model_is_derived_from_the_sizes_in_its_trace():
    sizes = {"hidden_size": 128, "expert_intermediate_size": 96, "expert_bytes": 147_456}
    profile = of_trace(meta("tiny-olmoe", 4, 16, 4, **sizes))
    assert (profile.name, profile.expert_bytes, profile.heads) == ("tiny-olmoe", 147_456, 2)
    with pytest.raises(InputError, match="does not state expert_bytes, hidden_size, expert_intermediate_size; choose"):
        derived(meta("tiny-olmoe", 4, 16, 4))


def test_sizes_by_layer_are_one_for_each_layer(tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text(f"layer_expert_bytes = [1000, 2000]\n{MODELS.find('olmoe-1b-7b').read_text()}")
    with pytest.raises(InputError, match="2 sizes for 16 MoE layers"):
        model(str(mine))
