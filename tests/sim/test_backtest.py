"""The back-test: files that cannot be used, closed forms of what is run, scores, fits, and the document's numbers.

The tables of docs/backtest.md are printed afresh by `python -m benchmarks.backtest`.
"""

import math
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tomli_w

from benchmarks import backtest as benchmark
from policies.core.systems import system_of, systems
from sim.backtest import DATA, file, score
from sim.catalogue.parts import CPUS, LINKS, thread_gflop_per_s
from sim.prediction import routing
from sim.prediction.case import Case
from sim.prediction.described import Machine, Model, Row, Setting
from sim.prediction.machine import hardware_of, kernels_per_layer
from sim.prediction.tables import FACTORS
from sim.prediction.timing import Runtime
from sim.profiles.hardware_profile import Hardware, gpu_of
from traces import InputError
from traces.models.profile import model
from traces.synthetic import synthetic
from traces.writer import write_trace

DOCUMENT = Path(__file__).parents[2] / "docs" / "backtest.md"

MACHINE = {
    "gpu_gb_per_s": 500.0,
    "host_gb_per_s": 50.0,
    "link_gb_per_s": 20.0,
    "hop_us": 40.0,
    "link_latency_us": 0.0,
    "fit_parameter": "host_gb_per_s",
}
MODEL = {
    "layers": 6,
    "experts": 16,
    "top_k": 4,
    "expert_bytes": 5_000_000,
    "dense_bytes": 60_000_000,
    "head_bytes": 10_000_000,
}
CACHED = {"policy": "lru", "cache": "50%"}
ROW = {
    "figure": "one",
    "system": "llama.cpp",
    "metric": "speed",
    "value": 100.0,
    "unit": "tok/s",
    "source": "here",
    "machine": "mine",
    "model": "small",
    "setting": {"host_layers": 2},
}


def written(folder: Path, *rows: dict, **held) -> Path:
    path = folder / "rows.toml"
    content = {"machines": {"mine": MACHINE}, "models": {"small": MODEL}, **held, "rows": list(rows)}
    path.write_text(tomli_w.dumps(content))
    return path


def case(folder: Path, **changed) -> Case:
    return Case(file.read(written(folder, {**ROW, **changed}))[0])


def hardware_of_case(one: Case) -> Hardware:
    assert one.hardware
    return one.hardware


def reached(machine: Machine, system: str, name: str = "qwen3-30b-a3b") -> Hardware:
    return hardware_of(machine, system_of(system), model(name))


def seconds(one: Case, own: Hardware | None = None) -> float:
    taken = one.simulated(own or hardware_of_case(one)).seconds
    assert taken
    return taken


# Files


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"sauce": "here"}, "unknown key 'sauce'; did you mean source"),
        ({"model": "large"}, "no model profile is known for 'large'"),
        ({"machine": {"gpu": "RTX 3091"}}, "unknown gpu 'RTX 3091'; did you mean RTX 3090"),
        (
            {"machine": {"gpu": "M3 Max"}, "setting": {"policy": "lru", "cache": "0"}},
            "from which link_gb_per_s follows",
        ),
        ({"fit": True, "machine": {"gpu_gb_per_s": 5.0}}, "the machine's fit_parameter"),
        ({"fit": True, "setting": {"all_on": "gpu"}}, "host_gb_per_s has no effect on one, which cannot fit it"),
        ({"setting": {}}, "give one of all_on, host_layers, host_share, cpu_layers, policy, not none"),
        ({"metric": "bytes read", "unit": "B"}, "a figure of bytes read is of a cache: give policy and cache"),
    ],
)
def test_a_row_that_cannot_be_used_is_one_line_with_file_and_row(tmp_path, changed, said):
    path = written(tmp_path, {**ROW, **changed})
    with pytest.raises(InputError) as told:
        score.backtest(file.read(path))
    text = str(told.value)
    assert "\n" not in text
    assert text.startswith(f"{path}: row one: ")
    assert text.count("row one: ") == 1
    assert said in text


def test_the_shipped_rows_are_those_that_were_published():
    rows = [row for path in file.shipped() for row in file.read(path)]
    assert len(rows) == 242
    assert all(row.source for row in rows)


# Machines and models


def test_a_gpu_may_be_named_with_its_maker_and_its_own_memory():
    names = ("RTX 3060", "NVIDIA GeForce RTX 3060", "rtx 3060 12GB", "RTX3060 12 GiB")
    assert all(gpu_of(name) == gpu_of(names[0]) for name in names)
    assert gpu_of("A100 80GB").gb_per_s > gpu_of("A100 40GB").gb_per_s
    with pytest.raises(InputError, match="RTX 3060 8GB"):
        gpu_of("RTX 3060 8GB")


def test_measured_figures_come_before_data_sheets_and_those_before_factors():
    sheet = Machine("m", gpu_data_sheet_gb_per_s=1008.0, host_peak_gb_per_s=100.0, link="PCIe 4.0 x16")
    told, gpu = reached(sheet, "llama.cpp"), FACTORS.gpu["gddr"]
    assert told.memory_bandwidth_gb_per_s == pytest.approx(1008 * gpu.read_of_data_sheet * gpu.kernels_of_read)
    assert told.host_memory_bandwidth_gb_per_s == pytest.approx(
        100 * FACTORS.host_stream_of_peak * FACTORS.host_experts_of_stream
    )
    assert told.link_bandwidth_gb_per_s == LINKS["PCIe 4.0 x16"].gb_per_s
    measured = reached(
        Machine("m", gpu_data_sheet_gb_per_s=1008.0, gpu_read_gb_per_s=800.0, host_gb_per_s=7.0, hop_us=0.0), "x"
    )
    assert measured.memory_bandwidth_gb_per_s == pytest.approx(800 * gpu.kernels_of_read)
    assert (measured.host_memory_bandwidth_gb_per_s, measured.host_hop_us) == (7.0, 0.0)


def test_reads_and_multiplications_of_a_cpu_add_up_as_sides_of_a_right_angle(tmp_path):
    """5 MB of experts at 50 GB/s, and 2 x 8.9 M multiplications at 8 x 25 GFLOP/s; measured reads have both in them."""
    machine = {"host_stream_gb_per_s": 50.0, "host_experts_of_stream": 1.0, "host_threads": 8}
    one = case(tmp_path, machine={**machine, "host_gflop_per_s_per_thread": 25.0}, setting={"all_on": "cpu"})
    timing = Runtime(hardware_of_case(one), one.profile, cpu=True)
    assert timing.host_ns(1) == pytest.approx(math.hypot(5e6 / 50, 2 * one.profile.expert_parameters / 200), abs=1)
    read = case(tmp_path, machine={"host_gb_per_s": 50.0, "host_threads": 8}, setting={"all_on": "cpu"})
    assert Runtime(hardware_of_case(read), read.profile, True).host_ns(1) == pytest.approx(5e6 / 50, rel=1e-3)


def test_the_name_of_a_cpu_says_what_the_threads_that_are_stated_multiply():
    """By the machine's title, unless it states a CPU; without threads, and of another CPU, by the general factors."""
    here = Machine("pc", title="RTX 3090, Ryzen 7 7800X3D", host_peak_gb_per_s=89.6, host_threads=8)
    named = {name: kind.gflop_per_s_per_thread for name, kind in CPUS.items()}
    desktop = FACTORS.cpu.desktop
    tflop = {
        here: 8 * named["Zen 4"],
        replace(here, cpu="AMD Ryzen 9 5950X 16-Core Processor"): 8 * named["Zen 2 and 3"],
        replace(here, cpu="Intel(R) Core(TM) i7-8700"): 8 * desktop.gflop_per_s_per_thread,
        replace(here, host_threads=0): desktop.threads * desktop.gflop_per_s_per_thread,
        replace(here, host_gflop_per_s_per_thread=30.0): 8 * 30,
    }
    for machine, each in tflop.items():
        assert reached(machine, "llama.cpp").host_compute_tflop_per_s == pytest.approx(each / 1_000), machine


@pytest.mark.parametrize(
    ("cpu", "kind"),
    [
        ("Ryzen 9950X", "Zen 5"),
        ("AMD Ryzen 5 7500F 6-Core Processor", "Zen 4"),
        ("Ryzen 5 5600X, RX 7900 XT", "Zen 2 and 3"),
        ("AMD Ryzen Threadripper PRO 5975WX 32-Cores", "Zen 2 and 3"),
        ("AMD EPYC 7763 64-Core Processor", "Zen 2 and 3"),
        ("Intel(R) Xeon(R) Processor @ 2.50GHz", "Xeon that a cloud does not name"),
        ("Apple M2 Max", "Apple M"),
        ("AMD EPYC 9354 32-Core Processor", "Zen 4"),
        ("AMD EPYC 9355P 32-Core Processor", "Zen 5"),
        ("13th Gen Intel(R) Core(TM) i7-13700K", "Core of the 12th to 14th generation, a P-core"),
        ("Intel(R) Xeon(R) CPU E5-2697A v4 @ 2.60GHz", "Xeon E5 and E7"),
        ("Intel(R) Xeon(R) Gold 6226R CPU @ 2.90GHz", ""),
        ("Ryzen AI 9 HX PRO 370", "Zen 5"),
    ],
)
def test_cpus_are_known_by_their_names(cpu, kind):
    assert thread_gflop_per_s(cpu) == (CPUS[kind].gflop_per_s_per_thread if kind else 0)


def test_weights_of_a_type_that_is_slow_to_unpack_take_a_cpu_longer_and_no_gpu(tmp_path):
    machine = {"gpu_gb_per_s": 500.0, "host_stream_gb_per_s": 50.0, "host_experts_of_stream": 1.0, "host_threads": 8}
    plain, slow = (
        case(tmp_path, model={"profile": "qwen3-30b-a3b", "file_gb": 13.0, "precision": name}, machine=machine)
        for name in ("q4_k_m", "iq3_xxs")
    )
    for cpu in (False, True):
        one, other = (Runtime(hardware_of_case(each), each.profile, cpu) for each in (plain, slow))
        read, multiplied = (
            one.model.bytes_of(0) / 50,
            2 * one.model.expert_parameters / (8 * FACTORS.cpu.desktop.gflop_per_s_per_thread),
        )
        times = FACTORS.host_multiply["iq3_xxs"]
        assert one.host_ns(1) == pytest.approx(math.hypot(read, multiplied), abs=1)
        assert other.host_ns(1) == pytest.approx(math.hypot(read, times * multiplied), abs=1)
        assert (other.dense_ns(0, 1, 1) > one.dense_ns(0, 1, 1)) == cpu


def test_a_model_in_bytes_has_the_compute_of_its_dense_part(tmp_path):
    profile = case(tmp_path).profile
    assert profile.layers_parameters == pytest.approx(60e6 * 8 / 8.5, rel=1e-3)
    assert profile.head_weights == pytest.approx(10e6 * 8 / 8.5, rel=1e-3)
    assert case(tmp_path, model={**MODEL, "precision": "bf16"}).profile.layers_parameters == pytest.approx(30e6)


def test_layers_that_the_cpu_computes_whole_take_their_attention_along(tmp_path):
    whole, experts = (case(tmp_path, setting={key: 3}) for key in ("cpu_layers", "host_layers"))
    assert seconds(case(tmp_path, setting={"cpu_layers": 0})) == seconds(case(tmp_path, setting={"host_layers": 0}))
    own = hardware_of_case(whole)
    cpu, gpu = (Runtime(own, whole.profile, on_cpu) for on_cpu in (True, False))
    context = FACTORS.context
    dense = sum(cpu.dense_ns(layer, 1, context) - gpu.dense_ns(layer, 1, context) for layer in range(3))
    assert seconds(whole) - seconds(experts) == pytest.approx((dense - 2 * gpu.hop_ns) / 1e9, rel=1e-3)


def test_stated_bytes_are_what_is_read(tmp_path):
    profile = case(tmp_path).profile
    timing = Runtime(reached(Machine("m", gpu_gb_per_s=100.0, us_per_layer=0.0, us_per_token=0.0), "x"), profile, False)
    assert sum(timing.dense_ns(layer, 1, 0) for layer in range(6)) == pytest.approx(60e6 / 100, rel=1e-3)
    assert timing.head_ns(1) == pytest.approx(10e6 / 100, rel=1e-3)
    assert timing.expert_ns(1) == pytest.approx(5e6 / 100, rel=1e-3)


def test_an_engine_is_known_by_its_whole_name_and_any_other_is_unknown():
    machine, overheads = Machine("m"), systems()["moe-infinity"].overheads
    assert reached(machine, "MoE Infinity (2026)").framework_us_per_expert == overheads.us_per_expert
    assert reached(machine, "accelerate").link_bandwidth_gb_per_s == 0
    launches = kernels_per_layer(model("qwen3-30b-a3b")) * FACTORS.gpu["gddr"].launch_us
    assert reached(machine, "llama.cpp (llama-bench)").framework_us_per_layer == launches
    assert [system_of(name).name for name in ("FlashMoE", "Flash-MoE")] == ["flashmoe", "flash-moe-metal"]
    for name in ("nobody's", "vLLM + a cache of experts", "DeepSpeed-like", "HOBBIT"):
        assert system_of(name).is_unknown
        assert reached(machine, name).framework_us_per_layer == launches + systems()["unknown"].overheads.us_per_layer


# What is run


def closed_form(one: Case, host_layers: int) -> float:
    """Seconds of a token whose first layers' experts the host computes, everything else the GPU."""
    own, profile = hardware_of_case(one), one.profile
    timing = Runtime(own, profile, False)
    context, k = FACTORS.context, profile.top_k
    ns = timing.head_ns(1)
    for layer in range(profile.moe_layers):
        ns += timing.dense_ns(layer, 1, context) + timing.combine_ns(1)
        ns += timing.hop_ns + k * timing.host_ns(1) if layer < host_layers else k * timing.expert_ns(1)
    return float(ns / 1e9)


@pytest.mark.parametrize("host_layers", [0, 1, 4, 6])
def test_a_static_split_takes_what_its_closed_form_says(tmp_path, host_layers):
    one = case(tmp_path, setting={"host_layers": host_layers})
    assert seconds(one) == pytest.approx(closed_form(one, host_layers), abs=1e-9)


def test_a_trace_all_on_the_gpu_copies_no_expert(tmp_path):
    write_trace(synthetic(1, 4, 6, 16, 4, seed=3), tmp_path / "t")
    changed = {"machine": {"gpu_gb_per_s": 500.0}, "setting": {"all_on": "gpu"}}
    own = case(tmp_path, **{**changed, "setting": {"all_on": "gpu", "trace": str(tmp_path / "t")}})
    assert seconds(own) == pytest.approx(seconds(case(tmp_path, **changed)), rel=0.05)


def test_all_on_the_cpu_reads_every_byte_once_from_host_memory(tmp_path):
    one = case(tmp_path, setting={"all_on": "cpu", "context": 1})
    own = replace(hardware_of_case(one), host_us_per_layer=0.0, framework_us_per_token=0.0)
    assert seconds(one, own) == pytest.approx((60e6 + 10e6 + 6 * 4 * 5e6) / 50e9, rel=2e-3)


def test_without_a_cache_every_expert_crosses_the_link(tmp_path):
    one = case(tmp_path, setting={"policy": "lru", "cache": "0", "blocking": True})
    out = one.simulated(hardware_of_case(one))
    compute = closed_form(one, 0)
    assert out.hit_rate == 0
    assert out.bytes_read == 6 * 4 * 5_000_000
    assert out.seconds == pytest.approx(compute + 6 * 4 * 5e6 / 20e9, rel=1e-3)


def test_whole_layers_move_all_experts_but_those_that_stay(tmp_path):
    one = case(tmp_path, setting={"policy": "lru", "cache": "50%", "whole_layers": True})
    out = one.simulated(hardware_of_case(one))
    assert out.bytes_read == pytest.approx((6 * 16 - 48) * 5_000_000, rel=0.05)


def test_whole_layers_serve_all_requests_of_a_batch(tmp_path):
    setting = {"policy": "lru", "cache": "0", "whole_layers": True}
    row = {"machine": {**MACHINE, "gpu_gb_per_s": 1e6}}
    one, two = (case(tmp_path, **row, setting={**setting, "batch": n}) for n in (1, 2))
    assert two.simulated(hardware_of_case(two)).step_tokens == 2
    assert seconds(two) == pytest.approx(seconds(one), rel=0.01)


def test_misses_from_the_disk_go_at_the_disks_rate(tmp_path):
    machine = {**MACHINE, "disk_gb_per_s": 2.0, "disk_latency_us": 0.0}
    fast = case(tmp_path, setting={"policy": "lru", "cache": "0", "blocking": True})
    slow = case(
        tmp_path, machine=machine, setting={"policy": "lru", "cache": "0", "blocking": True, "misses_from": "disk"}
    )
    assert seconds(slow) - seconds(fast) == pytest.approx(6 * 4 * 5e6 * (1 / 2e9 - 1 / 20e9), rel=1e-3)


def test_a_batch_shares_the_dense_weights_and_not_the_experts(tmp_path):
    alone, four = (case(tmp_path, setting={"all_on": "gpu", "batch": batch}) for batch in (1, 4))
    speeds = [score.figure(each.row, each.simulated(hardware_of_case(each))) for each in (alone, four)]
    assert 1.2 < speeds[1] / speeds[0] < 3.5


@pytest.mark.parametrize("setting", [{**CACHED, "batch": 3}, {**CACHED, "host_cache": "75%"}])
def test_without_a_clock_as_many_bytes_are_read_as_with_one(tmp_path, setting):
    one = case(tmp_path, setting=setting, machine={**MACHINE, "disk_gb_per_s": 2.0})
    read = one.simulated(None).bytes_read
    assert 0 < read == one.simulated(hardware_of_case(one)).bytes_read


@pytest.mark.parametrize("policy", ["lru", "lru@layer", "lru+previous:depth=0@layer/host"])
@pytest.mark.parametrize("hit_rate", [0.3, 0.7, 0.9])
def test_the_routing_reaches_a_measured_hit_rate(tmp_path, policy, hit_rate):
    setting = {"policy": policy, "cache": "50%", "hit_rate": hit_rate, "free_copies": True}
    one = case(tmp_path, setting=setting)
    own = hardware_of_case(one)
    assert one.aimed(own).simulated(own).hit_rate == pytest.approx(hit_rate, abs=0.025)


def test_made_routing_hits_under_lru_as_its_statistics_say():
    reuse = routing.like("gpt-oss-20b", 32, 4)
    request = routing.made(reuse, layers=4, top_k=4, tokens=400, loaded=8, context=1)
    hits, orders = 0, [list(range(32)) for _ in range(4)]
    for event in range(4, 401 * 4):
        ids = request.experts[request.offsets[event] : request.offsets[event + 1]] % 32
        order = orders[event % 4]
        hits += sum(order.index(expert) < 8 for expert in ids)
        orders[event % 4] = [*ids, *(expert for expert in order if expert not in ids)]
    assert hits / (400 * 4 * 4) == pytest.approx(reuse[:8].sum() / 4, abs=0.01)


def test_a_trace_in_a_file_is_run_as_it_is(tmp_path):
    experts = np.array([[[0, 1], [2, 3]], [[0, 2], [2, 3]], [[0, 1], [0, 3]]], np.uint8)
    np.savez(tmp_path / "short.npz", experts=experts, offsets=np.array([0, 3]))
    setting = {"policy": "lru@layer", "slots_per_layer": 2, "trace": str(tmp_path / "short.npz")}
    small = {**MODEL, "layers": 2, "experts": 4, "top_k": 2}
    one = case(tmp_path, metric="hit rate", unit="%", model=small, setting=setting)
    assert one.simulated(None).hit_rate == pytest.approx((1 + 2 + 1 + 1) / 12)


@pytest.mark.parametrize("blocking", [False, True])
def test_a_budget_is_of_what_the_link_carries_while_a_layer_computes(tmp_path, blocking):
    one = case(tmp_path, setting={"policy": "lru+popular:budget=0.5", "cache": "50%", "blocking": blocking})
    assert seconds(one)
    gpu = one.as_run(hardware_of_case(one)).gpu
    timing = Runtime(hardware_of_case(one), one.profile, False)
    computing = sum(timing.dense_ns(layer, 1, 1) for layer in range(6)) / 6
    computing += 4 * timing.expert_ns(1) + timing.combine_ns(1)
    assert gpu.experts_per_layer == computing / gpu.link.used_ns(gpu.link.expert_bytes)


# Where the routing of the very run is known


def test_the_speed_of_a_batch_counts_the_requests_that_run(tmp_path):
    """Of the requests of a trace some end before others: the last steps decode fewer tokens."""
    experts = np.tile(np.arange(12, 16, dtype=np.uint8), (5, 6, 1))
    np.savez(tmp_path / "short.npz", experts=experts, offsets=[0, 1, 5])
    one = case(tmp_path, setting={**CACHED, "trace": str(tmp_path / "short.npz"), "batch": 2})
    found = one.simulated(hardware_of_case(one))
    assert score.figure(one.row, found) == pytest.approx(5e9 / found.log.step_ns.sum())


@pytest.fixture(scope="module")
def phone():
    rows = [row for row in file.read(Path(file.__file__).parent / "bigmoeonedge.toml") if row.setting.trace]
    return score.backtest(rows)


def test_hit_rates_of_the_phone_agree_to_a_thousandth(phone):
    found = [result for result in phone.results if result.row.metric == "hit rate"]
    assert len(found) == 10
    assert max(abs(result.error) for result in found) < 0.001
    assert found[0].row.value == 0.749


def test_bytes_of_the_phone_agree_token_by_token(phone):
    told = benchmark.token_by_token(phone)
    measured = pd.read_parquet(DATA / f"{benchmark.PHONE}.tokens.parquet")
    assert told["tokens"] == len(measured) == 128
    assert told["hit_rate"]["predicted"] == pytest.approx(told["hit_rate"]["measured"], abs=0.001)
    assert told["bytes_read"]["measured"] == measured.read_bytes.sum()
    assert told["bytes_read"]["predicted"] == pytest.approx(told["bytes_read"]["measured"], rel=0.005)
    assert told["bytes_read"]["correlation"] > 0.9999
    assert told["io_s"]["correlation"] > 0.99


# Scores and fits


def test_scores_are_arithmetic(tmp_path):
    rows = file.read(written(tmp_path, *({**ROW, "figure": name} for name in "abc"), {**ROW, "figure": "d"}))
    rows[3] = replace(rows[3], metric="hit rate", unit="%", value=40.0)
    wrong = [
        score.Result(rows[0], predicted=110.0, blind=50.0),
        score.Result(replace(rows[1], assumed=("a",)), predicted=80.0, blind=80.0),
        score.Result(replace(rows[2], unsimulated="no")),
        score.Result(rows[3], predicted=0.43, blind=0.43),
    ]
    told = score.summary(score.Backtest(wrong, []))
    assert told["rows"] == 2
    assert told["unsimulated"] == 1
    assert told["median_abs_error"] == pytest.approx(0.15)
    assert told["worst_abs_error"] == pytest.approx(0.2)
    assert told["blind"]["worst_abs_error"] == pytest.approx(0.5)
    assert told["without_assumptions"]["rows"] == 1
    assert told["hit_rates"] == {
        "rows": 1,
        "median_abs_error": pytest.approx(0.03),
        "worst_abs_error": pytest.approx(0.03),
    }


def test_a_fit_finds_the_parameter_that_made_the_rows_and_is_in_no_score(tmp_path):
    truth = {}
    for n in (1, 3, 5):
        one = case(tmp_path, setting={"host_layers": n})
        truth[n] = 1 / seconds(one, replace(hardware_of_case(one), host_memory_bandwidth_gb_per_s=31.0))
    rows = [
        {**ROW, "figure": f"n={n}", "setting": {"host_layers": n}, "value": value, "fit": n == 3}
        for n, value in truth.items()
    ]
    test = score.backtest(file.read(written(tmp_path, *rows)))
    (fit,) = test.fits
    assert (fit.machine.name, fit.parameter, fit.before, fit.figures) == ("mine", "host_gb_per_s", 50.0, ("n=3",))
    assert fit.after == pytest.approx(31.0, rel=0.005)
    told = score.summary(test)
    assert (told["rows"], told["fit_rows"]) == (2, 1)
    assert told["worst_abs_error"] < 0.005 < told["same_rows_blind"]["median_abs_error"]


def test_a_fitted_machine_is_that_of_its_own_file(tmp_path):
    (tmp_path / "other").mkdir()
    fitted = written(tmp_path, {**ROW, "fit": True}, {**ROW, "figure": "two"})
    blind = written(tmp_path / "other", {**ROW, "figure": "three"})
    told = score.summary(score.backtest([*file.read(fitted), *file.read(blind)]))
    assert (told["rows"], told["after_fit"]["rows"]) == (2, 1)


# What is printed


def test_the_document_has_a_line_for_every_key_of_the_format():
    text = DOCUMENT.read_text()
    for cls in (Machine, Model, Setting, Row):
        for key in cls.__dataclass_fields__:
            assert f"`{key}" in text or key in ("name", "title", "file"), key


def test_the_document_shows_a_file_that_is_valid(tmp_path):
    shown = DOCUMENT.read_text().split("```toml\n")[1].split("```")[0]
    assert tomllib.loads(shown)
    path = tmp_path / "shown.toml"
    path.write_text(shown)
    told = score.summary(score.backtest(file.read(path)))
    assert told["rows"] == 2
    assert math.isfinite(told["worst_abs_error"])


def test_the_document_shows_what_came_of_the_blind_test():
    test = score.backtest(file.read(DATA / "unseen.toml"))
    text = DOCUMENT.read_text()
    assert f"The median error is {score.summary(test)['median_abs_error']:.0%}" in text
    outside = [f"`{result.row.figure}` ({result.error:+.0%})" for result in test.results if not result.inside]
    assert f"interval in {len(test.results) - len(outside)} of {len(test.results)} rows" in text
    assert len(outside) == 3
    assert all(named in text for named in outside)


@pytest.mark.slow
def test_the_documents_numbers_are_what_the_program_writes():
    rows = [row for path in file.shipped() for row in file.read(path)]
    assert benchmark.report(score.backtest(rows)) in DOCUMENT.read_text()
