"""A plan against the machine: its flags and two neighbours, run with the model's file, beside what was predicted.

What was measured is kept as rows of the back-test, which state all that a prediction takes: sim/backtest/community
holds those that people contributed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import tomli_w

from sim.planner.calibration import Calibration, placed
from sim.planner.flags import layers_of_file
from sim.planner.llama_bench import TOKENS, Bench
from sim.planner.placements import DISK, Layout, Placement, today
from sim.prediction.described import Setting
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
        return [Variant(count, L, count == threads) for count in sorted({threads, threads - 1, threads // 2} - {0})][
            ::-1
        ]
    return [Variant(threads, each, each == n) for each in (n, n + 1, n - 1) if 0 <= each <= L]


def verify(
    layout: Layout, path: Path, threads: int, bench: Bench, calibration: Calibration | None, say: Callable[[str], None]
) -> list[Checked]:
    """Run the variants with the model's file. Raise InputError where the plan's own does not run."""
    if today(layout).kind == DISK:
        raise InputError(
            f"{path.name} does not fit memory: what a disk gives depends on what the page cache holds already"
        )
    checked = []
    for each in variants(layout, threads):
        flags = ["-t", str(each.threads), *placed(layers_of_file(layout, each.host_layers), layout.on_gpu)]
        say(f"{bench.name} {' '.join(flags)}")
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
    own = replace(layout, machine=replace(layout.machine, host_threads=variant.threads))
    place = setting(own, variant, context)
    return Placement("variant", "static", own, 0, 0, ((place, layout.profile.moe_layers, True),)).seconds()


def setting(layout: Layout, variant: Variant, context: int) -> Setting:
    if not layout.on_gpu:
        return Setting(all_on="cpu", context=context)
    return Setting(host_layers=variant.host_layers, context=context)


def rows(layout: Layout, checked: Sequence[Checked], title: str, name: str, tool: str) -> str:
    """Return what was measured as a file of the back-test. title: of the machine; name: begins names of figures."""
    machine, profile = layout.computing, layout.profile
    shape = profile.moe_layers, profile.experts, profile.top_k
    bandwidths = {
        key: value
        for key in ("host_peak_gb_per_s", "host_stream_gb_per_s", "link", "link_gb_per_s")
        if (value := getattr(machine, key))
    }
    if machine.gpus:
        bandwidths["gpu_data_sheet_gb_per_s"] = machine.gpus[0].gb_per_s
    shipped = known(profile.name)
    alike = shipped and (shipped.moe_layers, shipped.experts, shipped.top_k) == shape
    stated = dict(zip(("layers", "experts", "top_k"), shape, strict=True))
    model: dict[str, Any] = {
        **({"profile": shipped.name} if shipped and alike else stated),
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
        place = setting(layout, each.variant, each.depth + TOKENS)
        where = {"all_on": "cpu"} if place.all_on else {"host_layers": place.host_layers}
        figures.append(
            {
                "figure": f"{here}-{profile.name}-{each.variant.host_layers}-{each.depth}",
                "system": "llama.cpp",
                "model": profile.name,
                "machine": here,
                "setting": {**where, "context": place.context},
                "metric": "speed",
                "value": float(f"{each.measured:.4g}"),
                "unit": "tok/s",
                "source": f"moe-sim plan --verify ({tool}, {each.flags}), {date.today()}",
                "quality": "A",
            }
        )
    return tomli_w.dumps({"machines": machines, "models": {profile.name: model}, "rows": figures})
