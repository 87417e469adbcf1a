"""Durations as runtimes reach them: what `sim.profiles.roofline` leaves to the best kernels.

On a CPU, threads read and multiply in turn: times add up as the sides of a right angle. The slopes of three formats on
an A10's host (Q8_0 87% of STREAM, Q4_K 74%, MXFP4 68%) give reads at 96% of STREAM and 20 GFLOP/s a thread, within 3%.
Attention goes head by head there, so its time follows heads and cached values; a latent value costs more.
"""

import math

from sim.prediction.tables import FACTORS
from sim.profiles.hardware_profile import Hardware
from sim.profiles.roofline import Roofline
from traces.models.profile import ModelProfile


class Runtime(Roofline):
    """A roofline whose dense part the GPU computes, or the CPU; experts of the host are always the CPU's."""

    def __init__(self, hardware: Hardware, model: ModelProfile, cpu: bool) -> None:
        super().__init__(hardware.on_host() if cpu else hardware, model)
        self.cpu = cpu
        self.kv_cache = 1.0 if cpu else FACTORS.gpu_kv_cache
        self.host_multiply = FACTORS.host_multiply.get(model.precision, 1.0)
        self.multiply = self.host_multiply if cpu else 1.0

    def host_ns(self, tokens: int, layer: int = 0) -> int:
        reading = self.model.bytes_of(layer) / self.hardware.host_expert_bandwidth_gb_per_s
        flop = 2 * self.host_multiply * self.model.expert_parameters * tokens
        multiplying = flop / (self.hardware.host_compute_tflop_per_s * 1_000)
        return math.ceil(math.hypot(reading, multiplying))

    def _attention_flop(self, pairs: float, kept: float) -> float:
        if not self.cpu:
            return super()._attention_flop(pairs, kept)
        value = FACTORS.host_attention_flop_per_value
        if self.model.kv_latent_size:
            value = FACTORS.host_attention_flop_per_latent_value
        return float(FACTORS.host_attention_flop_per_head * self.model.heads * pairs + value * kept)

    def _slower(self, read_bytes: float, flop: float) -> float:
        if not self.cpu:
            return super()._slower(read_bytes, flop)
        hardware = self.hardware
        multiplying = flop / (hardware.compute_tflop_per_s * 1_000)
        return math.hypot(read_bytes / hardware.memory_bandwidth_gb_per_s, multiplying)
