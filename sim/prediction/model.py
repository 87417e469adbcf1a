"""From what is known of a model's sizes to the model profile that is simulated."""

from dataclasses import replace

from sim.prediction.described import Model
from traces.errors import InputError
from traces.models.names import WHOLE, bytes_per_parameter, canonical
from traces.models.profile import LayerKind, ModelProfile, known, model

HIDDEN, HEAD, BITS, DENSE_BITS = 2048, 128, 4.5, 8.5  # assumed of a model of which only bytes are known; from the
# bits follow its parameters, and so what cores compute


def profile_of(facts: Model) -> ModelProfile:
    """Return its profile at its precision, with its stated sizes. Raise InputError where something is missing."""
    base = model(facts.profile) if facts.profile else known(facts.name) or _of_bytes(facts)
    if facts.file_gb:
        each = facts.file_gb * 1e9 / base.parameters
        base = base.at(each, each)
    if facts.precision and not facts.file_gb:
        base = base.at_precision(facts.precision)
    if facts.dense_precision:
        base = base.at(dense=bytes_per_parameter(facts.dense_precision))
    base = replace(base, experts=facts.experts or base.experts, top_k=facts.top_k or base.top_k)
    if facts.layers:
        base = base.cut(facts.layers)
    expert_bytes = facts.expert_bytes or facts.expert_mb * 1e6
    if expert_bytes:
        base = base.at(expert_bytes / base.expert_parameters)
    if facts.layer_expert_bytes:
        base = replace(base, layer_expert_bytes=facts.layer_expert_bytes)
    if facts.kv_bytes_per_token:
        width = base.kv_bytes_per_value * facts.kv_bytes_per_token / base.kv_cache_bytes(1)
        base = replace(base, kv_bytes_per_value=width)
    if facts.precision and not base.precision:
        base = replace(base, precision=canonical(facts.precision))
    return base.holding(facts.dense_bytes, facts.head_bytes)


def _of_bytes(facts: Model) -> ModelProfile:
    size = facts.expert_bytes or facts.expert_mb * 1e6 or max(facts.layer_expert_bytes, default=0)
    shape = {"layers": facts.layers, "experts": facts.experts, "top_k": facts.top_k}
    stated = {**shape, "expert_bytes": size, "dense_bytes": facts.dense_bytes}
    if missing := [key for key, value in stated.items() if not value]:
        raise InputError(
            f"no model profile is known for {facts.name!r}: name one (profile), or state {', '.join(missing)}"
        )
    bits = bytes_per_parameter(facts.precision) if facts.precision else BITS / 8
    whole = facts.precision if facts.precision and canonical(facts.precision).startswith(WHOLE) else ""
    dense = facts.dense_precision or whole
    width = bytes_per_parameter(dense) if dense else DENSE_BITS / 8
    return ModelProfile(
        name=facts.name,
        hub_ids=(),
        experts=facts.experts,
        top_k=facts.top_k,
        hidden_size=HIDDEN,
        expert_intermediate_size=max(1, round(size / bits / 3 / HIDDEN)),
        expert_bytes_per_parameter=bits,
        heads=HIDDEN // HEAD,
        head_size=HEAD,
        kv_heads=4,
        vocabulary=max(1, round(facts.head_bytes / width / HIDDEN)),
        embedding_parameters=HIDDEN,
        dense_bytes_per_parameter=width,
        layers=(f"{facts.layers} moe",),
        kinds={"moe": LayerKind(round(facts.dense_bytes / width / facts.layers), routed=True, kv=2 * 4 * HEAD)},
    )
