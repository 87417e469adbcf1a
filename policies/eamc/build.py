"""Learning an EAMC from a trace ahead of a run, without a cache: what `moe-sim eamc build` does.

The requests are learned in order, by the policy's own rule of replacement. Only `least-used` asks which EAMs were
matched on the way, so only for it the trace is run event by event; of a trace that holds EAMs alone nothing can be
matched, and there it replaces the oldest.
"""

from policies.core.events import Events
from policies.core.policy import Shape
from policies.core.spec import HALVES, make_policy
from policies.eamc.eamc import EamcPrefetcher, EamcRetention, Predictor, observe
from policies.eamc.matching import REQUEST
from traces.errors import InputError, refuse
from traces.steps import DECODE, PREFILL
from traces.trace import Trace


def build(trace: Trace, policy: str, capacity: int | None = None) -> Predictor:
    """Return the collections of `policy` after all requests; capacity: of these, where the policy states none."""
    predictor = predictor_of(policy, Shape(trace.layers, trace.num_experts), capacity)
    if predictor.options.replacement == "least-used" and trace.aggregate is None:
        for i in range(len(trace.requests)):
            request = trace.steps(i)
            events = Events.of(request, trace.layers)
            for step in range(len(request.phase)):
                for layer in range(trace.layers):
                    observe(predictor.matched, events.event(step, layer))
            predictor.learn()
        return predictor
    by_phase = {phase: trace.eams(phase) for phase in (PREFILL, DECODE)}
    for i in range(len(trace.requests)):
        for phase, eams in by_phase.items():
            predictor.of_phase(phase).bucket.eam[0, REQUEST] += eams[i].ravel()
        predictor.learn()
    return predictor


def predictor_of(policy: str, shape: Shape, capacity: int | None = None) -> Predictor:
    """What the eamc in `policy` knows, of whichever half. InputError if there is none in it."""
    spec = make_policy(policy)
    learning = (half for half in HALVES if issubclass(getattr(spec, half).cls, EamcRetention | EamcPrefetcher))
    name = next(learning, None)
    if name is None:
        raise InputError(f"{policy} learns no EAMs: name eamc, with options, or a preset of it")
    if capacity is not None:
        option = next(one for one in spec.declared() if one.key == "capacity" and name in one.parts)
        refuse((option.stated, f"{policy} states its capacity: leave out --capacity {capacity}"))
        spec = spec.with_options({option.name: capacity})
    predictor: Predictor = getattr(spec, name).build(shape).predictor
    return predictor
