"""This machine in the options of `moe-sim plan`, each with where it is from.

Of memories what is free counts: a plan is to start as the machine is now. docs/planner.md says what is detected.
"""

import json
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from sim.probe import busy, stream
from sim.probe.cores import core_classes, processor
from sim.probe.disk import kind_of, read_ahead_kib
from sim.probe.limits import memory_limit
from sim.profiles.hardware_profile import MACHINES, THIS_MACHINE, gpu_of, hardware
from traces.errors import InputError

GIB = 2**30

DESKTOP_BYTES, SYSTEM_BYTES = GIB // 2, 2 * GIB
"""Of what the planner keeps free, what a desktop and the system hold already where free memory is counted."""

MEASURED = ("cpu_bandwidth", "link", "disk")
"""Options that a probe measures; the others are detected each time."""

ANSWER_S = 20


@dataclass(frozen=True)
class Fact:
    """An option of the planner, and where its value is from."""

    value: Any
    source: str


@dataclass(frozen=True)
class Gpu:
    """A GPU as its driver names it."""

    name: str
    memory: int
    used: int
    link: str = ""


Facts = dict[str, Fact]


def detected(folder: Path, quick: bool = True) -> Facts:
    """Return this machine by the planner's options; folder: of models; quick: read memory where no probe has."""
    facts = _gpu_facts()
    facts["host_memory"] = _host_memory()
    classes = core_classes()
    kinds = " and ".join(f"{len(each.cpus)} {each.name.strip()}" for each in classes)
    facts["threads"] = Fact(len(classes[0].cpus), kinds)
    facts["cpu"] = Fact(processor() or None, "the system")
    kind = kind_of(folder)
    facts["disk"] = Fact(kind or "virtual disk", "assumed of its kind; moe-sim probe measures it")
    facts["read_ahead_kib"] = Fact(read_ahead_kib(folder), "the system: of a mapped file at a missing page")
    if THIS_MACHINE in MACHINES.names():
        probed = hardware(THIS_MACHINE).calibration
        source = f"probe of {probed['date']}"
        return facts | {key: Fact(probed["plan"][key], source) for key in MEASURED if key in probed["plan"]}
    if quick and "unified" not in facts:
        if (others := busy.load()) <= busy.QUIET:
            rate = stream.triad(classes[0].cpus, passes=3)
            source = f"STREAM Triad on {len(classes[0].cpus)} threads just now; moe-sim probe keeps it"
            facts["cpu_bandwidth"] = Fact(f"{rate:.4g}GB/s measured", source)
        else:
            facts["cpu_bandwidth"] = Fact(None, f"not read: other programs use {others:.1f} processors")
    return facts


def of_profile(text: str) -> Facts:
    """Return what a profile that `moe-sim probe` wrote says of its machine. Raise InputError for another one."""
    machine = hardware(text)
    stated = machine.calibration.get("plan")
    if not stated:
        raise InputError(f"--hardware {text}: moe-sim probe has not written it; state its GPU and memory by options")
    return {name: Fact(value, f"profile {machine.name}") for name, value in stated.items()}


def with_stated(facts: Facts, stated: dict[str, Any]) -> Facts:
    """Return the facts with those that a user states in their place."""
    if stated.keys() & {"gpu", "gpu_memory", "unified"}:
        facts = {key: fact for key, fact in facts.items() if key not in ("gpu", "gpu_memory", "unified", "link")}
    return facts | {key: Fact(value, f"--{key.replace('_', '-')}") for key, value in stated.items()}


def options(facts: Facts) -> dict[str, Any]:
    return {key: fact.value for key, fact in facts.items() if fact.value is not None}


def gpus() -> tuple[list[Gpu], str]:
    for program, read in (("nvidia-smi", _of_nvidia), ("rocm-smi", _of_amd)):
        if shutil.which(program) and (found := read()):
            return found, program
    return [], ""


def _gpu_facts() -> Facts:
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        chip = _answer("sysctl", "-n", "machdep.cpu.brand_string").strip().removeprefix("Apple ")
        known = _sheet(chip)
        return {"unified": Fact(True, "Apple")} | ({"gpu": Fact(chip, "sysctl")} if known else {})
    found, program = gpus()
    if not found:
        return {"gpu_memory": Fact("0", "no nvidia-smi or rocm-smi that lists a GPU")}
    memories = [min(gpu.memory, gpu.memory - gpu.used + DESKTOP_BYTES) for gpu in found]
    names = ", ".join(gpu.name for gpu in found)
    facts = {
        "gpu_memory": Fact(", ".join(f"{each >> 20}MiB" for each in memories), f"{program}: {names}, what is free")
    }
    if all(_sheet(gpu.name) for gpu in found):
        facts["gpu"] = Fact(names, program)
    if found[0].link:
        facts["link"] = Fact(found[0].link, program)
    return facts


def _sheet(name: str) -> bool:
    try:
        return bool(gpu_of(name))
    except InputError:
        return False


def _host_memory() -> Fact:
    memory, limit = psutil.virtual_memory(), memory_limit()
    total, free = memory.total, memory.available
    source = f"{free / GIB:.1f} of {total / GIB:.1f} GiB are free"
    if limit is not None and limit < total:
        free, total = min(free, limit), limit
        source += f", a limit of {limit / GIB:.1f} GiB holds"
    return Fact(f"{min(total, free + SYSTEM_BYTES) >> 20}MiB", source)


def _of_nvidia() -> list[Gpu]:
    keys = "name,memory.total,memory.used,pcie.link.gen.max,pcie.link.width.max"
    rows = _answer("nvidia-smi", f"--query-gpu={keys}", "--format=csv,noheader,nounits").splitlines()
    found = []
    for row in rows:
        name, total, used, generation, lanes = (part.strip() for part in row.split(","))
        link = f"pcie{generation}x{lanes}" if generation.isdigit() and lanes.isdigit() else ""
        found.append(Gpu(name, int(total) << 20, int(used) << 20, link))
    return found


def _of_amd() -> list[Gpu]:
    cards = json.loads(_answer("rocm-smi", "--showproductname", "--showmeminfo", "vram", "--json") or "{}")
    return [
        Gpu(
            card.get("Card Series") or card.get("Card series") or card.get("Card Model", "GPU"),
            int(card["VRAM Total Memory (B)"]),
            int(card["VRAM Total Used Memory (B)"]),
        )
        for card in cards.values()
        if "VRAM Total Memory (B)" in card
    ]


def _answer(*command: str) -> str:
    """Return what a program prints; nothing where it fails, as drivers without a GPU do."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=ANSWER_S).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
