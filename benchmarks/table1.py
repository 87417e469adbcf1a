"""Table 1 of the MoE-Infinity paper (arXiv 2401.14361) beside predictions: `python -m benchmarks.table1 TRACE`.

The paper measured DeepSeek-V2-Lite on an RTX A5000; `table1.toml` holds its figures, in ms a token. Of the trace's
prefills, run token by token, 100 requests count, 20 warm up. Prints the rows of docs/systems.md: predicted / printed,
and the error, predicted / printed - 1. Of other models the paper prints its own system's mean alone.
"""

import sys
from pathlib import Path
from typing import Any

from sim.experiment import Experiment
from sim.loaded import TimedRun
from sim.systems.predict import Setting, chosen
from traces.files import read_toml

TABLE: dict[str, dict[str, Any]] = read_toml(Path(__file__).with_suffix(".toml"))
OTHER_MODELS = {"mixtral-8x7b": 836.0, "nllb-moe-54b": 531.0, "switch-large-128": 155.0}
OURS, WITHIN = "moe-infinity", 0.15


def beside(predicted: float | None, printed: float) -> str:
    if not printed or predicted is None:
        return f"{predicted or 0.0:,.0f} / - | "
    return f"{predicted:,.0f} / {printed:,.0f} | {predicted / printed - 1:+.0%}"


def main() -> None:
    loaded = TimedRun.of(Experiment(sys.argv[1], as_decode=True, requests=100, warmup_requests=20))
    name, table = loaded.profile.name, TABLE
    if name in OTHER_MODELS:
        table = {OURS: {"mean_ms": OTHER_MODELS[name], "idle_ms": 0.0, "tail_ms": 0.0, "cause": ""}}
    setting, ratios = Setting(loaded), dict[str, float]()
    print("| predicted / paper | mean ms |  | GPU idle ms |  | tail ms |  |\n|---|---:|---:|---:|---:|---:|---:|")
    for system in chosen(table):
        found, row = setting.predicted(system), table[system.name]
        figures = ((found.tpot_mean_ms, "mean_ms"), (found.idle_ms, "idle_ms"), (found.tpot_p99_ms, "tail_ms"))
        print(f"| {system.name} | {' | '.join(beside(ours, row[key]) for ours, key in figures)} |")
        ratios[system.name] = mean = found.tpot_mean_ms or 0.0
        if row["cause"] and abs(mean / row["mean_ms"] - 1) > WITHIN:
            print(f"{system.name}: {row['cause']}", file=sys.stderr)
    others = [each / ratios[OURS] for other, each in ratios.items() if other != OURS]
    if others:
        print(f"\nOthers take {min(others):.1f} to {max(others):.1f} times as long as {OURS}; the paper: 3.1 to 16.7.")


if __name__ == "__main__":
    main()
