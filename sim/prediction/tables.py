"""Tables of the back-test: general factors (data/factors.toml), reuse, errors."""

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import Struct, toml

DATA = Path(__file__).parent / "data"


@cache
def table(name: str) -> Mapping[str, Any]:
    return tomllib.loads((DATA / f"{name}.toml").read_text("utf-8"))


class GpuFactors(Struct, forbid_unknown_fields=True):
    """Of a kind of GPU memory."""

    read_of_data_sheet: float
    kernels_of_read: float
    launch_us: float
    kernels_of_read_16_bits: float = 0.0  # 0: as of other weights


class CpuFactors(Struct, forbid_unknown_fields=True):
    """Of a class of CPU."""

    threads: int
    gflop_per_s_per_thread: float


class Cpus(Struct, forbid_unknown_fields=True):
    """By class; one that reads faster than `server_gb_per_s` is a server's."""

    desktop: CpuFactors
    server: CpuFactors


class Kernels(Struct, forbid_unknown_fields=True):
    """Of a layer on the GPU."""

    layer: int
    latent: int
    shared: int
    state: int


class Factors(Struct, forbid_unknown_fields=True):
    """What is assumed of a machine or a run that states nothing; what each means stands in the file."""

    gpu_tflop_per_gb_per_s: float
    gpu_prefill_of_tflop: float
    gpu_kv_cache: float
    host_prefill_of_decode: float
    host_stream_of_peak: float
    host_experts_of_stream: float
    host_attention_flop_per_head: float
    host_attention_flop_per_value: float
    host_attention_flop_per_latent_value: float
    host_and_link_of_host: float
    server_gb_per_s: float
    cpu_us_per_layer: float
    barrier_us_per_thread: float
    hop_us: float
    hop_us_on_chip: float
    us_per_token: float
    disk_of_peak: float
    link_latency_us: float
    disk_latency_us: float
    context: int
    gpu: dict[str, GpuFactors]
    kernels: Kernels
    cpu: Cpus
    host_multiply: dict[str, float]
    host_layouts: dict[str, float]


FACTORS = toml.decode((DATA / "factors.toml").read_bytes(), type=Factors)
