"""The machine as a user states it, and what is assumed where they state nothing.

What a runtime and an operating system need beside the model is reserved.
"""

import math
import re
from dataclasses import replace
from typing import Any

from sim.catalogue.parts import DISKS, GPUS, HOSTS, LINK, LINKS, Gpu, gpu_that_reads, link_named, ram_gb_per_s
from sim.prediction.described import Assumed, Machine
from sim.profiles.hardware_profile import UNIFIED, gpu_of
from sim.quantities import parse_bytes, parse_gb_per_s
from traces.errors import InputError, refuse

GIB = 2**30

GPU_RESERVED, GPU_BUFFERS = 3 * GIB // 2, GIB
"""The margin of the first GPU's memory: 1 GiB for the context and the buffers of a compiled runtime, and 0.5 GiB for a
desktop. Other GPUs have the buffers alone."""

HOST_RESERVED = 2 * GIB
"""The margin of host memory, for the operating system and the runtime."""

USUAL_HOST = 32 * GIB


def reserved(machine: Machine) -> tuple[int, ...]:
    """Return the bytes of each GPU's memory that are kept free."""
    return tuple(GPU_BUFFERS if place else GPU_RESERVED for place in range(len(machine.gpus)))


def margins(machine: Machine) -> tuple[int, int]:
    """Return the bytes of GPU and of host memory that are kept free."""
    return sum(reserved(machine)), HOST_RESERVED * bool(machine.host_memory)


def upgrades(machine: Machine) -> dict[str, Machine]:
    """Return the machine with what people buy next, of what it has."""

    def twice(*names: str) -> Machine:
        doubled: dict[str, Any] = {name: 2 * getattr(machine, name) for name in names}
        return replace(machine, **doubled)

    upgrades = {
        "one more card": replace(machine, gpus=(*machine.gpus, *machine.gpus[: not machine.unified])),
        "twice the RAM": twice("host_memory"),
        "RAM twice as fast": twice("host_peak_gb_per_s", "host_stream_gb_per_s"),
        "a link twice as fast": replace(machine, link="", link_gb_per_s=2 * machine.link_copies),
        "a disk twice as fast": twice("disk_peak_gb_per_s", "disk_gb_per_s"),
    }
    return {name: grown for name, grown in upgrades.items() if grown != machine}


def resources(
    gpu_memory: str | None = None,
    host_memory: str | None = None,
    link: str | None = None,
    disk: str | None = None,
    cpu_bandwidth: str | None = None,
    gpu: str | None = None,
    gpu_bandwidth: str | None = None,
    threads: int | None = None,
    unified: bool = False,
    cpu: str | None = None,
    read_ahead_kib: int | None = None,
) -> Machine:
    """Return the machine of these options. Raise InputError for what cannot be read or would do nothing.

    Several GPUs are a list: gpu="RTX 3090, 2 x RTX 3060" or gpu_memory="24GiB, 12GiB", and likewise gpu_bandwidth.
    """
    assumed: list[Assumed] = []
    host_memory, ram = _with_kind(host_memory)
    host = _memory(host_memory, "--host-memory")
    names, memories, rates = _listed(gpu), _listed(gpu_memory), _listed(gpu_bandwidth)
    sheets = [gpu_of(name) for name in names]
    unified = unified or not (gpu_memory or all(sheet.memory_gib for sheet in sheets))
    sizes = [_memory(text, "--gpu-memory") for text in memories]
    if unified and not sizes:
        sizes = [int(host * UNIFIED)]
    sizes = [size for size in sizes or [int(sheet.memory_gib * GIB) for sheet in sheets] if size]
    if sizes and host_memory is None and not unified:
        host = USUAL_HOST
        text = f"{host // GIB} GiB of host memory"
        assumed.append(Assumed(text, "--host-memory", {"host_memory": host // 2}, {"host_memory": 2 * host}))
    refuse(
        (not sizes and not host, "a machine without memory: give --gpu-memory 12GiB, --host-memory 32GiB or both"),
        (
            not sizes and (gpu or gpu_bandwidth),
            "a GPU without memory: give --gpu-memory 12GiB, or leave --gpu and --gpu-bandwidth out",
        ),
        (not host and cpu_bandwidth, "--cpu-bandwidth without host memory: give --host-memory 32GiB, or leave it out"),
    )
    for option, stated in (("--gpu", names), ("--gpu-bandwidth", rates)):
        if len(stated) not in (0, 1, len(sizes)):
            raise InputError(f"{option} states {len(stated)} GPUs, the memories are {len(sizes)}")
    if unified and cpu_bandwidth and not (rates or sheets):
        rates = [cpu_bandwidth.removesuffix("measured")]
    gpus = tuple(
        _gpu(size, sheets[place % len(sheets)] if sheets else None, rates[place % len(rates)] if rates else None)
        for place, size in enumerate(sizes)
    )
    if not (sheets or rates) and gpus:
        assumed.append(_assumed_gpus(gpus))
    if unified:
        lanes, carries, peak, stream = "", gpus[0].gb_per_s, gpus[0].gb_per_s, 0.0
    else:
        lanes, carries = _link(link, gpus, assumed if host else [])
        peak, stream = _host_reads(cpu_bandwidth or ram, lanes, host, assumed if host else [])
    sheet, reads = _disk(disk, assumed) if disk else (0.0, 0.0)
    return Machine(
        name="the machine of the plan",
        gpus=gpus,
        host_memory=host,
        unified=unified,
        host_peak_gb_per_s=peak,
        host_stream_gb_per_s=stream,
        link=lanes,
        link_gb_per_s=carries,
        disk_peak_gb_per_s=sheet,
        disk_gb_per_s=reads,
        host_threads=threads or 0,
        cpu=cpu or "",
        read_ahead_kib=read_ahead_kib or 0,
        assumed=tuple(assumed),
    )


def _listed(text: str | None) -> list[str]:
    """Return the parts of a list; `2 x RTX 3060` are two."""
    parts: list[str] = []
    for part in (text or "").split(","):
        times = re.fullmatch(r"\s*(\d{1,2})\s*x\s+(.+)", part)
        parts += [times[2].strip()] * int(times[1]) if times else [part.strip()]
    return [part for part in parts if part]


def _memory(text: str | None, option: str) -> int:
    """Return the bytes of a memory, which is made and sold in powers of two: 12GB is 12GiB."""
    if text is None or text.strip() in ("", "0"):
        return 0
    return parse_bytes(re.sub(r"(?i)(?<=[kmgt])b$", "iB", text.strip()), option)


def _with_kind(text: str | None) -> tuple[str | None, str | None]:
    """Return a memory, and the peak of its kind where that is stated: `64GB DDR5-5600`, two channels, or `8 x ...`."""
    kind = re.fullmatch(r"(.*?)\s+(?:(\d+)\s*x\s*)?((?:LP)?DDR\dX?-\d+)", (text or "").strip(), re.IGNORECASE)
    if not kind:
        return text, None
    return kind[1], f"{ram_gb_per_s(f'{kind[2] or 2} x {kind[3]}')}GB/s"


def _disk(text: str, assumed: list[Assumed]) -> tuple[float, float]:
    """Return GB/s of a disk's data sheet, and what was measured of it or is usual of its kind; the other is 0."""
    named = {"nvme": "NVMe disk", "ssd": "SSD", "hdd": "hard disk"}.get(text.strip().lower(), text)
    if named not in DISKS:
        rate = parse_gb_per_s(text.strip().removesuffix("measured"), "--disk")
        return (0.0, rate) if text.strip().endswith("measured") else (rate, 0.0)
    rate = DISKS[named]
    text = f"a {named} reads {rate:g} GB/s"
    assumed.append(Assumed.times(text, "--disk 3GB/s", "disk_gb_per_s", rate, (0.4, 2.0)))
    return 0.0, rate


def _gpu(memory: int, sheet: Gpu | None, stated: str | None) -> Gpu:
    """Return a GPU of so many bytes; without data sheet and bandwidth, the middle card of those of that size."""
    known = sheet or _of_size(memory)[1]
    if stated:
        reads = parse_gb_per_s(stated, "--gpu-bandwidth")
        alike = sheet or gpu_that_reads(reads)
        known = replace(alike, gb_per_s=reads)
    return replace(known, memory_gib=memory / GIB)


def _of_size(memory: int) -> tuple[Gpu, Gpu, Gpu]:
    """Return the slowest, the middle and the fastest card of those whose memory is nearest."""
    known = [one for name, one in GPUS.items() if re.match(r"RTX \d", name)]
    near = min(abs(math.log(one.memory_gib * GIB / memory)) for one in known)
    alike = [one for one in known if abs(math.log(one.memory_gib * GIB / memory)) <= near + 1e-9]
    alike.sort(key=lambda one: one.gb_per_s)
    return alike[0], alike[(len(alike) - 1) // 2], alike[-1]


def _assumed_gpus(gpus: tuple[Gpu, ...]) -> Assumed:
    """Return what is assumed of GPUs of which the memory alone is stated."""
    cards = [_of_size(int(gpu.memory_gib * GIB)) for gpu in gpus]

    def as_fast(place: int) -> dict[str, Any]:
        return {
            "gpus": tuple(replace(gpu, gb_per_s=card[place].gb_per_s) for gpu, card in zip(gpus, cards, strict=True))
        }

    names = sorted({name for name, one in GPUS.items() if any(one is card[1] for card in cards)})
    rates = " and ".join(f"{rate:,.0f}" for rate in dict.fromkeys(gpu.gb_per_s for gpu in gpus))
    text = f"the GPU reads {rates} GB/s, as the {' and '.join(names)} does"
    return Assumed(text, "--gpu or --gpu-bandwidth", as_fast(0), as_fast(2))


def _link(text: str | None, gpus: tuple[Gpu, ...], assumed: list[Assumed]) -> tuple[str, float]:
    """Return the link's name, or GB/s of a copy where it was stated as that."""
    if text and "/" in text:
        return "", parse_gb_per_s(text, "--link")
    if text:
        return link_named(text), 0.0
    name = (gpus and gpus[0].link) or LINK
    if gpus:
        changed = {"link_gb_per_s": LINKS[name].gb_per_s / 2}
        assumed.append(Assumed(f"the GPU is linked by {name}", "--link", changed, {}))
    return name, 0.0


def _host_reads(text: str | None, link: str, memory: int, assumed: list[Assumed]) -> tuple[float, float]:
    """Return the peak of host memory, or what was measured of it, in GB/s; the other is 0."""
    if text is None:
        host = HOSTS["desktop" if memory <= HOSTS["desktop"].most_gib * GIB else "server"]
        ram = host.ram or LINKS[link or LINK].ram
        peak = ram_gb_per_s(ram)
        low, high = ({"host_peak_gb_per_s": ram_gb_per_s(each)} for each in (host.slowest, host.fastest))
        sheet = f"host memory is {ram}, {peak:.1f} GB/s by its data sheet"
        assumed.append(Assumed(sheet, "--cpu-bandwidth", low, high))
        return peak, 0.0
    words = text.strip()
    if words.endswith("measured"):
        return 0.0, parse_gb_per_s(words.removesuffix("measured"), "--cpu-bandwidth")
    return parse_gb_per_s(words, "--cpu-bandwidth"), 0.0


def show_gib(size: float) -> str:
    return f"{size / GIB:.4g} GiB"


def described(machine: Machine) -> str:
    gpu, host = "no GPU", "no host memory for experts"
    if machine.gpus:
        memories = " + ".join(show_gib(one.memory_gib * GIB) for one in machine.gpus)
        reads = ", ".join(f"{one.gb_per_s:,.0f}" for one in machine.gpus)
        gpu = f"{memories} of GPU memory at {reads} GB/s"
    if machine.unified:
        gpu = f"a GPU that may use {show_gib(machine.gpu_memory)} of it"
    if machine.host_memory:
        host = f"{show_gib(machine.host_memory)} of host memory at {machine.host_reads:,.1f} GB/s"
    has_link = machine.gpus and machine.host_memory and not machine.unified
    link = f", a link of {machine.link_copies:g} GB/s" if has_link else ""
    first = f"{host.replace('host', 'unified')}, {gpu}" if machine.unified else f"{gpu}, {host}"
    return f"{first}{link}, " + (f"a disk of {machine.disk_reads:g} GB/s" if machine.disk_reads else "no disk")
