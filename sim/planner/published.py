"""Plans beside published speeds: `python -m sim.planner.published` prints them, and docs/planner.md shows them.

A check, not a fit: nothing of the planner was set by these figures. They are rows of the back-test as well, so they are
no blind test of what the back-test chose.
"""

import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from sim.planner.plan import quick

FILE = Path(__file__).parent / "published.toml"


def compared() -> Iterator[tuple[str, str, float, float, float, float]]:
    """Yield each figure's name, its model and machine, what was measured, what the plan expects, and its interval.

    The last four are tokens/s.
    """
    for name, row in tomllib.loads(FILE.read_text("utf-8")).items():
        options = row["options"]
        speed = quick(**options)
        model = " ".join(filter(None, [options["model"], options.get("precision")]))
        machine = f"{options.get('gpu', 'no GPU')}, {options['cpu_bandwidth']}"
        yield name, f"{model} on {machine}", row["tokens_per_s"], speed.tokens_per_s, speed.low, speed.high


def markdown() -> str:
    """Return the comparison as a table, and the median error below it."""
    lines = ["| figure | model, GPU, bandwidth of host memory | measured, tokens/s | expected | interval | error |"]
    lines.append("| --- | --- | ---: | ---: | --- | ---: |")
    errors, inside = [], 0
    for name, machine, measured, expected, low, high in compared():
        errors.append(expected / measured - 1)
        inside += low <= measured <= high
        interval = f"{low:.2f} to {high:.2f}"
        lines.append(f"| {name} | {machine} | {measured:.2f} | {expected:.2f} | {interval} | {errors[-1]:+.0%} |")
    median = float(np.median(np.abs(errors)))
    return "\n".join([*lines, "", f"Median error {median:.0%}; {inside} of {len(errors)} lie in their interval."])


if __name__ == "__main__":
    print(markdown())
