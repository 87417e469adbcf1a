"""What a record of real runs says of the bounds that this harness is to hold."""

from collections.abc import Iterator, Mapping, Sequence

from replay.comparison.cell import CLOSED_LOOP
from replay.comparison.record import ERROR
from sim.results.metrics import Row

COPY_SHARE, COPY_LEAST_BYTES = 0.97, 8_000_000
"""Bandwidth while busy over a large copy's, for experts of at least so many bytes."""
OVER_WITHOUT_HOST = {"mixtral-8x7b": 1.03, "deepseek-v2-lite": 1.10}
"""Measured step over the simulated one whose host takes no time, at a quarter of the experts."""
HOST_US = 30.0
"""Bookkeeping of a layer, calls of the device apart."""
MEAN, P99, P99_TOKENS, MAPE = 0.03, 0.08, 500, 0.10

QUARTER = 0.25
OF = ("model", "policy", "mode", "cache_fraction", "tokens")


def verdict(facts: Row, cells: Sequence[Row]) -> list[Row]:
    """Return a row for each bound and cell it is of: what, which cell, value, bound, and whether it holds."""
    rows: list[Row] = []

    def judge(what: str, cell: Row, value: float | None, bound: float, least: bool = False) -> None:
        of = {name: cell.get(name) for name in OF}
        holds = value is not None and (value >= bound if least else value <= bound)
        rows.append({"what": what, **of, "value": value, "bound": bound, "holds": holds})

    for kernel in facts.get("kernels") or ():
        judge("kernels against float64, relative error", kernel, kernel["relative_error"], kernel["tolerance"])
    for transfer in facts.get("transfers") or ():
        if transfer["expert_bytes"] >= COPY_LEAST_BYTES and facts.get("ceiling_gb_per_s"):
            share = transfer["gb_per_s"] / facts["ceiling_gb_per_s"]
            judge("experts one behind another, bandwidth of a large copy's", transfer, share, COPY_SHARE, least=True)
    for cell in cells:
        if ERROR in cell or "predicted" not in cell:
            continue
        errors, measured = cell["errors"], cell["measured"]
        over, bound = errors.get("measured_over_without_host"), OVER_WITHOUT_HOST.get(cell["model"])
        if _is_closed_loop_at_quarter(cell) and bound is not None and over is not None:
            judge("step over the simulated without host", cell, over, bound)
        if cell["mode"] == CLOSED_LOOP:
            judge("host bookkeeping a layer, us", cell, measured["host_us_per_layer"], HOST_US)
        judge("TPOT mean, error", cell, _size(errors["tpot_mean"]), MEAN)
        judge("per token, mean absolute error", cell, errors["token_mape"], MAPE)
        if cell["tokens"] >= P99_TOKENS:
            judge("TPOT p99, error", cell, _size(errors["tpot_p99"]), P99)
    for ranking in facts.get("rankings") or ():
        if differ := ranking["pairs_that_differ"]:
            right = ranking["pairs_as_measured"] / differ
            judge("pairs of policies ranked as measured", ranking, right, 1.0, least=True)
    return rows


def at_quarter(cell: Row) -> bool:
    """Return whether the cache holds a quarter of the experts."""
    return bool(abs(cell["cache_fraction"] - QUARTER) < 0.01)


def _is_closed_loop_at_quarter(cell: Row) -> bool:
    return bool(cell["mode"] == CLOSED_LOOP) and at_quarter(cell)  # others may have no cache


def _size(error: float | None) -> float | None:
    return None if error is None else abs(error)


def ratios(cells: Sequence[Row]) -> list[Row]:
    """Return how many times as long a token takes under what others do as under each policy here, at the same size.

    What others do was run over the first tokens. Where it has a policy, or warms up as a page cache does, so is ours
    taken: what that has learned by then differs from what it knows later. What else there is takes for every token the
    same.
    """
    finished = [cell for cell in cells if ERROR not in cell and "measured" in cell]
    others = [cell for cell in finished if "predicted" not in cell]
    ours = [cell for cell in finished if _is_closed_loop_at_quarter(cell)]
    return [
        {
            "model": own["model"],
            "policy": own["policy"],
            "cache_fraction": own["cache_fraction"],
            "over": other["mode"] + (f" under {other['policy']}" if other["policy"] else ""),
            "ratio": other["measured"]["tpot_mean_ms"]
            / (own["tpot_first_ms"] if other["policy"] or other.get("warms_up") else own["measured"]["tpot_mean_ms"]),
        }
        for own in ours
        for other in others
        if other["model"] == own["model"]
    ]


def unjudged(cells: Sequence[Row], wanted: Sequence[tuple[str, str]]) -> list[str]:
    """Return which (model, policy) that were to be run at a quarter of the experts were not."""
    judged = [cell for cell in cells if cell.get("predicted") and _is_closed_loop_at_quarter(cell)]
    ran = {(cell["model"], cell["policy"]) for cell in judged}
    return [f"{model}: {policy} at 25%" for model, policy in wanted if (model, policy) not in ran]


def lines(rows: Sequence[Mapping[str, object]]) -> Iterator[str]:
    """Yield how many cells each bound holds for, and the cells for which it does not."""
    for what in dict.fromkeys(row["what"] for row in rows):
        of = [row for row in rows if row["what"] == what]
        held = sum(bool(row["holds"]) for row in of)
        yield f"{'ok  ' if held == len(of) else 'FAIL'} {what}: {held} of {len(of)}"
        for row in of:
            if not row["holds"]:
                where = ", ".join(str(row[name]) for name in OF if row[name] is not None)
                value = "not finite" if row["value"] is None else f"{row['value']:.4g}"
                yield f"       {where}: {value}, bound {row['bound']:.4g}"
