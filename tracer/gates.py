"""Which numbers of a router are its probabilities: found by verification, because routers return what they like.

The weights of the chosen experts are their probabilities, up to a factor that is the same for all experts of a
token (renormalisation, scaling); biases that correct the selection do not enter them. So the right reading of a
router's output is the one under which weight / probability is constant over the experts of each token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from traces.errors import InputError
from traces.models.sites import Site

TOLERANCE = 0.03
"""The spread of a constant ratio in bfloat16, which has 8 bits of precision, twice over."""

TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda scores: scores,
    "softmax": lambda scores: scores.softmax(-1),
    "sigmoid": lambda scores: scores.sigmoid(),
    "sqrt(softplus)": lambda scores: torch.nn.functional.softplus(scores).sqrt(),
}


@dataclass(frozen=True)
class Gate:
    """How to read probabilities from the output of a site's router: which of its tensors, and its transform."""

    site: Site
    part: int
    transform: str

    def scores(self, output: Any, tokens: int) -> Tensor:
        """The tensor of the router's output that is transformed, float [T, at least E]."""
        return self.site.gate_logits(output, tokens)[self.part]

    def probabilities(self, scores: Tensor) -> Tensor:
        """float32 [..., E] from scores [..., at least E]; more than E are of experts that compute nothing."""
        probabilities = TRANSFORMS[self.transform](scores.float())
        return torch.nn.functional.pad(probabilities, (0, self.site.experts - scores.shape[-1]))


def read_gates(gates: list[Gate], outputs: list[Any], tokens: int) -> Tensor:
    """float32 [T, L, E] from the outputs of the routers of L layers for T tokens; in one go if layers are alike."""
    scores = [gate.scores(output, tokens) for gate, output in zip(gates, outputs, strict=True)]
    scores = [layer.to(scores[0].device) for layer in scores]
    if len({(gate.transform, layer.shape) for gate, layer in zip(gates, scores, strict=True)}) == 1:
        return gates[0].probabilities(torch.stack(scores, 1))
    return torch.stack([gate.probabilities(layer) for gate, layer in zip(gates, scores, strict=True)], 1)


def find_gate(site: Site, output: Any, index: Tensor, weights: Tensor) -> Gate:
    """Return the reading of `output` that explains the weights [T, k] of index [T, k]. InputError if none does."""
    best, least = None, TOLERANCE
    scored = [] if output is None else site.gate_logits(output, len(index))
    for part, scores in enumerate(scored):
        for name in TRANSFORMS:
            gate = Gate(site, part, name)
            spread = _spread(gate.probabilities(scores), index, weights.float())
            if spread < least:
                best, least = gate, spread
    if best is None:
        raise InputError(f"gate probabilities of {site.name} cannot be recorded: its router returns none")
    return best


def _spread(probabilities: Tensor, index: Tensor, weights: Tensor) -> float:
    """Return how far weight / probability is from constant over a token's experts (k = 1: over tokens), 0 to inf."""
    E, k = probabilities.shape[1], index.shape[1]
    if (probabilities < 0).any() or (probabilities > 0).sum(-1).max() <= min(k, E - 1):
        return float("inf")
    routed = (index >= 0) & (index < E) & (weights > 0)
    ratio = weights / probabilities.gather(-1, index.clamp(0, E - 1).long())
    if k == 1:
        ratio, routed = ratio.T, routed.T
    ratio = ratio[routed.sum(-1) > 1]
    routed = routed[routed.sum(-1) > 1]
    if not len(ratio):
        return float("inf")
    high = ratio.masked_fill(~routed, -torch.inf).amax(-1)
    low = ratio.masked_fill(~routed, torch.inf).amin(-1)
    return float((high / low - 1).nan_to_num(torch.inf).max())
