"""The weights of a model by the names under which a quantisation may list them: the model's own and the published ones.

What transformers renames and joins when it loads a checkpoint is undone by its own code, on tensors without data.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion
from transformers.quantizers.quantizers_utils import should_convert_module

from traces.models.precision import OF_MLX, Precision, Weight
from traces.models.sites import Site

PARTS = {
    **dict.fromkeys(("gate_up_proj", "input_linear"), (("gate_proj", "w1"), ("up_proj", "w3"))),
    **dict.fromkeys(("down_proj", "output_linear"), (("down_proj", "w2"),)),
}
"""Of tensors of all experts: the matrices in them, each by the names of transformers and of Mixtral."""

OF_ONE = re.compile(r"(.+experts)\.(?:expert_)?\d+\..+")
"""Published names of the weights of one expert, behind the name of all."""


class Weights:
    """The weights of a model, of each parameter those that a checkpoint has for it."""

    def __init__(self, model: Any, sites: Sequence[Site], routers: Collection[Tensor]) -> None:
        parameters: dict[str, Tensor] = dict(model.named_parameters())
        owner = {each.untyped_storage()._cdata: each for each in parameters.values()}
        self._published: dict[Tensor, dict[str, int]] = defaultdict(dict)
        for name, tensor in _published(model, parameters).items():
            if (parameter := owner.get(tensor.untyped_storage()._cdata)) is not None:
                self._published[parameter][name.removesuffix(".weight")] = tensor.numel()
        head: nn.Module | None = model.get_output_embeddings()
        heads = set() if head is None else set(head.parameters())
        floats = [*(getattr(model, "_keep_in_fp32_modules", None) or ())]  # that no method converts
        of_experts = {each: site for site in sites for each in site.weights}
        self.of: dict[Tensor, list[Weight]] = {}
        for name, each in parameters.items():
            own, module = name.removesuffix(".weight"), model.get_submodule(name.rpartition(".")[0])
            if each in of_experts and each.dim() > 2 and "bias" not in name:
                self.of[each] = self._of_experts(name, each, of_experts[each])
                continue
            kind = "embedding" if isinstance(module, nn.Embedding) else "head" if each in heads else "linear"
            kind = "expert" if each in of_experts else "router" if each in routers else kind
            is_linear = isinstance(module, nn.Linear) or type(module).__name__.endswith("Linear")
            if each.dim() < 2 or (kind == "linear" and not is_linear) or not should_convert_module(own, floats):
                kind = "other"
            parts = self._published[each] or {own: each.numel()}
            tied = ["lm_head"] if each in heads else []
            self.of[each] = [Weight((own, part, *tied), kind, count) for part, count in parts.items()]
        self.names = [name for weights in self.of.values() for each in weights for name in each.names]
        self.names += [name for name, _ in model.named_buffers()]

    def _of_experts(self, name: str, tensor: Tensor, site: Site) -> list[Weight]:
        """Return the matrices of a tensor of all experts of a layer."""
        leaf = name.removeprefix(f"{site.name}.").removesuffix(".weight")
        names = [name for each in site.weights for name in self._published[each]]
        apart = [match[1] for name in names if (match := OF_ONE.fullmatch(name))]
        published = [*apart, *(name.rpartition(".")[0] for name in names if not apart)]
        places = [
            place
            for each in dict.fromkeys((site.name, *published))
            for place in (each, f"{each.rpartition('.')[0]}.{OF_MLX}")
        ]
        parts = PARTS.get(leaf, ((leaf,),))
        return [
            Weight(
                tuple(
                    f"{place}{number}.{each}"
                    for each in (*part, *([] if apart else [leaf]))
                    for place in places
                    for number in (".{}", "")
                ),
                "expert",
                tensor.numel() // len(parts),
                site.experts,
            )
            for part in parts
        ]

    def width(self, parameters: Iterable[Tensor], precision: Precision) -> float:
        """Return the bytes of a number of these, their mean; 0 where there are none."""
        weights = list(chain.from_iterable(self.of[each] for each in parameters))
        bits = sum(each.size * precision.bits(each) for each in weights)
        return bits / 8 / max(1, sum(each.size for each in weights))


def _published(model: Any, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a model's checkpoint; those of the model where transformers cannot say."""
    try:
        return dict(revert_weight_conversion(model, parameters))
    except Exception:  # of conversions that look at data
        return parameters
