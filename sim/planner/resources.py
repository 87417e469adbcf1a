"""The machine as a user states it, and what is assumed where they state nothing.

What a runtime and an operating system need beside the model is reserved; each assumption is a sentence for the user.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sim.backtest.file import Machine
from sim.backtest.machine import gpu_data_sheet, table
from sim.quantities import parse_bytes, parse_gb_per_s
from traces.errors import InputError, refuse, unknown

GIB = 2**30

GPU_RESERVED = 3 * GIB // 2
"""The margin of GPU memory: 1 GiB for the context and the buffers of a compiled runtime, and 0.5 GiB for a desktop."""

HOST_RESERVED = 2 * GIB
"""The margin of host memory, for the operating system and the runtime."""

RAM = {"PCIe 3.0": "2 x DDR4-2666", "PCIe 4.0": "2 x DDR4-3200", "PCIe 5.0": "2 x DDR5-5600"}
"""Memory of a desktop of that time, where neither its bandwidth nor its kind is stated."""

LINK = "PCIe 4.0 x16"

_LINK = re.compile(r"(?:pcie)?\s*-?([345])(?:\.0)?\s*[x ]*x(\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class Resources:
    """A machine. Memories in bytes and bandwidths in GB/s; 0: it has none.

    machine: the same as the back-test takes it, from which all times follow. assumed: sentences.
    """

    gpu_memory: int
    host_memory: int
    machine: Machine
    gpu_gb_per_s: float  # of the data sheet
    host_gb_per_s: float  # peak, or as measured
    link_gb_per_s: float
    disk_gb_per_s: float
    assumed: tuple[str, ...] = ()

    @property
    def has_gpu(self) -> bool:
        return self.gpu_memory > 0

    @property
    def margins(self) -> tuple[int, int]:
        """Bytes of GPU and of host memory that are kept free."""
        return GPU_RESERVED * self.has_gpu, HOST_RESERVED * bool(self.host_memory)

    @property
    def host_reads(self) -> float:
        """GB/s of host memory, for link and CPU together: at least what the link carries."""
        return max(self.host_gb_per_s, self.link_gb_per_s)

    def with_more(self, **more: float) -> "Resources":
        """Return the machine with more of some resources, by the names of the fields."""
        grown = replace(self, **{name: getattr(self, name) + value for name, value in more.items()})
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
) -> Resources:
    """Return the machine of these options. Raise InputError for what cannot be read or would do nothing."""
    assumed: list[str] = []
    sheet = gpu_data_sheet(gpu or "")
    memory = _memory(gpu_memory, "--gpu-memory")
    if gpu_memory is None and gpu:
        if not sheet.get("memory_gib"):
            raise InputError(f"--gpu {gpu} shares its memory with the CPU: say how much of it with --gpu-memory 36GiB")
        memory = int(sheet["memory_gib"]) * GIB
    host = _memory(host_memory, "--host-memory")
    refuse(
        (not memory and not host, "a machine without memory: give --gpu-memory 12GiB, --host-memory 32GiB or both"),
        (
            not memory and (gpu or gpu_bandwidth),
            "a GPU without memory: give --gpu-memory 12GiB, or leave --gpu and --gpu-bandwidth out",
        ),
        (not host and cpu_bandwidth, "--cpu-bandwidth without host memory: give --host-memory 32GiB, or leave it out"),
    )
    reads, like = 0.0, ""
    if memory:
        reads, like = _gpu_reads(memory, sheet, gpu_bandwidth)
        if like:
            assumed.append(f"the GPU reads {reads:,.0f} GB/s, as the {like} does (--gpu or --gpu-bandwidth)")
    lanes, carries = _link(link, sheet, like, assumed, bool(memory and host))
    peak, stream = _host_reads(cpu_bandwidth, lanes, assumed, bool(host))
    disk_reads = parse_gb_per_s(disk, "--disk") if disk else 0.0
    machine = Machine(
        name="the machine of the plan",
        gpu_data_sheet_gb_per_s=reads,
        host_peak_gb_per_s=peak,
        host_stream_gb_per_s=stream,
        link_gb_per_s=carries,
        disk_gb_per_s=disk_reads,
        host_threads=threads or 0,
    )
    return Resources(memory, host, machine, reads, stream or peak, carries, disk_reads, tuple(assumed))


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
    links = table("factors")["links"]
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
        gpu = f"{show_gib(each.gpu_memory)} of GPU memory at {each.gpu_gb_per_s:,.0f} GB/s"
    if each.host_memory:
        host = f"{show_gib(each.host_memory)} of host memory at {each.host_gb_per_s:,.1f} GB/s"
    link = f", a link of {each.link_gb_per_s:g} GB/s" if each.has_gpu and each.host_memory else ""
    return f"{gpu}, {host}{link}, " + (f"a disk of {each.disk_gb_per_s:g} GB/s" if each.disk_gb_per_s else "no disk")
