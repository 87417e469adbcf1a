"""Patch NLLB-MoE, which transformers 5 runs wrongly, for as long as it is recorded.

Its experts one-hot a mask that is one-hot already, so that only experts 0 and 1 ever run and with wrong weights.
What was meant, and what 4.57 computes: the weighted sum of the experts whose combine weight is not zero.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

NOTE = (
    "transformers runs only experts 0 and 1 of NLLB-MoE (a defect since 5.0); while it is recorded, all experts "
    "run as the router says, as in 4.57"
)


def intended_forward(self: Any, hidden: Tensor, mask: Tensor, combine: Tensor) -> Tensor:
    """The weighted sum [T, H] of the experts of each token, for hidden[T, H] and combine weights [T, E]."""
    output = torch.zeros_like(hidden)
    for expert in range(self.num_experts):
        rows = combine[:, expert].nonzero().ravel()
        if len(rows):
            states = self[f"expert_{expert}"](hidden[rows]) * (1 - self.moe_token_dropout)
            output.index_add_(0, rows, (states * combine[rows, expert, None]).to(output.dtype))
    return output


@contextmanager
def mended(model: nn.Module) -> Iterator[list[str]]:
    """Within the context, NLLB's experts in `model` run as intended; yields what to tell the user, if anything."""
    broken: list[Any] = [module for module in model.modules() if type(module).__name__ == "NllbMoeExperts"]
    with ExitStack() as patched:
        for module in broken:
            patched.enter_context(patch.object(module, "forward", MethodType(intended_forward, module)))
        yield [NOTE] if broken else []
