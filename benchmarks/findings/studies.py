"""What is run over the large traces, and written as one table for each study. No routing leaves them.

gpt-oss-20b: requests from 205 on, of the half on which no weight of `eamc-blend` was fitted. DeepSeek-V2-Lite: requests
from 250 on, prompts run token by token, since the trace has no decoding. Both on the A5000 profile.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd

from policies.core.spec import parse
from policies.core.stack_distances import lru_misses
from replay.live.model import LiveModel
from replay.live.opening import open_live
from replay.live.quality import prices
from sim import simulate, sweep
from sim.analysis import speculation as analysis
from sim.analysis.curves import accesses, belady_misses
from sim.experiment import Experiment
from sim.loaded import TimedRun
from sim.sweeps.grid import grid_of, summed
from tracer.prompts import Columns, read_prompts
from traces.board import board
from traces.hot_experts import carry_over
from traces.importers import import_dump
from traces.importers.source import Options
from traces.models.profile import model
from traces.stats import WINDOWS, statistics
from traces.steps import DECODE
from traces.trace import Trace

POLICIES = (
    *("lru", "lfu-perfect", "lfu-aged", "lrfu", "least-stale", "eamc+none", "eamc", "eamc-blend+none", "eamc-blend"),
    "belady",
)
SIZES = ("10%", "25%", "50%")
SPECULATED = ("25%", "50%", "100%")
CAPACITIES = (1, 10, 50, 120, 300)
USERS = (1, 2, 4, 8)
DRAFTED = (1, 2, 4, 8)
QUARTER_AND_HALF = ("25%", "50%")
DROPS = ("drop:below=0.5/k", "drop:below=0.75/k", "drop:below=1/k")
SUBSTITUTES = ("substitute:bonus=0.05", "substitute:bonus=0.15", "substitute:bonus=0.3")
HYBRID = {
    "online": "lrfu/split/second:window=8:insert_cap=4",
    "online, all on the CPU": "lrfu/host/score:insert_cap=4",
    "one read": "belady/admitted/score",
    "fewest reads, lead": "belady+fewest-reads:lead=72/host",
    "two reads": "belady/host/second:window=1000000",
    "most hits, lead": "belady+oracle:horizon=72/host",
    "eamc-blend, order alone": "eamc-blend+none/split/second:window=8:insert_cap=4",
    "eamc-blend": "eamc-blend/split",
    "eamc-blend, fetched": "eamc-blend",
}
"""What is run of a hybrid engine, by its name in the text: the first is what the others are compared with."""
HYBRID_SIZES = ("15%", "25%", "40%")
MACHINE = Path(__file__).with_name("hybrid.toml")
AT_ONCE = 59.7
"""GB/s of host memory that CPU and link read together, on that machine."""
WINDOW = 16
"""Tokens whose experts are counted together."""
GPT_OSS, DEEPSEEK, MIXTRAL = "gpt-oss-20b", "deepseek-v2-lite", "mixtral-8x7b"
SHIPPED, TRAINED = "shipped OLMoE", "small Mixtral"
FILES = {GPT_OSS: "gpt-oss-20b-decode", DEEPSEEK: "deepseek-v2-lite-prefill"}
MOST = 60
"""Requests of the study of policies, and half of them of that of users: the first ones."""
HALVES = {GPT_OSS: range(205, 409), DEEPSEEK: range(250, 500)}


def read(folder: Path, name: str) -> tuple[Trace, pd.DataFrame]:
    """Return a trace with ids of tokens, decoded token by token, and what its source says of each request."""
    path = folder / f"{FILES[name]}.npz"
    ids = Options(token_ids=folder / f"{FILES[name]}-tokens.npz")
    trace = import_dump(path, path.with_suffix(".json"), ids)[0]
    trace = trace if trace.phases == "decode" else trace.as_decode()
    requests = json.loads(path.with_suffix(".json").read_text("utf-8"))["requests"]
    listed = requests if isinstance(requests, list) else [{} for _ in range(requests)]
    facts = pd.DataFrame(
        {
            "loop": [bool(each.get("repetition", False)) for each in listed],
            "cut": [not each.get("finished", True) for each in listed],
        }
    )
    return trace, facts


def policies(trace: Trace, facts: pd.DataFrame, rows: Sequence[int], asked: Sequence[str] = POLICIES) -> pd.DataFrame:
    """Return hits and times of each policy at each size, a row a request."""
    found = sweep(trace.select(np.array(rows)), list(asked), list(SIZES))
    return _labelled(found.requests, facts, rows)


def capacities(trace: Trace, facts: pd.DataFrame, rows: Sequence[int]) -> pd.DataFrame:
    """Return the same of the paper's policy by the capacity of its collection, and of LRU and Belady."""
    asked = ["lru", *(f"eamc:capacity={n}+none" for n in CAPACITIES), "belady"]
    found = sweep(trace.select(np.array(rows)), asked, ["25%"])
    return _labelled(found.requests, facts, rows)


def users(trace: Trace, rows: Sequence[int]) -> pd.DataFrame:
    """Return tokens a second and hit rate of several users at once, a row a run."""
    some = trace.select(np.array(rows))
    runs = [sweep(some, ["lru", "eamc-blend"], ["25%"], max_batch=n).frame.assign(users=n) for n in USERS]
    columns = ["policy", "users", "hit_rate", "tokens_per_s", "tpot_mean_ms", "tokens", "requests"]
    return pd.concat(runs)[columns].reset_index(drop=True)


def curves(trace: Trace, rows: Sequence[int]) -> pd.DataFrame:
    """Return LRU's and Belady's hit rate at every cache size, layers sharing the cache."""
    some = trace.select(np.array(rows))
    experts, _ = accesses(some.steps(i) for i in range(len(some.requests)))
    lookups, total = len(experts), some.layers * some.num_experts
    lru, belady = (f(experts, total) for f in (lru_misses, belady_misses))
    slots = np.arange(total + 1)
    return pd.DataFrame({"slots": slots, "lru": 1 - lru / lookups, "belady": 1 - belady / lookups})


def activation(trace: Trace, facts: pd.DataFrame) -> pd.DataFrame:
    """Return the share of all experts that each request uses, and uses for more than one token."""
    eams = trace.eams(DECODE)
    tokens = eams[:, 0].sum(axis=1) // trace.top_k
    shares = {"used": (eams > 0).mean(axis=(1, 2)), "repeated": (eams > 1).mean(axis=(1, 2))}
    return pd.DataFrame({"tokens": tokens, **shares, **facts})


def similarity(trace: Trace) -> pd.DataFrame:
    """Return how alike the requests' EAMs are, one row."""
    found = statistics(trace)["decode"].similarity
    assert found
    return pd.DataFrame([vars(found)], dtype=np.float64)


def speculation(trace: Trace) -> pd.DataFrame:
    """Return what drafted tokens do under LRU, a row for each cache size and number of them; a lookup drafts."""
    loaded = TimedRun.of(Experiment("in memory"), trace)
    grid = grid_of(loaded, [parse("lru")], list(SPECULATED))
    return without_lists(pd.DataFrame(analysis.rows(analysis.speculate(loaded, grid, DRAFTED), loaded)))


def without_lists(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the same with the speed at three acceptances, for that at all, and without what is by layer."""
    speeds = {f"speedup_{n}0": [each[n] for each in rows["speedups"]] for n in (5, 7, 9)}
    bounds = {name: rows[name].astype(np.float64) for name in ("break_even", "low", "high")}
    return rows.drop(columns=["union_by_layer", "speedups"]).assign(**bounds, **speeds)


def hybrid(trace: Trace, rows: Sequence[int]) -> pd.DataFrame:
    """Return what policies do where the CPU computes misses, a row for each and each size, at MXFP4.

    The contract's streams do not slow each other down. So each runs at rates that its own run makes consistent: in the
    share of a token in which the other is busy, CPU and link have their parts of what both read at once.
    """
    some = trace.select(np.array(rows))
    size = model("gpt-oss-20b").expert_bytes
    some = replace(some, meta=replace(some.meta, layer_expert_bytes=(size,) * some.layers))
    loaded, found = TimedRun.of(Experiment("in memory", hardware=str(MACHINE)), some), []
    machine = loaded.hardware
    alone = np.array([machine.host_memory_bandwidth_gb_per_s, machine.link_bandwidth_gb_per_s])
    for name, text in HYBRID.items():
        policy = parse(text)
        for asked in HYBRID_SIZES:
            rates = alone
            for _ in range(4):
                host, link = rates.tolist()
                at = replace(machine, host_memory_bandwidth_gb_per_s=host, link_bandwidth_gb_per_s=link)
                run = replace(loaded, hardware=at)
                row = summed(run, policy, [run.slots(asked)], lambda n: None)[0].row()
                elapsed = row["gpu_idle_ms"] + row["compute_busy_ms"]
                beside = np.array([row["link_busy_ms"], row["host_busy_ms"]]) / elapsed
                rates = 1 / (beside / (alone * AT_ONCE / alone.sum()) + (1 - beside) / alone)
            moved = sum(row[f"bytes_{kind}"] or 0 for kind in ("demand", "prefetch", "copied")) / size
            figures = {"hit_rate": row["hit_rate"], "tokens_per_s": row["tokens_per_s"]}
            reads = {"host_reads": row["on_host"] / row["tokens"], "copies": moved / row["tokens"]}
            found.append({"run": name, "size": asked, **figures, **reads})
    return pd.DataFrame(found)


def models(traces: Sequence[tuple[str, Trace]]) -> pd.DataFrame:
    """Return how alike neighbours are, how far popularity carries over, and what a quarter of the experts hits."""
    rows = []
    for name, trace in traces:
        found = statistics(trace).get("decode") or statistics(trace)["prefill"]
        assert found.working_sets
        window = found.working_sets[WINDOWS.index(WINDOW)]
        served = carry_over(trace, [-(-trace.num_experts // 4)])
        hits = curves(trace, range(len(trace.requests))).set_index("slots")
        quarter = hits.loc[round(len(hits) / 4)]
        rows.append(
            {
                "trace": name,
                "num_layers": trace.layers,
                "num_experts": trace.num_experts,
                "top_k": trace.top_k,
                "requests": len(trace.requests),
                "tokens": len(trace.experts),
                "reuse": found.reuse.share,
                "chance": found.reuse.chance,
                "popular": served["itself"][0],
                "carried": served["other half"][0],
                "window": window.experts,
                "window_hits": window.hits,
                "lru": quarter["lru"],
                "belady": quarter["belady"],
            }
        )
    return pd.DataFrame(rows)


def bent(folder: Path) -> pd.DataFrame:
    """Return fetches and what is lost where absent experts are dropped, of the requests with recorded weights."""
    with np.load(folder / f"{FILES[GPT_OSS]}-weights-first40.npz", allow_pickle=False) as held:
        weights = held["weights"]
    trace = read(folder, GPT_OSS)[0].head(40)
    trace, rows = replace(trace, weights=weights), []
    for size, (policy, rule) in product(
        QUARTER_AND_HALF, (("belady", None), *(("lru", rule) for rule in (None, *DROPS)))
    ):
        run = simulate(trace, policy, size, untimed=True, routing=rule)
        kept = ("policy", "cache_fraction", "routing", "tokens", "lost_weight", "changed_choices")
        rows.append(
            {**{name: run[name] or 0 for name in kept}, "routing": rule or "", "fetches": run["misses"] / run["tokens"]}
        )
    return pd.DataFrame(rows)


def quality(folder: Path, trained: Path) -> pd.DataFrame:
    """Return what rules cost and save on two models and the test set of GSM8K, which they were not trained on.

    trained: folder of a model of another architecture than the shipped one's.
    """
    asked, found = read_prompts(folder.parent / "prompts" / "gsm8k_test.jsonl", Columns()), list[pd.DataFrame]()
    for name, model_folder in ((SHIPPED, None), (TRAINED, str(trained))):

        def opening(policy: str, size: str, rule: str | None, model: str | None = model_folder) -> LiveModel:
            return open_live(model, policy=policy, cache_size=size, routing=rule)

        rows = prices(opening, asked, ["lru"], QUARTER_AND_HALF, (*DROPS, *SUBSTITUTES, "commit:layers=1"), 1_000)
        found.append(pd.DataFrame(rows).drop(columns=["ms", "ms_whole"]).assign(model=name))
    return pd.concat(found)


def mixtral(folder: Path) -> Trace:
    """Return the small trace of Mixtral, whose source says nothing but the routing."""
    with np.load(folder / f"{MIXTRAL}.npz", allow_pickle=False) as held:
        requests = np.split(held["experts"].astype(np.int64), held["offsets"][1:-1])
    return Trace.from_arrays(requests, 8, model=MIXTRAL)


def _labelled(requests: pd.DataFrame, facts: pd.DataFrame, rows: Sequence[int]) -> pd.DataFrame:
    places = requests.groupby(["policy", "cache_experts"], sort=False).cumcount().to_numpy()
    kept = requests[["policy", "cache_fraction", "tokens", "lookups", "hits", "tpot_mean_ms"]].reset_index(drop=True)
    known = {str(name): facts[name].to_numpy()[rows][places] for name in facts}
    return kept.assign(request=np.array(rows)[places], **known)


def run(folder: Path, trained: Path, out: Path, only: Sequence[str] = ()) -> None:
    """Run every study, or those named, whose result is not there yet. trained: see `quality`."""
    held: dict[str, tuple[Trace, pd.DataFrame]] = {}

    def of(name: str) -> tuple[Trace, pd.DataFrame]:
        return held.setdefault(name, read(folder, name)) if name not in held else held[name]

    def halves(study: Callable[..., pd.DataFrame], most: int | None = None, facts: bool = True) -> pd.DataFrame:
        parts = []
        for name, half in HALVES.items():
            trace, known = of(name)
            rows = list(half)[:most]
            parts.append((study(trace, known, rows) if facts else study(trace, rows)).assign(trace=name))
        return pd.concat(parts, ignore_index=True)

    studies: dict[str, Callable[[], pd.DataFrame]] = {
        "curves": lambda: halves(curves, MOST, facts=False),
        "activation": lambda: pd.concat([activation(*of(name)).assign(trace=name) for name in HALVES]),
        "similarity": lambda: pd.concat([similarity(of(name)[0]).assign(trace=name) for name in HALVES]),
        "policies": lambda: halves(policies, MOST),
        "capacities": lambda: halves(capacities),
        "users": lambda: halves(users, MOST // 2, facts=False),
        "hybrid": lambda: hybrid(of(GPT_OSS)[0], list(HALVES[GPT_OSS])[: MOST // 2]),
        "models": lambda: models(
            [
                *(
                    (card.name, Trace.read(card.folder))
                    for card in board().cards
                    if card.sha256 and card.name != GPT_OSS
                ),
                *((name, of(name)[0].select(np.array(half)[:MOST])) for name, half in HALVES.items()),
                (MIXTRAL, mixtral(folder)),
            ]
        ),
        "bent": lambda: bent(folder),
        "quality": lambda: quality(folder, trained),
        "speculation": lambda: pd.concat(
            [
                halves(lambda trace, rows: speculation(trace.select(np.array(rows))), MOST // 2, facts=False),
                speculation(mixtral(folder)).assign(trace=MIXTRAL),
            ]
        ),
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, study in studies.items():
        if (file := out / f"{name}.parquet").exists() or (only and name not in only):
            continue
        began = time.process_time()
        study().reset_index(drop=True).to_parquet(file, compression="zstd")
        print(f"{name}: {time.process_time() - began:.0f} s of CPU", file=sys.stderr, flush=True)
