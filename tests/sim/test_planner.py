"""Plans: what fits where, times that can be reckoned by hand, what is missing, and how far off published speeds are."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import planner as benchmark
from sim import profiles
from sim.backtest import Model, file, score
from sim.experiment import SIMPY
from sim.planner import Plan, errors, quick
from sim.planner.placements import TOKENS, Layout, cached, missed_bytes
from sim.planner.plan import PRECISIONS, _limit_s, plan
from sim.planner.resources import GPU_RESERVED, resources
from sim.profiles.model_profile import model
from tests.support.command import moe_sim
from traces import InputError

DESKTOP: dict[str, Any] = {"gpu_memory": "12GiB", "host_memory": "32GiB", "link": "pcie4x8", "cpu_bandwidth": "50GB/s"}
LAPTOP = {**DESKTOP, "gpu_memory": "3GiB", "host_memory": "7GiB"}


@pytest.fixture(scope="module")
def desktop() -> Plan:
    return plan("qwen3-30b-a3b", precision="q4_k_m", **DESKTOP)


def test_a_desktop_gets_a_split_whose_time_adds_up_by_hand(desktop):
    profile = model("qwen3-30b-a3b").at(4.85 / 8, 4.85 / 8)
    host = desktop.llama_cpp[0].split("--n-cpu-moe ")[1].split()[0]
    per_layer = profile.top_k * profile.expert_bytes
    host_s = int(host) * (per_layer / (50e9 * 0.8 * 0.73) + 45e-6)  # data sheet to expert kernels; a hop
    gpu_bytes = (48 - int(host)) * per_layer + profile.dense_bytes - profile.head_bytes + profile.kv_cache_bytes(8192)
    gpu_s = gpu_bytes / (504e9 * 0.82 * 0.8) + 48 * 27 * 2e-6  # launches
    assert 1 / desktop.speed.tokens_per_s == pytest.approx(host_s + gpu_s, rel=0.02)
    assert desktop.speed.low < desktop.speed.tokens_per_s < desktop.speed.high
    assert desktop.wall == "CPU and host memory"


def test_what_is_said_to_be_on_the_gpu_fits_it_and_one_layer_more_would_not(desktop):
    profile = model("qwen3-30b-a3b").at(4.85 / 8, 4.85 / 8)
    fixed = profile.dense_bytes - profile.head_bytes + profile.kv_cache_bytes(8192) + GPU_RESERVED
    layer = profile.experts * profile.expert_bytes
    assert fixed + desktop.cache_bytes <= 12 * 2**30 < fixed + desktop.cache_bytes + layer
    assert desktop.cache_bytes == desktop.cache_experts * profile.expert_bytes


def test_nothing_beats_the_limit_and_more_of_a_resource_never_costs(desktop):
    assert desktop.cache is not None
    assert max(desktop.speed.tokens_per_s, desktop.cache.speed.tokens_per_s) < desktop.limit_tokens_per_s
    assert {each.resource for each in desktop.upgrades} >= {"GPU memory", "CPU bandwidth", "link", "GPU bandwidth"}
    assert all(each.gain >= 0 for each in desktop.upgrades)
    assert max(desktop.upgrades, key=lambda each: each.gain).resource == "CPU bandwidth"


def test_nothing_beats_the_limit_where_the_host_is_faster_than_the_gpu(monkeypatch):
    monkeypatch.setattr("sim.planner.plan._upgrades", lambda *_: ())  # takes half of the time
    slow = {"gpu_memory": "8GiB", "gpu_bandwidth": "50GB/s", "link": "12GB/s"}
    found = plan("mixtral-8x7b", precision="q8_0", host_memory="64GiB", cpu_bandwidth="800GB/s", context=512, **slow)
    assert found.kind == "split"
    assert found.of_limit < 1


def test_nothing_beats_the_limit_where_link_and_cpu_read_host_memory_at_once(monkeypatch):
    """Each with all of its bandwidth, they took 83% of the limit's time."""
    monkeypatch.setattr("sim.planner.plan._upgrades", lambda *_: ())
    slow: dict[str, Any] = {"gpu_memory": "3.9GiB", "gpu_bandwidth": "3277GB/s", "link": "7GB/s"}
    found = plan("gpt-oss-20b", precision="bf16", host_memory="64GiB", cpu_bandwidth="6GB/s measured", **slow)
    assert found.cache
    assert 0.9 < found.of_limit < 1


def test_the_limit_does_not_fall_where_the_gpu_holds_the_last_experts_too():
    """Host memory may still be read at the same time: with all of the model there, both bandwidths add up."""
    machine: dict[str, Any] = {"host_memory": "32GiB", "gpu_bandwidth": "1000GB/s", "cpu_bandwidth": "100GB/s"}
    layouts = [Layout(Model("gpt-oss-20b"), resources(memory, **machine), 512) for memory in ("12GiB", "24GiB")]
    some, everything = (1 / _limit_s(layout) for layout in layouts)
    assert layouts[0].host_layers > layouts[1].host_layers == 0
    assert everything == pytest.approx(1100e9 / (layouts[1].fixed_bytes + layouts[1].profile.token_bytes))
    assert some <= everything


@pytest.mark.parametrize(("memory", "helps"), [("50GB/s", True), ("12GB/s", False)])
def test_a_split_helps_where_the_link_leaves_the_cpu_bandwidth_of_host_memory(memory: str, helps: bool):
    layout = Layout(Model("gpt-oss-20b"), resources("5GiB", "64GiB", "12GB/s", cpu_bandwidth=memory), 512)
    seconds = {each.policy: each.simulated()[0] for each in cached(layout)}
    assert (seconds["lru/split"] < seconds["lru"]) == helps


def test_a_cache_has_as_many_experts_as_its_bytes_hold():
    layout = Layout(Model("deepseek-v2-lite"), resources("8GiB", "64GiB"), 512)
    memory = int(GPU_RESERVED + layout.fixed_bytes) + 30 * layout.profile.expert_bytes
    full = replace(layout, resources=replace(layout.resources, gpu_memory=memory))
    assert {each.gpu_experts for each in cached(full)} == {30}


def test_a_model_that_fits_the_gpu_needs_no_host_and_no_cache():
    found = plan("qwen3-30b-a3b", precision="q4_k_m", gpu="RTX 3090")
    assert (found.kind, found.cache, found.host_bytes, found.vllm) == ("resident", None, 0, ("--max-model-len 8192",))
    assert found.llama_cpp == ("-ngl 99 -c 8192",)
    assert found.wall == "GPU memory"


@pytest.mark.parametrize("gpu_memory", [None, "0"])
def test_without_a_gpu_the_cpu_reads_all_of_a_token(gpu_memory):
    found = plan("mixtral-8x7b", precision="q8_0", gpu_memory=gpu_memory, host_memory="64GiB", cpu_bandwidth="50GB/s")
    profile = model("mixtral-8x7b").at(8.5 / 8, 8.5 / 8)
    read = profile.token_bytes + profile.dense_bytes - profile.head_bytes + profile.kv_cache_bytes(8192)
    assert 1 / found.speed.tokens_per_s == pytest.approx(read / (50e9 * 0.8 * 0.73) + 32 * 100e-6, rel=0.02)
    assert (found.kind, found.cache, found.llama_cpp) == ("cpu", None, ("-ngl 0 -c 8192",))
    assert found.limit_tokens_per_s == pytest.approx(50e9 / read)


def test_what_memory_does_not_hold_comes_from_the_disk_and_a_lower_precision_is_named():
    found = plan("olmoe-1b-7b", disk="3GB/s", **LAPTOP)
    assert found.kind == "disk"
    assert found.disk_bytes > 5e9
    assert found.better_precision
    assert found.better_precision.name == "q4_k_m"
    assert found.better_precision.times > 3
    slow = quick("olmoe-1b-7b", disk="1GB/s", **LAPTOP)
    assert slow.tokens_per_s < found.speed.tokens_per_s


def test_experts_of_several_sizes_are_planned_with_their_own_bytes(tmp_path: Path):
    """All alike they are the plan without sizes, also over a disk; smaller ones are as many bytes less to read."""
    shipped, layers = profiles.find("models", "model", "qwen3-30b-a3b").read_text(), model("qwen3-30b-a3b").moe_layers
    size = model("qwen3-30b-a3b").expert_bytes
    for name, sizes in (("alike", [size] * layers), ("third", [size, *[size // 3] * (layers - 1)])):
        (tmp_path / f"{name}.toml").write_text(f"{shipped}\nlayer_expert_bytes = {sizes}\n")
    machine = {**DESKTOP, "host_memory": "16GiB", "disk": "3GB/s"}
    plain, alike, third = (
        quick(each, **machine) for each in ("qwen3-30b-a3b", str(tmp_path / "alike.toml"), str(tmp_path / "third.toml"))
    )
    assert alike.tokens_per_s == pytest.approx(plain.tokens_per_s, rel=0.02)
    assert third.tokens_per_s > 2 * plain.tokens_per_s
    cpu: dict[str, Any] = {"host_memory": "96GiB", "cpu_bandwidth": "50GB/s"}
    most, least = (1 / plan(str(tmp_path / f"{name}.toml"), **cpu).limit_tokens_per_s for name in ("alike", "third"))
    smaller = model("qwen3-30b-a3b").top_k * (layers - 1) * (size - size // 3)
    assert 50e9 * (most - least) == pytest.approx(smaller)


def test_the_limit_counts_missed_experts_with_their_own_bytes(tmp_path: Path):
    """Over all tokens it is a sum of whole experts, of 1,000,000 and of 10,000 bytes."""
    shipped, L = profiles.find("models", "model", "olmoe-1b-7b").read_text(), model("olmoe-1b-7b").moe_layers
    (tmp_path / "one.toml").write_text(f"{shipped}\nlayer_expert_bytes = {[10**6, *[10**4] * (L - 1)]}\n")
    layout = Layout(Model("one", str(tmp_path / "one.toml")), resources("8GiB", "8GiB"), 1)
    missed = missed_bytes(layout, "belady", 0.7 * layout.experts_bytes) * TOKENS
    assert missed > 0
    assert missed == pytest.approx(10**4 * round(missed / 10**4))


def test_a_gpu_that_is_not_used_makes_nothing_faster():
    without: dict[str, Any] = {"precision": "q4_k_m", "host_memory": "4.5GiB", "disk": "3GB/s"}
    assert quick("olmoe-1b-7b", gpu="RTX 4090", gpu_memory="1GiB", **without) == quick("olmoe-1b-7b", **without)


def test_the_precision_is_that_of_the_sizes_that_a_profile_states(tmp_path: Path):
    shipped, profile = profiles.find("models", "model", "olmoe-1b-7b").read_text(), model("olmoe-1b-7b")
    sizes = [profile.expert_parameters * 17 // 16] * profile.moe_layers  # 8.5 bits
    (tmp_path / "sized.toml").write_text(f"{shipped}\nlayer_expert_bytes = {sizes}\n")
    assert Layout(Model("sized", str(tmp_path / "sized.toml")), resources("8GiB", "8GiB"), 1).precision == "q8_0"


def test_precisions_of_a_mixed_file_are_lower_than_the_file_not_than_its_largest_experts(tmp_path: Path):
    shipped, profile = profiles.find("models", "model", "olmoe-1b-7b").read_text(), model("olmoe-1b-7b")
    size = profile.expert_bytes
    sizes = [size, *[size // 4] * (profile.moe_layers - 1)]
    (tmp_path / "mixed.toml").write_text(f"{shipped}\nlayer_expert_bytes = {sizes}\n")
    found = plan(str(tmp_path / "mixed.toml"), gpu_memory="24GiB")
    assert found.precision == "mixed"
    assert {each.name for each in found.precisions} == {"q3_k_m", "iq2_m"}


def test_an_encoder_decoder_is_refused():
    with pytest.raises(InputError, match="nllb-moe-54b is an encoder-decoder"):
        plan("nllb-moe-54b", **DESKTOP)


def test_a_small_machine_without_a_gpu_streams_from_the_disk():
    held, streamed = (quick("qwen3-30b-a3b", host_memory=memory, disk="3GB/s") for memory in ("96GiB", "16GiB"))
    assert streamed.tokens_per_s < held.tokens_per_s / 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {**DESKTOP, "precision": "bf16"},
            r"17\.\d GB are missing; give --host-memory 49GiB or --disk .*at --precision q8_0 it fits",
        ),
        ({"gpu_memory": "2GiB"}, r"do not hold the dense part .* are missing, or --host-memory"),
        ({"host_memory": "4GiB", "disk": "3GB/s", "precision": "bf16"}, r"beside experts .* are missing"),
        ({}, "a machine without memory: give --gpu-memory"),
        ({"gpu": "RTX 3O90"}, "did you mean RTX 3090"),
        ({"host_memory": "64GiB", "gpu_bandwidth": "fast"}, "a GPU without memory: give --gpu-memory"),
    ],
)
def test_what_cannot_be_is_said_with_what_is_missing(options, message):
    with pytest.raises(InputError, match=message):
        plan("qwen3-30b-a3b", **options)


def test_a_model_that_does_not_fit_as_published_is_planned_at_the_next_precision_that_does():
    found = plan("olmoe-1b-7b", **LAPTOP)
    assert (found.precision, found.notes[0].split(" at ")[0]) == ("q6_k", "q6_k, since olmoe-1b-7b")
    assert replace(found, notes=()) == replace(plan("olmoe-1b-7b", precision="q6_k", **LAPTOP), notes=())


@pytest.mark.parametrize(
    ("name", "odd", "plain"), [("gpt-oss-20b", "MXFP4", "mxfp4"), ("qwen3-30b-a3b", " UD_Q4_K_M", "q4_k_m")]
)
def test_a_precision_means_the_same_however_it_is_spelled(name, odd, plain):
    assert quick(name, precision=odd, **DESKTOP) == quick(name, precision=plain, **DESKTOP)


def test_a_config_gives_its_model_the_name_of_its_folder(tmp_path: Path) -> None:
    """All are called config.json: what was measured with one model was taken for another one with experts as large."""
    for name in ("a/config.json", "b/config.json", "mine.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(QWEN3))
    assert plan(tmp_path / "a", precision="q4_k_m", **DESKTOP).model == "a"
    paths = [tmp_path / "a", tmp_path / "a" / "config.json", tmp_path / "b" / "config.json", tmp_path / "mine.json"]
    assert [model(str(path)).name for path in paths] == ["a", "a", "b", "mine"]


@pytest.mark.parametrize("name", ["model.gguf", "model.safetensors"])
def test_a_file_of_weights_is_no_model_profile(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"GGUF\x03")
    with pytest.raises(InputError, match=rf"{name} holds weights: name its transformers config \(config.json"):
        plan(tmp_path / name, **DESKTOP)


def test_layers_without_experts_count_in_llama_cpps_numbers():
    found = plan("deepseek-v3", precision="q4_k_m", gpu="RTX 3090", host_memory="512GiB")
    n = int(found.llama_cpp[0].split("--n-cpu-moe ")[1].split()[0])
    assert n - 3 == (found.all_experts - found.cache_experts) // 256


@pytest.mark.parametrize("text", ["pcie4x8", "PCIe 4.0 x8", "4x8", "pcie4.0x8", "12.5GB/s"])
def test_a_link_is_read_however_it_is_written(text):
    assert resources("12GiB", "32GiB", text).link_gb_per_s == 12.5


def test_bandwidth_of_memory_counts_as_the_data_sheets_unless_it_was_measured():
    stated, measured = (
        quick("mixtral-8x7b", host_memory="128GiB", cpu_bandwidth=text) for text in ("100GB/s", "80GB/s measured")
    )
    assert stated.tokens_per_s == pytest.approx(measured.tokens_per_s, rel=1e-6)


QWEN3 = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "torch_dtype": "bfloat16",
}


def test_a_transformers_config_gives_the_plan_of_the_shipped_profile(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    options = {**DESKTOP, "precision": "q4_k_m"}
    assert quick(str(tmp_path), **options) == quick("qwen3-30b-a3b", **options)
    assert quick(str(tmp_path / "config.json"), **options) == quick("Qwen/Qwen3-30B-A3B", **options)


LINEAR, SLIDING, CHUNKED = (
    [*[f"{kind}_attention"] * 3, "full_attention"] * 12 for kind in ("linear", "sliding", "chunked")
)
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128}


@pytest.mark.parametrize(
    ("changed", "window", "full"),
    [
        ({"full_attention_interval": 4, "head_dim": 256, "num_key_value_heads": 2}, 1024, 12),
        ({"full_attention_interval": 5, "head_dim": 256, "num_key_value_heads": 2}, 1024, 9),
        ({"layer_types": LINEAR, "head_dim": 256}, 512, 12),
        ({"layer_types": LINEAR, **LATENT, "linear_num_value_heads": None, "linear_num_heads": 8}, 456, 12),
        ({"layer_types": SLIDING, "sliding_window": 128}, 128, 12),
        ({"layer_types": SLIDING[::-1], "sliding_window": 128}, 128, 12),
        ({"layer_types": ["sliding"] * 48, "sliding_window": 128}, 128, 0),
        ({"layer_types": ["indexed", *["sliding"] * 4] * 3 + ["sliding"] * 33, "sliding_window": 128}, 128, 3),
        ({"layer_types": [*["full"] * 3, "sliding"] * 12, "sliding_window": 128}, 128, 48),
        ({"layer_types": CHUNKED, "attention_chunk_size": 512}, 512, 12),
        ({"attention_chunk_size": 512, "no_rope_layers": []}, 512, 12),
    ],
)
def test_layers_without_full_attention_keep_no_more_than_their_window(tmp_path: Path, changed, window: int, full: int):
    linear = {"linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3, **linear, **changed}))
    found = model(str(tmp_path))
    assert found.kv_cache_bytes(8192) == (full * 8192 + (48 - full) * window) * found.kv_bytes


def test_chunks_are_the_window_of_layers_as_in_the_shipped_profiles(tmp_path: Path):
    """Of Llama-4-Maverick every other layer has experts, and of those every other one full attention; no other has."""
    chunked = {**QWEN3, "attention_chunk_size": 8192, "head_dim": 128, "num_key_value_heads": 8}
    for name, step in (("llama-4-scout", 1), ("llama-4-maverick", 2)):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({**chunked, "interleave_moe_layer_step": step, "decoder_sparse_step": None}))
        found, shipped = model(str(path)), model(name)
        windows = [[each.window_of(layer) for layer in range(each.moe_layers)] for each in (found, shipped)]
        assert windows[0] == windows[1] == [0 if (i * step + step) % 4 == 0 else 8192 for i in range(48 // step)]
        assert found.kv_cache_bytes(32768) == shipped.kv_cache_bytes(32768)
        assert shipped.kv_cache_bytes(32768) == (12 * 32768 + 36 * 8192) * shipped.kv_bytes


def test_configs_of_other_architectures_are_read(tmp_path: Path):
    deepseek = {
        **QWEN3,
        "n_routed_experts": 64,
        "num_experts": None,
        "num_hidden_layers": 27,
        "first_k_dense_replace": 1,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "moe_intermediate_size": 1408,
        "intermediate_size": 10944,
        "vocab_size": 102400,
    }
    maverick = {
        "text_config": {
            **QWEN3,
            "model_type": "llama4_text",
            "moe_layers": list(range(1, 48, 2)),
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "moe_intermediate_size": None,
            "num_experts": None,
            "num_local_experts": 128,
            "num_experts_per_tok": 1,
            "hidden_size": 5120,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "vocab_size": 202048,
        }
    }
    for name, config in (("deepseek-v2-lite", deepseek), ("llama-4-maverick", maverick)):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(config))
        found, shipped = model(str(path)), model(name)
        for key in ("moe_layers", "experts", "top_k", "leading_dense_layers", "dense_layers_before_each"):
            assert getattr(found, key) == getattr(shipped, key), (name, key)
        assert found.parameters == pytest.approx(shipped.parameters, rel=0.001)
        assert found.kv_bytes == shipped.kv_bytes


@pytest.mark.parametrize(
    ("quantised", "bits"),
    [
        ({"quant_method": "gptq", "bits": 8}, 8),
        ({"quant_method": "gptq", "bits": 4}, 4.25),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}, 8),
        ({"quant_method": "bitsandbytes", "load_in_8bit": False, "load_in_4bit": True}, 4.5),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, 8),
        ({"quant_method": "mxfp4"}, 4.25),
    ],
)
def test_experts_have_the_bits_that_their_config_states(tmp_path: Path, quantised: dict[str, Any], bits: float):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**QWEN3, "quantization_config": quantised}))
    assert model(str(path)).expert_bytes_per_parameter == bits / 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps({**QWEN3, "num_experts": None}), "no Mixture-of-Experts model"),
        (json.dumps({**QWEN3, "vocab_size": None}), "vocab_size"),
        (json.dumps({**QWEN3, "quantization_config": {"quant_method": "vptq"}}), "how many bits 'vptq' has"),
        (json.dumps({**QWEN3, "num_experts_per_tok": 200}), "top_k 200 is above 128"),
    ],
)
def test_a_config_that_cannot_be_used_says_why(tmp_path: Path, text: str, message: str):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        model(str(path))


def test_the_errors_are_those_of_the_shipped_rows_of_the_back_test():
    rows = [row for path in file.shipped() for row in file.read(path)]
    timed = {row.figure for row in rows if row.metric in ("speed", "latency") and not row.unsimulated and row.machine}
    held = tomllib.loads(errors.FILE.read_text("utf-8"))
    assert {row["figure"] for kind in held.values() for row in kind} == timed
    by_name = {row.figure: row for row in rows}
    for kind, listed in held.items():
        assert all(errors.kind_of(by_name[row["figure"]].setting) == kind for row in listed)


@pytest.mark.slow
def test_the_errors_are_what_the_back_test_gives():
    rows = file.unique([row for path in file.shipped() for row in file.read(path)])
    assert benchmark.errors_text(score.backtest(rows, SIMPY).results) == errors.FILE.read_text("utf-8")


def test_plans_stand_beside_published_speeds_as_the_docs_say():
    text = benchmark.published()
    assert text in (Path(__file__).parents[2] / "docs" / "planner.md").read_text("utf-8")
    median = float(text.split("Median error ")[1].split("%")[0])
    assert median <= 15


def test_the_command_prints_a_plan_and_its_json_begins_with_the_speed(tmp_path):
    options = ["--model", "olmoe-1b-7b", "--gpu-memory", "8GiB", "--host-memory", "32GiB"]
    shown = moe_sim("plan", *options, cwd=tmp_path)
    assert all(word in shown.stdout for word in ("expect", "placement", "wall", "limit", "llama.cpp", "vLLM"))
    facts = json.loads(moe_sim("plan", *options, "--json", cwd=tmp_path).stdout)
    assert next(iter(facts)) == "tokens_per_s"
    assert facts["tokens_per_s_low"] < facts["tokens_per_s"] < facts["tokens_per_s_high"]
    assert {each["name"] for each in facts["precisions"]} <= set(PRECISIONS)
