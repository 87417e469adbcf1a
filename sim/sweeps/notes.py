"""What a sweep reports: warnings and notes before it, and which policies are the best after it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from policies.core.grammar import policy_title
from policies.core.spec import PolicySpec
from sim.experiment import overheads
from sim.loaded import Loaded, TimedRun
from sim.profiles.policy_overhead import cost_us
from sim.quantities import show_bytes, show_gap, show_ms, show_share, show_three
from sim.results import compare
from sim.results.metrics import Row, engine_words, idle_share, size_text
from sim.sweeps.grid import Grid, Outcome

GAPS = (
    "hits gap: share closed of the way from LRU to Belady in lookups that need no transfer, not even a prefetch",
    "time gap: the same in time; <0: worse than LRU, >100%: better than Belady, which prefetches nothing",
)

IN_REPORTS = ("tokens/s", "fetched,\nMB a token", "prefetched,\nMB a token")
"""Columns that a sweep does not print."""

COLUMNS: dict[str, Callable[[Row], str]] = {
    "cache": size_text,
    "a\nlayer": lambda row: engine_words(row)[0],
    "MiB": lambda row: "".join(engine_words(row)[1:]) or "-",
    "policy": lambda row: policy_title(row["policy"], row["oracle"]),
    "hits": lambda row: show_share(row["hit_rate"]),
    "decode\nhits": lambda row: show_share(row["decode_hit_rate"] if row["phase"] == "both" else None),
    "hits\ngap": lambda row: show_gap(row["gap_hits"]),
    "host\nreads": lambda row: _per_token(row, "on_host", 1) if row["on_host"] else "-",
    "TPOT\nms": lambda row: _known(row["tpot_mean_ms"], show_ms),
    "time\ngap": lambda row: show_gap(row["gap_latency"]),
    "p99": lambda row: _known(row["tpot_p99_ms"], show_ms),
    "TTFT\nms": lambda row: _known(row["ttft_mean_ms"], show_ms),
    "idle": lambda row: _known(idle_share(row), "{:.0%}".format),
    "misses": lambda row: f"{row['misses']:,}",
    IN_REPORTS[0]: lambda row: _known(row["tokens_per_s"], show_three),
    IN_REPORTS[1]: lambda row: _per_token(row, "bytes_demand"),
    IN_REPORTS[2]: lambda row: _per_token(row, "bytes_prefetch"),
}
"""What each column of a sweep's table shows of a row."""

BEST, EQUAL, UNKNOWN, NO_ROOM = "best", "equal", "?", "no room"


def columns(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return the texts of each column of which anything is known."""
    texts = {name: [show(row) for row in rows] for name, show in COLUMNS.items()}
    return {name: each for name, each in texts.items() if {*each} != {"-"}}


def _known(value: float | None, show: Callable[[float], str]) -> str:
    return "-" if value is None else show(value)


def _per_token(row: Row, name: str, unit: float = 1e6) -> str:
    return _known(row[name], lambda value: show_three(value / row["tokens"] / unit))


def warnings(loaded: Loaded, grid: Grid) -> list[str]:
    """Cache sizes and memories that are too small or too large for the model, and overheads that may surprise."""
    found = [
        f"a cache of {text} is larger than all {loaded.all_experts:,} experts: it holds them all (100%)"
        for text in grid.sizes
        if loaded.exceeds(text)
    ]
    demand = loaded.token_experts
    shared = not all(policy.scope.cls.per_layer for policy in grid.policies)  # a layer's slots are used once a token
    for slots in map(loaded.experts_in, grid.sizes.values()) if shared and loaded.trace.phases != "prefill" else ():
        if slots < demand:
            none = slots <= demand - loaded.trace.top_k
            found.append(
                f"a cache of {slots} experts is below the working set of one token ({demand} experts): LRU evicts "
                f"experts before their next use{' and never hits' if none else ''}"
            )
    return found + (_of_machine(loaded, grid) if isinstance(loaded, TimedRun) else [])


def _of_machine(loaded: TimedRun, grid: Grid) -> list[str]:
    found = [
        f"a cache of {loaded.experts_in(slots)} experts needs {show_bytes(loaded.needed(slots))} with dense weights "
        f"and KV cache, {loaded.hardware.name} has {show_bytes(loaded.memory)}"
        for slots in grid.sizes.values()
        if not loaded.fits(slots)
    ]
    experts = loaded.all_experts * loaded.mean_expert_bytes
    held = loaded.hardware.host_memory_gib * 2**30
    host_memory = loaded.experiment.host_memory
    if host_memory and loaded.exceeds(host_memory):
        found.append(f"`host_memory` {host_memory} is larger than all experts: it holds them all (100%)")
    if host_memory is None and 0 < held < experts:
        found.append(
            f"all experts take {show_bytes(experts)} of host memory, {loaded.hardware.name} has "
            f"{show_bytes(held)}: `host_memory` puts a disk below it"
        )
    if loaded.hardware.measured and not loaded.measured:
        known = ", ".join(f"{each.model} ({each.expert_bytes} bytes an expert)" for each in loaded.hardware.measured)
        size = loaded.profile.expert_bytes if loaded.sizes is None else "experts of several sizes"
        run = f"{loaded.profile.name} ({size})"
        found.append(f"{loaded.hardware.name} was measured with {known}, not with {run}: times go by its rates")
    return [*found, *_of_overhead(loaded, grid.policies)]


def _of_overhead(loaded: TimedRun, policies: Sequence[PolicySpec]) -> Iterator[str]:
    stated = loaded.experiment.predictor_us
    if isinstance(stated, str):
        names = overheads(stated).keys() - {policy.text for policy in policies}
        if names:
            yield f"`predictor_us` has a time for {', '.join(sorted(names))}, which is not run"
    elif stated:
        shape = loaded.shape.layers, loaded.shape.experts
        if free := [policy.text for policy in policies if cost_us(policy, *shape) == 0]:
            yield (
                f"`predictor_us` {stated:g} is charged to all policies, so to {', '.join(free)} too, which would cost "
                f"nothing: `predictor_us` POLICY={stated:g} charges one"
            )


def overhead_notes(us: Mapping[str, float]) -> Iterator[str]:
    """Yield what was measured of policies of a user's own (`Loaded.measured_us`), and how to state it."""
    for policy, each in us.items():
        yield f"{policy}: {each:g} us an event, measured here and charged to it (`predictor_us` {policy}={each:g})"


def sizes_note(loaded: Loaded, grid: Grid, cache_sizes: Iterable[str]) -> Iterator[str]:
    """Yield notes on sizes: which, as given, hold as many experts as another, and which slots of layers are shared."""
    held = {loaded.experts_in(room): text for text, room in grid.sizes.items()}
    for text in dict.fromkeys(cache_sizes):
        if text not in grid.sizes:
            experts = loaded.experts_in(loaded.slots(text))
            yield f"a cache of {text} holds {experts} experts, as many as one of {held[experts]}, which alone is run"
    shared = [policy.text for policy in grid.policies if not policy.scope.cls.per_layer]
    if shared and (by_layer := [text for text in grid.sizes if text.endswith("layer")]):
        yield (
            f"{', '.join(by_layer)}: all layers share these slots under {', '.join(shared)}; "
            "--scope layer gives each layer its own"
        )


def untimed_note(loaded: Loaded, policies: Iterable[PolicySpec]) -> Iterator[str]:
    partly = [policy.text for policy in policies if policy.prefetches or policy.uses_host]
    if partly and not isinstance(loaded, TimedRun):
        yield (
            "untimed runs neither prefetch nor compute on the host: "
            f"of {', '.join(partly)} only the eviction policy counts"
        )


def marks(outcome: Outcome, runs: Sequence[compare.SweptRun]) -> dict[tuple[int, str], str]:
    """Return what stands beside a size and policy: BEST, EQUAL for each of several within the noise, or NO_ROOM.

    UNKNOWN stands for EQUAL where too few requests were run, nothing beside a policy that was run alone.
    """
    able = {
        (row["cache_experts"], row["policy"]): row["fits"] is not False for row in outcome.rows if not row["oracle"]
    }
    found = {cell: NO_ROOM for cell, has_room in able.items() if not has_room}
    for winner in outcome.winners:
        here = [each for each in runs if each.cache_experts == winner.cache_experts]
        best = next(each for each in here if each.policy == winner.policy)
        others = [each for each in here if each is not best and able.get((each.cache_experts, each.policy))]
        equal = compare.indistinct(best, others, compare.measure_of(outcome.judged_by))
        too_few = not compare.sample(best, best, compare.measure_of(outcome.judged_by)).is_enough
        mark = BEST if not equal else UNKNOWN if too_few else EQUAL
        for each in (best, *equal) if others else ():
            found[each.cache_experts, each.policy] = mark
    return found


def legend(marks: Mapping[tuple[int, str], str], runs: Sequence[compare.SweptRun], judged_by: str) -> Iterator[str]:
    yield from GAPS
    if EQUAL in marks.values():
        drawn = compare.sample(runs[0], runs[0], compare.measure_of(judged_by))
        of = "blocks of tokens" if drawn.tokens else "requests"
        yield f"{EQUAL}: the best mean, or within its noise ({compare.CONFIDENCE:.0%}, paired over {of})"
    if UNKNOWN in marks.values():
        count = int(runs[0].requests[compare.OF_A_REQUEST[judged_by]].count())
        yield f"{UNKNOWN}: too few requests to say which is the best ({count}; {compare.FEWEST} are needed)"
    if NO_ROOM in marks.values():
        yield f"{NO_ROOM}: GPU memory does not hold this cache beside dense weights and KV cache"
