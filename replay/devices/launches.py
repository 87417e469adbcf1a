"""How a decoded token is launched: few launches, since each costs the host some microseconds.

What does not depend on routing (dense parts, combine, head) is a CUDA graph each; small experts that are at hand go
through one fused kernel. Large experts, and those of longer steps, are matmuls on views of their slots.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.util import find_spec

import torch

from replay.devices.gpu import Gpu, Task
from replay.model.network import Network

Fused = Callable[[torch.Tensor, Sequence[int]], object]
"""From the pool (uint8[slots, stride]), the experts in these slots on one token, in one go."""


class Launches:
    """Of one network on one GPU. A dense part has a graph for each bucket of context lengths."""

    def __init__(self, gpu: Gpu, network: Network) -> None:
        self._gpu = gpu
        self._network = network
        self._dense: dict[tuple[int, int], Task] = {}  # layer, bucket
        self.combine: Task = partial(network.combine, 1)
        self.head: Task = partial(network.head, 1)
        self.fallbacks: list[str] = []  # why something is launched kernel by kernel that should not be
        try:
            self.experts = fused(network)
        except Exception as error:  # Triton's own are many: its compiler's, its driver's
            self.experts = None
            self.fallbacks.append(f"no fused kernel: {type(error).__name__}: {' '.join(str(error).split())[:300]}")

    def prepare(self, contexts: Iterable[int]) -> None:
        """Capture what one token at each of these contexts runs, unless it was captured before."""
        network = self._network
        buckets = {network.bucket(1, context): context for context in contexts}
        layers = range(network.profile.moe_layers)
        missing = [(layer, at) for at in sorted(buckets) for layer in layers if (layer, at) not in self._dense]
        if missing:
            tasks: list[Task] = [partial(network.dense, layer, 1, buckets[at]) for layer, at in missing]
            ends: list[Task] = [] if self._dense else [self.combine, self.head]
            try:
                graphs = self._gpu.capture([*tasks, *ends])
            except torch.AcceleratorError:
                raise
            except RuntimeError as error:
                self.fallbacks.append(f"no CUDA graphs: {' '.join(str(error).split())[:300]}")
                return
            if ends:
                self.combine, self.head = graphs[-2:]
            self._dense.update(zip(missing, graphs, strict=False))

    def dense(self, layer: int, context: int) -> Task:
        """Return the launch of one token's dense part; what was not prepared is launched kernel by kernel."""
        graph = self._dense.get((layer, self._network.bucket(1, context)))
        return graph or partial(self._network.dense, layer, 1, context)


def fused(network: Network) -> Fused | None:
    """Return the fused kernel; None for large experts, other numbers than the hidden state's, and without Triton."""
    if network.hidden.device.type != "cuda" or find_spec("triton") is None:
        return None
    from replay.model.kernels import FusedExperts, is_small

    profile = network.profile
    shape = profile.routed_size, profile.expert_intermediate_size, profile.expert_matrices, network.expert_dtype
    if network.hidden.dtype != network.expert_dtype or not is_small(*shape):
        return None
    kernel = FusedExperts(*shape, network.hidden.device)
    hidden, out, weight = network.hidden[0], network.experts_out[0], network.router_weight
    return lambda pool, slots: kernel(hidden, pool, slots, weight, out)
