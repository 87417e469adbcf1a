"""The matrices that are really multiplied: a model's shapes on any torch device, with random weights.

`dense` never asks the device for a value, so it can be captured in a CUDA graph. Routing comes from the trace, and
experts count with equal weights. Experts whose bytes are no float32 or bfloat16 are packed: their bytes are moved, and
matrices of their shape, which lie ready, are multiplied in their place. Nothing is unpacked.
"""

from itertools import cycle

import torch
from torch.nn import functional

from replay.model.dense import Source, Stack, Weights, activated, rms_norm
from traces.models.profile import ModelProfile

BUCKET = 256  # contexts are rounded up to multiples of this, so that few CUDA graphs serve all
ALIGNMENT = 256  # of an expert's matrices, in bytes
READY_BYTES = 256 << 20  # of matrices that lie ready for packed experts: more than caches hold


def stored_dtype(profile: ModelProfile) -> torch.dtype | None:
    """Return the type of an expert's matrices, perhaps with biases; None: they are packed, or of several sizes."""
    for dtype in () if profile.differing_bytes else (torch.float32, torch.bfloat16):
        if dtype.itemsize <= profile.expert_bytes / profile.expert_parameters < dtype.itemsize * 1.05:
            return dtype
    return None


class Network:
    """One state that steps flow through, of at most `max_tokens` tokens each, in contexts of at most `max_context`.

    hidden: [max_tokens, H], what experts get. experts_out: float32[max_tokens, H], the sum of their outputs, each times
    `router_weight`. dense: "real", or "none" to replay experts alone. ready: of packed experts uint8[n, bytes],
    matrices that are multiplied in their place.
    """

    def __init__(
        self,
        profile: ModelProfile,
        device: torch.device,
        max_tokens: int,
        max_context: int,
        seed: int,
        dense: str = "real",
    ) -> None:
        if device.type == "cuda":
            torch.backends.cuda.enable_cudnn_sdp(False)  # it plans again for each shape, in the middle of a run
        self.profile = profile
        dtype = torch.float32 if profile.dense_bytes_per_parameter >= torch.float32.itemsize else torch.bfloat16
        stored = stored_dtype(profile)
        self.expert_dtype = stored or dtype
        self.router_weight = 1 / profile.top_k
        self._positions = -(-max(max_context, max_tokens) // BUCKET) * BUCKET
        self._source = Source(device, dtype, seed)
        self._stack = Stack(profile, self._source, self._positions, max_tokens) if dense == "real" else None
        numbers = -(-profile.expert_parameters * dtype.itemsize // ALIGNMENT) * ALIGNMENT // dtype.itemsize
        most = max(1, READY_BYTES // (numbers * dtype.itemsize))  # each whole units of what a kernel loads
        ready = min(profile.moe_layers * profile.experts, most)
        self.ready = None if stored else self._source.matrices(ready, numbers).view(torch.uint8)
        self._residual = torch.ones(max_tokens, profile.hidden_size, device=device, dtype=dtype)
        self.hidden = torch.ones_like(self._residual)
        self.experts_out = torch.zeros_like(self._residual, dtype=torch.float32)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all that is not in slots; a network on the device `meta` takes none."""
        ready = 0 if self.ready is None else self.ready.numel()
        return (self._source.parameters + self._source.cached) * self._source.dtype.itemsize + ready

    @property
    def computed_in(self) -> str | None:
        """Return the type in which packed experts are computed; None: experts are not packed."""
        return None if self.ready is None else str(self.expert_dtype).removeprefix("torch.")

    def bucket(self, tokens: int, context: int) -> int:
        """The context that `dense` computes with: a prefill's own, else rounded up; its own bucket again.

        A single token is decoded, also the first one, unless that is when an encoder runs.
        """
        is_prefill = tokens == context and (tokens > 1 or self.profile.encoder_moe_layers > 0)
        return context if is_prefill else min(-(-context // BUCKET) * BUCKET, self._positions)

    def weights(self, buffer: torch.Tensor) -> Weights:
        """Return an expert's matrices as views of its bytes. buffer: uint8[expert_bytes]."""
        profile = self.profile
        H, I = profile.routed_size, profile.expert_intermediate_size  # noqa: E741  the field's name
        flat = buffer[: profile.expert_parameters * self.expert_dtype.itemsize].view(self.expert_dtype)
        rows = (profile.expert_matrices - 1) * I
        return flat[: rows * H].view(rows, H), flat[rows * H : (rows + I) * H].view(H, I)

    def dense(self, layer: int, tokens: int, context: int) -> None:
        """From the combine before, or the embedding, to this router. Encoder layers do nothing but in a prefill."""
        residual, hidden = self._residual[:tokens], self.hidden[:tokens]
        if self._stack:
            self._stack.before_router(layer, residual, hidden, self.bucket(tokens, context))
        else:
            hidden.copy_(rms_norm(residual))

    def expert(self, weights: Weights, tokens: int) -> None:
        """Compute one expert for `tokens` tokens; its output is added to the event's."""
        width = self.profile.routed_size
        output = expert_output(
            weights, self.hidden[:tokens, :width].to(self.expert_dtype), self.profile.expert_matrices
        )
        self.experts_out[:tokens, :width].add_(output, alpha=self.router_weight)

    def forget(self) -> None:
        self.experts_out.zero_()

    def combine(self, tokens: int) -> None:
        out = self.experts_out[:tokens]
        self._residual[:tokens] += out
        out.zero_()

    def head(self, tokens: int) -> None:
        """Compute the layers after the last experts, and the last token's logits: the greatest comes next."""
        residual, hidden = self._residual[:tokens], self.hidden[:tokens]
        if self._stack:
            self._stack.head(residual, hidden)
        else:
            hidden.copy_(rms_norm(residual))

    def finite(self) -> bool:
        state = (self._residual, self.hidden, self.experts_out)
        return all(bool(each.isfinite().all()) for each in state)


def expert_output(weights: Weights, tokens: torch.Tensor, matrices: int) -> torch.Tensor:
    """Return one expert's output of tokens [n, H]; three matrices: down(silu(gate) * up), two: down(relu(up))."""
    first, down = weights
    return functional.linear(activated(first, tokens, matrices), down)


class Operands:
    """What experts in slots are multiplied from; packed ones from ready matrices in turn, so that caches lose them."""

    def __init__(self, network: Network, pool: torch.Tensor) -> None:
        """pool: uint8[slots, stride]."""
        self.pool = pool if network.ready is None else network.ready
        self._turns = None if network.ready is None else cycle(range(len(self.pool)))
        self._weights = [network.weights(row) for row in self.pool]

    def rows(self, slots: list[int]) -> list[int]:
        """Return the rows of `pool` that stand for these slots."""
        return slots if self._turns is None else [next(self._turns) for _ in slots]

    def __getitem__(self, slot: int) -> Weights:
        return self._weights[self.rows([slot])[0]]
