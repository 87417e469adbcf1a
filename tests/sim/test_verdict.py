"""The first sentences about a sweep, from rows made by hand: each number in them has a closed form."""

from dataclasses import replace

import pandas as pd

from sim.results.compare import differences, swept_runs
from sim.sweeps import verdict

GIB = 2**30


def row(policy: str, experts: int, tpot: float, hit_rate: float, **changed):
    """A cell of a model of 100 experts of 1 GiB; Belady hits 90% at 25 experts, and 95 at 50."""
    made = {
        "policy": policy,
        "options": '{"prefetch": {"name": "none"}}',
        "oracle": False,
        "trace": "t",
        "phase": "decode",
        "hardware": "card",
        "warmup_requests": 0,
        "cache_experts": experts,
        "cache_fraction": experts / 100,
        "cache_bytes": experts * GIB,
        "all_experts": 100,
        "layers": 10,
        "expert_bytes": GIB,
        "hit_rate": hit_rate,
        "misses": round(1000 * (1 - hit_rate)),
        "lookups": 1000,
        "tpot_mean_ms": tpot,
        "ttft_mean_ms": None,
        "belady_hit_rate": {10: 0.7, 25: 0.9, 50: 0.95}[experts],
        "gap_hits": 0.5,
        "gap_latency": 0.4,
        "fits": True,
        "resident_ms": None,
        "predictor_us": 0.0,
        "routing": None,
        "prefetch_used": 0,
    }
    return made | changed


def runs_of(rows, requests: int = 8):
    """`requests` of each, whose times lie about its mean as those of all others do, so that pairs differ alike."""
    table = [
        {name: each[name] for name in ("policy", "cache_experts")}
        | {
            "request": str(i),
            "hits": 1000 - each["misses"],
            "lookups": 1000,
            "decoded": 10,
            "ttft_ms": None,
            "steps": None,
        }
        | {"tpot_mean_ms": each["tpot_mean_ms"] and each["tpot_mean_ms"] + (i - (requests - 1) / 2)}
        for each in rows
        for i in range(requests)
    ]
    return swept_runs(rows, pd.DataFrame(table))


def said(rows, requests: int = 8):
    return verdict.sentences(rows, runs_of(rows, requests))


SWEPT = [
    *(row("lru", 10, 100.0, 0.5), row("mine", 10, 80.0, 0.6)),
    *(row("lru", 25, 50.0, 0.7), row("mine", 25, 35.0, 0.8)),
    *(row("lru", 50, 30.0, 0.8), row("mine", 50, 25.0, 0.9)),
]


def test_the_answer_names_the_policy_its_gain_the_knee_and_whose_the_misses_are():
    assert said(SWEPT) == [
        "mine is the fastest at 10%, 25% and 50%.",
        "With 25% of the experts in the cache (25 GiB) a token takes 35.0 ms, 30% less than under LRU "
        "(95%: 30 to 30); that closes 40% of the gap from LRU to Belady.",
        "Up to 25% a GiB more of cache saves 3.00 ms, above it 0.4 ms.",
        "Of 100 lookups 40, 20 and 10 miss at 10%, 25% and 50% under the best policy: 10, 10 and 5 of them because of "
        "the policy, as Belady, which knows the future, hits them; the others because of the size.",
    ]


def test_where_all_experts_fit_no_cache_is_needed():
    first, second, *_ = said([{**each, "resident_ms": 12.0} for each in SWEPT])
    assert first == "All 100 experts (100 GiB) fit the card: no cache is needed, and a token takes 12.0 ms."
    assert second == "Where less memory is free, mine is the fastest at 10%, 25% and 50%."


def test_a_cache_without_room_never_wins():
    small = [{**each, "fits": each["cache_experts"] < 25} for each in SWEPT]
    assert said(small)[0] == "mine is the fastest at 10%."
    (nothing,) = said([{**each, "fits": False} for each in SWEPT])
    assert nothing == "None of these caches fits card beside dense weights and KV cache: nothing to choose."


def test_how_sure_it_is_and_where_no_policy_helps():
    assert "too few requests to compare it with LRU (5; 6 are needed)" in said(SWEPT, requests=5)[1]
    plain = said([row("lru", 25, 50.0, 0.7), row("mine", 25, 60.0, 0.6)])
    assert plain[:2] == [
        "lru is the fastest at 25%.",
        "With 25% of the experts in the cache (25 GiB) a token takes 50.0 ms; no policy that was run is better than "
        "LRU there.",
    ]
    (oracle,) = said([row("belady", 25, 50.0, 0.7, oracle=True)])
    assert oracle == "Only oracles were run, which know the future: there is nothing to choose."


def test_from_which_recall_on_a_predictor_pays():
    def guesses(recall, gap):
        options = f'{{"prefetch": {{"name": "lookahead", "recall": {recall}}}}}'
        policy = f"lru+lookahead:recall={recall}:distance=2"
        return row(policy, 25, 50.0, 0.7, options=options, gap_latency=gap, oracle=True)

    def last(*rows):
        return said([row("mine", 25, 35.0, 0.8), *rows])[-1]

    faster = "At 25% lru+lookahead:distance=2 (oracle) is faster than mine"
    assert last(guesses(0.5, 0.1), guesses(0.9, 0.6)) == f"{faster} from a recall of 0.74 on."  # mine closes 0.4
    assert last(guesses(0.5, 0.1)) == f"{faster} at no recall up to 0.5, the highest that was run."
    assert last(guesses(0.9, 0.6)) == f"{faster} from a recall of 0.9 on, the least that was run."
    assert said([guesses(0.5, -0.1), guesses(0.9, 0.3)])[-1].endswith("than lru from a recall of 0.60 on.")


def test_a_policy_that_hits_more_but_costs_more_is_named():
    dear = row("mine", 25, 52.0, 0.8, predictor_us=40.0)
    text = said([row("lru", 25, 50.0, 0.7, predictor_us=0.0), dear])[1]
    assert text.endswith("mine hits 10.0 points more, but with an overhead of 40 us an event it takes longer.")


def test_without_a_clock_it_speaks_of_misses():
    counted = [{**each, "tpot_mean_ms": None, "gap_latency": None, "fits": None} for each in SWEPT]
    texts = said(counted)
    assert texts[0] == "mine misses least at 10%, 25% and 50%."
    assert "20.0% of lookups miss, 10 points fewer than under LRU (95%: 10 to 10)" in texts[1]


def test_one_run_is_judged_beside_lru():
    rows = SWEPT[2:4]
    runs = runs_of(rows)
    assert verdict.of_run(rows[1], runs) == [
        "With 25% of the experts in the cache (25 GiB) a token takes 35.0 ms under mine, 30% less than under "
        "LRU (95%: 30 to 30); that closes 40% of the gap from LRU to Belady.",
        "Of 100 lookups 20 miss at 25% under mine: 10 of them because of the policy, as Belady, which knows the "
        "future, hits them; the others because of the size.",
    ]
    fetched = verdict.of_run({**rows[1], "misses": 150, "prefetch_used": 100}, runs)[-1]
    assert fetched.startswith("Of 100 lookups 25 miss or hit what was just prefetched at 25% under mine: 15 of them")
    assert verdict.of_run({**rows[1], "misses": 1000}, runs)[-1].startswith(
        "Of 100 lookups 100 miss at 25% under mine: 90 of them because of the policy"
    )
    assert (
        verdict.of_run({**rows[1], "fits": False}, runs)[0] == "This cache does not fit the card: choose a smaller one."
    )
    lru = verdict.of_run(rows[0], runs)[0]
    assert lru.endswith("a token takes 50.0 ms under lru, the baseline of other policies.")
    twins = runs[0], replace(runs[0], row={**runs[0].row, "policy": "twin"})
    pairs = [(one, other, differences(one, other)) for one, other in (runs, runs[::-1], twins)]
    chosen = "Choose mine, which beats lru in time per token, at 25%."
    assert verdict.of_pairs(pairs[:2]) == ["Choose mine, which beats lru in time per token, at 25% and 25%."]
    assert verdict.of_pairs(pairs[:1]) == [chosen]
    assert verdict.of_pairs(pairs[2:]) == ["lru and twin differ in time per token by no more than chance at 25%."]


def test_of_several_policies_one_is_chosen_at_a_size():
    times = {"lru": 50.0, "mine": 35.0, "other": 35.0, "worst": 60.0}
    lru, *others = runs_of([row(policy, 25, ms, 0.7) for policy, ms in times.items()])
    pairs = [(lru, each, differences(lru, each)) for each in others]
    assert verdict.of_pairs(pairs[::2]) == ["Choose mine, which beats lru and worst in time per token, at 25%."]
    assert verdict.of_pairs(pairs) == [
        "Choose mine or other, which differ in time per token by no more than chance and beat lru and worst, at 25%."
    ]


def test_one_policy_alone_is_not_compared_with_itself():
    first, *rest = said([each for each in SWEPT if each["policy"] == "lru"])
    assert first.endswith("a token takes 50.0 ms under lru, the baseline of other policies.")
    assert [text.split()[0] for text in rest] == ["Up", "Of"]


def test_one_policy_for_several_tables_is_the_nearest_to_the_best_of_each_size():
    """`mine` takes 0.5 and 2 times the time of lru: 1 and 2 over the best, and lru 2 and 1."""
    first = [row("lru", 25, 50.0, 0.7), row("mine", 25, 25.0, 0.8), row("even", 25, 25.0, 0.7)]
    second = [row("lru", 25, 50.0, 0.7), row("mine", 25, 100.0, 0.8), row("even", 25, 60.0, 0.7)]
    assert verdict.joint([first, second]) == [
        "One policy for all 2 tables: even, with 1.10 times the time of the best one at each of 2 sizes, in the "
        "geometric mean (at most 1.20); lru 1.41 (at most 2.00), mine 1.41 (at most 2.00)."
    ]
    assert verdict.joint([first]) == []
