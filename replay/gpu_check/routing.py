"""What a GPU check runs: a trace of the model where one is given, else synthetic routing."""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np

from replay.choice import first_tokens
from sim.experiment import Experiment
from sim.loaded import TimedRun
from sim.profiles import model_profile
from sim.profiles.hardware_profile import hardware
from sim.profiles.model_profile import ModelProfile
from traces.errors import InputError
from traces.schema import TraceMeta
from traces.shards import Shards
from traces.synthetic import synthetic
from traces.trace import Trace, concatenate

REQUEST_TOKENS, PROMPT_TOKENS = 20, 96
"""Of a request that is synthetic: what it decodes, and the prompt of the first one."""


def load(profile: ModelProfile, traces: Path | None, tokens: int) -> TimedRun:
    """The first requests of a trace of that model among `traces`, prefills as decode if it has nothing else.

    Synthetic where there is none: one request with a prompt, then short ones.
    """
    machine = hardware("h200")
    for folder in sorted(traces.iterdir()) if traces else ():
        try:
            opened = Shards.open(str(folder))
            fits = _fits(opened.meta, profile)
        except InputError:
            continue
        if fits:
            experiment = Experiment(str(folder), hardware="h200", as_decode=opened.phases == "prefill")
            decoded = opened.as_decode() if experiment.as_decode else opened
            return first_tokens(TimedRun(experiment, decoded, profile, machine), tokens)
    trace = made_up(profile, tokens)
    return TimedRun(Experiment(trace.name, hardware="h200"), trace, profile, machine)


def _fits(meta: TraceMeta, profile: ModelProfile) -> bool:
    """The same model, or at least its shape under a name that is not known."""
    known = model_profile.known(meta.model)
    shape = (meta.layers, meta.experts, meta.top_k) == (profile.moe_layers, profile.experts, profile.top_k)
    return shape and (known is None or known.hidden_size == profile.hidden_size)


def made_up(profile: ModelProfile, tokens: int) -> Trace:
    """Routing from nothing: a request with a prompt, then short ones, together at least `tokens` decoded tokens."""
    shape = profile.moe_layers, profile.experts, profile.top_k
    first = synthetic(1, REQUEST_TOKENS, *shape, seed=0, prompt_tokens=PROMPT_TOKENS)
    more = -(-tokens // REQUEST_TOKENS) - 1
    trace = concatenate([first, synthetic(more, REQUEST_TOKENS, *shape, seed=1)]) if more else first
    return replace(trace, meta=replace(trace.meta, model=profile.name))


def content_of(loaded: TimedRun) -> str:
    """Which routing, beyond its name."""
    routed = np.ascontiguousarray(loaded.trace.experts) if isinstance(loaded.trace, Trace) else None
    return loaded.fingerprint if routed is None else hashlib.sha256(routed.tobytes()).hexdigest()[:16]
