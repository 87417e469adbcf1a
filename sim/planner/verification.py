"""A plan against the machine: its flags and two neighbours, run with the model's file, beside what was predicted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sim.planner.calibration import BENCH, TOKENS, Calibration, placed, seconds
from sim.planner.flags import layers_of_file
from sim.planner.placements import Layout, Placement
from traces.errors import InputError

DEPTHS = (0, 2048)
"""Tokens before those that are decoded; neighbours of a plan run without any."""


@dataclass(frozen=True)
class Variant:
    """Flags: threads of the CPU, and layers of the file whose experts it computes."""

    threads: int
    host_layers: int
    planned: bool


@dataclass(frozen=True)
class Checked:
    """Tokens a second of a variant behind so many tokens. measured: 0 where it did not run, and `failure` says why."""

    variant: Variant
    flags: str
    depth: int
    predicted: float
    measured: float
    failure: str = ""

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def variants(layout: Layout) -> list[Variant]:
    """Return the plan's and its neighbours: a layer more or less on the CPU; without a GPU, fewer threads."""
    n, L, threads = layout.host_layers, layout.profile.moe_layers, layout.machine.host_threads
    if not layout.on_gpu:
        counts = sorted({threads, threads - 1, threads // 2} - {0}, reverse=True)
        return [Variant(count, L, count == threads) for count in counts]
    return [Variant(threads, each, each == n) for each in (n, n + 1, n - 1) if 0 <= each <= L]


def verify(
    layout: Layout, path: Path, bench: Sequence[str], calibration: Calibration | None, say: Callable[[str], None]
) -> list[Checked]:
    """Run the variants with the model's file. Raise InputError where the plan's own does not run."""
    checked, threads = [], layout.machine.host_threads
    for each in variants(layout):
        flags = ["-t", str(each.threads), *placed(layers_of_file(layout, each.host_layers), layout.on_gpu)]
        say(f"{BENCH} {' '.join(flags)}")
        depths = DEPTHS if each.planned else DEPTHS[:1]
        failure, took = "", dict[tuple[Path, int], float]()
        try:
            took = seconds(bench, [path], depths, flags)
        except InputError as error:
            if each.planned:
                raise
            failure = str(error)
        for depth in depths:
            token_s = predicted_s(layout, each, depth + TOKENS, calibration if each.threads == threads else None)
            speed = 1 / took[path, depth] if took else 0.0
            checked.append(Checked(each, " ".join(flags), depth, 1 / token_s, speed, failure))
    return checked


def predicted_s(layout: Layout, variant: Variant, context: int, calibration: Calibration | None) -> float:
    if calibration:
        return calibration.seconds(variant.host_layers, layout.on_gpu, context)
    own = layout.changed({"host_threads": variant.threads})
    part = layout.static(variant.host_layers, context), layout.profile.moe_layers, True
    return Placement("variant", "static", own, 0, 0, (part,)).seconds()
