"""The machine as a user states it, and what is assumed where they state nothing.

What a runtime and an operating system need beside the model is reserved; each assumption is a sentence for the user.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sim.prediction.described import Machine
from sim.prediction.machine import gpu_data_sheet
from sim.prediction.tables import FACTORS, table
from sim.quantities import parse_bytes, parse_gb_per_s
from traces.errors import InputError, refuse, unknown

GIB = 2**30

GPU_RESERVED, GPU_BUFFERS = 3 * GIB // 2, GIB
"""The margin of the first GPU's memory: 1 GiB for the context and the buffers of a compiled runtime, and 0.5 GiB for a
desktop. Other GPUs have the buffers alone."""

HOST_RESERVED = 2 * GIB
"""The margin of host memory, for the operating system and the runtime."""

RAM = {"PCIe 3.0": "2 x DDR4-2666", "PCIe 4.0": "2 x DDR4-3200", "PCIe 5.0": "2 x DDR5-5600"}
"""Memory of a desktop of that time, where neither its bandwidth nor its kind is stated."""

LINK = "PCIe 4.0 x16"

USUAL_HOST = 32 * GIB
"""Host memory beside a GPU, where it is not stated."""

UNIFIED = 0.75
"""Of unified memory, what a GPU may use: what macOS grants by default on machines of more than 36 GB."""

_LINK = re.compile(r"(?:pcie)?\s*-?([345])(?:\.0)?\s*[x ]*x(\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class Gpu:
    """A GPU: its memory in bytes, and GB/s and TFLOP/s of its data sheet; 0: not known."""

    memory: int
    gb_per_s: float
    tflop_per_s: float = 0.0


@dataclass(frozen=True)
class Resources:
    """A machine. Memories in bytes and bandwidths in GB/s; 0: it has none.

    gpus: in the order in which a runtime lists them; layers of a model are split over them in that order. unified: GPU
    and CPU share host_memory, of which the GPU may use a part. machine: the same as the back-test takes it, from which
    all times follow. assumed: sentences.
    """

    gpus: tuple[Gpu, ...]
    host_memory: int
    machine: Machine
    host_gb_per_s: float  # peak, or as measured
    link_gb_per_s: float
    disk_gb_per_s: float
    unified: bool = False
    assumed: tuple[str, ...] = ()

    @property
    def gpu_memory(self) -> int:
        return sum(gpu.memory for gpu in self.gpus)

    @property
    def gpu_gb_per_s(self) -> float:
        """GB/s of the GPUs' data sheets, one after another in proportion to their memories."""
        return self.gpu_memory / sum(gpu.memory / gpu.gb_per_s for gpu in self.gpus) if self.gpus else 0.0

    @property
    def has_gpu(self) -> bool:
        return bool(self.gpus)

    @property
    def reserved(self) -> tuple[int, ...]:
        """Bytes of each GPU's memory that are kept free."""
        return tuple(GPU_RESERVED if gpu is self.gpus[0] else GPU_BUFFERS for gpu in self.gpus)

    @property
    def margins(self) -> tuple[int, int]:
        """Bytes of GPU and of host memory that are kept free."""
        return sum(self.reserved), HOST_RESERVED * bool(self.host_memory)

    @property
    def host_reads(self) -> float:
        """GB/s of host memory, for link and CPU together: at least what the link carries."""
        return max(self.host_gb_per_s, self.link_gb_per_s)

    def with_more(self, **more: float) -> "Resources":
        """Return the machine with more of some resources, by the names of the fields; of GPUs, each has more."""
        memory, reads = (more.pop(key, 0) for key in ("gpu_memory", "gpu_gb_per_s"))
        gpus = tuple(replace(gpu, memory=gpu.memory + int(memory), gb_per_s=gpu.gb_per_s + reads) for gpu in self.gpus)
        grown = replace(self, gpus=gpus, **{name: getattr(self, name) + value for name, value in more.items()})
        host = grown.host_gb_per_s / self.host_gb_per_s if self.host_gb_per_s else 1.0
        machine = replace(
            self.machine,
            gpu="",
            gpu_data_sheet_gb_per_s=grown.gpu_gb_per_s,
            ram="",
            host_peak_gb_per_s=self.machine.host_peak_gb_per_s * host,
            host_stream_gb_per_s=self.machine.host_stream_gb_per_s * host,
            link="",
            link_gb_per_s=grown.link_gb_per_s,
            disk_gb_per_s=grown.disk_gb_per_s,
        )
        return replace(grown, machine=machine)


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
) -> Resources:
    """Return the machine of these options. Raise InputError for what cannot be read or would do nothing.

    Several GPUs are a list: gpu="RTX 3090, 2 x RTX 3060" or gpu_memory="24GiB, 12GiB", and likewise gpu_bandwidth.
    """
    assumed: list[str] = []
    host = _memory(host_memory, "--host-memory")
    names, memories, rates = _listed(gpu), _listed(gpu_memory), _listed(gpu_bandwidth)
    sheets = [gpu_data_sheet(name) for name in names]
    if sheets and not gpu_memory and not all("memory_gib" in sheet for sheet in sheets):
        if not host:
            raise InputError(f"--gpu {gpu} shares its memory with the CPU: say how much there is with --host-memory")
        unified = True
    if unified and not (gpu_memory or host):
        raise InputError("--unified without memory: say how much there is with --host-memory 36GiB")
    sizes = [_memory(text, "--gpu-memory") for text in memories]
    if unified and not sizes:
        sizes = [int(host * UNIFIED)]
    sizes = [size for size in sizes or [int(sheet["memory_gib"]) * GIB for sheet in sheets] if size]
    if sizes and host_memory is None and not unified:
        host = USUAL_HOST
        assumed.append(f"{host // GIB} GiB of host memory (--host-memory)")
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
    gpus, like = [], ""
    for place, size in enumerate(sizes):
        sheet = sheets[place % len(sheets)] if sheets else {}
        reads, like = _gpu_reads(size, sheet, rates[place % len(rates)] if rates else None)
        if like:
            assumed.append(f"the GPU reads {reads:,.0f} GB/s, as the {like} does (--gpu or --gpu-bandwidth)")
        gpus.append(Gpu(size, reads, float(sheet.get("tflop_per_s", 0.0))))
    if unified:
        lanes, carries, peak, stream = "", gpus[0].gb_per_s, gpus[0].gb_per_s, 0.0
    else:
        lanes, carries = _link(link, sheets[0] if sheets else {}, like, assumed, bool(gpus and host))
        peak, stream = _host_reads(cpu_bandwidth, lanes, assumed, bool(host))
    disk_reads = parse_gb_per_s(disk, "--disk") if disk else 0.0
    links = FACTORS.links.items()
    named = next((name for name, rate in links if lanes and name.startswith(lanes) and rate == carries), "")
    machine = Machine(
        name="the machine of the plan",
        host_peak_gb_per_s=peak,
        host_stream_gb_per_s=stream,
        link=named,
        link_gb_per_s=0.0 if named else carries,
        disk_gb_per_s=disk_reads,
        host_threads=threads or 0,
        cpu=cpu or "",
    )
    return Resources(tuple(gpus), host, machine, stream or peak, carries, disk_reads, unified, tuple(assumed))


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


def _gpu_reads(memory: int, sheet: Mapping[str, Any], stated: str | None) -> tuple[float, str]:
    """Return GB/s of GPU memory, and the GPU that was assumed, if one was: the middle card of those of that size."""
    if stated:
        return parse_gb_per_s(stated, "--gpu-bandwidth"), ""
    if sheet:
        return float(sheet["gb_per_s"]), ""
    known = {name: one for name, one in table("gpus").items() if re.match(r"RTX \d", name)}
    near = min(abs(math.log(one["memory_gib"] * GIB / memory)) for one in known.values())
    alike = [name for name, one in known.items() if abs(math.log(one["memory_gib"] * GIB / memory)) <= near + 1e-9]
    alike.sort(key=lambda name: known[name]["gb_per_s"])
    middle = alike[(len(alike) - 1) // 2]
    return float(known[middle]["gb_per_s"]), middle


def _link(text: str | None, sheet: Mapping[str, Any], like: str, assumed: list[str], needed: bool) -> tuple[str, float]:
    """Return the link's generation, and GB/s of a copy; ("", GB/s) where it was stated as that."""
    links = FACTORS.links
    if text and "/" in text:
        return "", parse_gb_per_s(text, "--link")
    if text:
        parts = _LINK.fullmatch(text.strip())
        name = f"PCIe {parts[1]}.0 x{parts[2]}" if parts else text
        if name not in links:
            names = [each.replace(" ", "").replace(".0", "").lower() for each in links]
            raise unknown("link", text, [*names, "25GB/s"])
    else:
        name = str(sheet.get("link") or (table("gpus")[like]["link"] if like else LINK))
        if needed:
            assumed.append(f"the GPU is linked by {name} (--link)")
    return name.rsplit(" ", 1)[0], float(links[name])


def _host_reads(text: str | None, lanes: str, assumed: list[str], needed: bool) -> tuple[float, float]:
    """Return the peak of host memory, or what was measured of it, in GB/s; the other is 0."""
    if text is None:
        ram = RAM.get(lanes, RAM["PCIe 4.0"])
        channels, kind = ram.split(" x ")
        peak = int(channels) * int(kind.split("-")[1]) * 8 / 1_000
        if needed:
            assumed.append(f"host memory is {ram}, {peak:.1f} GB/s by its data sheet (--cpu-bandwidth)")
        return peak, 0.0
    words = text.strip()
    if words.endswith("measured"):
        return 0.0, parse_gb_per_s(words.removesuffix("measured"), "--cpu-bandwidth")
    return parse_gb_per_s(words, "--cpu-bandwidth"), 0.0


def show_gib(size: int) -> str:
    return f"{size / GIB:.4g} GiB"


def described(resources: Resources) -> str:
    gpu, host, each = "no GPU", "no host memory for experts", resources
    if each.has_gpu:
        memories = " + ".join(show_gib(one.memory) for one in each.gpus)
        reads = ", ".join(f"{one.gb_per_s:,.0f}" for one in each.gpus)
        gpu = f"{memories} of GPU memory at {reads} GB/s"
    if each.unified:
        gpu = f"a GPU that may use {show_gib(each.gpu_memory)} of it"
    if each.host_memory:
        host = f"{show_gib(each.host_memory)} of host memory at {each.host_gb_per_s:,.1f} GB/s"
    has_link = each.has_gpu and each.host_memory and not each.unified
    link = f", a link of {each.link_gb_per_s:g} GB/s" if has_link else ""
    first = f"{host.replace('host', 'unified')}, {gpu}" if each.unified else f"{gpu}, {host}"
    return f"{first}{link}, " + (f"a disk of {each.disk_gb_per_s:g} GB/s" if each.disk_gb_per_s else "no disk")
