"""From what is known of a machine to the rates of a run, and to the hardware profile that is simulated.

What is stated comes first, measured before data sheet; what is not comes from the machine's hardware profile, and then
from the general factors (`data/factors.toml`). A framework's overheads are its system's (`policies.core.systems`).
"""

from collections.abc import Mapping
from dataclasses import replace

from policies.core.systems import System
from sim.catalogue.parts import LINKS, Entries, Gpu, gpu_that_reads, ram_gb_per_s, thread_gflop_per_s
from sim.prediction.described import Machine
from sim.prediction.tables import FACTORS
from sim.profiles.hardware_profile import WHOLE, Hardware, gpu_of, hardware
from traces.errors import unknown
from traces.models.profile import ModelProfile

ON_CHIP = 100
"""GB/s above which a link is no PCIe."""

ENOUGH = 1e3
"""TFLOP/s that limit nothing."""

FITTED: Mapping[str, str] = {
    "gpu_gb_per_s": "memory_bandwidth_gb_per_s",
    "gpu_tflop_per_s": "compute_tflop_per_s",
    "host_gb_per_s": "host_memory_bandwidth_gb_per_s",
    "host_tflop_per_s": "host_compute_tflop_per_s",
    "hop_us": "host_hop_us",
    "cpu_us_per_layer": "host_us_per_layer",
    "link_gb_per_s": "link_bandwidth_gb_per_s",
    "link_latency_us": "link_latency_us",
    "disk_gb_per_s": "disk_bandwidth_gb_per_s",
    "disk_latency_us": "disk_latency_us",
    "us_per_layer": "framework_us_per_layer",
    "us_per_expert": "framework_us_per_expert",
    "us_per_token": "framework_us_per_token",
}
"""What a machine may have fitted: rates by the names that a machine states them with, and as fields of Hardware."""


def hardware_of(machine: Machine, engine: System, model: ModelProfile) -> Hardware:
    """Return a machine under an engine, as runtimes reach it. Raise InputError for an unknown link.

    A rate of 0: the machine has none, or nothing is known of it. Launches of a layer are in its overhead, since one
    kernel computes all experts of a token.
    """
    factors, sheet = FACTORS, _data_sheet(machine)
    gpu = factors.gpu[sheet.kind]
    of_read = (model.expert_bytes_per_parameter >= WHOLE and gpu.get("kernels_of_read_16_bits")) or gpu.kernels_of_read
    base = hardware(machine.profile) if machine.profile else None
    link = machine.link or ("" if base or not machine.gpu else sheet.link)
    if machine.fit_parameter not in ("", *FITTED):
        raise unknown("fit_parameter", machine.fit_parameter, FITTED)
    if link and link not in LINKS:
        raise unknown("link", link, LINKS)

    def of_base(field: str, general: float = 0.0) -> float:
        return float(getattr(base, field)) if base else general

    def stated(key: str, general: float) -> float:
        value = float(getattr(machine, key))
        return value if value >= 0 else general

    data_sheet = machine.gpu_data_sheet_gb_per_s or sheet.gb_per_s
    read = machine.gpu_read_gb_per_s or data_sheet * gpu.read_of_data_sheet
    stream = machine.host_stream_gb_per_s or peak_of(machine) * factors.host_stream_of_peak
    experts = (stream or of_base("host_memory_bandwidth_gb_per_s")) * (
        machine.host_experts_of_stream or factors.host_experts_of_stream
    )
    reads = (machine.host_gb_per_s or experts) * factors.host_layouts.get(machine.host_layout, 1.0)
    cpu = cpu_class(reads)
    copies = LINKS[link].gb_per_s if link else of_base("link_bandwidth_gb_per_s")
    named = thread_gflop_per_s(machine.cpu or machine.title) if machine.host_threads else 0.0
    thread = machine.host_gflop_per_s_per_thread or named or cpu.gflop_per_s_per_thread
    threads = machine.host_threads or cpu.threads
    cores = threads * thread / 1_000
    if machine.host_gb_per_s and not machine.host_gflop_per_s_per_thread:
        cores = ENOUGH  # what its kernels were measured to reach has their compute in it
    sheet_tflop = sheet.tflop_per_s or (read or machine.gpu_gb_per_s) * factors.gpu_tflop_per_gb_per_s
    kernels = kernels_per_layer(model)
    launches_us = kernels * (machine.launch_us or gpu.launch_us)
    waiting_us = factors.cpu_us_per_layer + kernels * threads * factors.barrier_us_per_thread
    link_rate = machine.link_gb_per_s or copies
    disk = machine.disk_gb_per_s or machine.disk_peak_gb_per_s * factors.disk_of_peak
    at_once = machine.host_and_link_gb_per_s
    hop = factors.hop_us_on_chip if link_rate > ON_CHIP else factors.hop_us
    reached = Hardware(
        name=machine.name,
        title=machine.title or machine.name,
        memory_gib=1.0,
        launch_us=0.0,
        host_expert_share=1.0,
        memory_bandwidth_gb_per_s=machine.gpu_gb_per_s or (read or of_base("memory_bandwidth_gb_per_s")) * of_read,
        compute_tflop_per_s=machine.gpu_tflop_per_s or of_base("compute_tflop_per_s", sheet_tflop),
        host_memory_bandwidth_gb_per_s=reads,
        host_compute_tflop_per_s=cores,
        host_and_link=at_once / max(reads, link_rate) if at_once else factors.host_and_link_of_host,
        host_hop_us=hop,
        host_us_per_layer=stated("cpu_us_per_layer", waiting_us),
        link_bandwidth_gb_per_s=link_rate,
        link_latency_us=stated("link_latency_us", factors.link_latency_us),
        disk_bandwidth_gb_per_s=disk or of_base("disk_bandwidth_gb_per_s"),
        disk_latency_us=stated("disk_latency_us", factors.disk_latency_us),
        read_ahead_kib=machine.read_ahead_kib or of_base("read_ahead_kib", Hardware.read_ahead_kib),
        page_fault_us=machine.page_fault_us or of_base("page_fault_us", Hardware.page_fault_us),
        framework_us_per_layer=launches_us,
        framework_us_per_token=factors.us_per_token,
    ).under(engine.overheads)
    counted = {key: getattr(machine, key) for key in ("hop_us", "us_per_layer", "us_per_expert", "us_per_token")}
    return replace(reached, **{FITTED[key]: us for key, us in counted.items() if us >= 0})


def peak_of(machine: Machine) -> float:
    """Return the peak of the machine's memory in GB/s. Raise InputError for a kind that cannot be read."""
    return machine.host_peak_gb_per_s or (ram_gb_per_s(machine.ram) if machine.ram else 0.0)


def cpu_class(gb_per_s: float) -> Entries:
    """Return the threads, and GFLOP/s of each, of a CPU that reads memory so fast."""
    cpu: Entries = FACTORS.cpu.server if gb_per_s > FACTORS.server_gb_per_s else FACTORS.cpu.desktop
    return cpu


def kernels_per_layer(model: ModelProfile) -> float:
    counts, order = FACTORS.kernels, model.order
    more = [
        counts.shared * bool(kind.shared or (kind.mlp and kind.routed))
        + counts.state * bool(kind.state and not kind.kv)
        for kind in order
    ]
    return float(counts.layer + counts.latent * bool(model.kv_latent_size) + sum(more) / len(order))


def _data_sheet(machine: Machine) -> Gpu:
    """Return the data sheet of its GPU, else the one that its title names, by bandwidth. Raise InputError."""
    if machine.gpus:
        return machine.gpus[0]
    if machine.gpu:
        return gpu_of(machine.gpu)
    return gpu_that_reads(machine.gpu_data_sheet_gb_per_s, machine.title)
