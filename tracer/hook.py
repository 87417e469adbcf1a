"""Observe the routing of a live transformers model: one forward pre-hook on each module of routed experts.

Such a module is called as experts(hidden[T, H], top_k_index[T, k], top_k_weights[T, k]); its arguments are
the selection itself, after group limits and correction biases, which logits alone do not give. Each must be
called once in a forward pass; a model that routes in another way is refused with the module's name.
"""

import inspect
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from traces.errors import InputError


class ExpertsHook:
    """Observes `model` while entered as a context manager.

    After `probe`, `names` and `modules` list the MoE layers in the order of execution, `experts` is E and
    `top_k` is k. Tensors stay on their device until `take`, which copies those of one forward pass at once.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        found = {name: m for name, m in model.named_modules() if type(m).__name__.endswith("Experts")}
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            raise InputError(f"{_kind(model)} is an encoder-decoder; only decoders can be recorded")
        if not found:
            raise InputError(f"{_kind(model)} has no routed experts that can be observed: is it an MoE model?")
        self.names = list(found)
        self.modules = list(found.values())
        self.experts = 0
        self.top_k = 0
        self._seen: list[tuple[str, Tensor, Tensor]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> "ExpertsHook":
        for name, module in zip(self.names, self.modules, strict=True):
            self._handles.append(module.register_forward_pre_hook(self._observe(name, module), with_kwargs=True))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def probe(self) -> None:
        """Run one token through the model to learn the order of the layers, E and k."""
        self._seen.clear()
        with torch.inference_mode():
            self.model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=next(self.model.parameters()).device))
        self._require_each_once()
        modules = dict(zip(self.names, self.modules, strict=True))
        self.names = [name for name, _, _ in self._seen]
        self.modules = [modules[name] for name in self.names]
        for name, module, (_, index, _) in zip(self.names, self.modules, self._seen, strict=True):
            shape = (_expert_count(name, module), index.shape[1])
            if self.experts and shape != (self.experts, self.top_k):
                raise InputError(
                    f"{name} routes top-{shape[1]} of {shape[0]} experts, the layers before it "
                    f"top-{self.top_k} of {self.experts}: layers that differ cannot be recorded"
                )
            self.experts, self.top_k = shape
        self._seen.clear()

    def discard(self) -> None:
        """Forget what an unfinished forward pass has left."""
        self._seen.clear()

    def take(self, weights: bool) -> tuple[NDArray[np.int32], NDArray[np.float16] | None]:
        """The routing of the forward pass that has just ended, best expert first, and its weights if wanted.

        Returns int32[T, L, k] (-1: no routed expert) and float16[T, L, k]. Raises InputError if a layer was
        not called exactly once.
        """
        if [name for name, _, _ in self._seen] != self.names:
            self._require_each_once()
            raise InputError(f"the MoE layers of {_kind(self.model)} run in an order that changes")
        device = self._seen[0][1].device
        index = torch.stack([index.to(device) for _, index, _ in self._seen], dim=1)
        weight = torch.stack([weight.to(device) for _, _, weight in self._seen], dim=1).float()
        self._seen.clear()
        order = weight.argsort(dim=-1, descending=True, stable=True)
        ids = index.gather(-1, order)
        ids = torch.where((ids >= 0) & (ids < self.experts), ids, -1).to(torch.int32)
        kept = weight.gather(-1, order).to(torch.float16).cpu().numpy() if weights else None
        return ids.cpu().numpy(), kept

    def _observe(self, name: str, module: nn.Module) -> Any:
        """The pre-hook of one module."""
        parameters = list(inspect.signature(module.forward).parameters)[:3]

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = (*args, *(kwargs[key] for key in parameters[len(args) :] if key in kwargs))
            if not _is_routing(given):
                raise InputError(
                    f"{name} ({type(module).__name__}) is not called as experts(hidden, index, weights): "
                    f"routing of {_kind(self.model)} cannot be observed"
                )
            self._seen.append((name, given[1], given[2]))

        return hook

    def _require_each_once(self) -> None:
        counts = dict.fromkeys(self.names, 0)
        for name, _, _ in self._seen:
            counts[name] += 1
        for name, count in counts.items():
            if count != 1:
                raise InputError(
                    f"{name} was called {count} times in one forward pass instead of once, so its routing "
                    "cannot be recorded (is the model compiled, or do fused kernels replace its layers?)"
                )


def _is_routing(given: tuple[Any, ...]) -> bool:
    """Whether arguments are hidden[T, H] or [rows, columns, H], an integer index[T, k] and weights[T, k]."""
    if len(given) < 3 or not all(isinstance(argument, Tensor) for argument in given[:3]):
        return False
    hidden, index, weight = given[:3]
    return (
        hidden.dim() >= index.dim() == 2
        and index.dtype in (torch.int64, torch.int32)
        and weight.is_floating_point()
        and index.shape == weight.shape
        and len(index) * hidden.shape[-1] == hidden.numel()
    )


def _expert_count(name: str, module: nn.Module) -> int:
    """E: the routed experts that a module names, else the least length of its weights, else what it says it has.

    Some weights may be longer than E, for experts that compute nothing.
    """
    lengths = [len(weight) for weight in module.parameters() if weight.dim() == 3]
    least = min(lengths) if lengths else getattr(module, "num_experts", None)
    count = getattr(module, "num_routed_experts", least)
    if not isinstance(count, int):
        raise InputError(f"{name} ({type(module).__name__}) does not show how many experts it has")
    return count


def _kind(model: nn.Module) -> str:
    return type(model).__name__
