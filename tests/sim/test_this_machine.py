"""This machine: what is detected of it, cuts of models that llama.cpp runs, and what a plan says beside a run."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sim.catalogue.parts import thread_gflop_per_s
from sim.planner import random_gguf
from sim.planner.calibration import Calibration, _fitted, bytes_read, values
from sim.planner.placements import Layout
from sim.planner.resources import resources
from sim.planner.verification import variants
from sim.prediction.described import Model
from sim.probe import detection, limits
from sim.probe.stream import triad
from sim.profiles.hardware_profile import hardware
from traces.models import gguf_files
from traces.models.gguf_profile import of_file
from traces.models.profile import ModelProfile, model


def small(name: str) -> ModelProfile:
    """A shipped model with a vocabulary of 256, so that its cuts are quick to write."""
    whole = model(name)
    return replace(whole, vocabulary=256, embedding_parameters=256 * whole.hidden_size)


def fake(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a program on PATH that prints a text."""
    (folder / name).write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


# Detection


def test_gpus_are_what_nvidia_smi_lists_with_the_memory_that_is_free(tmp_path: Path, monkeypatch) -> None:
    answer = "NVIDIA GeForce RTX 3090, 24576, 1200, 4, 16\nNVIDIA GeForce RTX 3060, 12288, 0, 4, 8"
    fake(tmp_path, "nvidia-smi", answer, monkeypatch)
    facts = detection._gpu_facts()
    assert facts["gpu_memory"].value == "23888MiB, 12288MiB"  # half a GiB of the desktop's is kept free anyway
    machine = resources(**detection.options(facts), host_memory="32GiB")
    assert [(gpu.memory_gib * 1024, gpu.gb_per_s) for gpu in machine.gpus] == [(23888, 936), (12288, 360)]
    assert machine.link_copies == 25.0


def test_a_container_has_the_memory_and_processors_of_the_lowest_limit_above_it(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "memory.max").write_text(f"{3 << 30}\n")
    for group, used in ((tmp_path / "a", 3 << 30), (tmp_path / "a" / "b", 1)):
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text("anon 5\ninactive_file 4096\n")
    (tmp_path / "a" / "b" / "memory.max").write_text("max\n")
    (tmp_path / "a" / "b" / "cpu.max").write_text("150000 100000\n")
    groups = tmp_path / "groups"
    groups.write_text("0::/a/b\n")
    monkeypatch.setattr(limits, "ROOT", tmp_path)
    monkeypatch.setattr(limits, "GROUPS", groups)
    assert (limits.memory_limit(), limits.cpu_quota()) == (3 << 30, 1.5)
    assert limits.available_memory_bytes() == 4096, "what is cached is given back"


def test_what_a_user_states_of_a_gpu_replaces_all_that_was_detected_of_it() -> None:
    facts = {name: detection.Fact(name, "found") for name in ("gpu", "gpu_memory", "link", "host_memory", "threads")}
    options = detection.options(detection.with_stated(facts, {"gpu_memory": "8GiB", "threads": 3}))
    assert options == {"host_memory": "host_memory", "gpu_memory": "8GiB", "threads": 3}


def test_triad_counts_24_bytes_an_element() -> None:
    """A clock that ticks once a call: two passes between which nothing else is asked are one second each."""
    ticks = iter(range(100))
    rate = triad((0,), passes=2, clock=lambda: float(next(ticks)))
    assert rate == pytest.approx(3 * 8 * (round(rate * 1e9) // 24) / 1e9)
    assert 0.01 < rate < 1


# Cuts


@pytest.mark.parametrize("name", ["olmoe-1b-7b", "qwen3-30b-a3b", "glm-4.5-air", "deepseek-v2-lite", "glm-4.7-flash"])
def test_a_profile_as_a_file_has_its_shape_and_its_parameters(name: str) -> None:
    pytest.importorskip("gguf", reason="the extra `llama`")
    known, found = model(name), of_file(random_gguf.of_profile(model(name), "bf16"), name)
    for field in ("experts", "top_k", "hidden_size", "moe_layers", "expert_parameters", "vocabulary"):
        assert getattr(found, field) == getattr(known, field), field
    assert found.parameters == pytest.approx(known.parameters, rel=0.005)
    assert found.token_bytes == known.token_bytes


@pytest.mark.parametrize(
    ("name", "precision", "gb"),
    [("olmoe-1b-7b", "q4_k_m", 4.21), ("qwen3-30b-a3b", "q4_k_m", 18.56), ("gpt-oss-20b", "mxfp4", 12.1)],
)
def test_sizes_are_those_of_the_files_that_people_run(name: str, precision: str, gb: float) -> None:
    """As published: allenai/OLMoE-1B-7B-0924-GGUF, Qwen/Qwen3-30B-A3B-GGUF, ggml-org/gpt-oss-20b-GGUF."""
    pytest.importorskip("gguf", reason="the extra `llama`")
    file = random_gguf.of_profile(model(name), precision)
    assert sum(each.size for each in file.tensors) / 1e9 == pytest.approx(gb, rel=0.01)


def test_a_cut_has_the_mean_bytes_of_the_models_layers() -> None:
    pytest.importorskip("gguf", reason="the extra `llama`")
    whole = random_gguf.of_profile(model("qwen3-30b-a3b"), "q4_k_m")
    read = [sum(bytes_read(of_file(each, "x"), 0, False)) for each in (random_gguf.cut(whole, 4), whole)]
    assert read[0] / 4 == pytest.approx(read[1] / 48, rel=0.01)
    fewer = of_file(random_gguf.cut(whole, 4, 32), "x")
    assert fewer.experts == 32
    router = 4 * 4 * 2048 * (128 - 32)  # of 32 bits
    assert sum(bytes_read(fewer, 0, False)) == pytest.approx(read[0] - router, rel=1e-4)


def test_the_time_of_a_whole_model_follows_from_its_cuts_where_layers_add_up() -> None:
    """Seconds made by hand: 10 ms, 0.1 ms a MB of the GPU, 0.3 ms of the CPU, 5 us for 1,000 values."""
    profile = model("qwen3-30b-a3b")
    made = Calibration(profile, 0.01, 1e-10, 3e-10, 5e-9)
    cuts = [profile.cut(layers) for layers in (2, 4, 8)]
    read = [(1.0, *bytes_read(each, n * each.moe_layers, True)) for each in cuts for n in (0, 1)]
    rows_ = np.array([(*x, 0.01 + 1e-10 * x[1] + 3e-10 * x[2]) for x in read])
    assert _fitted(rows_) == pytest.approx((0.01, 1e-10, 3e-10))
    gpu, cpu = bytes_read(profile, 20, True)
    assert gpu + cpu == pytest.approx(sum(bytes_read(profile, 48, False)))
    assert made.seconds(20, True, 1000) == pytest.approx(
        0.01 + 1e-10 * gpu + 3e-10 * cpu + 5e-9 * values(profile, 1000)
    )


@pytest.mark.parametrize(("name", "precision"), [("olmoe-1b-7b", "q4_k_m"), ("deepseek-v2-lite", "q8_0")])
def test_llama_cpp_runs_cuts_and_its_times_come_in_the_keys_of_llama_bench(name, precision, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: the extra `llama`")
    shape = random_gguf.cut(random_gguf.of_profile(small(name), precision), 2, 12)
    random_gguf.write(tmp_path / "cut.gguf", shape)
    assert of_file(gguf_files.read(str(tmp_path / "cut.gguf")), "x") == of_file(shape, "x")
    options = ["-m", str(tmp_path / "cut.gguf"), "-n", "1", "-r", "2", "-d", "0,20", "-t", "1", "--processor-time"]
    command = [sys.executable, "-m", "benchmarks.llama_bench", *options]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    measured = json.loads(done.stdout or f'"{done.stderr}"')
    assert [(row["n_depth"], len(row["samples_ns"])) for row in measured] == [(0, 2), (20, 2)]


# A plan beside a run


def test_without_a_gpu_a_plan_is_run_beside_fewer_threads() -> None:
    machine = resources(None, "32GiB", cpu_bandwidth="20GB/s measured", threads=2)
    layout = Layout(Model("olmoe-1b-7b", precision="q4_k_m"), machine, 512)
    assert [(each.threads, each.planned) for each in variants(layout)] == [(2, True), (1, False)]


def test_a_probes_profile_is_a_machine_of_sweeps_and_plans(tmp_path: Path, monkeypatch) -> None:
    from sim.probe.disk import Reads
    from sim.probe.measuring import READ, Probe, profile
    from sim.probe.stream import Rate

    found = Probe([Rate("cores", 1, 10.0), Rate("cores", 2, 18.0)], 5.0, [Reads(*READ, 0.6)], 0)
    cpu = "AMD Ryzen 7 7800X3D 8-Core Processor"
    facts = {"gpu_memory": detection.Fact("0", ""), "threads": detection.Fact(2, ""), "cpu": detection.Fact(cpu, "")}
    facts["host_memory"] = detection.Fact("20480MiB", "")
    (tmp_path / "here.toml").write_text(profile(found, facts, False))
    assert hardware(str(tmp_path / "here.toml")).host_memory_bandwidth_gb_per_s == 18.0
    machine = resources(**detection.options(detection.of_profile(str(tmp_path / "here.toml"))))
    assert (machine.host_reads, machine.disk_gb_per_s, machine.host_threads) == (18.0, 0.6, 2)
    assert machine.cpu == cpu
    assert hardware(str(tmp_path / "here.toml")).host_compute_tflop_per_s == 2 * thread_gflop_per_s(cpu) / 1e3
