"""How long a prompt takes: batches of 512 tokens, whose matmuls limit compute, and whose experts all cross the link."""

from sim.planner.placements import Layout
from sim.prediction.tables import FACTORS
from sim.profiles.hardware_profile import Hardware

BATCH = 512


def seconds(layout: Layout, tokens: int) -> float:
    own = layout.hardware
    full, rest = divmod(tokens, BATCH)
    batches = [BATCH] * full + [rest] * (rest > 0)
    return sum(_batch_s(layout, own, size, min(i * BATCH + size / 2, tokens)) for i, size in enumerate(batches))


def _batch_s(layout: Layout, own: Hardware, tokens: int, before: float) -> float:
    """Return the seconds of a batch whose tokens see `before` others in the mean."""
    profile = layout.profile
    pair = 2 * profile.heads * (2 * profile.head_size + profile.rope_head_size)
    attended = pair * sum(kind.attended(before) for kind in profile.order)
    weights = profile.layers_parameters + profile.moe_layers * profile.top_k * profile.expert_parameters
    used = 1 - (1 - profile.top_k / profile.experts) ** tokens
    flop = (2 * weights + attended) * tokens + 2 * profile.head_weights
    dense = profile.layers_parameters * profile.dense_bytes_per_parameter + profile.head_bytes
    disk = used * layout.missing_bytes / own.mapped(profile).disk_bandwidth_gb_per_s if layout.missing_bytes else 0.0
    if not layout.on_gpu:
        cores: float = own.host_compute_tflop_per_s * FACTORS.host_prefill_of_decode * 1e3
        reading = (dense + used * layout.experts_bytes) / own.host_memory_bandwidth_gb_per_s
        return max(reading, flop / cores, disk) / 1e9
    computing: float = flop / (own.compute_tflop_per_s * FACTORS.gpu_prefill_of_tflop * 1e3)
    reading = (dense + used * layout.experts_bytes) / own.memory_bandwidth_gb_per_s
    copying = used * layout.host_bytes / own.link_bandwidth_gb_per_s if layout.host_bytes else 0.0
    return (max(reading, computing) + max(copying, disk)) / 1e9
