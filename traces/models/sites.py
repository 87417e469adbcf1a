"""Where a model routes: its MoE layers, and for each how the experts that were chosen are read.

The rule: read what the model itself hands to its experts, never a repetition of its choice from logits. Nearly all
of transformers calls experts(hidden[T, H], index[T, k], weights[T, k]), which `Interface` reads; whoever differs
has an adapter of a few lines, found in ADAPTERS by the class of the module.
"""

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from traces.errors import InputError
from traces.models.profile import ExpertShape

Report = Callable[[Tensor, Tensor], None]
"""Hears of a choice: index, integer [T, k], -1 where nothing is routed, and weights, float [T, k]."""


class Site:
    """One MoE layer: `module` holds the experts, `owner` is the block around them, `router` scores them.

    Attributes: `name` as in `model.named_modules()`, `experts` is E, and `alone` says whether other rows of a batch, or
    its padding, change what a token is routed to.
    """

    alone = False

    def __init__(self, name: str, module: Any, owner: nn.Module):
        self.name = name
        self.module = module
        self.owner = owner
        self.router: Any = getattr(owner, "gate", None) or getattr(owner, "router", None)

    @property
    def weights(self) -> list[Tensor]:
        """The parameters of all experts; each has E as its first axis or is a part of one expert's."""
        return list(self.module.parameters())

    @property
    def experts(self) -> int:
        return int(self.module.num_experts)

    def shape(self, hidden_size: int) -> ExpertShape:
        """Return the shape of one expert, from the shapes of its weights [E, ...] or of each expert's own."""
        stacked = [tuple(weight.shape[1:]) for weight in self.weights if weight.dim() > 2]
        flat = [tuple(weight.shape) for weight in self.weights if weight.dim() <= 2]
        total = sum(map(prod, stacked)) + sum(map(prod, flat)) // self.experts
        matrices: list[tuple[int, ...]]
        if stacked:
            matrices = [shape for shape in stacked if min(shape) > 1]
        elif len(flat) < self.experts:  # tables of which a row is an expert's
            matrices = [(1, prod(shape) // self.experts) for shape in flat]
        else:
            matrices = list(filter(lambda shape: len(shape) == 2, flat))[: len(flat) // self.experts]
        common = set.intersection(*map(set, matrices))
        first = matrices[0][
            0 if getattr(self.module, "is_transposed", False) else -1
        ]  # in [out, in], as nn.Linear has it
        width = hidden_size if hidden_size in common else first if first in common else max(common)
        inner = min(prod(shape) // width for shape in matrices)
        count = sum(map(prod, matrices)) // (width * inner)
        return ExpertShape(width, inner, count, total - count * width * inner)

    @property
    def block(self) -> nn.Module | None:
        """The module that does nothing but route and compute experts, so that its forward may be tried out."""
        pure = not any("Attention" in type(module).__name__ for module in self.owner.modules())
        return self.owner if pure and self.router is not None else None

    def attach(self, report: Report) -> Iterator[Any]:
        """Hook the layer so that each of its calls is reported; yield the handles of the hooks."""

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            report(*self.chosen(handed(module, args, kwargs)))

        yield self.module.register_forward_pre_hook(before, with_kwargs=True)

    def chosen(self, given: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """Return what a call of the experts chooses, as it is reported, from the first three arguments."""
        raise NotImplementedError

    def routed_by(self, output: Any) -> tuple[Tensor, Tensor] | None:
        """Index and weights, [T, k] each, as the router alone returned them; None if it does not."""
        index = [part for part in tensors(output) if part.dim() == 2 and not part.is_floating_point()]
        weight = [part for part in tensors(output) if index and part.shape == index[0].shape and part is not index[0]]
        return (index[0], weight[0]) if weight else None

    def gate_logits(self, output: Any, tokens: int) -> list[Tensor]:
        """What in the router's output may be scores of all experts: float [T, at least E] each."""
        found = [part for part in tensors(output) if part.is_floating_point() and part.dim() > 1]
        found = [part.reshape(-1, part.shape[-1]) for part in found if part.shape[-1] >= self.experts]
        return [part for part in found if len(part) == tokens]


class Interface(Site):
    """transformers' experts interface: a module called as experts(hidden, index, weights)."""

    _known = False  # that its calls are such

    @property
    def weights(self) -> list[Tensor]:
        """The parameters of all experts, [E, ...] or flat; a vector is no expert's, but scales what all return."""
        return [weight for weight in self.module.parameters() if weight.dim() > 1]

    @property
    def experts(self) -> int:
        """Return E: the routed experts that a module names, else the least length of its weights, else what it says."""
        lengths = [len(weight) for weight in self.weights if weight.dim() == 3]
        count = getattr(self.module, "num_routed_experts", min(lengths) if lengths else None)
        return count if isinstance(count, int) else super().experts

    def chosen(self, given: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        if not self._known and not is_routing(given):
            raise InputError(
                f"{self.name} ({type(self.module).__name__}) is not called as experts(hidden, index, weights)"
            )
        self._known = True
        return given[1], given[2]


def handed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return what a module is called with in the place of its first three parameters, as far as it is."""
    names = list(inspect.signature(module.forward).parameters)[:3]
    return args if len(args) > 2 else (*args, *(kwargs[key] for key in names[len(args) :] if key in kwargs))


class SkipExpert(Interface):
    """Zaya: a token that takes the expert that computes nothing is told as expert 0 with weight 0."""

    def chosen(self, given: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        index, weights = super().chosen(given)
        return torch.where(weights != 0, index, -1), weights


class OneHot(Site):
    """Switch Transformers: argument 1 is a mask [T, 1, E] with at most one one; a token without one was dropped."""

    alone = True

    def chosen(self, given: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        chosen, index = given[1].flatten(0, 1).max(-1)
        return torch.where(chosen > 0, index, -1)[:, None], given[2] * chosen[:, None]


class CombineWeights(Site):
    """NLLB-MoE: argument 2 is [T, E], the weight of each expert for each token; at most two are not zero."""

    alone = True

    def chosen(self, given: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        weights, index = given[2].topk(2, dim=-1)
        return torch.where(weights > 0, index, -1), weights


class ByRouter(Site):
    """A layer whose choice only its router returns."""

    def attach(self, report: Report) -> Iterator[Any]:
        yield self.router.register_forward_hook(lambda _, args, output: report(*self.routed_by(output)))

    @abstractmethod
    def routed_by(self, output: Any) -> tuple[Tensor, Tensor]: ...


class RouterScores(ByRouter):
    """Llama 4: the router's scores [T, E] are zero but for the k chosen, and all experts are called with them."""

    def routed_by(self, output: Any) -> tuple[Tensor, Tensor]:
        weights, index = output[0].topk(self.router.top_k, dim=-1)
        return torch.where(weights > 0, index, -1), weights


class SortedGate(ByRouter):
    """JetMoE: the gate returns token slots in the order of their experts, for MLPs and for attention alike."""

    def __init__(self, name: str, module: Any, owner: nn.Module):
        super().__init__(name, module, module)

    @property
    def weights(self) -> list[Tensor]:
        return [self.module.input_linear.weight, self.module.output_linear.weight]

    @property
    def experts(self) -> int:
        return len(self.weights[0])

    @property
    def block(self) -> nn.Module | None:
        """None: attention experts run in two halves with attention between, and both kinds have the same gate."""
        return None

    def routed_by(self, output: Any) -> tuple[Tensor, Tensor]:
        """Invert the sort: slot s of token t was s = t * k + j."""
        slots, _, gates, sizes, _ = output
        experts = torch.arange(len(sizes), device=slots.device)
        index = experts.repeat_interleave(torch.tensor(sizes, device=slots.device))
        index, weights = (torch.empty_like(each).scatter_(0, slots, each) for each in (index, gates))
        return index.view(-1, self.router.top_k), weights.view(-1, self.router.top_k)


class ProductKeys(Site):
    """Doge: experts are rows of two embeddings, looked up by index [T, k]; the weights are a softmax of key sums."""

    alone = True

    def __init__(self, name: str, module: Any, owner: nn.Module):
        super().__init__(name, module, module)
        self.router = getattr(module, "router_gate", None)

    @property
    def weights(self) -> list[Tensor]:
        return [self.module.down_embed.weight, self.module.up_embed.weight]

    def attach(self, report: Report) -> Iterator[Any]:
        scores: list[Tensor] = []

        def keyed(_: nn.Module, args: Any, output: Tensor) -> None:
            scores[:] = self.gate_logits(output, 0)

        def before(_: nn.Module, args: tuple[Tensor]) -> None:
            report(args[0], scores.pop().gather(-1, args[0]).softmax(-1))

        yield self.router.register_forward_hook(keyed)
        yield self.module.down_embed.register_forward_pre_hook(before)

    def gate_logits(self, output: Any, tokens: int) -> list[Tensor]:
        """The sums of both keys, [T, E], split among tokens as the module does it."""
        keys: Any = output.reshape(2, -1, output.shape[-1] // 2)
        return [(keys[0].unsqueeze(-1) + keys[1].unsqueeze(-2)).flatten(-2)]


ADAPTERS: dict[str, type[Site] | None] = {
    "SwitchTransformersExperts": OneHot,
    "NllbMoeExperts": CombineWeights,
    "Llama4TextExperts": RouterScores,
    "JetMoeMoE": SortedGate,
    "JetMoeMoA": SortedGate,
    "JetMoeParallelExperts": None,  # a part of the two above
    "DogeCDMoE": ProductKeys,
    "ZayaExperts": SkipExpert,
}
"""How to read what is not called as transformers' experts are, by the class of the module."""

REFUSED = {
    "DiffusionGemmaTextExperts": "it denoises blocks of tokens again and again, so no pass has tokens of its own"
}
"""What is neither recorded nor cached although its experts can be hooked, by the class of the experts, and why."""

TOP_K = ("top_k", "num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk")


def k_of(*places: Any) -> int | None:
    """Return the k of top-k that the first of these states: modules or configs, or None."""
    named = (getattr(place, name, None) for place in places for name in TOP_K)
    return next((k for k in named if isinstance(k, int)), None)


def find_sites(model: nn.Module) -> list[Site]:
    """The MoE layers of a model in the order of its modules. Raises InputError for a model that is refused."""
    sites: list[Site] = []
    for name, module in model.named_modules():
        kind, (parent, _, leaf) = type(module).__name__, name.rpartition(".")
        if kind in REFUSED:
            raise InputError(f"{name} ({kind}) is not supported: {REFUSED[kind]}")
        adapter = ADAPTERS.get(kind)
        if kind not in ADAPTERS and kind.endswith("Experts") and leaf != "shared_experts":
            adapter = Interface
        if adapter is not None:
            sites.append(adapter(name, module, model.get_submodule(parent)))
    return sites


def tensors(output: Any) -> list[Tensor]:
    """The tensors among arguments or results of a module."""
    parts = output if isinstance(output, tuple | list) else (output,)
    return [part for part in parts if isinstance(part, Tensor)]


def is_routing(given: tuple[Any, ...]) -> bool:
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
