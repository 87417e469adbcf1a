"""What a trace says about the model that it was recorded from."""

from importlib.metadata import version

from tracer.hook import ExpertsHook
from tracer.models import LoadedModel
from traces.models.meta import expert_shape
from traces.schema import TraceMeta


def describe(loaded: LoadedModel, hook: ExpertsHook) -> TraceMeta:
    """Return the metadata of a trace recorded from this model; `hook` has probed it."""
    config = loaded.model.config.get_text_config()
    hidden = getattr(config, "hidden_size", None) or config.d_model
    shapes = [expert_shape(site, hidden) for site in hook.sites]
    width = hook.sites[0].weights[0].element_size()
    sizes = [shape.parameters * width for shape in shapes]
    shape = max(shapes, key=lambda shape: shape.parameters)
    if len(set(sizes)) > 1:
        hook.notes.append(f"experts have {min(sizes)} to {max(sizes)} bytes; the trace has the size of the largest")
    weights = hook.sites[0].weights
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
        expert_intermediate_size=shape.inner,
        expert_hidden_size=None if shape.width == hidden else shape.width,
        expert_matrices=shape.matrices,
        tools={name: version(name) for name in ("moe-expert-cache", "torch", "transformers")},
    )
