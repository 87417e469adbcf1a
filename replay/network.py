"""The matrices that are really multiplied: a model's shapes with random weights, on any torch device.

Per layer one matmul reads as many dense weights as the layer has (attention projections, shared experts, router, the
layers without experts before it); an expert is SwiGLU, or ReLU where it has no gate; the head is the vocabulary.
Attention over the KV cache is not computed, so context length costs nothing here.
"""

import torch
from torch.nn import functional

from sim.models import ModelProfile
from traces.errors import InputError

Weights = tuple[torch.Tensor, torch.Tensor]  # (gate and up, or up: [n * I, H]; down: [H, I])


class Network:
    """One hidden state that steps flow through. Steps are at most `max_tokens` long."""

    def __init__(self, profile: ModelProfile, device: torch.device, max_tokens: int, seed: int) -> None:
        self.profile = profile
        self.expert_dtype = dtype_of(profile.expert_bytes_per_parameter, "an expert's")
        dtype = dtype_of(profile.dense_bytes_per_parameter, "a dense")
        rng = torch.Generator(device).manual_seed(seed)
        H = profile.hidden_size

        def random(rows: int) -> torch.Tensor:
            return torch.randn(rows, H, generator=rng, device=device, dtype=dtype) * 0.02

        self._dense = [random(dense_rows(profile, layer)) for layer in range(profile.moe_layers)]
        self._vocabulary = random(profile.vocabulary)
        self._hidden = random(max_tokens)
        self._experts_out = torch.zeros(max_tokens, H, device=device, dtype=dtype)

    def weights(self, buffer: torch.Tensor) -> Weights:
        """An expert's matrices as views of its bytes. buffer: uint8[expert_bytes]."""
        profile = self.profile
        H, I = profile.hidden_size, profile.expert_intermediate_size  # noqa: E741  the field's name
        used = profile.expert_parameters * self.expert_dtype.itemsize
        flat = buffer[:used].view(self.expert_dtype)
        rows = (profile.expert_matrices - 1) * I
        return flat[: rows * H].view(rows, H), flat[rows * H :].view(H, I)

    def dense(self, layer: int, tokens: int) -> None:
        """The step's tokens through all dense weights of the layer; the result flows on, normalised."""
        hidden = self._hidden[:tokens]
        mixed = functional.linear(hidden, self._dense[layer])
        width = min(mixed.shape[1], hidden.shape[1])
        hidden[:, :width] += mixed[:, :width]
        hidden[:] = functional.rms_norm(hidden, hidden.shape[-1:])

    def expert(self, weights: Weights, tokens: int) -> None:
        """`tokens` tokens through one expert; its output is added to the event's."""
        first = self._hidden[:tokens].to(self.expert_dtype)
        self._experts_out[:tokens] += expert_output(weights, first, self.profile.expert_matrices)

    def combine(self, tokens: int) -> None:
        """The experts' outputs join the hidden state, normalised."""
        joined = self._hidden[:tokens] + self._experts_out[:tokens] / self.profile.top_k
        self._hidden[:tokens] = functional.rms_norm(joined, joined.shape[-1:])
        self._experts_out[:tokens] = 0

    def head(self, tokens: int) -> None:
        """The last token's vocabulary logits, and the greatest."""
        functional.linear(self._hidden[tokens - 1], self._vocabulary).argmax()

    def finite(self) -> bool:
        """Whether the hidden state holds neither NaN nor infinity."""
        return bool(self._hidden.isfinite().all())


def expert_output(weights: Weights, tokens: torch.Tensor, matrices: int) -> torch.Tensor:
    """One expert on tokens [n, H] -> [n, H]; three matrices: down(silu(gate) * up), two: down(relu(up))."""
    first, down = weights
    inner = functional.linear(tokens, first)
    if matrices == 3:
        gate, up = inner.chunk(2, dim=-1)
        return functional.linear(functional.silu(gate) * up, down)
    return functional.linear(functional.relu(inner), down)


def dense_rows(profile: ModelProfile, layer: int) -> int:
    """Rows of [rows, H] that hold the dense weights between the experts of the layer before and this router."""
    plain = profile.dense_layers_before_each + (0 if layer else profile.leading_dense_layers)
    parameters = profile.attention_parameters * (plain + 1) + profile.dense_layer_parameters * plain
    return max(1, (parameters + profile.moe_layer_parameters) // profile.hidden_size)


def dtype_of(bytes_per_parameter: float, whose: str) -> torch.dtype:
    """float32 or bfloat16; a buffer may hold a little more than the matrices (biases), which is moved as well."""
    for dtype in (torch.float32, torch.bfloat16):
        if dtype.itemsize <= bytes_per_parameter < dtype.itemsize * 1.05:
            return dtype
    raise InputError(
        f"replay multiplies float32 and bfloat16, but {whose} parameter of this model profile has "
        f"{bytes_per_parameter:g} bytes; choose another with --model-profile"
    )
