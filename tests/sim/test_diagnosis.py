from sim.results.diagnosis import lines

BELADY = [{"cache_experts": 16, "hit_rate": 0.8}]


def a_row(**changed):
    """A cell without a problem: few misses, a GPU that hardly waits, no wasted prefetch."""
    row = {
        "policy": "lru",
        "oracle": False,
        "phase": "decode",
        "cache_experts": 16,
        "cache_fraction": 0.25,
        "lookups": 1000,
        "misses": 100,
        "late": 0,
        "on_host": 0,
        "hit_rate": 0.9,
        "bytes_demand": 100,
        "bytes_prefetch": 100,
        "bytes_wasted": 10,
        "gpu_idle_ms": 10.0,
        "compute_busy_ms": 90.0,
        "stall_demand_ms": 10.0,
        "stall_late_ms": 0.0,
        "stall_behind_prefetch_ms": 0.0,
        "stall_predictor_ms": 0.0,
        "stall_disk_ms": 0.0,
        "stall_host_ms": 0.0,
        "stall_slot_ms": 0.0,
    }
    return {**row, **changed}


def said(demand=0.1, bound=BELADY, **changed):
    return lines([a_row(**changed)], bound, demand)


def test_a_cell_that_nothing_ails_gets_no_line():
    assert said() == []


def test_misses_are_the_policys_where_belady_has_far_fewer_and_else_the_working_sets():
    (policys,) = said(misses=450, hit_rate=0.55)
    assert policys == "lru at 16 (25%): 45% of lookups miss, because of the policy: Belady hits 80%, not 55%"
    (working_sets,) = said(misses=450, hit_rate=0.55, bound=[{"cache_experts": 16, "hit_rate": 0.6}])
    assert "because of the cache size: Belady hits 60%; a larger cache would help" in working_sets
    (late,) = said(misses=450, late=100, hit_rate=0.45)
    assert late.startswith("lru at 16 (25%): 45% of lookups miss, 10% are late prefetches, because of the policy")
    (unknown,) = said(misses=450, hit_rate=0.55, bound=[])
    assert unknown == "lru at 16 (25%): 45% of lookups miss"


def test_misses_that_the_host_computes_are_the_placements_and_no_fault_of_the_policy():
    (placements,) = said(misses=450, on_host=400, hit_rate=0.55, policy="lru/split")
    assert placements == "lru/split at 16 (25%): 45% of lookups miss, because of the placement: the host computes 40%"
    (sizes,) = said(misses=450, on_host=200, hit_rate=0.55)
    assert "45% of lookups miss, 20% are computed on the host, because of the cache size: Belady hits 80%" in sizes
    (policys,) = said(misses=550, on_host=200, hit_rate=0.45)
    assert policys.endswith("20% are computed on the host, because of the policy: Belady hits 80%, not 45%")


def test_below_one_tokens_demand_that_is_the_reason_but_not_of_a_prefill():
    (line,) = said(demand=0.3, misses=900, hit_rate=0.1)
    assert "the cache is below the working set of one token (30%)" in line
    (prefill,) = said(demand=0.3, misses=900, hit_rate=0.1, phase="prefill")
    assert "demand" not in prefill


def test_an_idle_gpu_is_told_with_what_it_waits_for_most_first():
    (line,) = said(
        gpu_idle_ms=90.0, compute_busy_ms=10.0, stall_demand_ms=20.0, stall_late_ms=68.0, stall_predictor_ms=2.0
    )
    assert line.endswith(
        "the GPU waits 90% of the time: 68% for late prefetches, 20% for experts that were not fetched early"
    )
    assert said(gpu_idle_ms=None, compute_busy_ms=None) == []


def test_an_idle_gpu_may_wait_for_the_disk_or_the_host():
    (line,) = said(
        gpu_idle_ms=90.0,
        compute_busy_ms=10.0,
        stall_demand_ms=1.0,
        stall_disk_ms=60.0,
        stall_host_ms=22.0,
        stall_slot_ms=7.0,
    )
    assert line.endswith("waits 90% of the time: 60% for the disk, 22% for the host to compute, 7% for a slot")


def test_bytes_moved_in_vain_are_told():
    (line,) = said(bytes_wasted=80)
    assert line == "lru at 16 (25%): 40% of the bytes moved were wasted prefetches"
    assert said(bytes_demand=None, bytes_prefetch=None, bytes_wasted=None) == []
    (line,) = said(bytes_wasted=300)  # of the warm-up, most of it
    assert line == "lru at 16 (25%): 50% of the bytes moved were wasted prefetches"


def test_oracles_are_not_judged():
    assert said(oracle=True, misses=900, hit_rate=0.1, bytes_wasted=200) == []
