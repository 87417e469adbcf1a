"""Which experts compute which tokens, found out without any hook on the routing: by poisoning their weights."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tracer.hook import ExpertsHook
from tracer.nllb import mended
from tracer.observed import Pass, Wanted
from traces.models.sites import CombineWeights, Interface, OneHot, Site

IDS = torch.tensor([[5, 19, 77, 31, 200, 19, 19, 120, 60, 88]])

FINITE = {"Llama4TextExperts", "ZayaExperts"}
"""Experts that are also given tokens with weight 0, which NaN would reach and finite numbers do not."""


EVERY = 1 << 30
"""More candidates than there are experts."""


def probabilities(seen: Pass, experts: int) -> NDArray[np.float64]:
    """Those of all experts, [T, L, E], of a pass with the scores of all."""
    assert seen.candidates is not None
    assert seen.scores is not None
    found = np.zeros((*seen.ids.shape[:2], experts + 1))  # the last: nothing is routed
    np.put_along_axis(found, seen.candidates.astype(np.int64), np.exp(seen.scores.astype(np.float64)), -1)
    return found[..., :experts]


def run(model: Any, ids: Tensor = IDS, **more: Any) -> Any:
    """A forward pass; of an encoder-decoder, both stacks run over as many tokens."""
    if model.config.is_encoder_decoder:
        more["decoder_input_ids"] = ids.flip(-1)
    with torch.no_grad():
        return model(input_ids=ids, **more)


def asked(names: Sequence[str]) -> Wanted:
    """What a hook is to record: all of these."""
    values: dict[str, Any] = {"lookahead": (1, 2, 3), "scores": EVERY}
    values = {name: values.get(name, True) for name in names}
    return Wanted(**values)


def observed(
    model: Any, ids: Tensor = IDS, wanted: tuple[str, ...] = (), **more: Any
) -> tuple[ExpertsHook, list[Pass]]:
    """The hook, left again, and what it saw in one forward pass."""
    with ExpertsHook(model, asked(wanted)) as hook:
        hook.probe()
        run(model, ids, **more)
        return hook, list(hook.passes)


def merged(passes: list[Pass]) -> NDArray[np.int32]:
    """Ids [T, L, k] of all stacks."""
    ids: NDArray[np.int32] = np.max([seen.ids for seen in passes], axis=0)
    return ids


def check(model: Any, ids: Tensor = IDS, **more: Any) -> NDArray[np.int32]:
    """Require of each token and layer that the experts recorded are those that compute it; returns the ids."""
    hook, passes = observed(model, ids, **more)
    seen = merged(passes)
    assert seen.shape == (ids.numel(), len(hook.sites), hook.top_k)
    with mended(model):
        for layer, site in enumerate(hook.sites):
            clean = _layer_output(model, site, ids, more)
            for expert in range(hook.experts):
                poisoned = _poisoned_output(model, site, expert, ids, more)
                computed = (poisoned != clean).any(-1).nonzero().ravel().tolist()
                assert computed == np.flatnonzero((seen[:, layer] == expert).any(-1)).tolist(), (site.name, expert)
    return seen


def _poisoned_output(model: Any, site: Site, expert: int, ids: Tensor, more: dict[str, Any]) -> Tensor:
    weights = _weights_of(site, expert)
    saved = [weight.clone() for weight in weights]
    for weight in weights:
        weight.fill_(1e3 if type(site.module).__name__ in FINITE else torch.nan)
    try:
        return _layer_output(model, site, ids, more)
    finally:
        for weight, old in zip(weights, saved, strict=True):
            weight.copy_(old)


def _weights_of(site: Site, expert: int) -> list[Tensor]:
    """The part of a layer's weights that is one expert's, as views."""
    children = dict(site.module.named_children())
    child = children.get(f"expert_{expert}") or children.get(str(expert))
    if child is not None:
        return [weight.detach() for weight in child.parameters()]
    whole = [weight.detach() for weight in site.weights]
    # A row for each expert, or, flat, the rows of all of them.
    return [w[expert] if w.dim() > 2 or len(w) == site.experts else w.view(site.experts, -1)[expert] for w in whole]


def _layer_output(model: Any, site: Site, ids: Tensor, more: dict[str, Any]) -> Tensor:
    """What the layer itself returns, [T, H]."""
    outputs: list[Any] = []
    module: Any = site.module if isinstance(site, Interface | OneHot | CombineWeights) else site.owner
    if hasattr(module, "reduce"):  # JetMoE's attention experts are never called as a module
        reduce = module.reduce

        def observed_reduce(*args: Any) -> Any:
            outputs.append(reduce(*args))
            return outputs[-1]

        module.reduce = observed_reduce
        run(model, ids, **more)
        del module.reduce
    else:
        handle = module.register_forward_hook(lambda _, args, output: outputs.append(output))
        run(model, ids, **more)
        handle.remove()
    output: Tensor = outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0]
    return output.reshape(ids.numel(), -1)
