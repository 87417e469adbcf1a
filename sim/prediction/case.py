"""One row, simulated: its machine's rates, its model's sizes and its routing go to an engine, and a figure comes out.

A row of hit rates or bytes needs no machine: it is run on one where nothing takes time. The first step, which fills
the cache, is not counted, nor are a few after it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from policies.core.policy import Shape
from policies.core.spec import PolicySpec, parse
from policies.core.systems import System, system_of
from sim.engines.compiled_engine import simulate
from sim.loop.log import RunLog
from sim.loop.run import Run, Tier, Users, gpu_run
from sim.prediction import routing
from sim.prediction.described import Row
from sim.prediction.machine import FITTED, hardware_of
from sim.prediction.model import profile_of
from sim.prediction.tables import FACTORS
from sim.prediction.timing import Runtime
from sim.profiles.derived import Blocking, FirstLayersElsewhere
from sim.profiles.hardware_profile import Hardware
from sim.profiles.roofline import host_link
from sim.profiles.timing import FixedTiming, Link, Timing, experts_per_layer
from sim.quantities import parse_cache_size, show_share, stated_bytes
from traces.errors import InputError
from traces.models.profile import ModelProfile
from traces.steps import DECODE, RequestSteps

FREE = Link(0, 1, 10**12, 1)

NO_TIME = FixedTiming(0, 0, 0, 0, 0)

SETTLING = 8
"""Decoded tokens after the one that fills the cache that are not counted, where a cache is run."""

CORRECTIONS, NEAR, FAR = 10, 0.1, 0.3
"""How often routing is made again for a hit rate; shares of its misses by which it is near enough, or another run."""

TURNS = 3
"""Runs until what CPU and link read of host memory at once is near what they do."""

STILL = 4
"""Tokens of a run in which every token is like the one before it."""


@dataclass(frozen=True)
class Outcome:
    """What a simulated row comes to. seconds: of a step that decodes; None without a clock."""

    seconds: float | None
    step_tokens: float  # decoded in a step: of each request that runs
    hit_rate: float
    host_hit_rate: float  # of what misses the GPU's cache, where host memory is over a disk
    bytes_read: float  # a token, over the link or from the disk
    log: RunLog


@dataclass(frozen=True)
class Case:
    """A row, ready to be simulated. aim: the hit rate that its routing is made for, where it states one."""

    row: Row
    aim: float = -1.0

    @cached_property
    def profile(self) -> ModelProfile:
        assert self.row.model
        return profile_of(self.row.model)

    @cached_property
    def engine(self) -> System:
        return system_of(self.row.engine or self.row.system)

    @cached_property
    def hardware(self) -> Hardware | None:
        """The row's machine, as its engine reaches it; None where it is counted without a clock."""
        if self.row.machine is None or not self.row.timed:
            return None
        return hardware_of(self.row.machine, self.engine, self.profile)

    @property
    def static(self) -> bool:
        """Whether every expert is computed where it lies, so that routing does not matter."""
        return not self.row.setting.policy

    @cached_property
    def policy(self) -> PolicySpec:
        setting, layers = self.row.setting, self.profile.moe_layers
        if setting.all_on:
            return PolicySpec.of("lru")
        if self.static:
            n = max(setting.host_layers, setting.cpu_layers)
            n = round(setting.host_share * layers) if n < 0 else n
            return PolicySpec.of("lru", placement=f"layers:n={n}")
        return parse("belady" if setting.whole_layers else setting.policy)

    @cached_property
    def capacity(self) -> int:
        """The cache's, in slots, or in bytes where layers differ in size."""
        setting, everything = self.row.setting, self._all_bytes
        if self.static:
            return self._within(everything)
        if setting.slots_per_layer:
            return self._within(setting.slots_per_layer / self.profile.experts * everything)
        return self._within(_bytes_of_cache(setting.cache, everything, self.profile))

    @cached_property
    def host_capacity(self) -> int | None:
        """That of host memory over the disk, likewise; None where host memory holds all."""
        size = self.row.setting.host_cache
        if not size:
            return None
        kept = self.hardware.mapped_more(self.profile) if self.row.setting.mmap and self.hardware else 1.0
        return self._within(_bytes_of_cache(size, self._all_bytes, self.profile) / kept)

    @property
    def _all_bytes(self) -> int:
        return sum(map(self.profile.bytes_of, range(self.profile.moe_layers))) * self.profile.experts

    def _within(self, size: float) -> int:
        """Return the capacity of so many bytes, at least what one event computes at once, at most all experts."""
        profile = self.profile
        size = min(max(size, profile.top_k * profile.expert_bytes), self._all_bytes)
        return round(size) if profile.differing_bytes else max(1, int(size / profile.expert_bytes + 1e-6))

    @property
    def slots_per_layer(self) -> float:
        """Of the cache, in the mean; of host memory, where that is over a disk."""
        return self._per_layer(self.host_capacity or self.capacity)

    def _per_layer(self, capacity: int) -> float:
        sizes = self.profile.differing_bytes
        return float(capacity / (np.mean(sizes) if sizes else 1) / self.profile.moe_layers)

    @property
    def stand_in(self) -> str:
        """The model whose routing statistics stand for the row's; empty where none do."""
        setting = self.row.setting
        if self.static or setting.whole_layers or setting.trace or setting.hit_rate >= 0:
            return ""
        capacities = [self.capacity, *([self.host_capacity] if self.host_capacity else [])]
        if not any(self.profile.top_k <= self._per_layer(each) < self.profile.experts for each in capacities):
            return ""  # a token's experts of a layer fit no cache, or all do
        return setting.like or routing.nearest(self.profile.experts)

    @cached_property
    def requests(self) -> Sequence[RequestSteps]:
        setting, profile = self.row.setting, self.profile
        L, E, k = profile.moe_layers, profile.experts, profile.top_k
        context = setting.context or FACTORS.context
        if setting.trace:
            return routing.traced(setting.trace, setting.prompts == "decoded", (L, E, k), setting.requests)
        if profile.encoder_moe_layers:
            raise InputError(f"{profile.name} is an encoder-decoder, whose routing is not made: give its own (trace)")
        loaded, tokens = min(int(self.slots_per_layer + 1e-6), E), SETTLING + setting.tokens
        if setting.whole_layers:  # every step uses every expert
            reuse, k, tokens, loaded = np.ones(E), E, STILL, E
        elif self.static:
            tokens, loaded = STILL, k if setting.batch == 1 else E
            same_each_time = (np.arange(E) < k).astype(np.float64)
            reuse = same_each_time if setting.batch == 1 else np.full(E, k / E)  # of several, each its own
        elif setting.hit_rate >= 0:
            reuse = routing.of_hit_rate(self.aim, self.slots_per_layer, E, k)
        elif self.stand_in:
            reuse = routing.like(self.stand_in, E, k)
            if setting.misses != 1:
                slots = round(self.slots_per_layer)
                most = max(0.0, 1 - slots / k, (1 - reuse[:slots].sum() / k) * setting.misses)
                reuse = routing.of_hit_rate(1 - min(most, 1.0), slots, E, k)
        else:
            reuse = np.full(E, k / E)
        return [routing.made(reuse, L, k, tokens, loaded, context, i) for i in range(setting.batch)]

    def changed(self, fields: Mapping[str, Any]) -> "Case":
        """Return the case with other values of fields of its machine or its setting."""
        row, machine = self.row, self.row.machine
        assert machine
        parts = {key: value for key, value in fields.items() if hasattr(machine, key)}
        setting = replace(row.setting, **{key: value for key, value in fields.items() if key not in parts})
        return replace(self, row=replace(row, machine=replace(machine, **parts), setting=setting))

    def simulated(self, hardware: Hardware | None) -> Outcome:
        """Run it on this machine; None: without a clock. Raise InputError for what its row cannot have."""
        log = simulate(self.as_run(hardware))
        for _ in range(TURNS if hardware and self._shares_memory else 0):
            both = min(1.0, float(log.link_busy_ns.sum() / max(log.host_busy_ns.sum(), 1)))
            log = simulate(self.as_run(hardware, both))
        return self._summary(log, hardware is not None)

    def aimed(self, hardware: Hardware | None) -> "Case":
        """Return the case whose routing reaches the measured hit rate, if there is one, when it is run.

        Late copies are no hits and policies keep other experts than LRU, so the routing is made for more or less until
        it fits: by the difference at first, then by halves of what is left to try.
        """
        case = replace(self, aim=self.row.setting.hit_rate)
        if self.row.setting.hit_rate < 0 or self.static:
            return case
        low, high = 0.0, min(1.0, self.slots_per_layer / self.profile.top_k)
        tried = []
        for number in range(CORRECTIONS):
            off = case.off(case.simulated(hardware))
            tried.append((abs(off), case))
            if abs(off) < NEAR * self._tolerance:
                break
            low, high = (case.aim, high) if off < 0 else (low, case.aim)
            by_difference = number == 0 and low < case.aim - off < high
            case = replace(self, aim=case.aim - off if by_difference else (low + high) / 2)
        return min(tried, key=lambda each: each[0])[1]

    def off(self, outcome: Outcome) -> float:
        """Return by how much a run's hit rate, of host memory where that is over a disk, is above the measured one."""
        return (outcome.host_hit_rate if self.host_capacity else outcome.hit_rate) - self.row.setting.hit_rate

    def warnings(self, outcome: Outcome) -> tuple[str, ...]:
        """Return that a run is far from the measured hit rate, as where nothing fills the cache; else nothing."""
        wanted, off = self.row.setting.hit_rate, self.off(outcome)
        if wanted < 0 or abs(off) <= FAR * self._tolerance:
            return ()
        reached, measured = show_share(wanted + off), show_share(wanted)
        return (f"{self.policy.text} hits {reached}, far from the hit_rate of {measured} that was measured",)

    @property
    def _tolerance(self) -> float:
        """What a hit rate is compared with: its misses, of which 5 to 10% are as good as any."""
        return min(max(1 - self.row.setting.hit_rate, 0.02), 0.1)

    @property
    def _shares_memory(self) -> bool:
        """Whether the CPU computes some misses while the link copies others."""
        copies = not (self.static or self.row.setting.free_copies)
        return copies and self.policy.uses_host and self.policy.text.endswith("split")

    def as_run(self, hardware: Hardware | None, both: float = 1.0) -> Run:
        """Return the run on a machine; both: of the time in which the CPU computes experts, in what the link copies."""
        setting, profile, shape = self.row.setting, self.profile, Shape(self.profile.moe_layers, self.profile.experts)
        if self.policy.needs_lookahead and not (setting.trace and all(one.lookahead for one in self.requests)):
            raise InputError(
                f"setting: {self.policy.text} needs a trace with what routers pick early (column lookahead)"
            )
        timing, link, below = self._times(hardware, both) if hardware else (NO_TIME, FREE, FREE)
        link, below = (
            replace(each, expert_bytes=profile.expert_bytes, layer_bytes=profile.differing_bytes or None)
            for each in (link, below)
        )
        window = experts_per_layer(timing, link, shape.layers, profile.top_k)
        if setting.blocking or setting.whole_layers or self.engine.overheads.blocking:
            timing = Blocking(timing, shape.layers, shape.experts, profile.top_k)
        host = Tier(self.host_capacity, None, below) if self.host_capacity else None
        users = Users(setting.batch) if setting.batch > 1 else None
        return gpu_run(self.requests, shape, self.capacity, self.policy, timing, link, False, window, host, users)

    def _times(self, hardware: Hardware, both: float) -> tuple[Timing, Link, Link]:
        """Return durations with each expert computed by itself, the link to the cache, and that below host memory."""
        setting, profile = self.row.setting, self.profile
        cpu = setting.all_on == "cpu" or not hardware.memory_bandwidth_gb_per_s
        disk = setting.misses_from == "disk" or (cpu and setting.misses_from != "host" and not self.static)
        copies = not (self.static or setting.free_copies)
        hardware = _complete(
            hardware,
            gpu_gb_per_s=not cpu,
            host_gb_per_s=cpu or (self.policy.uses_host and setting.host_layers != 0),
            link_gb_per_s=copies and not (disk and not self.host_capacity),
            disk_gb_per_s=disk or bool(self.host_capacity),
        )
        if self.engine.overheads.dequantises:
            hardware = hardware.dequantising(profile)
        changed: dict[str, Any] = {}
        if setting.cpu_layers > 0:  # one hop, behind the last of them
            token_us = hardware.framework_us_per_token + hardware.host_hop_us
            changed |= {"host_hop_us": 0.0, "framework_us_per_token": token_us}
        if setting.copy_back:
            changed["link_bandwidth_gb_per_s"] = hardware.link_bandwidth_gb_per_s / 2
        if setting.mmap:
            hardware = hardware.mapped(profile)
        hardware = replace(hardware, **changed)
        if self._shares_memory:
            alone, beside = hardware.host_expert_bandwidth_gb_per_s, hardware.host_beside_link_gb_per_s
            reads = both * beside + (1 - both) * alone
            hardware = replace(hardware, host_expert_share=reads / hardware.host_memory_bandwidth_gb_per_s)
        above = hardware.from_disk() if disk and not self.host_capacity else hardware
        link = host_link(above, profile) if copies else FREE
        below = host_link(hardware.from_disk(), profile) if self.host_capacity else FREE
        timing: Timing = Runtime(above, profile, cpu)
        if setting.cpu_layers > 0:
            timing = FirstLayersElsewhere(timing, Runtime(hardware, profile, True), setting.cpu_layers)
        return timing, link, below

    def _summary(self, log: RunLog, timed: bool) -> Outcome:
        setting = self.row.setting
        if self.row.metric == "bytes read" and self.host_capacity and self.profile.differing_bytes:
            raise InputError("setting: host_cache: reads of the disk have no bytes where experts differ in size")
        uncounted = 0 if setting.trace else 1 if self.static or setting.whole_layers else 1 + SETTLING
        decoded = (log.phase == DECODE) & (np.arange(len(log.step_ns)) >= uncounted)
        with_prompts = setting.trace and setting.prompts == "counted" and not timed
        counted = np.ones(len(decoded), bool) if with_prompts else decoded
        tokens = int(log.tokens[decoded].sum())
        lookups = (log.hits + log.late + log.misses)[counted].sum()
        missed = int((log.late + log.misses)[decoded].sum())
        reads = (log.reads_demand + log.reads_prefetch)[decoded].sum() * log.expert_bytes
        sent = (log.demand_bytes + log.prefetch_bytes)[decoded].sum()
        return Outcome(
            seconds=float(log.step_ns[decoded].mean() / 1e9) if timed else None,
            step_tokens=tokens / max(int(decoded.sum()), 1),
            hit_rate=float(log.hits[counted].sum() / max(lookups, 1)),
            host_hit_rate=1 - reads / log.expert_bytes / max(missed, 1),
            bytes_read=float((reads if self.host_capacity else sent) / max(tokens, 1)),
            log=log,
        )


def _complete(hardware: Hardware, **needed: bool) -> Hardware:
    """Return the machine with any rate in place of those that it has not. Raise InputError for one that is needed."""
    absent = [name for name, field in FITTED.items() if name.endswith("gb_per_s") and not getattr(hardware, field)]
    for name in absent:
        if needed.get(name):
            raise InputError(f"its machine states nothing from which {name} follows")
    anything: dict[str, Any] = {FITTED[name]: 1.0 for name in absent if name != "gpu_gb_per_s"}
    return replace(hardware, **anything)


def _bytes_of_cache(text: str, everything: float, profile: ModelProfile) -> float:
    """Return the bytes of a cache of this size, which may be none: `0`."""
    if text.strip() in ("0", "0%"):
        return 0.0
    if (size := stated_bytes(text)) is not None:
        return size
    all_experts = profile.moe_layers * profile.experts
    return parse_cache_size(text, all_experts, None, profile.moe_layers) * everything / all_experts
