"""`moe-sim sensitivity` against closed forms: traces whose TPOT can be written down, and what nothing can change."""

import dataclasses
import json
import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from policies.core import parse
from sim.analysis import point_of
from sim.analysis.sensitivity import DISK, HOST, MACHINE, plan, sensitivity
from sim.experiment import Experiment
from sim.loaded import TimedRun
from sim.profiles.hardware_profile import hardware
from sim.profiles.roofline import Roofline, disk_link, host_link
from tests.support.command import moe_sim
from tests.support.tiny import SIZES
from traces import MARKER, write_trace
from traces.synthetic import synthetic

LAYERS, EXPERTS = 3, 4
TOKEN = LAYERS * EXPERTS
EXPERT_BYTES = SIZES["expert_bytes"]

LINK_ALONE = """
title = "a machine on which only the link takes time"
link_bandwidth_gb_per_s = 2.0
link_latency_us = {latency_us}
memory_gib = 24.0
memory_bandwidth_gb_per_s = 1e9
compute_tflop_per_s = 1e9
launch_us = 0.0
framework_us_per_layer = 0.0
host_compute_tflop_per_s = 1.0
host_memory_bandwidth_gb_per_s = 100.0
disk_bandwidth_gb_per_s = 1.0
disk_latency_us = 1.0
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """`every`: each token needs every expert; `some`: 3 of 16 a layer; `prompts`: no decode."""
    home = tmp_path_factory.mktemp("home")
    shapes = {
        "every": synthetic(3, tokens=6, layers=LAYERS, experts=EXPERTS, top_k=EXPERTS, seed=1),
        "some": synthetic(4, tokens=12, layers=4, experts=16, top_k=3, seed=3, prompt_tokens=6),
        "prompts": synthetic(2, tokens=0, layers=4, experts=16, top_k=3, seed=3, prompt_tokens=6),
    }
    for name, made in shapes.items():
        write_trace(replace(made, meta=replace(made.meta, model="tiny", **SIZES)), home / name)
    for name, latency in (("link.toml", 0.0), ("latency.toml", EXPERT_BYTES / 2.0 / 1_000)):
        (home / name).write_text(LINK_ALONE.format(latency_us=latency))
    (home / "file").touch()
    return home


def measured(home, trace, policy="lru", slots=TOKEN // 2, step=0.2, **setup):
    """Effects by parameter, and everything else that was found."""
    point = point_of(TimedRun.of(Experiment(str(home / trace), **setup)), parse(policy), slots)
    variants, left_out = plan(point, step)
    found = sensitivity(point, variants)
    return {effect.parameter.name: effect for effect in found.effects}, found, left_out


def test_where_all_misses_and_only_bytes_take_time_tpot_is_bytes_over_bandwidth(home):
    """LRU over half of what each token needs misses at every lookup; elasticities are then -1 and +1, all others 0."""
    effects, found, left_out = measured(home, "every", hardware=str(home / "link.toml"))
    assert found.row["misses"] == found.row["lookups"] == 3 * 6 * TOKEN
    assert found.row["tpot_mean_ms"] == pytest.approx(TOKEN * EXPERT_BYTES / 2.0 / 1e6, rel=1e-3)
    for name, elasticity in (("link bandwidth", -1), ("expert size", 1)):
        assert effects[name].elasticity == pytest.approx(elasticity, abs=1e-3)
    down, up = effects["link bandwidth"].changes
    assert (down, up) == pytest.approx((1 / 0.8 - 1, 1 / 1.2 - 1), rel=1e-2)
    assert {effect.parameter.name for effect in found.effects[:2]} == {"link bandwidth", "expert size"}
    assert all(effect.largest < 1e-3 for effect in found.effects[2:])
    assert "cache size" in {effect.parameter.name for effect in found.idle}
    assert [text.split(" is 0, ")[0] for text in left_out] == [
        *("link latency", "kernel launch", "framework", "framework by expert", "framework by step"),
        "predictor",
    ]


def test_latency_and_bytes_share_the_elasticity(home):
    """T = latency + bytes / bandwidth with both halves equal: moved by f, T changes by (f - 1) / 2."""
    effects, _, _ = measured(home, "every", hardware=str(home / "latency.toml"), step=0.5)
    for name, factors in (("link latency", (0.5, 1.5)), ("link bandwidth", (1 / 0.5, 1 / 1.5))):
        down, up = ((1 + factor) / 2 for factor in factors)
        assert effects[name].changes == pytest.approx((down - 1, up - 1), rel=1e-3)
        assert effects[name].elasticity == pytest.approx(math.log(up / down) / math.log(1.5 / 0.5), rel=1e-3)


def test_one_more_slot_is_worth_everything_where_it_completes_a_token(home):
    """One slot short, LRU misses one expert of each layer; with it, none."""
    setup: dict[str, Any] = {"warmup_requests": 1, "hardware": str(home / "link.toml")}
    effects, found, _ = measured(home, "every", slots=TOKEN - 1, **setup)
    assert found.row["misses"] == 2 * 6 * LAYERS
    size = found.effects[0]
    assert size is effects["cache size"]
    assert (size.down[0], size.here[0], size.up[0]) == (9, TOKEN - 1, TOKEN)
    everything = sensitivity(
        point_of(TimedRun.of(Experiment(str(home / "every"), **setup)), parse("lru"), TOKEN), []
    ).row
    assert everything["misses"] == 0
    assert size.up[1] == everything["tpot_mean_ms"] < 1e-3


def test_with_the_whole_model_cached_the_link_has_no_effect_at_all(home):
    effects, found, _ = measured(home, "every", slots=TOKEN, warmup_requests=1, predictor_us=3.0)
    idle = {effect.parameter.name for effect in found.idle}
    assert {"link bandwidth", "link latency"} <= idle
    assert {"kernel launch", "framework", "memory bandwidth", "predictor"}.isdisjoint(idle)
    assert effects["cache size"].up is None, "there is no larger one"
    steps_us = LAYERS * 3.0
    change = 0.2 * steps_us / 1_000 / found.row["tpot_mean_ms"]
    assert effects["predictor"].changes == pytest.approx((-change, change))


def test_the_machines_parameters_are_the_fields_that_durations_depend_on(home):
    """Of a profile's numbers, moving one of MACHINE, HOST or DISK changes some duration; moving any other, none."""
    loaded = TimedRun.of(Experiment(str(home / "some")))
    machine, profile = hardware("a5000"), loaded.profile
    machine = replace(machine, framework_us_per_expert=1.0, framework_us_per_token=1.0)
    assert profile

    def durations(one):
        timing = Roofline(one, profile)
        computed = [(timing.dense_ns(0, n, n), timing.expert_ns(n), timing.combine_ns(n)) for n in (1, 10**7)]
        of_host = timing.host_ns(1), timing.host_ns(10**7), timing.hop_ns
        return computed, timing.head_ns(1), host_link(one, profile), of_host, disk_link(one, profile)

    numbers = [field.name for field in dataclasses.fields(machine) if isinstance(getattr(machine, field.name), float)]
    assert len(numbers) == 16
    read = {
        name
        for name in numbers
        if durations(replace(machine, **{name: 2 * getattr(machine, name)})) != durations(machine)
    }
    assert read == {*MACHINE, *HOST, *DISK}


def test_host_and_disk_are_moved_where_they_are_used(home):
    """Without them they are not parameters; with them they are felt, and a placement's host at its own rate."""
    plain, *_ = measured(home, "some")
    names = {name for told in (HOST, DISK) for name, _ in told.values()}
    assert not names & set(plain)
    felt, *_ = measured(home, "some", "lru/host", 16, host_memory="50%")
    assert names <= set(felt)
    assert felt["host memory bandwidth"].elasticity == pytest.approx(felt["host bandwidth share"].elasticity)
    assert felt["host memory bandwidth"].elasticity < 0 > felt["disk bandwidth"].elasticity


def test_a_variant_is_the_cell_that_a_user_would_have_typed(home):
    """Options, chunk and cache size by another way; the predictor's cost is held, also where options move it."""
    policy = "eamc:cosine=rows:replacement=k-means"
    setup: dict[str, Any] = {"chunk_bytes": 20_000, "warmup_requests": 1}
    effects, _, left_out = measured(home, "some", policy, 16, **setup)
    loaded = TimedRun.of(Experiment(str(home / "some"), **setup))
    cost = loaded.predictor_us(parse(policy))
    assert cost is not None
    assert cost != loaded.predictor_us(parse(f"{policy}:capacity=96")), "not the preset that was measured any more"
    for name, typed, slots, changed in (
        ("capacity", f"{policy}:capacity=96", 16, {}),
        ("cache size", policy, 13, {}),
        ("chunk", policy, 16, {"chunk_bytes": 16_000}),
        ("predictor", policy, 16, {"predictor_us": round(0.8 * cost, 3)}),
    ):
        same = TimedRun.of(Experiment(str(home / "some"), **{**setup, "predictor_us": cost, **changed}))
        row = sensitivity(point_of(same, parse(typed), slots), []).row
        assert effects[name].down[1] == row["tpot_mean_ms"], name
    assert effects["matches"].down is None
    assert effects["matches"].up[0] == 2
    assert "matches at 0, which may stand for all" in left_out
    assert "depth is 0, which no factor changes" in left_out


@pytest.fixture
def command(tmp_path):
    """Runs `moe-sim sensitivity` in a folder of its own: status, standard output, standard error."""
    return partial(moe_sim, "sensitivity", cwd=tmp_path)


def test_the_command_ranks_names_what_helps_most_and_writes(command, home, tmp_path):
    asked = (home / "every", "--policy", "lru", "--cache-size", "50%", "--hardware", home / "latency.toml")
    status, out, err = command(*asked, "--workers", "1")
    assert status == 0, err
    ranked = [line.split("(")[0].strip() for line in out.splitlines() if "GB/s)" in line or "(MB)" in line]
    assert ranked[0] == "link bandwidth"
    assert "what helps most: expert size at 0.059 MB, TPOT -10.0%" in out
    assert "no effect: " in out
    assert "left out: kernel launch is 0" in out
    assert {file.name for file in (tmp_path / "results/every/sensitivity").iterdir()} == {
        "sensitivity.parquet",
        "sensitivity.png",
        MARKER,
    }
    status, out, err = command(*asked, "--quiet", "--json", "--out", "json")
    assert (status, err.count("\n")) == (0, 1), "one warning: the cache is below a token's demand"
    told = json.loads(out)
    assert told["metric"] == "tpot_mean_ms"
    assert {each["parameter"] for each in told["parameters"]} >= {"link bandwidth", "cache size", "expert size"}
