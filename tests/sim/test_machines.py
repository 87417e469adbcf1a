"""Host, disk, several users and experts of several sizes as a user asks for them: setups, sweeps and their results."""

from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from policies.core.spec import parse
from replay.choice import Choice
from replay.device_choice import DeviceChoice
from sim.engines import compiled_engine, simpy_engine
from sim.experiment import Experiment
from sim.loaded import TimedRun, load
from sim.loop.log import RunLog, joined
from sim.loop.requests import users
from sim.sweeps.grid import Grid, run_grid
from tests.support.logs import assert_logs_equal
from tests.support.profiles import HALF, plain
from tests.support.tiny import SIZES
from traces import InputError, Trace
from traces.models.profile import written
from traces.shards import Shards
from traces.synthetic import synthetic
from traces.writer import write_trace

L, E, K = 3, 16, 2


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    made = synthetic(6, tokens=8, layers=L, experts=E, top_k=K, seed=3)
    made = replace(made, meta=replace(made.meta, model="tiny", **SIZES))
    write_trace(made, home / "tiny")
    for name, arrivals in (("arriving", [0, 0, 10**6, 10**6, 10**7, 10**9]), ("backward", [6, 8, 7, 5, 9, 10])):
        requests = made.requests.assign(arrival_ns=pd.array(arrivals, dtype="Int64"))
        write_trace(replace(made, requests=requests), home / name)
    return home


def row_of(setup: Experiment, policy: str, size: str = "50%") -> dict[str, Any]:
    loaded = load(setup)
    (row,) = run_grid(loaded, Grid((parse(policy),), {size: loaded.slots(size)}))[0].rows
    return {name: value for name, value in row.items() if name != "cell"}


ASKED: dict[str, tuple[dict[str, Any], str]] = {
    "placement": ({}, "lru/split"),
    "host": ({}, "eamc/host"),
    "disk": ({"host_memory": "60%"}, "lru+popular"),
    "both": ({"host_memory": "20"}, "lfu/split"),
    "closed": ({"max_batch": 3}, "eamc-blend"),
    "poisson": ({"max_batch": 2, "arrivals": "poisson", "arrival_rate": 500.0}, "lru+markov"),
    "everything": ({"max_batch": 2, "host_memory": "60%", "cold": True}, "lru+oracle/split"),
}


@pytest.mark.parametrize("asked", ASKED)
def test_both_engines_give_the_same_row(home: Path, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options, policy = ASKED[asked]
    row = row_of(Experiment(str(home / "tiny"), **options), policy)
    monkeypatch.setattr(compiled_engine, "play", simpy_engine.play)
    assert row_of(Experiment(str(home / "tiny"), **options), policy) == row


def test_what_the_host_the_disk_and_the_queue_did_is_in_the_row(home: Path) -> None:
    plain, host = (row_of(Experiment(str(home / "tiny")), policy) for policy in ("lru", "lru/host"))
    assert plain["on_host"] == 0 == plain["host_busy_ms"] == plain["disk_busy_ms"]
    assert host["on_host"] == host["misses"] == host["lookups"], "nothing ever comes to the GPU"
    assert host["bytes_demand"] == 0 < host["stall_host_ms"]
    disk = row_of(Experiment(str(home / "tiny"), host_memory="100%"), "lru")
    assert disk["reads_demand"] == len(used_experts(home)), "each is read once, and never leaves"
    assert disk["stall_disk_ms"] > 0
    assert plain["queue_mean_ms"] is None
    closed = row_of(Experiment(str(home / "tiny"), max_batch=2), "lru")
    assert closed["queue_max_ms"] == 0 < closed["tokens_per_s"]
    crowd = row_of(Experiment(str(home / "tiny"), max_batch=1, arrivals="poisson", arrival_rate=1e6), "lru")
    assert crowd["queue_max_ms"] > crowd["queue_mean_ms"] > 0


def used_experts(home: Path) -> set[int]:
    trace = Trace.read(home / "tiny")
    return {int(expert) for i in range(len(trace.requests)) for expert in trace.steps(i).experts}


def test_recorded_arrivals_are_those_of_the_trace(home: Path) -> None:
    asked = Experiment(str(home / "arriving"), max_batch=2, arrivals="trace")
    found = users(asked, Shards.open(asked.trace))
    assert found is not None
    assert found.arrival_ns == (0, 0, 10**6, 10**6, 10**7, 10**9)


def test_poisson_arrivals_have_their_rate_and_their_seed(home: Path) -> None:
    def arrivals(seed: int) -> tuple[int, ...]:
        setup = Experiment(str(home / "tiny"), max_batch=2, arrivals="poisson", arrival_rate=1000.0, seed=seed)
        found = users(setup, Shards.open(setup.trace))
        assert found is not None
        assert found.arrival_ns
        return found.arrival_ns

    assert arrivals(1) == arrivals(1) != arrivals(2)
    drawn = np.diff([each for seed in range(200) for each in (0, *arrivals(seed))])
    assert drawn[drawn > 0].mean() == pytest.approx(1e6, rel=0.1), "1,000 a second, in ns"


REFUSED: dict[str, dict[str, Any]] = {
    "need `max_batch`": {"arrivals": "trace"},
    "need each other": {"max_batch": 2, "arrivals": "poisson"},
    "unknown arrivals": {"max_batch": 2, "arrivals": "closd"},
    "without a clock": {"untimed": True, "max_batch": 2},
    "have `chunk_bytes` or `predictor_us`": {"untimed": True, "chunk_bytes": 4096, "predictor_us": 0.0},
    "`host_memory`": {"host_memory": "3B"},
    "does not say when": {"max_batch": 2, "arrivals": "trace"},
}


@pytest.mark.parametrize("says", REFUSED)
def test_what_cannot_be_is_refused_in_one_line(home: Path, says: str) -> None:
    with pytest.raises(InputError, match=says) as refused:
        row_of(Experiment(str(home / "tiny"), **REFUSED[says]), "lru")
    assert "\n" not in str(refused.value)


def test_recorded_arrivals_count_from_the_first_wherever_it_stands_in_the_trace(home: Path) -> None:
    """Requests that all arrive before a step ends wait in the order of their arrival (rule 18)."""
    loaded = TimedRun.of(Experiment(str(home / "backward"), max_batch=1, arrivals="trace"))
    sent = users(loaded.experiment, loaded.trace)
    assert sent is not None
    assert sent.arrival_ns == (1, 3, 2, 0, 4, 5)
    run = loaded.run(parse("lru"), 12)
    log = compiled_engine.simulate(run)
    assert_logs_equal(log, simpy_engine.simulate(run))
    assert list(dict.fromkeys(log.request.tolist())) == [3, 0, 2, 1, 4, 5]


@pytest.mark.parametrize("capacity", ["30%", "700000B", "12"])
def test_a_cache_in_bytes_counts_as_a_plain_lru_in_bytes(home: Path, tmp_path: Path, capacity: str) -> None:
    sizes = [40_000, 73_728, 55_555]
    trace = Trace.read(home / "tiny")
    trace = replace(trace, meta=replace(trace.meta, layer_expert_bytes=tuple(sizes)))
    loaded = load(Experiment("stated", untimed=True), trace)
    room = loaded.slots(capacity)
    log = loaded.log(parse("lru"), room)
    held: OrderedDict[int, int] = OrderedDict()
    hits = moved = 0
    for request in map(trace.steps, range(len(trace.requests))):
        for event in np.split(request.experts, request.offsets[1:-1]):
            missed = [expert for expert in event.tolist() if expert not in held]
            for expert in event.tolist():
                if expert in held:
                    hits += 1
                    held.move_to_end(expert)
            for expert in missed:
                size = sizes[expert // E]
                while sum(held.values()) + size > room:
                    held.popitem(last=False)
                held[expert] = size
                moved += size
            for expert in event.tolist():  # of one event, ascending ids are ascending recency
                held.move_to_end(expert)
    assert (log.hits.sum(), log.demand_bytes.sum()) == (hits, moved)


@pytest.mark.parametrize("policy", ["lru", "lfu", "arc", "lru+popular"])
def test_bytes_divided_among_layers_are_as_many_slots_of_each(home: Path, policy: str) -> None:
    sizes, sets = (40_000, 73_728, 55_555), 4
    trace = Trace.read(home / "tiny")
    stated = replace(trace, meta=replace(trace.meta, layer_expert_bytes=sizes))
    alike, sized = (load(Experiment("x", untimed=True), each) for each in (trace, stated))
    layered = parse(f"{policy}@layer")
    room = sized.slots(f"{sets * sum(sizes) + sizes[0]}B")  # one slot more for the first layer
    assert layered.divide(sized.shape, room, sized.sizes) == (5 * sizes[0], 4 * sizes[1], 4 * sizes[2])
    assert layered.divide(sized.shape, sized.slots("100%"), sized.sizes) == tuple(E * size for size in sizes)
    one, other = alike.log(layered, sets * L + 1), sized.log(layered, room)
    for column in ("hits", "misses", "evictions"):
        assert getattr(one, column).tolist() == getattr(other, column).tolist(), column
    timed = TimedRun.of(Experiment("x"), stated).run(layered, room)
    parts: list[RunLog] = []
    compiled_engine.play(timed, parts.append)
    assert_logs_equal(joined(parts), simpy_engine.simulate(timed))
    with pytest.raises(InputError, match="cannot be divided among 3 layers: scope layer needs 169,283 or more"):
        sized.slots_for(layered, "169000B")


def test_layers_that_all_state_one_size_run_as_a_model_of_that_size(home: Path, tmp_path: Path) -> None:
    rows = []
    for name, sizes in (("plain", ()), ("stated", (3 * 32 * 24 * 2,) * L)):
        profile = tmp_path / name / "tiny.toml"
        profile.parent.mkdir()
        made = plain("tiny", f"{L} moe", experts=E, top_k=K, layer_expert_bytes=sizes, **HALF)
        profile.write_text(written(made, ""))
        options: dict[str, Any] = {"host_memory": "11%", "model_profile": str(profile)}  # 5.28 experts of 48
        rows.append(row_of(Experiment(str(home / "tiny"), **options), "lru+popular@layer", "20%"))  # 9.6
    assert rows[0] == rows[1]


def test_one_user_is_the_run_without_users(home: Path) -> None:
    plain, one = (row_of(Experiment(str(home / "tiny"), max_batch=batch), "lru+popular") for batch in (None, 1))
    changed = {name for name, value in plain.items() if one[name] != value}
    assert changed == {"max_batch", "arrivals", "queue_mean_ms", "queue_p99_ms", "queue_max_ms"}


@pytest.mark.parametrize(
    ("options", "policy", "instead"),
    [
        ({}, "lru+markov:n=2/host", r"without it \(`policy` lru\+markov:n=2\), or simulate it"),
        ({}, "lru@layer/split", r"without it \(`policy` lru@layer\), or simulate it"),
        ({"max_batch": 2}, "lru", "the winner of a sweep without it, or simulate it"),
        ({"host_memory": "9"}, "lru", "the winner of a sweep without it, or simulate it"),
    ],
)
def test_the_replay_says_what_to_run_instead_of_what_no_device_runs(
    home: Path, options: dict[str, Any], policy: str, instead: str
) -> None:
    loaded = TimedRun.of(Experiment(str(home / "tiny"), **options))
    with pytest.raises(InputError, match=f"hardware does not run .* so far: replay .*{instead}"):
        Choice(loaded, parse(policy), 10, DeviceChoice("virtual"))
