"""An experiment with its files read, so that cells of it can be run: each a policy with one size of cache.

`TimedRun` has a machine and a model and runs on an engine, `CountedRun` counts hits and misses without a clock.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any, Self

import numpy as np

from policies.core.bent import Rule, require
from policies.core.policy import Int, Shape
from policies.core.spec import PolicySpec, read_rule
from policies.overhead import measured_us
from sim.engines import compiled_engine, untimed
from sim.experiment import Experiment
from sim.loop.log import Ended, RunLog, joined
from sim.loop.requests import Requests, users
from sim.loop.run import Run, Tier, gpu_run
from sim.profiles.hardware_profile import Hardware, hardware
from sim.profiles.measured import MeasuredModel
from sim.profiles.policy_overhead import cost_us
from sim.profiles.roofline import Roofline, host_link
from sim.profiles.timing import Link, Timing, experts_per_layer
from sim.quantities import exceeds, parse_cache_bytes, parse_cache_size, show_bytes
from sim.results.metrics import Cell
from traces.errors import InputError, located, refuse
from traces.models import profile as model_profile
from traces.models.expert_sizes import with_sizes_of
from traces.models.profile import ModelProfile
from traces.reader import RUN, open_folder
from traces.shards import Shards
from traces.trace import Trace

NONE: Mapping[str, float] = MappingProxyType({})

SAMPLE, IN_A_ROW = 2**24, 16
"""Lookups of a sample of requests, about, and how many requests it has in a row."""


@dataclass(frozen=True)
class Loaded(ABC):
    """What timed and counted runs share."""

    experiment: Experiment
    trace: Shards | Trace  # the first where only its requests are run, in order
    profile: ModelProfile | None
    in_memory: bool = field(default=False, kw_only=True)  # the trace, which no other process can open then

    @cached_property
    def whole(self) -> Trace:
        """The trace in memory, to take requests from in any order."""
        if isinstance(self.trace, Trace):
            return self.trace
        trace = _cut(self.experiment, Trace.read(self.experiment.trace, RUN))
        assert isinstance(trace, Trace)
        return trace

    def sampled(self) -> Self:
        """Return the same with some of the requests, from all over the trace; itself where it has few lookups."""
        count = len(self.trace.requests)
        every = -(-int(self.trace.offsets[-1]) * self.trace.layers * self.trace.top_k // SAMPLE)
        if every <= 1:
            return self
        runs = np.arange(count) // max(1, min(IN_A_ROW, count // every))
        chosen = np.flatnonzero(runs % every == 0)
        warmup = int(np.count_nonzero(chosen < self.experiment.warmup_requests))
        experiment = replace(self.experiment, warmup_requests=warmup)
        return replace(self, trace=self.trace.select(chosen), experiment=experiment)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the trace: another one for other content."""
        in_files = isinstance(self.trace, Shards) or self.in_memory
        return self.trace.fingerprint if in_files else open_folder(self.experiment.trace).fingerprint

    @property
    def shape(self) -> Shape:
        return Shape(self.trace.layers, self.trace.num_experts, top_k=self.trace.top_k)

    @cached_property
    def rule(self) -> Rule | None:
        """What bends the routing (rule 22). Raise InputError for what the trace lacks."""
        if self.experiment.routing is None:
            return None
        rule = read_rule(self.experiment.routing)
        rule.by(self.trace.top_k)
        require(rule, self.trace.steps(0).choices)
        return rule

    @property
    def all_experts(self) -> int:
        return self.trace.layers * self.trace.num_experts

    @property
    def model(self) -> str:
        return self.profile.name if self.profile else self.trace.meta.model

    @property
    def expert_bytes(self) -> int | None:
        """Bytes of one expert, of the largest where layers differ; None if nothing states them."""
        return self.profile.expert_bytes if self.profile else self.trace.meta.largest_expert_bytes

    @property
    def sizes(self) -> Int | None:
        """Bytes of every expert, int64[L*E], where layers differ; None where all are alike."""
        layers = (self.profile or self.trace.meta).layer_expert_bytes
        return np.repeat(np.array(layers, np.int64), self.trace.num_experts) if len(set(layers)) > 1 else None

    @property
    def notes(self) -> list[str]:
        """What there is to say of the model's sizes: what was not understood, and that they are not the trace's."""
        meta, profile, experiment = self.trace.meta, self.profile, self.experiment
        recorded = meta.largest_expert_bytes
        wrong = [f"{profile.name}: sizes may be wrong: {note}" for note in profile.notes] if profile else []
        if not (profile and recorded) or profile.expert_bytes == recorded:
            return wrong
        source = experiment.expert_sizes or experiment.model_profile or profile.name
        sizes = f"the trace states {show_bytes(recorded)}, {source} {show_bytes(profile.expert_bytes)}"
        return [*wrong, f"expert size: {sizes} (which is used)"]

    def alike(self) -> Self:
        """Return the same with experts of one size, their mean; itself where they are."""
        if self.sizes is None:
            return self
        sizes = (round(float(self.sizes.mean())),) * self.trace.layers
        if self.profile:
            return replace(self, profile=replace(self.profile, layer_expert_bytes=sizes))
        return replace(self, trace=replace(self.trace, meta=replace(self.trace.meta, layer_expert_bytes=sizes)))

    @property
    def machine(self) -> dict[str, Any]:
        return {"profile": self.profile}

    @property
    def token_experts(self) -> int:
        """Distinct experts that one decoded token needs."""
        layers = self.profile.decode_layers if self.profile else self.trace.layers
        return layers * self.trace.top_k

    def slots(self, cache_size: str) -> int:
        """Return the slots of a cache of this size, or its bytes where experts differ in size. Raise InputError."""
        if self.sizes is None:
            return parse_cache_size(cache_size, self.all_experts, self.expert_bytes, self.trace.layers)
        return parse_cache_bytes(cache_size, self.sizes, self.trace.layers)

    @property
    def whole_slots(self) -> int:
        """Slots of a cache of all experts: bytes, where experts differ in size."""
        return self.all_experts if self.sizes is None else int(self.sizes.sum())

    def exceeds(self, cache_size: str) -> bool:
        alike = self.expert_bytes and self.all_experts * self.expert_bytes
        whole = alike if self.sizes is None else int(self.sizes.sum())
        return exceeds(cache_size, self.all_experts, whole, self.trace.layers)

    def experts_in(self, slots: int) -> int:
        """Return how many experts such a cache holds, of mean size where they differ."""
        return slots if self.sizes is None else round(slots * self.all_experts / int(self.sizes.sum()))

    def require(self, policy: PolicySpec, slots: int) -> None:
        """Raise InputError for what the policy lacks: slots for its scope, a file; timed, a column."""
        policy.divide(self.shape, slots, self.sizes)
        policy.require(self.shape)
        future = f"{policy.text} knows the routing of the trace, which `routing` bends: choose another policy"
        refuse((self.rule is not None and policy.oracle, future))

    def slots_for(self, policy: PolicySpec, cache_size: str) -> int:
        """Return the capacity of a cache of this size for a policy. Raise InputError where this trace cannot run it."""
        slots = self.slots(cache_size)
        self.require(policy, slots)
        return slots

    def measured_us(self, policies: Iterable[PolicySpec], before: Mapping[str, float] = NONE) -> dict[str, float]:
        """Measure what an event takes of each policy whose overhead is not known; return microseconds, by policies.

        before: what was measured earlier, and is not measured again.
        """
        return {}

    def charging(self, us: Mapping[str, float]) -> Self:
        """Return the same run with these overheads, which are of policies whose own is not known."""
        return replace(self, experiment=self.experiment.charging(us))

    def versions(self, policies: Iterable[PolicySpec]) -> list[bool]:
        """Return which version of the engine runs each policy (`compiled_engine.tiered`)."""
        return []

    @abstractmethod
    def play(self, policy: PolicySpec, slots: int, ended: Ended) -> None:
        """Run one cell; `ended` takes the log of each request as it ends."""

    def play_cells(self, policy: PolicySpec, slots: Sequence[int], ended: Sequence[Ended]) -> None:
        """Run cells of one policy, which may learn once for all of them."""
        for each, heard in zip(slots, ended, strict=True):
            self.play(policy, each, heard)

    def learns_once(self, policy: PolicySpec) -> bool:
        """Return whether cells of a policy gain by running together."""
        return False

    def log(self, policy: PolicySpec, slots: int) -> RunLog:
        parts: list[RunLog] = []
        self.play(policy, slots, parts.append)
        return joined(parts)

    def cell(self, policy: PolicySpec, slots: int) -> Cell:
        experiment = self.experiment
        return Cell(
            policy=policy.text,
            options=policy.options(),
            oracle=policy.oracle,
            trace=self.trace.name,
            phase=self.trace.phases,
            model=self.model,
            cache_experts=self.experts_in(slots),
            cache_bytes=slots if self.sizes is not None else slots * self.expert_bytes if self.expert_bytes else None,
            all_experts=self.all_experts,
            layers=self.trace.layers,
            host_memory=experiment.host_memory,
            draft=experiment.draft or None,
            acceptance=experiment.acceptance_text,
            prefill_chunk=experiment.prefill_chunk,
            routing=experiment.routing if self.rule and self.rule.is_lossy(self.trace.top_k) else None,
            max_batch=experiment.max_batch,
            arrivals=experiment.arrivals if experiment.max_batch else None,
            arrival_rate=experiment.arrival_rate,
            cold=experiment.cold,
            warmup_requests=experiment.warmup_requests,
            seed=policy.seed,
        )


@dataclass(frozen=True)
class CountedRun(Loaded):
    """Runs that count without a clock; without a profile where nothing states the sizes of experts."""

    def play(self, policy: PolicySpec, slots: int, ended: Ended) -> None:
        shape, size, cold = (self.trace.layers, self.trace.num_experts), self.expert_bytes or 0, self.experiment.cold
        top_k = self.trace.top_k
        untimed.play(Requests(self.trace), *shape, slots, policy, ended, cold, size, self.sizes, top_k, self.rule)


@dataclass(frozen=True)
class TimedRun(Loaded):
    """Runs on a machine."""

    profile: ModelProfile
    hardware: Hardware
    drafter: ModelProfile | None = None
    engine: Callable[[Run, Ended], None] = field(default=compiled_engine.play, kw_only=True)

    @classmethod
    def of(cls, experiment: Experiment, trace: Trace | None = None) -> "TimedRun":
        """Return `load` of an experiment that is timed. Raise InputError for one that is not."""
        return timed(load(experiment, trace))

    @property
    def machine(self) -> dict[str, Any]:
        return {"profile": self.profile, "hardware": self.hardware, "drafter": self.drafter}

    @property
    def memory(self) -> float:
        return self.hardware.memory_gib * 2**30

    @property
    def mean_expert_bytes(self) -> float:
        return self.profile.expert_bytes if self.sizes is None else float(self.sizes.mean())

    @cached_property
    def beside_experts(self) -> float:
        """Bytes of GPU memory beside the cache: dense weights, KV cache of the longest requests, the draft model."""
        requests, context = self.experiment.max_batch or 1, int(np.diff(self.trace.offsets).max())
        models = [self.profile, *([self.drafter] if self.drafter else [])]
        drafter = self.drafter.moe_layers * self.drafter.experts * self.drafter.expert_bytes if self.drafter else 0
        return drafter + sum(model.dense_bytes + requests * model.kv_cache_bytes(context) for model in models)

    def needed(self, slots: int) -> float:
        """Return the bytes of GPU memory that a run with a cache of so many slots takes."""
        return self.experts_in(slots) * self.mean_expert_bytes + self.beside_experts

    def fits(self, slots: int) -> bool:
        return self.needed(slots) <= self.memory

    @property
    def measured(self) -> MeasuredModel | None:
        """What was measured with this model on this machine, which then stands for its rates; None: nothing was."""
        return self.hardware.measured_with(self.profile)

    def predictor_us(self, policy: PolicySpec) -> float | None:
        """Return the policy overhead of an event, as stated, measured here, or shipped; None: unknown."""
        stated = self.experiment.overhead_us(policy.text)
        if stated is not None:
            return stated
        if self.measured and policy.text in self.measured.predictor_us:
            return self.measured.predictor_us[policy.text]
        return cost_us(policy, self.trace.layers, self.trace.num_experts)

    def measured_us(self, policies: Iterable[PolicySpec], before: Mapping[str, float] = NONE) -> dict[str, float]:
        found = {}
        for policy in policies:
            if self.predictor_us(policy) is None:
                earlier = before.get(policy.text)
                found[policy.text] = (
                    measured_us(policy, self.shape, Requests(self.trace)) if earlier is None else earlier
                )
        return found

    def timing(self, policy: PolicySpec | None = None) -> Timing:
        """Return durations on this machine under a policy, whose work is free where its cost is unknown."""
        us = self.predictor_us(policy) if policy else None
        predictor_ns = round((us or 0.0) * 1_000)
        if self.measured:
            return self.measured.timing(predictor_ns, Roofline(self.hardware, self.profile))
        return Roofline(self.hardware, self.profile, predictor_ns)

    @cached_property
    def requests(self) -> Requests:
        """The requests as an engine runs them, with what drafting takes."""
        us, drafter = self.experiment.draft_us, self.drafter
        if us is not None:
            return Requests(self.trace, lambda context: math.ceil(us * 1_000))
        if drafter is None:
            return Requests(self.trace)
        roofline = Roofline(self.hardware, drafter)
        return Requests(self.trace, cache(lambda context: roofline.token_ns(context)))

    @property
    def link(self) -> Link:
        if self.measured:
            return self.measured.link(self.experiment.chunk_bytes)
        return host_link(self.hardware, self.profile, self.experiment.chunk_bytes)

    def versions(self, policies: Iterable[PolicySpec]) -> list[bool]:
        more = self.experiment.host_memory is not None or self.sizes is not None
        return [more or policy.uses_host or policy.admits is not None for policy in policies]

    def simulated_alone(self, policy: PolicySpec) -> str | None:
        """Return what of a cell no real device runs so far; None: nothing."""
        reasons = {
            f"the placement {policy.placement.term}": policy.uses_host,
            f"the admission {policy.admission.term}": policy.admits is not None,
            "a disk below host memory (`host_memory`)": self.experiment.host_memory is not None,
            "several users (`max_batch`)": self.experiment.max_batch is not None,
            "bent routing (`routing`)": self.experiment.routing is not None,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def require(self, policy: PolicySpec, slots: int) -> None:
        super().require(policy, slots)
        if policy.needs_lookahead and not self.trace.has_lookahead:
            raise InputError(
                f"{policy.text}: the trace {self.experiment.trace} has no lookahead column; "
                "record it with `moe-trace record --lookahead`"
            )

    def play(self, policy: PolicySpec, slots: int, ended: Ended) -> None:
        self.engine(self.run(policy, slots), ended)

    def play_cells(self, policy: PolicySpec, slots: Sequence[int], ended: Sequence[Ended]) -> None:
        compiled_engine.play_cells([self.run(policy, each) for each in slots], ended)

    def learns_once(self, policy: PolicySpec) -> bool:
        """Return whether cells of a policy gain by running together: it learns, and from events alone."""
        learns = policy.evict.cls.observes or policy.prefetch.cls.observes or policy.prefetches
        alone = self.experiment.max_batch is None and self.experiment.routing is None
        return learns and policy.learns_from_events_alone and alone

    def run(self, policy: PolicySpec, slots: int) -> Run:
        timing, link = self.timing(policy), self.link
        window = experts_per_layer(timing, link, self.trace.layers, self.trace.top_k)
        requests, cold = self.requests, self.experiment.cold
        sent = users(self.experiment, self.trace)
        return gpu_run(requests, self.shape, slots, policy, timing, link, cold, window, self._host(), sent, self.rule)

    def _host(self) -> Tier | None:
        """Return host memory over the disk, if it does not hold all experts."""
        if self.experiment.host_memory is None:
            return None
        with located("`host_memory`"):
            slots = self.slots(self.experiment.host_memory)
        return Tier(slots, None, host_link(self.hardware.from_disk(), self.profile))

    def cell(self, policy: PolicySpec, slots: int) -> Cell:
        machine = f"{self.hardware.name} (measured)" if self.measured else self.hardware.name
        predictor_us = self.timing(policy).predictor_ns / 1_000
        cell = super().cell(policy, slots)
        return replace(cell, hardware=machine, predictor_us=predictor_us, fits=self.fits(slots))


def sample_text(sample: Loaded, whole: Loaded) -> str:
    requests = f"{len(sample.trace.requests):,} of {len(whole.trace.requests):,} requests, from all over the trace"
    return f"{requests}, {sample.trace.offsets[-1]:,} tokens"


def timed(loaded: CountedRun | TimedRun) -> TimedRun:
    """Return a run on a machine as it is. Raise InputError for one that counts."""
    if not isinstance(loaded, TimedRun):
        raise InputError("`untimed` is for simulation that counts: this needs times")
    return loaded


def load(experiment: Experiment, trace: Trace | None = None) -> CountedRun | TimedRun:
    """Return the experiment with its files read, or its trace in memory. Raise InputError for what cannot be used."""
    bent = experiment.routing is not None
    requests = _requests(experiment, Shards.open(experiment.trace, scores=bent) if trace is None else trace)
    profile = _profile(experiment, requests)
    if profile and profile.encoder_moe_layers and (experiment.as_decode or experiment.prefill_chunk):
        stated = "as_decode" if experiment.as_decode else "prefill_chunk"
        raise InputError(
            f"{profile.name} is an encoder-decoder, and encoders take a prompt whole: leave `{stated}` out"
        )
    in_memory = trace is not None
    if profile is None or experiment.untimed:
        return CountedRun(experiment, requests, profile, in_memory=in_memory)
    drafter = model_profile.model(experiment.draft_model) if experiment.draft_model else None
    users(experiment, requests)  # refuses arrivals that cannot be
    return TimedRun(experiment, requests, profile, hardware(experiment.hardware), drafter, in_memory=in_memory)


def _cut(experiment: Experiment, trace: Shards | Trace) -> Shards | Trace:
    """Return the part of a trace that an experiment runs, as it runs it."""
    trace = trace if experiment.requests is None else trace.head(experiment.requests)
    trace = trace.without_prompts() if experiment.decode_only else trace
    trace = trace.as_decode() if experiment.as_decode else trace
    drafts = experiment.drafts
    if drafts and drafts.acceptance is None and not trace.has_drafts:
        raise InputError(f"`draft` needs `acceptance`, as in 0.7: {experiment.trace} was recorded without drafts")
    return trace.in_steps(experiment.prefill_chunk, drafts)


def _requests(experiment: Experiment, trace: Shards | Trace) -> Shards | Trace:
    """Return the requests that are run. Raise InputError where nothing is left of them to count."""
    trace.require_sequences()
    trace = _cut(experiment, trace)
    warm, known = experiment.warmup_requests, len(trace.requests)
    refuse(
        (warm >= known, f"{warm} warm-up requests leave none of {known} to count: use a smaller `warmup_requests`"),
        (not trace.offsets[-1], f"{experiment.trace} has no tokens: there is nothing to run"),
    )
    return trace


def _profile(experiment: Experiment, trace: Shards | Trace) -> ModelProfile | None:
    """Return the model with the sizes that `expert_sizes` states; None: counting does without, as of some layers."""
    meta, profile, stated = trace.meta, None, not model_profile.not_stated(trace.meta)
    known = model_profile.known(meta.model)
    part = known is not None and meta.layers < known.moe_layers
    if not experiment.untimed or experiment.model_profile or (not part and (stated or known)):
        profile = model_profile.of_trace(meta, experiment.model_profile)
    if experiment.expert_sizes is None:
        return profile
    if profile is None:
        raise InputError("`expert_sizes` needs a model profile: name one with `model_profile`")
    return with_sizes_of(profile, experiment.expert_sizes)
