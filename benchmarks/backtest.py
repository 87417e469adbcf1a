"""The report of docs/backtest.md: `python -m benchmarks.backtest` runs the shipped rows and replaces it, in minutes.

`token_by_token` compares the phone's run with what the device itself measured.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sim.backtest import DATA, file, printed, score
from sim.backtest.printed import Cells
from sim.backtest.score import Backtest
from sim.prediction.case import Case
from traces.steps import DECODE

DOCUMENT = Path(__file__).parents[1] / "docs" / "backtest.md"

BEGINS, ENDS = "<!-- moe-sim backtest -->", "<!-- end of moe-sim backtest -->"
"""The report stands between these."""

HEADINGS = ("By source", "By what is known")
"""Of the command's tables, those that the document has."""

PHONE = "bigmoeonedge-qwen3-30b"
LANES = 4
"""Reads in flight at once; the device adds up the time of each."""


def report(test: Backtest) -> str:
    tables = [(heading, rows) for heading, rows in printed.tables(test) if heading in HEADINGS]
    parts = [f"### {heading}\n\n{markdown_table(rows)}" for heading, rows in tables]
    return "\n\n".join([f"{printed.headline(test)}.", *parts]) + "\n"


def markdown_table(rows: list[Cells]) -> str:
    def line(cells: Cells) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(rows[0]), line(["---"] * len(rows[0])), *map(line, rows[1:])])


def token_by_token(test: Backtest) -> dict[str, Any]:
    """Compare the phone's run with what the device measured; totals in bytes and in seconds of the disk."""
    phone = next(Case(each.row) for each in test.results if each.row.timed and each.row.setting.trace == PHONE)
    log = phone.simulated(phone.hardware).log
    decoded = log.phase == DECODE
    measured = pd.read_parquet(DATA / f"{PHONE}.tokens.parquet")
    hit_rate = float(log.hits.sum() / (log.hits + log.late + log.misses).sum())
    return {
        "tokens": len(measured),
        "hit_rate": {"predicted": hit_rate, "measured": float(measured.cache_hit_pct.iloc[-1] / 100)},
        "bytes_read": _compared(log.demand_bytes[decoded], measured.read_bytes.to_numpy()),
        "io_s": _compared(log.link_busy_ns[decoded] / 1e9, measured.io_ms.to_numpy() / 1e3 / LANES),
        "wall_s": _compared(log.step_ns[decoded] / 1e9, measured.wall_ms.to_numpy() / 1e3),
    }


def _compared(predicted: NDArray[Any], measured: NDArray[Any]) -> dict[str, float]:
    """Return totals, the correlation over tokens, and the median of the tokens' absolute errors."""
    return {
        "predicted": float(predicted.sum()),
        "measured": float(measured.sum()),
        "correlation": float(np.corrcoef(predicted, measured)[0, 1]),
        "median_abs_error": float(np.median(np.abs(predicted / measured - 1))),
    }


def main() -> None:
    before, _, rest = DOCUMENT.read_text("utf-8").partition(BEGINS)
    _, _, after = rest.partition(ENDS)
    rows = [row for path in file.shipped() for row in file.read(path)]
    text = report(score.backtest(rows))
    DOCUMENT.write_text(f"{before}{BEGINS}\n\n{text}\n{ENDS}{after}", "utf-8")


if __name__ == "__main__":
    main()
