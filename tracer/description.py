"""What a trace says about the model that it was recorded from."""

from importlib.metadata import version

import torch

from tracer.hook import ExpertsHook
from tracer.models import LoadedModel
from tracer.sites import Site
from traces.schema import TraceMeta


def describe(loaded: LoadedModel, hook: ExpertsHook) -> TraceMeta:
    """Return the metadata of a trace recorded from this model; `hook` has probed it."""
    sizes = [_expert_bytes(site) for site in hook.sites]
    if len(set(sizes)) > 1:
        hook.notes.append(f"experts have {min(sizes)} to {max(sizes)} bytes; the trace has the size of the largest")
    weights = hook.sites[0].weights
    config = loaded.model.config.get_text_config()
    hidden = getattr(config, "hidden_size", None)
    return TraceMeta(
        model=loaded.name,
        layers=len(hook.names),
        experts=hook.experts,
        top_k=hook.top_k,
        layer_names=tuple(hook.names),
        expert_bytes=max(sizes) or None,
        dtype=str(weights[0].dtype).removeprefix("torch.") if weights else None,
        revision=getattr(loaded.model.config, "_commit_hash", None),
        hidden_size=hidden,
        expert_intermediate_size=_inner_size(hook.modules[0], hidden),
        tools={name: version(name) for name in ("moe-expert-cache", "torch", "transformers")},
    )


def _expert_bytes(site: Site) -> int:
    """Bytes of one expert: of weights with an expert per row, and maybe rows beyond E, one row; else a share."""
    stacked = [weight for weight in site.weights if weight.dim() > 2]
    shared = sum(weight.nbytes for weight in site.weights if weight.dim() <= 2)
    return sum(weight[0].nbytes for weight in stacked) + shared // site.experts


def _inner_size(module: torch.nn.Module, hidden: int | None) -> int | None:
    """The inner size of an expert, from its down projection [E, hidden, inner], either way round."""
    down = getattr(module, "down_proj", None)
    if not isinstance(down, torch.Tensor) or down.dim() != 3 or hidden not in down.shape[1:]:
        return None
    return int(down.shape[2] if down.shape[1] == hidden else down.shape[1])
