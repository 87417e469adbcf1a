"""Run systems over one trace, on one machine, with one GPU budget: what each would take a token.

The budget is that of docs/systems.md, in bytes; what a system needs beside it (buffers) comes out of it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from policies.core.policy import Shape
from policies.core.scope import read_profile
from policies.core.spec import PolicySpec, parse
from policies.core.systems import System, systems
from sim.engines import compiled_engine
from sim.loaded import TimedRun
from sim.loop.log import RunLog
from sim.loop.requests import Requests
from sim.loop.run import Run, Tier, gpu_run
from sim.profiles.derived import Blocking, FirstLayersElsewhere
from sim.profiles.hardware_profile import Hardware
from sim.profiles.roofline import Roofline, host_link
from sim.profiles.timing import Timing, experts_per_layer
from sim.quantities import parse_bytes, show_bytes
from sim.systems import transforms
from traces.errors import InputError, unknown
from traces.models.names import bytes_per_parameter
from traces.models.profile import ModelProfile
from traces.steps import DECODE, PREFILL, RequestSteps

CONTEXT = 512 + 32
"""Tokens in the KV cache, as in the evaluation of the MoE-Infinity paper: prompt and answer."""

HOST_MEMORY = "16GiB"


def chosen(names: Iterable[str]) -> list[System]:
    """Return the systems of these names, all if there are none. Raise InputError for one that is not run."""
    known = {name: system for name, system in systems().items() if system.runs}
    names = list(dict.fromkeys(names)) or list(known)
    for name in names:
        if name not in known:
            raise unknown("system", name, known)
    return [known[name] for name in names]


class CannotRunError(Exception):
    """A system cannot run this; its text says why."""


@dataclass(frozen=True)
class Prediction:
    """What a system takes, of decoded tokens; all None where it cannot run, and `reason` says why."""

    system: System
    policy: str | None = None
    oracle: bool = False  # whether the policy sees which experts come; not where whole layers come in their order
    tpot_mean_ms: float | None = None
    tpot_p99_ms: float | None = None
    idle_ms: float | None = None  # of the GPU, a token
    hit_rate: float | None = None  # of expert uses, in GPU memory
    mb_per_token: float | None = None  # over the link, both ways
    overhead_ms: float | None = None  # of the TPOT, what the system's framework is declared to take
    reason: str = ""


@dataclass(frozen=True)
class Setting:
    """What all systems share. cache_size: None: what GPU memory leaves.

    profile: a trace to take popularity from, empty: the one that is run. precision: where systems name none.
    """

    loaded: TimedRun
    cache_size: str | None = None
    profile: str = ""
    host_memory: str = HOST_MEMORY
    precision: str | None = None

    def model(self, system: System | None = None) -> ModelProfile:
        """Return the model in the precision of a system, or of all. Raise InputError for an unknown or unclear one."""
        profile = self.loaded.profile
        if profile.differing_bytes and not self.precision:
            raise InputError(f"{profile.name} has experts of several sizes, which no system here runs: use --precision")
        experts = (system and system.precision) or self.precision
        dense = system and system.dense_precision
        return profile.at(
            experts=bytes_per_parameter(experts) if experts else None,
            dense=bytes_per_parameter(dense) if dense else None,
        )

    def budget(self, model: ModelProfile) -> float:
        """Return the bytes of GPU memory for experts. Raise InputError where there are none."""
        if self.cache_size:
            base = self.model()
            return replace(self.loaded, profile=base).slots(self.cache_size) * base.expert_bytes
        memory = self.loaded.hardware.memory_gib * 2**30
        kept = model.dense_bytes + model.kv_cache_bytes(CONTEXT)
        if memory - kept < model.expert_bytes:
            raise InputError(
                f"{show_bytes(memory)} of GPU memory on {self.loaded.hardware.name} do not hold the dense part and the "
                f"KV cache of {model.name} ({show_bytes(kept)}) and one expert: choose another --hardware"
            )
        return memory - kept

    def slots(self, system: System | None = None) -> int:
        model = self.model(system)
        return min(self.loaded.shape.total, int(self.budget(model) / model.expert_bytes))

    @cached_property
    def popularity(self) -> transforms.Int:
        """int64[L*E]: tokens of the profile that chose each expert. Raise InputError for a profile of another model."""
        trace = read_profile(self.profile or self.loaded.experiment.trace, self.loaded.shape)
        counts: transforms.Int = (trace.eams(PREFILL) + trace.eams(DECODE)).sum(axis=0).ravel()
        return counts

    @cached_property
    def mark(self) -> int:
        """Tokens of an expert that is only loaded before the run: more than any step of the trace has."""
        return 1 + max(int(steps.tokens.max(initial=0)) for steps in Requests(self.loaded.trace))

    def predicted(self, system: System) -> Prediction:
        try:
            run = SystemRun.of(system, self)
        except CannotRunError as cannot:
            return Prediction(system, reason=str(cannot))
        return run.prediction(compiled_engine.simulate(run.run))


@dataclass(frozen=True)
class SystemRun:
    """A system in a setting, as an engine takes it."""

    system: System
    setting: Setting
    policy: PolicySpec
    hardware: Hardware  # as the system's framework reaches it
    run: Run
    resident_layers: int  # of whole layers
    host_layers: int  # that do not fit
    loads: int  # requests of one step before the trace's that only load experts

    @classmethod
    def of(cls, system: System, setting: Setting) -> "SystemRun":
        """Raise CannotRunError where the system cannot run so, InputError for bad input."""
        shape, slots, model = setting.loaded.shape, setting.slots(system), setting.model(system)
        if system.preload == "all" and slots < shape.total:
            needed, free = show_bytes(shape.total * model.expert_bytes), show_bytes(setting.budget(model))
            raise CannotRunError(f"{needed} of experts, room for {free}")
        fitting = shape.layers if slots == shape.total else slots // shape.experts
        host_layers = shape.layers - fitting
        if system.whole_layers and not fitting:
            raise CannotRunError(f"room for {slots} experts, a layer has {shape.experts}")
        hardware = setting.loaded.hardware.under(system.overheads)
        if system.overheads.dequantises:
            hardware = hardware.dequantising(model)
        if system.mmap:
            hardware = hardware.mapped(model)
        loaded = replace(setting.loaded, profile=model, hardware=hardware.from_disk() if system.disk else hardware)
        policy = _policy(system, setting, host_layers, slots)
        loaded.require(policy, slots)
        link, timing = loaded.link, _timing(system, setting, loaded, policy, host_layers)
        if system.copy_back:
            link = transforms.copying_back(link)
        first = _preload(system, setting, slots, host_layers)
        requests: Sequence[RequestSteps] = Requests(loaded.trace)
        resident = 0
        if system.whole_layers:
            buffers = min(system.buffers, fitting)
            resident = shape.layers if not host_layers else fitting - buffers
            requests = transforms.Changed(requests, lambda steps: transforms.streamed(steps, shape.layers, resident))
            link, slots = transforms.of_whole_layers(link, shape.experts), buffers
        if first:
            requests = transforms.Changed(requests, first=first)
        top_k = loaded.trace.top_k
        window = experts_per_layer(timing, link, shape.layers, top_k)
        if system.overheads.blocking or system.whole_layers:
            timing = Blocking(timing, shape.layers, shape.experts, top_k)
        host = _host(setting, model) if system.mmap else None
        of_run = Shape(shape.layers, 1) if system.whole_layers else shape
        run = gpu_run(requests, of_run, slots, policy, timing, link, experts_per_layer=window, host=host)
        return cls(system, setting, policy, hardware, run, resident, host_layers, len(first))

    def prediction(self, log: RunLog) -> Prediction:
        """Sum up the log of the run, decoded tokens alone, without what loads and what warms up."""
        first, loaded = self.loads + self.setting.loaded.experiment.warmup_requests, self.setting.loaded
        counted = (log.phase == DECODE) & (log.request >= first)
        if not counted.any():
            raise InputError(f"{loaded.trace.name} holds no decoded tokens to count; --as-decode runs a prefill so")
        ns = log.step_ns[counted]
        lookups = int((log.hits + log.late + log.misses)[counted].sum())
        moved = int((log.demand_bytes + log.prefetch_bytes)[counted].sum())
        if self.system.zero_copy:
            moved += int(log.on_host[counted].sum()) * log.expert_bytes
        hit_rate = float(log.hits[counted].sum() / lookups) if lookups else 1.0
        if self.system.whole_layers:
            hit_rate = self.resident_layers / loaded.shape.layers
        return Prediction(
            system=self.system,
            policy=self.policy.text,
            oracle=self.policy.oracle and not self.system.whole_layers,
            tpot_mean_ms=float(ns.mean()) / 1e6,
            tpot_p99_ms=float(np.percentile(ns, 99)) / 1e6,
            idle_ms=(float(log.stall_ns[counted].sum(axis=1).mean()) + self._cpu_dense_ns(first)) / 1e6,
            hit_rate=hit_rate,
            mb_per_token=moved * (2 if self.system.copy_back else 1) / len(ns) / 1e6,
            overhead_ms=self._framework_ns(log, counted) / 1e6,
        )

    def _framework_ns(self, log: RunLog, counted: NDArray[np.bool_]) -> float:
        """Return what the framework adds to a decoded token in the mean, slower copies and CPU kernels aside."""
        model = self.setting.model(self.system)
        best, reached = (Roofline(hardware, model) for hardware in (self.setting.loaded.hardware, self.hardware))
        on_cpu = 0.0 if self.system.zero_copy else float(log.on_host[counted].sum() / counted.sum())
        more = reached.token_ns(CONTEXT) - best.token_ns(CONTEXT)
        return more - on_cpu * (reached.expert_ns(1) - best.expert_ns(1))

    def _cpu_dense_ns(self, first: int) -> float:
        """Of a decoded token in the mean: while the CPU computes the dense part of layers, the GPU is idle."""
        if not self.system.cpu_layers or not self.host_layers:
            return 0.0
        cpu = Roofline(self.setting.loaded.hardware.on_host(), self.setting.model(self.system))
        steps = [self.run.requests[i] for i in range(first, len(self.run.requests))]
        contexts, times = np.unique(
            np.concatenate([each.context[each.phase == DECODE] for each in steps]), return_counts=True
        )
        ns = [sum(cpu.dense_ns(layer, 1, each) for layer in range(self.host_layers)) for each in contexts.tolist()]
        return float(np.average(ns, weights=times))


def _policy(system: System, setting: Setting, host_layers: int, slots: int) -> PolicySpec:
    names = {"profile": setting.profile or setting.loaded.experiment.trace, "host_layers": host_layers}

    def made(text: str) -> PolicySpec:
        return parse(text.format(**names))

    policy = made(system.runs)
    if policy.needs_lookahead and not setting.loaded.trace.has_lookahead:
        if not system.without_lookahead:
            raise CannotRunError("needs a trace with lookahead (moe-trace record --lookahead)")
        policy = made(system.without_lookahead)
    if policy.scope.cls.per_layer and slots < setting.loaded.shape.layers:
        raise CannotRunError(f"needs an expert of each of {setting.loaded.shape.layers} layers in GPU memory")
    return policy


def _timing(system: System, setting: Setting, loaded: TimedRun, policy: PolicySpec, host_layers: int) -> Timing:
    """Return the durations of each part where each expert is computed by itself."""
    timing = loaded.timing(policy)
    if system.cpu_layers:
        cpu = Roofline(loaded.hardware.on_host(), loaded.profile)
        timing = FirstLayersElsewhere(timing, cpu, host_layers)
    if system.zero_copy:
        timing = transforms.ZeroCopy(timing, loaded.link)
    if system.preload:
        timing = transforms.Preloaded(timing, setting.mark)
    return timing


def _preload(system: System, setting: Setting, slots: int, host_layers: int) -> list[RequestSteps]:
    L, E = setting.loaded.shape.layers, setting.loaded.shape.experts
    if not system.preload:
        return []
    if system.preload == "popular":
        most_used = np.lexsort((-np.arange(L * E), -setting.popularity))  # ties: the higher id, as in `static`
        ids = np.sort(most_used[:slots])
    else:
        ids = np.arange((host_layers if system.preload == "layers" else 0) * E, L * E)
    return [transforms.preload(ids, L, E, setting.mark)]


def _host(setting: Setting, model: ModelProfile) -> Tier:
    """Return host memory as a cache over the disk. Raise InputError where it does not hold a layer's experts."""
    slots, shape = parse_bytes(setting.host_memory, "--host-memory") // model.expert_bytes, setting.loaded.shape
    if slots < shape.experts:
        raise InputError(f"--host-memory {setting.host_memory}: does not hold the experts of one layer")
    return Tier(min(slots, shape.total), None, host_link(setting.loaded.hardware.from_disk(), model))
