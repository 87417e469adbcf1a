"""What the cells of a sweep recommend: the fastest causal one, by how much, and how sure that is."""

from collections.abc import Iterator, Sequence

from sim.quantities import show_bytes, show_share
from sim.report.inputs import Results
from sim.results import compare
from sim.results.compare import Difference, SweptRun
from sim.results.metrics import Row, size_text
from sim.sweeps import winner
from traces.errors import InputError


def text(sweep: Results) -> str:
    by = winner.metric(sweep.rows)
    causal = [row for row in sweep.rows if not row["oracle"] and row[by] is not None]
    if not causal:
        return f"{sweep.folder}: only oracles were run, which know the future."
    best = min(causal, key=lambda row: (row[by], row["cache_experts"]))
    unit = {"misses": "misses"}.get(by, "ms a token" if by.startswith("tpot") else "ms to the first token")
    machine = f" on {best['hardware']}" if best["hardware"] else ""
    users = f" with {best['max_batch']} requests at a time" if best["max_batch"] else ""
    size = f", {show_bytes(best['cache_bytes'])}" if best["cache_bytes"] else ""
    share = f"{size_text(best)} of the experts in the cache{size}"
    best_cell = (
        f"For {best['model']}{machine}{users}, run {best['policy']} with {share}: {best[by]:,.4g} {unit}, "
        f"hit rate {show_share(best['hit_rate'])}."
    )
    return " ".join([best_cell, *_against_lru(sweep, best, by), *_smaller(causal, best, by, unit)])


def _against_lru(sweep: Results, best: Row, by: str) -> Iterator[str]:
    if best["policy"] == "lru":
        others = [row for row in sweep.rows if row["cache_experts"] == best["cache_experts"] and row is not best]
        if any(not row["oracle"] for row in others):
            better = "misses less" if by == "misses" else "is faster"
            yield f"No other policy that was run {better} there: cleverness does not help."
        return
    cells = {(cell.policy, cell.cache_experts): cell for cell in sweep.cells}
    pair = [cells.get((policy, best["cache_experts"])) for policy in ("lru", best["policy"])]
    if pair[0] is None or pair[1] is None:
        return
    if more := difference(sweep, pair[0], pair[1], by):
        yield f"There, {more.sentence()}."


def difference(sweep: Results, baseline: SweptRun, cell: SweptRun, by: str) -> Difference | None:
    """Return the paired difference in the judging measure; None, with the reason among the problems, without one."""
    try:
        every = compare.differences(baseline, cell, resamples=compare.RESAMPLES_OF_A_TABLE)
    except InputError as error:
        sweep.note(f"no intervals in {sweep.folder}: {error}")
        return None
    return next((each for each in every if each.measure.name == compare.OF_A_REQUEST[by]), None)


def _smaller(causal: Sequence[Row], best: Row, by: str, unit: str) -> Iterator[str]:
    sizes = sorted(
        {row["cache_experts"] for row in causal if row["cache_experts"] < best["cache_experts"]}, reverse=True
    )
    texts = []
    for slots in sizes[:3]:
        row = min((row for row in causal if row["cache_experts"] == slots), key=lambda row: row[by])
        texts.append(f"{row[by]:,.4g} {unit} at {size_text(row)} ({row['policy']})")
    if texts:
        yield f"Smaller caches: {', '.join(texts)}."
