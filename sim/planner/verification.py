"""A plan against the machine: its flags and two neighbours, run with the model's file, beside what was predicted.

What was measured is kept as rows of the back-test, which state all that a prediction takes: sim/backtest/community
holds those that people contributed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import tomli_w

from sim.planner.calibration import Calibration, placed
from sim.planner.flags import layers_of_file
from sim.planner.llama_bench import NAME, TOKENS, Bench
from sim.planner.placements import Layout, Placement
from traces.errors import InputError
from traces.models.profile import known

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


def variants(layout: Layout, threads: int) -> list[Variant]:
    """Return the plan's and its neighbours: a layer more or less on the CPU; without a GPU, fewer threads."""
    n, L = layout.host_layers, layout.profile.moe_layers
    if not layout.on_gpu:
        counts = sorted({threads, threads - 1, threads // 2} - {0}, reverse=True)
        return [Variant(count, L, count == threads) for count in counts]
    return [Variant(threads, each, each == n) for each in (n, n + 1, n - 1) if 0 <= each <= L]


def verify(
    layout: Layout, path: Path, threads: int, bench: Bench, calibration: Calibration | None, say: Callable[[str], None]
) -> list[Checked]:
    """Run the variants with the model's file. Raise InputError where the plan's own does not run."""
    checked = []
    for each in variants(layout, threads):
        flags = ["-t", str(each.threads), *placed(layers_of_file(layout, each.host_layers), layout.on_gpu)]
        say(f"{NAME} {' '.join(flags)}")
        depths = DEPTHS if each.planned else DEPTHS[:1]
        failure, took = "", dict[tuple[Path, int], float]()
        try:
            took = bench.seconds([path], depths, flags)
        except InputError as error:
            if each.planned:
                raise
            failure = str(error)
        for depth in depths:
            seconds = predicted_s(layout, each, depth + TOKENS, calibration if each.threads == threads else None)
            speed = 1 / took[path, depth] if took else 0.0
            checked.append(Checked(each, " ".join(flags), depth, 1 / seconds, speed, failure))
    return checked


def predicted_s(layout: Layout, variant: Variant, context: int, calibration: Calibration | None) -> float:
    """Return the seconds of a token behind so many others that are planned for a variant."""
    if calibration:
        return calibration.seconds(variant.host_layers, layout.on_gpu, context)
    own = layout.changed({"host_threads": variant.threads})
    part = layout.static(variant.host_layers, context), layout.profile.moe_layers, True
    return Placement("variant", "static", own, 0, 0, (part,)).seconds()


def rows(layout: Layout, checked: Sequence[Checked], title: str, name: str) -> str:
    """Return what was measured as a file of the back-test. title: of the machine; name: begins names of figures."""
    machine, profile, shipped = layout.computing, layout.profile, known(layout.profile.name)
    keys = "host_peak_gb_per_s", "host_stream_gb_per_s", "link", "link_gb_per_s"
    bandwidths = {key: value for key in keys if (value := getattr(machine, key))}
    if machine.gpus:
        bandwidths["gpu_data_sheet_gb_per_s"] = machine.gpus[0].gb_per_s
    shape = {"layers": profile.moe_layers, "experts": profile.experts, "top_k": profile.top_k}
    alike = shipped and [shipped.moe_layers, shipped.experts, shipped.top_k] == [*shape.values()]
    model: dict[str, Any] = {
        **({"profile": shipped.name} if shipped and alike else shape),
        "layer_expert_bytes": list(profile.layer_expert_bytes) or [profile.expert_bytes] * profile.moe_layers,
        "dense_bytes": round(profile.layers_parameters * profile.dense_bytes_per_parameter),
        "head_bytes": round(profile.head_bytes),
        "kv_bytes_per_token": profile.kv_cache_bytes(1),
    }
    machines: dict[str, Any] = {}
    figures = list[dict[str, Any]]()
    for each in checked:
        if not each.measured:
            continue
        threads = each.variant.threads
        here = f"{name}-{threads}t"
        machines[here] = {"title": f"{title}, {threads} threads", **bandwidths, "host_threads": threads}
        where = {"host_layers": each.variant.host_layers} if layout.on_gpu else {"all_on": "cpu"}
        figures.append(
            {
                "figure": f"{here}-{profile.name}-{each.variant.host_layers}-{each.depth}",
                "system": "llama.cpp",
                "model": profile.name,
                "machine": here,
                "setting": {**where, "context": each.depth + TOKENS},
                "metric": "speed",
                "value": float(f"{each.measured:.4g}"),
                "unit": "tok/s",
                "source": f"moe-sim plan --verify ({NAME}, {each.flags}), {date.today()}",
                "quality": "A",
            }
        )
    return tomli_w.dumps({"machines": machines, "models": {profile.name: model}, "rows": figures})
