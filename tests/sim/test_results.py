import json
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from policies.core.bent import COUNTS
from sim.loop.log import RequestLog, RunLog
from sim.results.files import write_rows
from sim.results.metrics import REQUESTS, RESULTS, Cell, summarise
from traces import DECODE, PREFILL

MS = 1_000_000


def a_log(**changed):
    """Two requests: the first a prefill of 5 tokens and two decoded ones, the second three decoded tokens."""
    columns = {
        "phase": [PREFILL, DECODE, DECODE, DECODE, DECODE, DECODE],
        "tokens": [5, 1, 1, 1, 1, 1],
        "step_ns": [50 * MS, 10 * MS, 20 * MS, 30 * MS, 40 * MS, 50 * MS],
        "stall_ns": [[1 * MS, 2 * MS, 3 * MS, 4 * MS, 0, 0, 5 * MS]] * 6,
        "hits": [1, 2, 3, 4, 5, 6],
        "late": [0, 1, 0, 1, 0, 1],
        "misses": [3, 3, 3, 3, 3, 3],
        "demand_transfers": [3, 3, 3, 3, 3, 3],
        "prefetch_transfers": [0, 2, 2, 2, 2, 2],
        "prefetch_used": [0, 1, 1, 1, 1, 1],
        "prefetch_wasted": [0, 0, 1, 0, 0, 1],
        **dict.fromkeys(
            ("on_host", "reads_demand", "reads_prefetch", *COUNTS, "host_busy_ns", "disk_busy_ns"), [0] * 6
        ),
        **dict.fromkeys(("admitted", "bypassed", "copies", "copied_bytes"), [0] * 6),
        "demand_bytes": [300] * 6,
        "prefetch_bytes": [0, 200, 200, 200, 200, 200],
        "wasted_bytes": [0, 0, 100, 0, 0, 100],
        "link_busy_ns": [20 * MS] * 6,
        "compute_busy_ns": [5 * MS] * 6,
    }
    arrays: dict[str, Any] = {name: np.array(column, np.int64) for name, column in columns.items()} | changed
    nothing = np.zeros(6, np.int64)
    alone = RequestLog(np.arange(6), np.array([0, 0, 0, 1, 1, 1]), arrays["tokens"], arrays["step_ns"], *[nothing] * 3)
    evictions: dict[str, Any] = {"evictions": np.zeros(0, np.int64), "host_evictions": np.zeros(0, np.int64)}
    return RunLog(**arrays, **evictions, expert_bytes=100, ended_ns=200 * MS, by_request=alone)


def a_cell(**changed):
    made = {
        "policy": "lru+eamc",
        "options": {"prefetch": {"capacity": 120}, "evict": {"name": "lru"}},
        "oracle": False,
        "trace": "t",
        "phase": "both",
        "model": "m",
        "hardware": "a5000",
        "predictor_us": 2.5,
        "cache_experts": 16,
        "cache_bytes": 1600,
        "all_experts": 64,
        "layers": 4,
        "host_memory": None,
        "routing": None,
        **dict.fromkeys(("draft", "acceptance", "prefill_chunk")),
        "max_batch": None,
        "arrivals": None,
        "arrival_rate": None,
        "cold": False,
        "warmup_requests": 0,
        "seed": 7,
        "fits": None,
    }
    return Cell(**{**made, **changed})


REQUESTS_OF_TRACE = pd.DataFrame({"id": ["a", "b"], "dataset": ["gsm8k", "mmlu"], "task": ["", "law"]})


def rows(log=None, **cell):
    row, requests = summarise(log or a_log(), a_cell(**cell), REQUESTS_OF_TRACE)
    return row, requests.to_pylist()


def test_counters_are_sums_over_all_steps_played():
    row, _ = rows()
    wanted = {"tokens": 10, "hits": 21, "late": 3, "misses": 18, "lookups": 42, "requests": 2, "seed": 7}
    assert {name: row[name] for name in wanted} == wanted
    assert row["hit_rate"] == 21 / 42
    assert (row["bytes_demand"], row["bytes_prefetch"], row["bytes_wasted"]) == (1800, 1000, 200)
    assert row["prefetch_precision"] == 5 / 10
    assert row["cache_fraction"] == 0.25


def test_tpot_is_over_decoded_tokens_and_ttft_over_prefills():
    row, _ = rows()
    assert row["ttft_mean_ms"] == 50
    assert [row[f"tpot_{what}_ms"] for what in ("mean", "p50", "max")] == [30, 30, 50]
    assert row["tpot_p95_ms"] == pytest.approx(48)  # linear between the 4th and 5th of five
    assert row["tpot_p99_ms"] == pytest.approx(49.6)
    assert row["tokens_per_s"] == pytest.approx(5 / 0.2), "the other five are a prompt"


def test_what_a_host_does_between_two_steps_is_in_the_tpot_and_in_tokens_per_second():
    log, between = a_log(), np.array([0, 4, 4, 4, 0, 4]) * 1_000_000
    late = replace(log.by_request, latency_ns=log.by_request.latency_ns + between)
    before, row = rows()[0], rows(replace(log, by_request=late))[0]
    assert row["tpot_mean_ms"] == pytest.approx(before["tpot_mean_ms"] + 16 / 5)
    assert row["tokens_per_s"] == pytest.approx(5 / 0.216)


def test_stalls_add_up_to_the_gpus_idle_time_and_exposed_transfers_are_no_overlap():
    row, _ = rows()
    causes = ["predictor", "demand", "late", "behind_prefetch", "slot"]
    assert [row[f"stall_{cause}_ms"] for cause in causes] == [6, 12, 18, 24, 30]
    assert row["gpu_idle_ms"] == 90
    assert row["link_busy_ms"] == 120
    assert row["overlap"] == pytest.approx(1 - (12 + 18 + 24) / 120)
    assert row["compute_busy_ms"] == 30


def test_warm_up_is_played_but_not_counted():
    row, requests = rows(warmup_requests=1)
    assert (row["requests"], row["tokens"], row["hits"], row["tpot_mean_ms"]) == (1, 3, 15, 40)
    assert row["ttft_mean_ms"] is None
    assert [request["request"] for request in requests] == ["b"]


def test_a_step_that_a_warm_up_request_shares_counts_in_the_row_of_the_other_request_alone():
    steps, requests = np.array([0, 1, 2, 3, 3, 4, 5]), np.array([0, 0, 0, 0, 1, 1, 1])
    log = a_log()
    nothing, tokens = np.zeros(7, np.int64), np.array([5, 1, 1, 1, 1, 1, 1])
    shared = RequestLog(steps, requests, tokens, log.step_ns[steps], *[nothing] * 3)
    row, (second,) = rows(replace(log, by_request=shared), warmup_requests=1, max_batch=2)
    assert (row["tokens"], row["tpot_mean_ms"], row["tokens_per_s"]) == (2, 45, pytest.approx(2 / 0.09))
    assert (second["tokens"], second["tpot_mean_ms"]) == (3, 40)


def test_precision_counts_what_warm_up_prefetched_and_left_unused():
    used, none = np.array([0, 0, 0, 1, 1, 1]), np.zeros(6, np.int64)
    log = a_log(prefetch_transfers=np.array([0, 2, 2, 0, 0, 0]), prefetch_used=used, prefetch_wasted=none)
    assert rows(log, warmup_requests=1)[0]["prefetch_precision"] == 3 / 4


def test_a_row_for_each_request():
    _, (first, second) = rows()
    assert (first["request"], first["dataset"], first["ttft_ms"], first["tpot_mean_ms"]) == ("a", "gsm8k", 50, 15)
    assert (second["task"], second["ttft_ms"], second["tpot_mean_ms"], second["lookups"]) == ("law", None, 40, 26)
    assert [first["tokens"], first["hits"], first["late"], first["misses"]] == [7, 6, 1, 9]


def test_what_nothing_can_be_said_of_is_null():
    still = a_log(
        link_busy_ns=np.zeros(6, np.int64), prefetch_transfers=np.zeros(6, np.int64), phase=np.zeros(6, np.uint8)
    )
    row, _ = rows(still)
    for name in ("overlap", "prefetch_precision", "prefetch_coverage", "tpot_mean_ms", "tpot_p99_ms"):
        assert row[name] is None


def test_without_hardware_there_are_no_times():
    row, requests = rows(hardware=None)
    assert not any(row[name] is not None for name in RESULTS.names if name.endswith("_ms"))
    assert row["overlap"] is row["tokens_per_s"] is None
    assert requests[0]["ttft_ms"] is requests[0]["tpot_mean_ms"] is None
    assert row["hits"] == 21


def test_rows_survive_parquet_with_their_types(tmp_path):
    row, requests = rows()
    write_rows([row], RESULTS, tmp_path / "results.parquet")
    write_rows(requests, REQUESTS, tmp_path / "requests.parquet")
    read = pd.read_parquet(tmp_path / "results.parquet").iloc[0]
    assert json.loads(read["options"]) == a_cell().options
    assert read["tpot_mean_ms"] == 30
    assert len(pd.read_parquet(tmp_path / "requests.parquet")) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"results.parquet", "requests.parquet"}
