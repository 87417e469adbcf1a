"""From what is known of a model's sizes to the model profile that is simulated."""

from dataclasses import replace

from sim.backtest.file import Model
from sim.profiles.model_profile import ModelProfile, known, model
from sim.profiles.precision import bytes_per_parameter, canonical
from traces.errors import InputError

WHOLE = ("q", "iq", "bf16", "fp16", "f16", "fp8", "fp32", "int8")
"""Beginnings of precisions that a whole file has; others (MXFP4, INT4, HQQ) are the experts' alone."""

HIDDEN, HEAD, BITS = 2048, 128, 4.5  # of a model of which only bytes are known: they matter to no time at batch 1


def profile_of(given: Model) -> ModelProfile:
    """Return its profile at its precision, with its stated sizes; InputError where something is missing."""
    base = model(given.profile) if given.profile else known(given.name) or _of_bytes(given)
    if given.file_gb:
        each = given.file_gb * 1e9 / base.parameters
        base = base.at(each, each)
    if given.precision:
        whole = canonical(given.precision).startswith(WHOLE)
        base = base.at(bytes_per_parameter(given.precision), bytes_per_parameter(given.precision) if whole else None)
    if given.dense_precision:
        base = base.at(dense=bytes_per_parameter(given.dense_precision))
    base = replace(
        base,
        moe_layers=given.layers or base.moe_layers,
        experts=given.experts or base.experts,
        top_k=given.top_k or base.top_k,
    )
    expert_bytes = given.expert_bytes or given.expert_mb * 1e6
    if expert_bytes:
        base = base.at(expert_bytes / base.expert_parameters)
    sizes = given.layer_expert_bytes or base.layer_expert_bytes[: base.moe_layers]  # of the first, if these are fewer
    if sizes and len(sizes) != base.moe_layers:
        raise InputError(f"layer_expert_bytes: {len(sizes)} for {base.moe_layers} layers")
    base = replace(base, layer_expert_bytes=sizes)
    if given.kv_bytes_per_token:
        width = base.kv_bytes_per_value or base.dense_bytes_per_parameter
        base = replace(base, kv_bytes_per_value=width * given.kv_bytes_per_token / base.kv_cache_bytes(1))
    if not base.expert_bytes:
        raise InputError("model: an expert is smaller than a byte")
    if base.top_k > base.experts:
        raise InputError(f"top_k {base.top_k} is above {base.experts} experts")
    return replace(
        base,
        stated_dense_bytes=given.dense_bytes or base.stated_dense_bytes,
        stated_head_bytes=given.head_bytes or base.stated_head_bytes,
    )


def _of_bytes(given: Model) -> ModelProfile:
    """Return the profile of a model of which sizes are stated and no more."""
    size = given.expert_bytes or given.expert_mb * 1e6 or max(given.layer_expert_bytes, default=0)
    shape = {"layers": given.layers, "experts": given.experts, "top_k": given.top_k}
    stated = {**shape, "expert_bytes": size, "dense_bytes": given.dense_bytes}
    if missing := [key for key, value in stated.items() if not value]:
        raise InputError(
            f"no model profile is known for {given.name!r}: name one (profile), or state {', '.join(missing)}"
        )
    return ModelProfile(
        name=given.name,
        hub_ids=(),
        moe_layers=given.layers,
        experts=given.experts,
        top_k=given.top_k,
        hidden_size=HIDDEN,
        expert_intermediate_size=max(1, round(size * 8 / BITS / 3 / HIDDEN)),
        expert_bytes_per_parameter=BITS / 8,
        heads=HIDDEN // HEAD,
        head_size=HEAD,
        kv_heads=4,
        vocabulary=1,
        dense_bytes_per_parameter=2.0,
    )
