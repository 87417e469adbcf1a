"""Durations computed from a machine's rates and a model's shape: a roofline, and the host link.

Rules 11 and 12 of docs/contract.md. A machine on which the model was measured goes by `sim.profiles.measured` instead.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

from sim.profiles.hardware_profile import Hardware
from sim.profiles.timing import Link
from traces.models.profile import LayerKind, ModelProfile

ATTENTION_KERNELS = 8  # norm, projections, rotation, cache, attention, output, residual and norm
DENSE_KERNELS = 3  # two matmuls and an activation: of a layer without experts, or of shared experts
ROUTER_KERNELS = 2  # matmul, top-k
EXPERT_KERNELS = 3  # two matmuls and an activation
COMBINE_KERNELS = 1
HEAD_KERNELS = 3  # norm, vocabulary matmul, sampling

LINK_STEPS = 10**6
"""Of a GB/s: a bandwidth is rounded to the nearest whole fraction with at most so many parts, to stay exact."""


def host_link(hardware: Hardware, model: ModelProfile, chunk_bytes: int | None = None) -> Link:
    """Return the profile's link to the host as whole numbers, carrying experts of `model`."""
    per_byte = 1 / Fraction(hardware.link_bandwidth_gb_per_s).limit_denominator(LINK_STEPS)
    return Link(
        latency_ns=math.ceil(hardware.link_latency_us * 1_000),
        ns_per_byte_num=per_byte.numerator,
        ns_per_byte_den=per_byte.denominator,
        expert_bytes=model.expert_bytes,
        chunk_bytes=chunk_bytes,
        layer_bytes=model.differing_bytes or None,
    )


class Roofline:
    """Durations from profiles: the slower of reading and multiplying, then what each launch and layer costs.

    Layers without experts belong to the MoE layer after them, the last ones to the head; only a step's last token
    reaches the vocabulary. An encoder takes time only in a prefill, a step that is as long as its context.
    kv_cache, multiply: how many times as much a byte of the KV cache, and a weight's FLOP, cost as others.
    """

    kv_cache = 1.0
    multiply = 1.0

    def __init__(self, hardware: Hardware, model: ModelProfile, predictor_ns: int = 0):
        self.hardware, self.model = hardware, model
        self.predictor_ns = predictor_ns  # the policy's, not the machine's: see `sim.profiles.policy_overhead`
        self._stretches = [model.stretch(layer) for layer in range(model.moe_layers + 1)]
        # Many layers are alike, and a step asks for all of them.
        self._alike = [self._stretches.index(stretch) for stretch in self._stretches]
        self._timed = lru_cache(maxsize=256)(self._of_stretch)
        self._combine_ns: dict[int, int] = {}  # by tokens: that of every layer

    def dense_ns(self, layer: int, tokens: int, context: int, requests: int = 1) -> int:
        """Return the time of attention over `context`, shared experts, router and the layers without experts before."""
        if not self.model.runs(layer, tokens, context):
            return 0
        return self._timed(self._alike[layer], tokens, context, requests)

    def expert_ns(self, tokens: int, layer: int = 0) -> int:
        """Return the time of an expert whose weights are read once, from GPU memory."""
        flop = 2 * self.multiply * self.model.expert_parameters * tokens
        framework = self.hardware.framework_us_per_expert * 1_000
        return math.ceil(self._slower(self.model.bytes_of(layer), flop) + self._launched(EXPERT_KERNELS) + framework)

    @property
    def hop_ns(self) -> int:
        return math.ceil(self.hardware.host_hop_us * 1_000)

    def host_ns(self, tokens: int, layer: int = 0) -> int:
        """Return the time of an expert whose weights are read once, from host memory, at its kernels' rate."""
        flop = 2 * self.model.expert_parameters * tokens
        reading = self.model.bytes_of(layer) / self.hardware.host_expert_bandwidth_gb_per_s
        return math.ceil(max(reading, flop / (self.hardware.host_compute_tflop_per_s * 1_000)))

    def combine_ns(self, tokens: int, layer: int = 0, context: int = 0) -> int:
        if not self.model.runs(layer, tokens, context):
            return 0
        if tokens not in self._combine_ns:
            row = self.model.hidden_size * self.model.dense_bytes_per_parameter
            moved = tokens * (self.model.top_k + 1) * row
            self._combine_ns[tokens] = math.ceil(self._slower(moved, 0) + self._launched(COMBINE_KERNELS))
        return self._combine_ns[tokens]

    def head_ns(self, tokens: int, requests: int = 1) -> int:
        """Trailing layers (their context taken as the step's tokens), then the vocabulary, a token of each request."""
        vocabulary = self._slower(self.model.head_bytes, 2 * self.multiply * self.model.head_weights * requests)
        trailing = self._stretch_ns(self._stretches[-1], tokens, tokens)
        framework = self.hardware.framework_us_per_token * 1_000
        return math.ceil(trailing + vocabulary + self._launched(HEAD_KERNELS) + framework)

    def token_ns(self, context: int) -> int:
        """Return the time of one decoded token with all experts in GPU memory, under no policy."""
        layers = [layer for layer in range(self.model.moe_layers) if self.model.runs(layer, 1, context)]
        experts = sum(self.model.top_k * self.expert_ns(1, layer) for layer in layers)
        return sum(self.dense_ns(layer, 1, context) + self.combine_ns(1, layer, context) for layer in layers) + (
            experts + self.head_ns(1)
        )

    def _of_stretch(self, layer: int, tokens: int, context: int, requests: int) -> int:
        return math.ceil(self._stretch_ns(self._stretches[layer], tokens, context, requests))

    def _stretch_ns(self, layers: Sequence[LayerKind], tokens: int, context: int, requests: int = 1) -> float:
        """Weights and KV caches are read once; a token attends to its request's tokens before it, in each window."""
        model = self.model
        before = context / requests - (tokens / requests - 1) / 2  # of the mean token of the step
        parameters = sum(kind.parameters for kind in layers)
        kept = sum(kind.kept(context, requests) for kind in layers)
        states = sum(kind.state for kind in layers) * requests
        attended = sum(kind.attended(before) for kind in layers)
        flop = 2 * self.multiply * parameters * tokens + self._attention_flop(tokens * attended, kept)
        framework = len(layers) * self.hardware.framework_us_per_layer * 1_000
        read = parameters * model.dense_bytes_per_parameter + self.kv_cache * kept * model.kv_bytes_per_value + states
        return self._slower(read, flop) + self._launched(sum(map(_kernels, layers))) + framework

    def _attention_flop(self, pairs: float, kept: float) -> float:
        """Return the FLOP of attention: pairs of a token and one it attends to, and values of the KV cache."""
        return 2 * self.model.heads * (2 * self.model.head_size + self.model.rope_head_size) * pairs

    def _slower(self, read_bytes: float, flop: float) -> float:
        """Return the longer of reading and multiplying, in ns: GB/s are bytes a ns, TFLOP/s are 1,000 FLOP a ns."""
        reading = read_bytes / self.hardware.memory_bandwidth_gb_per_s
        return max(reading, flop / (self.hardware.compute_tflop_per_s * 1_000))

    def _launched(self, kernels: int) -> float:
        return kernels * self.hardware.launch_us * 1_000


def _kernels(kind: LayerKind) -> int:
    """Return how many kernels compute a layer, routed experts aside."""
    return (
        ATTENTION_KERNELS * kind.mixes
        + DENSE_KERNELS * (kind.mlp > 0)
        + ROUTER_KERNELS * kind.routed
        + DENSE_KERNELS * (kind.shared > 0)
    )
