"""Calibration on the CPU: what it writes is what the simulator reads, and passes that disagree are told."""

import math
import sys
import tomllib
from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.core.spec import parse
from replay import commands as cli
from replay.calibration import calibrate, rates
from replay.calibration.calibrate import Calibration, choices, dumps, profile, steps_ns
from replay.calibration.measure import Measurement, middle
from replay.device_choice import DeviceChoice
from sim import commands as sim_cli
from sim.experiment import Experiment
from sim.loaded import TimedRun
from sim.profiles import measured
from sim.profiles.hardware_profile import hardware
from tests.support.fake_gpu import FakeGpu
from traces import demo_trace
from traces.models import profile as model_profile
from traces.models.profile import ModelProfile

# The file

KEYS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=8)
SCALARS = KEYS | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = SCALARS | st.lists(SCALARS | st.lists(SCALARS, max_size=3), max_size=4)
TABLES = st.recursive(
    st.dictionaries(KEYS, VALUES, max_size=4),
    lambda inner: st.dictionaries(KEYS, VALUES | inner | st.lists(inner, min_size=1, max_size=3), max_size=4),
    max_leaves=6,
)


@given(TABLES)
def test_what_is_written_as_toml_is_read_back_the_same(table) -> None:
    assert tomllib.loads(dumps(table)) == table


# The machine


def test_the_rates_of_a_cpu_are_those_of_copies_that_were_made() -> None:
    found = rates.rates(None)
    assert all(0 < each < math.inf for each in asdict(found).values())
    assert found.memory_bandwidth_gb_per_s >= found.link_bandwidth_gb_per_s


@pytest.mark.parametrize("refuse", [None, 0])
def test_the_rates_of_a_gpu_are_asked_through_its_interface_and_memory_is_given_back(refuse: int | None) -> None:
    gpu = FakeGpu(seed=1, refuse=refuse)
    found = rates.rates(gpu, buffers=5, n=32)
    assert all(
        0 < each < math.inf
        for each in (found.link_bandwidth_gb_per_s, found.memory_bandwidth_gb_per_s, found.launch_us)
    )
    assert found.link_latency_us >= 0
    assert (found.memory_gib, gpu.registered) == (2.0, [])


# Passes


MODEL = measured.MeasuredModel(
    model="tiny",
    expert_bytes=100,
    transfer_ns=1_000,
    latency_ns=10,
    turnaround_ns=5,
    launch_ns=2,
    first_dense=((1, 4, 90), (1, 8, 100), (2, 2, 200)),
    dense=((1, 4, 40), (1, 8, 50), (2, 2, 60)),
    expert=((1, 7), (2, 9)),
    combine=((1, 3), (2, 3)),
    head=((1, 20), (2, 21)),
)
RATES = rates.Rates(10.0, 1.0, 24.0, 30.0, 0.5, 2.0, 0.4, 25.0, 64.0)


def found_of(*models: measured.MeasuredModel, rates=(RATES, RATES)) -> Calibration:
    return Calibration(
        facts={"device_name": "Somebody's CPU", "driver": None, "torch": "2", "host_pinned": False, "host_experts": 3},
        rates=list(rates),
        models={"tiny": replace(middle(models), predictor_us={"lru": 0.0, "lru+popular:n=2": 3.25})},
        passes={"tiny": [Measurement(model, noise) for model, noise in zip(models, (0.01, 0.02, 0.005), strict=False)]},
        shapes={"tiny": (3, 2)},
    )


def test_a_disk_whose_transfers_are_all_latency_has_a_profile() -> None:
    found = found_of(replace(MODEL, latency_ns=1_000))
    found.facts["lanes"] = 2
    written = tomllib.loads(profile(found))
    assert written["disk_bandwidth_gb_per_s"] == written["link_bandwidth_gb_per_s"] == MODEL.expert_bytes
    assert written["disk_latency_us"] == 0.999
    assert "experts that 2 lanes read" in profile(found)


def test_the_medians_of_passes_keep_their_shape_and_whole_numbers() -> None:
    passes = [{"a": (1, 2.0), "b": [[4]], "c": "x"}, {"a": (3, 3.0), "b": [[9]], "c": "y"}]
    assert middle(passes) == {"a": (2, 2.5), "b": [[6]], "c": "x"}
    assert middle([*passes, {"a": (100, 0.0), "b": [[5]], "c": "z"}]) == {"a": (3, 2.0), "b": [[5]], "c": "x"}


def test_a_steps_time_is_the_sum_of_its_parts() -> None:
    steps = steps_ns(MODEL, (3, 2))
    one = 90 + 2 * 40 + 3 * (5 + 2 * (7 + 2) + 3) + 20
    assert steps == {
        "a token": one,
        "a token of the longest context": one + 10 + 2 * 10,
        "the longest step": 200 + 2 * 60 + 3 * (5 + 2 * 9 + 3) + 21,
    }


def test_passes_that_agree_do_and_what_differs_most_is_named() -> None:
    assert found_of(MODEL, MODEL).disagreement()[0] == 0
    apart, what = found_of(MODEL, replace(MODEL, transfer_ns=1_100)).disagreement()
    assert apart == pytest.approx(100 / 1_050)
    assert what == "a transfer of tiny"
    slower = replace(RATES, link_bandwidth_gb_per_s=8.0)
    apart, what = found_of(MODEL, replace(MODEL, transfer_ns=1_100), rates=(RATES, slower)).disagreement()
    assert apart == pytest.approx(2 / 9)
    assert what == "link bandwidth"
    apart, what = found_of(MODEL, replace(MODEL, turnaround_ns=50)).disagreement()
    assert what == "a token of tiny"


def test_the_profile_is_read_back_as_it_was_found(tmp_path: Path) -> None:
    other = replace(MODEL, transfer_ns=1_100, dense=((1, 4, 42), (1, 8, 50), (2, 2, 60)))
    found = found_of(MODEL, other)
    file = tmp_path / "here.toml"
    file.write_text(profile(found))
    machine = hardware(str(file))
    assert machine.measured == (found.models["tiny"],)
    (model,) = machine.measured
    assert model.transfer_ns == 1_050
    assert model.dense[0] == (1, 4, 41)
    assert model.predictor_us == {"lru": 0.0, "lru+popular:n=2": 3.25}
    assert (machine.link_bandwidth_gb_per_s, machine.launch_us, machine.title) == (10.0, 2.0, "Somebody's CPU")
    told = machine.calibration
    assert told["cpu"] == "Somebody's CPU"
    assert {"torch", "commit", "date", "host_pinned"} <= set(told)
    assert told["disagreement"] == round(100 / 1_050, 5)
    assert told["noise"] == {"tiny": 0.02}
    assert "a disk that is assumed" in file.read_text()


# What is measured


def tiny(name: str = "tiny") -> ModelProfile:
    own = TimedRun.of(Experiment(str(demo_trace()))).profile
    assert own
    return replace(own, name=name)


def write_profile(made: ModelProfile, folder: Path) -> str:
    path = folder / f"{made.name}.toml"
    path.write_text(model_profile.written(made, ""))
    assert model_profile.model(str(path)) == made
    return str(path)


def test_a_trace_is_run_by_the_first_named_model_of_its_shape_and_others_get_synthetic_routing(tmp_path: Path) -> None:
    shape_of_the_trace = write_profile(tiny("alike"), tmp_path)
    another = write_profile(replace(tiny("wider"), experts=96), tmp_path)
    chosen = choices([another, shape_of_the_trace], [str(demo_trace())], DeviceChoice("cpu", host_dedup=7))
    by_name = {choice.loaded.profile.name: choice for choice in chosen if choice.loaded.profile}
    assert set(by_name) == {"alike", "wider"}
    assert by_name["alike"].loaded.experiment.trace == str(demo_trace())
    assert by_name["wider"].loaded.trace.num_experts == 96
    assert by_name["wider"].most_context == calibrate.LONGEST["cpu"] + 1
    assert {choice.target.host_dedup for choice in chosen} == {7}
    (own,) = choices([], [str(demo_trace())], DeviceChoice("cpu", dense="none"))
    assert own.loaded.profile
    assert own.loaded.profile == replace(tiny(), name=own.loaded.profile.name)
    assert own.target.dense == "none"


# The command


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Run a command in an empty folder: its exit status, stdout and stderr."""

    def invoke(name: str, *arguments: str, folder: str | Path = tmp_path) -> tuple[int, str, str]:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(SystemExit) as ended:
            {"moe-replay": cli.main, "moe-sim": sim_cli.main}[name]()
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return invoke


def test_a_calibrated_profile_is_swept_and_gives_the_durations_that_were_measured(command, tmp_path: Path) -> None:
    status, out, err = command(
        "moe-replay", "calibrate", "--device", "cpu", "--policies", "lru,eamc", "--out", "a.toml"
    )
    assert status == ("too noisy" in err), err  # as this machine may be: the profile is written all the same
    assert "a.toml" in out.splitlines()[-1]
    machine = hardware(str(tmp_path / "a.toml"))
    (model,) = machine.measured
    assert set(model.predictor_us) == {"lru", "eamc"}
    assert model.predictor_us["lru"] == 0 < model.predictor_us["eamc"]

    arguments = ("--policies", "lru,eamc", "--cache-sizes", "100%", "--requests", "2", "--out", "swept")
    status, _, err = command("moe-sim", "sweep", "--hardware", "a.toml", *arguments)
    assert status == 0, err
    rows = pd.read_parquet(tmp_path / "swept/results.parquet").set_index("policy")
    assert set(rows["hardware"]) == {"a (measured)"}
    assert rows.loc["eamc", "predictor_us"] == model.predictor_us["eamc"]

    loaded = TimedRun.of(Experiment(str(demo_trace()), hardware=str(tmp_path / "a.toml"), requests=2))
    log = loaded.log(parse("lru"), loaded.all_experts)
    steps = loaded.trace.steps(1)
    last = len(steps.tokens) - 1
    assert log.misses[-1] == 0
    timing = model.timing()
    layers, context = loaded.trace.layers, int(steps.context[last])
    expected = sum(timing.dense_ns(layer, 1, context) for layer in range(layers)) + timing.head_ns(1)
    expected += layers * (loaded.trace.top_k * timing.expert_ns(1) + timing.combine_ns(1))
    assert log.step_ns[-1] == expected
