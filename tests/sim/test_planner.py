"""Plans: what fits where, times that can be reckoned by hand, what is missing, and how far off published speeds are."""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import planner as benchmark
from benchmarks.planner import quick
from sim.backtest import file, score
from sim.catalogue.parts import Gpu
from sim.planner import prefill
from sim.planner.placements import Layout, cached, today
from sim.planner.plan import PRECISIONS, Plan, TooSmallError, chosen, plan
from sim.planner.resources import GPU_BUFFERS, GPU_RESERVED, resources, upgrades
from sim.prediction import errors, table
from sim.prediction.case import Case
from sim.prediction.described import Machine, Model
from sim.prediction.model import profile_of
from sim.prediction.tables import DATA
from tests.support.command import moe_sim
from tests.support.profiles import QWEN3
from traces import InputError
from traces.models.profile import MODELS, model

DESKTOP: dict[str, Any] = {"gpu_memory": "12GiB", "host_memory": "32GiB", "link": "pcie4x8", "cpu_bandwidth": "50GB/s"}
LAPTOP = {**DESKTOP, "gpu_memory": "3GiB", "host_memory": "7GiB"}


def write_sized(name: str, sizes: list[int], path: Path) -> None:
    """Write a shipped profile with the bytes of an expert of each layer; top-level keys stand before its tables."""
    path.write_text(f"layer_expert_bytes = {sizes}\n{MODELS.find(name).read_text()}")


@pytest.fixture(scope="module")
def desktop() -> Plan:
    return plan("qwen3-30b-a3b", precision="q4_k_m", **DESKTOP)


def test_a_desktop_gets_a_split_whose_time_adds_up_by_hand(desktop):
    profile = model("qwen3-30b-a3b").at(4.85 / 8, 4.85 / 8)
    host = desktop.llama_cpp[0].split("--n-cpu-moe ")[1].split()[0]
    per_layer = profile.top_k * profile.expert_bytes
    reading, multiplying = per_layer / (50e9 * 0.76 * 0.95), 2 * 8 * profile.expert_parameters / (24 * 22.5e9)
    host_s = int(host) * (math.hypot(reading, multiplying) + 90e-6)  # data sheet to expert kernels; a hop
    kept = 2.4 * profile.kv_cache_bytes(8192)
    gpu_bytes = (48 - int(host)) * per_layer + profile.dense_bytes - profile.head_bytes + kept
    gpu_s = gpu_bytes / (504e9 * 0.85 * 0.77) + 48 * 24 * 2e-6 + 100e-6  # launches, sampling
    assert 1 / desktop.speed.tokens_per_s == pytest.approx(host_s + gpu_s, rel=0.02)
    assert desktop.speed.low < desktop.speed.tokens_per_s < desktop.speed.high
    assert desktop.wall == "CPU and host memory"


def test_what_is_said_to_be_on_the_gpu_fits_it_and_one_layer_more_would_not(desktop):
    profile = model("qwen3-30b-a3b").at(4.85 / 8, 4.85 / 8)
    fixed = profile.dense_bytes - profile.head_bytes + profile.kv_cache_bytes(8192) + GPU_RESERVED
    layer = profile.experts * profile.expert_bytes
    assert fixed + desktop.cache_bytes <= 12 * 2**30 < fixed + desktop.cache_bytes + layer
    assert desktop.cache_bytes == desktop.cache_experts * profile.expert_bytes
    assert (desktop.gpu_margin_bytes, desktop.host_margin_bytes) == (1.5 * 2**30, 2 * 2**30)


def test_llama_cpps_flags_move_fused_and_split_tensors_alike(desktop):
    n = int(desktop.llama_cpp[0].split("--n-cpu-moe ")[1].split()[0])
    pattern = desktop.llama_cpp[1].split('-ot "')[1].split("=CPU")[0]
    for parts in (("up_exps", "gate_exps", "down_exps"), ("gate_up_exps", "down_exps"), ("up_chexps",)):
        names = [f"blk.{layer}.ffn_{part}.weight" for layer in range(48) for part in parts]
        assert len(list(filter(re.compile(pattern).search, names))) == n * len(parts)


def test_more_of_a_resource_never_costs(desktop):
    assert {each.resource for each in desktop.upgrades} >= {"one more card", "twice the RAM", "RAM twice as fast"}
    assert all(each.gain >= 0 for each in desktop.upgrades)
    assert max(desktop.upgrades, key=lambda each: each.gain).resource == "one more card"


def test_each_stated_fact_narrows_the_interval():
    """What is assumed widens it, and is named with what it is worth; a plan whose facts are all stated assumes none."""
    stated: dict[str, Any] = {"gpu_memory": "12GiB"}
    widths, count = [], []
    for fact in (
        {"host_memory": "64GiB"},
        {"gpu": "RTX 3060"},
        {"link": "pcie4x16"},
        {"cpu_bandwidth": "40GB/s measured"},
        {"threads": 8, "cpu": "Ryzen 7 7700X"},
    ):
        stated |= fact
        found = plan("qwen3-30b-a3b", precision="q8_0", **stated)
        widths.append(found.speed.high / found.speed.low)
        count.append(len(found.assumed))
        assert all(each.without.high / each.without.low <= widths[-1] * (1 + 1e-9) for each in found.assumed)
    assert count == sorted(count, reverse=True)
    assert count[-1] == 0
    assert widths[0] > 1.5 * widths[-1]
    assert found.speed.low / found.speed.tokens_per_s == pytest.approx(found.interval.low)


def test_a_cache_has_as_many_experts_as_its_bytes_hold():
    layout = Layout(Model("deepseek-v2-lite"), resources("8GiB", "64GiB"), 512)
    memory = int(GPU_RESERVED + layout.fixed_bytes) + 30 * layout.profile.expert_bytes
    full = replace(layout, machine=replace(layout.machine, gpus=(Gpu(448.0, memory_gib=memory / 2**30),)))
    cache = cached(full)
    assert cache
    assert cache.gpu_experts == 30


def test_a_model_that_fits_the_gpu_needs_no_host_and_no_cache():
    found = plan("qwen3-30b-a3b", precision="q4_k_m", gpu="RTX 3090")
    assert (found.kind, found.cache, found.host_bytes, found.vllm) == ("resident", None, 0, ("--max-model-len 8192",))
    assert found.llama_cpp == ("-ngl 99 -c 8192",)
    assert found.wall == "GPU memory"


def test_layers_of_two_gpus_follow_their_memories_and_their_times_add_up():
    """DeepSeek-V2-Lite in 16 bits: 27 layers, the first one without experts, and the vocabulary matmul."""
    found = plan("deepseek-v2-lite", gpu="RTX 3090, RTX 3060", host_memory="64GiB", context=512, precision="bf16")
    layout = Layout(Model("deepseek-v2-lite"), resources(gpu="RTX 3090, RTX 3060", host_memory="64GiB"), 512)
    first, second = layout.layers_by_gpu
    assert found.llama_cpp == (f"-ngl 99 -c 512 -ts {first},{second}",)
    assert (first + second, layout.host_layers) == (28, 0)
    sizes = [layout._kept(kind) for kind in layout.profile.order]
    experts = [0.0, *[layout.layer_bytes[0]] * 26]
    assert sum(sizes[:first]) + sum(experts[:first]) <= 24 * 2**30 - GPU_RESERVED
    assert sum(sizes[:first]) + sum(experts[: first + 1]) + sizes[first] > 24 * 2**30 - GPU_RESERVED
    assert sum(sizes[first:]) + sum(experts[first:]) + layout.profile.head_bytes <= 12 * 2**30 - GPU_BUFFERS
    token = [size + all_of * 6 / 64 for size, all_of in zip(sizes, experts, strict=True)]
    seconds = sum(token[:first]) / 936e9 + (sum(token[first:]) + layout.profile.head_bytes) / 360e9
    (one,) = layout.computing.gpus
    assert one.gb_per_s == pytest.approx((sum(token) + layout.profile.head_bytes) / seconds / 1e9)


def test_unified_memory_is_counted_once():
    options: dict[str, Any] = {"host_memory": "36GiB", "context": 512, "precision": "q4_k_m"}
    found = plan("qwen3-30b-a3b", gpu="M3 Max", **options)
    assert (found.kind, found.host_bytes) == ("resident", 0)
    assert "a GPU that may use 27 GiB of it" in found.machine
    assert plan("qwen3-30b-a3b", gpu_bandwidth="400GB/s", unified=True, **options).speed == found.speed


@pytest.mark.parametrize("gpu_memory", [None, "0"])
def test_without_a_gpu_the_cpu_reads_all_of_a_token(gpu_memory):
    found = plan("mixtral-8x7b", precision="q8_0", gpu_memory=gpu_memory, host_memory="64GiB", cpu_bandwidth="50GB/s")
    profile = model("mixtral-8x7b").at(8.5 / 8, 8.5 / 8)
    read = profile.token_bytes + profile.dense_bytes - profile.head_bytes + profile.kv_cache_bytes(8192)
    attention = 5 * 2 * 32 * 32 * 2 * 128 * 8192  # layers, heads, keys and values of 128
    dense = (
        2 * 1.15 * (profile.layers_parameters + profile.head_weights) + attention
    )  # a weight of 8 bits takes 1.15 times
    experts = 2 * 1.15 * 32 * 2 * profile.expert_parameters
    parts = (profile.token_bytes, experts), (read - profile.token_bytes, dense)
    taken = sum(math.hypot(size / (50e9 * 0.76 * 0.95), flop / (24 * 22.5e9)) for size, flop in parts)
    waiting = 32 * 24 * 24 * 85e-9  # of 24 threads, behind each of the 24 kernels of a layer
    assert 1 / found.speed.tokens_per_s == pytest.approx(taken + waiting + 33 * 120e-6, rel=0.02)
    assert (found.kind, found.cache, found.llama_cpp) == ("cpu", None, ("-ngl 0 -c 8192",))


def test_what_memory_does_not_hold_comes_from_the_disk_and_a_lower_precision_is_named():
    found = plan("olmoe-1b-7b", precision="bf16", disk="3GB/s", **LAPTOP)
    assert found.kind == "disk"
    assert found.disk_bytes > 5e9
    assert found.faster_precision
    assert found.faster_precision.name == "q4_k_m"
    assert found.faster_precision.times > 3
    slow = quick("olmoe-1b-7b", precision="bf16", disk="1GB/s", **LAPTOP)
    assert slow.tokens_per_s < found.speed.tokens_per_s
    assert found.past_cache
    expected, direct = found.speed, found.past_cache
    assert direct.tokens_per_s > 2 * expected.tokens_per_s
    assert direct.high / direct.low < expected.high / expected.low
    assert any("128 KiB at a missing page" in note for note in found.notes)
    assert any("a read of 128 KiB through mmap waits" in each.what for each in found.assumed)
    assert all("--no-repack" in each for each in (*found.llama_cpp, found.llama_cpp_fit))


def test_reads_through_mmap_come_a_window_at_a_time_and_bring_one_more_around_each_matrix():
    machine, olmoe = resources(None, "8GiB", disk="2GB/s measured"), Model("olmoe-1b-7b")  # 3 matrices of 4 MiB
    small = Layout(olmoe, replace(machine, page_fault_us=100.0), 2048).hardware
    profile = profile_of(olmoe)
    ns = 100_000 + 131_072 / 2
    assert small.mapped(profile).disk_bandwidth_gb_per_s == pytest.approx(131_072 / ns / (1 + 1 / 32))
    wide = replace(small, read_ahead_kib=8192)
    assert wide.mapped_more(profile) == pytest.approx(3)
    slow = today(Layout(olmoe, replace(machine, read_ahead_kib=8192), 2048)).seconds()
    assert slow > today(Layout(olmoe, machine, 2048)).seconds()


def test_a_disk_changes_nothing_of_what_fits_without_it_and_else_gives_the_fastest_of_4_bits():
    assert quick("olmoe-1b-7b", disk="3GB/s", **LAPTOP) == quick("olmoe-1b-7b", **LAPTOP)
    small: dict[str, Any] = {"host_memory": "5GiB", "disk": "3GB/s"}
    good = [name for name in ("bf16", *PRECISIONS) if name not in ("q3_k_m", "iq2_m")]
    speeds = [quick("olmoe-1b-7b", precision=name, **small).tokens_per_s for name in good]
    assert quick("olmoe-1b-7b", **small).tokens_per_s == max(speeds)


def test_llama_cpps_cache_is_lru_with_its_flag_over_the_layers_that_host_memory_holds(desktop):
    assert desktop.cache
    mib = desktop.cache.cache_bytes // 2**20
    assert desktop.cache.llama_cpp == f"-ngl 99 --n-cpu-moe 48 --moe-cache-mib {mib} -c 8192"
    assert desktop.cache.policy == "lru"
    layout = Layout(Model("mixtral-8x7b", precision="q4_k_m"), resources("24GiB", "12GiB"), 8192)
    held, sizes = layout.cached_layers, layout.layer_bytes
    assert layout.host_layers <= held < 32
    assert sum(sizes[:held]) <= layout.host_free < sum(sizes[: held + 1])
    cache = cached(layout)
    assert cache
    assert cache.cache_bytes + sum(sizes[held:]) <= layout.gpu_free


def test_experts_of_several_sizes_are_planned_with_their_own_bytes(tmp_path: Path):
    """All alike they are the plan without sizes, also over a disk; smaller ones are as many bytes less to read."""
    layers, size = model("qwen3-30b-a3b").moe_layers, model("qwen3-30b-a3b").expert_bytes
    for name, sizes in (("alike", [size] * layers), ("third", [size, *[size // 3] * (layers - 1)])):
        write_sized("qwen3-30b-a3b", sizes, tmp_path / f"{name}.toml")
    machine = {**DESKTOP, "host_memory": "16GiB", "disk": "3GB/s"}
    paths = [str(tmp_path / "alike.toml"), str(tmp_path / "third.toml")]
    models = [Model("qwen3-30b-a3b"), *(Model(Path(path).stem, path) for path in paths)]
    plain, alike, third = (1 / today(Layout(each, resources(**machine), 8192)).seconds() for each in models)
    assert alike == pytest.approx(plain, rel=0.02)
    assert third > 2 * plain


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {**DESKTOP, "precision": "bf16"},
            r"19\.\d GB are missing; give --host-memory 50GiB or --disk .*at --precision q8_0 it fits",
        ),
        ({"gpu_memory": "2GiB", "host_memory": "0"}, r"do not hold the dense part .* are missing, or --host-memory"),
        ({"host_memory": "4GiB", "disk": "3GB/s", "precision": "bf16"}, r"beside experts .* are missing"),
        ({}, "a machine without memory: give --gpu-memory"),
        ({"gpu": "RTX 3O90"}, "did you mean RTX 3090"),
        ({"host_memory": "64GiB", "gpu_bandwidth": "fast"}, "a GPU without memory: give --gpu-memory"),
    ],
)
def test_what_cannot_be_is_said_with_what_is_missing(options, message):
    with pytest.raises(InputError, match=message):
        plan("qwen3-30b-a3b", **options)


def test_a_model_is_planned_at_the_fastest_precision_that_keeps_the_quality():
    found = plan("olmoe-1b-7b", **LAPTOP)
    assert found.precision == "q4_k_m"
    assert found.notes[0].startswith("q4_k_m, the fastest of those that keep the quality")
    assert replace(found, notes=()) == replace(plan("olmoe-1b-7b", precision="q4_k_m", **LAPTOP), notes=())
    assert found.better_precision
    assert (found.better_precision.name, found.faster_precision) == ("q5_k_m", None)


MORE: Mapping[str, Callable[[Machine], Machine]] = {
    "GPU memory": lambda one: replace(one, gpus=tuple(replace(gpu, memory_gib=gpu.memory_gib + 8) for gpu in one.gpus)),
    "GPU": lambda one: replace(one, gpus=tuple(replace(gpu, gb_per_s=gpu.gb_per_s * 1.5) for gpu in one.gpus)),
    "second card": lambda one: upgrades(one).get("one more card", one),
    "RAM": lambda one: replace(one, host_memory=one.host_memory + 32 * 2**30),
    "rate of RAM": lambda one: upgrades(one)["RAM twice as fast"],
    "link": lambda one: upgrades(one)["a link twice as fast"],
    "disk": lambda one: upgrades(one)["a disk twice as fast"],
}


@given(
    st.sampled_from(["qwen3-30b-a3b", "gpt-oss-20b", "glm-4.5-air", "deepseek-v2-lite", "mixtral-8x7b"]),
    st.sampled_from([None, "q4_k_m", "q8_0"]),
    st.sampled_from(["0", "8GiB", "12GiB", "24GiB"]),
    st.sampled_from(["16GiB", "32GiB", "96GiB", "192GiB"]),
    st.sampled_from(["40GB/s", "80GB/s"]),
    st.sampled_from(["1GB/s", "6GB/s"]),
    st.sampled_from(sorted(MORE)),
)
@settings(max_examples=25, deadline=None)
def test_more_of_any_resource_never_makes_the_first_line_slower(model, precision, gpu, host, reads, disk, more):
    precision = None if model == "gpt-oss-20b" else precision
    machine = resources(gpu, host, disk=disk, cpu_bandwidth=reads)
    grown = MORE[more](machine)
    try:
        before = today(chosen(model, machine, 4096, precision)[0]).seconds()
    except TooSmallError:
        return
    after = today(chosen(model, grown, 4096, precision)[0]).seconds()
    assert after <= before * (1 + 1e-6)


def test_a_transformers_config_gives_the_plan_of_the_shipped_profile(tmp_path: Path):
    pytest.importorskip("torch")
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    options = {**DESKTOP, "precision": "q4_k_m"}
    shipped = quick("Qwen/Qwen3-30B-A3B", **options)
    for path in (tmp_path, tmp_path / "config.json"):
        assert quick(str(path), **options).tokens_per_s == pytest.approx(shipped.tokens_per_s, rel=1e-4)


def test_what_was_not_understood_of_a_config_comes_first(tmp_path: Path):
    pytest.importorskip("torch")
    stated = {"quant_method": "fp8", "modules_to_not_convert": ["no.such.module"]}
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3, "quantization_config": stated}))
    where = ["plan", "--model", str(tmp_path), "--host-memory", "64GiB"]
    shown, as_json = (moe_sim(*where, *more, cwd=tmp_path).stdout for more in ([], ["--json"]))
    assert shown.startswith("Sizes may be wrong: its quantisation names modules that the model does not have: 'no.such")
    assert "no.such.module" in json.loads(as_json)["not_understood"][0]


def test_the_errors_are_those_of_the_shipped_rows_of_the_back_test():
    rows = [row for path in file.shipped() for row in file.read(path)]
    cases = {row.figure: Case(row) for row in rows if row.timed and not row.unsimulated}
    held = {kind: {row["figure"] for row in listed} for kind, listed in table("errors").items()}
    calibrated = held.pop(errors.CALIBRATED)
    unknown = held.pop(errors.UNKNOWN)
    assert set().union(unknown, *held.values()) == set(cases)
    assert all(errors.class_of(cases[name]) == kind for kind, names in held.items() for name in names)
    assert unknown == {name for name, one in cases.items() if not one.engine.overheads.is_nothing}
    assert calibrated == {name for name, one in cases.items() if calibrates(one, cases)}


def calibrates(one: Case, cases: dict[str, Case]) -> bool:
    """Whether another row fits this one's machine."""
    return not one.row.fit and any(
        each.row.fit and (each.row.file, each.row.machine) == (one.row.file, one.row.machine) for each in cases.values()
    )


@pytest.mark.slow
def test_the_errors_are_what_the_back_test_gives():
    rows = [row for path in file.shipped() for row in file.read(path)]
    assert benchmark.errors_text(score.backtest(rows).results) == (DATA / "errors.toml").read_text("utf-8")


def test_an_interval_of_equal_machines_leaves_a_tenth_of_them_on_each_side():
    rows = [{"machine": str(i), "ratio": 2.0**i, "slower": 0.0, "faster": 0.0} for i in range(-9, 10)]
    found = errors.of_rows("measured", rows, left_out=1.0)
    assert found.machines == 19
    assert [found.low, found.high] == pytest.approx([2.0**-8, 2.0**8])
    twice = errors.of_rows("measured", rows + [{**rows[0], "machine": "0", "ratio": 1.0}] * 5, left_out=1.0)
    assert [twice.low, twice.high] == pytest.approx([found.low, found.high])
    explained = errors.of_rows("measured", [{**row, "slower": 9.0, "faster": 9.0} for row in rows], left_out=1.0)
    assert [explained.low, explained.high] == [1, 1]


def test_plans_stand_beside_published_speeds_as_the_docs_say():
    page = (Path(__file__).parents[2] / "docs" / "planner.md").read_text("utf-8").splitlines()
    *rows, _, last = benchmark.published().splitlines()
    assert last in page
    assert {line for line in page if line.startswith("| mosl-")} == {row for row in rows[2:] if error_of(row) > 10}
    assert int(last.split("Median error ")[1].split("%")[0]) <= 15


def error_of(row: str) -> int:
    """Return the error of a published speed, in percent, without its sign."""
    return abs(int(row.split("|")[-2].strip().removesuffix("%")))


def test_several_models_are_a_table_and_an_unknown_one_is_an_error(tmp_path):
    where = ["--gpu-memory", "12GB", "--host-memory", "32GB"]
    shown = moe_sim("plan", "--model", "gpt-oss-20b, deepseek-v3.2", *where, "--json", cwd=tmp_path).stdout
    small, large = json.loads(shown)["models"]
    assert (small["model"], large["model"]) == ("gpt-oss-20b", "deepseek-v3.2")
    alone = plan("gpt-oss-20b", gpu_memory="12GB", host_memory="32GB")
    assert small["speed"]["tokens_per_s"] == alone.speed.tokens_per_s
    assert large["speed"] is None
    assert "unknown model profile" in moe_sim("plan", "--model", "gpt-oss-20b,no", *where, cwd=tmp_path).stderr


def test_the_first_tokens_of_a_context_are_those_of_a_short_one():
    long = plan("olmoe-1b-7b", host_memory="32GiB", context=8192)
    short = plan("olmoe-1b-7b", host_memory="32GiB", context=1)
    assert long.first_tokens_per_s == pytest.approx(short.speed.tokens_per_s)
    assert long.speed.tokens_per_s < long.first_tokens_per_s / 1.5


def test_a_prompt_takes_its_matmuls_and_one_copy_of_the_hosts_experts_a_batch():
    """Two batches of 512 tokens; without a GPU the same matmuls on 8 cores."""
    layout = Layout(Model("mixtral-8x7b"), resources(gpu="RTX 3090", host_memory="128GiB"), 1024)
    split = prefill.seconds(layout, 1024)
    copies = 2 * layout.host_bytes / 25e9
    matmuls = 2 * 1024 * (layout.profile.layers_parameters + 32 * 2 * layout.profile.expert_parameters)
    assert split == pytest.approx(copies + matmuls / (71e12 * 0.25), rel=0.05)
    cores = Layout(layout.model, resources(host_memory="128GiB", threads=8), 1024)
    assert prefill.seconds(cores, 1024) == pytest.approx(matmuls / (8 * 22.5e9 * 2), rel=0.05)
