"""One row, run: its machine's rates, its model's sizes and its routing go to the simulator, and a figure comes out.

A row of hit rates or bytes needs no machine: it is run on one where nothing takes time. The first step, which fills
the cache, is not counted, nor are a few after it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

import numpy as np

from policies.core.policy import Shape
from policies.core.spec import parse
from sim.backtest import routing
from sim.backtest.file import Row
from sim.backtest.machine import Rates, overheads_of, table
from sim.backtest.model import profile_of
from sim.engines import engine
from sim.experiment import AUTO
from sim.loop.log import RunLog
from sim.loop.run import Run, Tier, Users, gpu_run
from sim.profiles.derived import Blocking
from sim.profiles.model_profile import ModelProfile
from sim.profiles.roofline import Roofline, host_link
from sim.profiles.timing import FixedTiming, Link, Timing, experts_per_layer
from sim.quantities import exceeds, parse_bytes, parse_whole
from traces.errors import InputError, located
from traces.steps import DECODE, RequestSteps

FREE = Link(0, 1, 10**12, 1)
"""A link on which copies take no time."""

NO_TIME = FixedTiming(0, 0, 0, 0, 0)

WHOLE = 2
"""Bytes of a parameter that is not quantised."""

SETTLING = 8
"""Decoded tokens after the one that fills the cache that are not counted, where a cache is run."""

CORRECTIONS, NEAR = 2, 0.005
"""How often routing is made again for a hit rate, and how near to it is near enough."""

FAR = 0.03
"""Off the measured hit rate, a run is another one."""

MOST_EXPERTS = 1_000_000
"""Of all layers: routing is made in Python, and no model has so many."""

STILL = 4
"""Tokens of a run in which every token is like the one before it."""


@dataclass(frozen=True)
class Played:
    """What came out. seconds: of a step that decodes; None without a clock."""

    seconds: float | None
    step_tokens: float  # decoded in a step: of each request that runs
    hit_rate: float
    bytes_read: float  # a token, over the link or from the disk
    log: RunLog


@dataclass(frozen=True)
class Case:
    """A row, ready to be run. aim: the hit rate that its routing is made for, where it states one."""

    row: Row
    aim: float = -1.0

    @cached_property
    def profile(self) -> ModelProfile:
        """Its model's, at its sizes."""
        assert self.row.model
        return profile_of(self.row.model)

    @property
    def shape(self) -> Shape:
        """Layers and experts."""
        return Shape(self.profile.moe_layers, self.profile.experts)

    @property
    def static(self) -> bool:
        """Whether every expert is computed where it lies, so that routing does not matter."""
        return not self.row.setting.policy

    @cached_property
    def policy(self) -> str:
        """Return it as given."""
        setting, layers = self.row.setting, self.profile.moe_layers
        if setting.all_on:
            return "lru"
        if self.static:
            n = setting.host_layers if setting.host_layers >= 0 else round(setting.host_share * layers)
            if n > layers:
                raise InputError(f"setting: host_layers {n} of {layers} layers")
            return f"lru/layers:n={n}"
        return "belady" if setting.whole_layers else setting.policy

    @cached_property
    def room(self) -> int:
        """Of the cache: slots, or bytes where layers differ in size."""
        setting, everything = self.row.setting, self._everything
        if self.static:
            return self._within(everything)
        if setting.slots_per_layer:
            return self._within(setting.slots_per_layer / self.profile.experts * everything)
        return self._within(_bytes_of_cache(setting.cache, everything, self.profile))

    @property
    def _host_room(self) -> int:
        """Return the room of host memory over the disk: slots, or bytes where layers differ in size."""
        return self._within(_bytes_of_cache(self.row.setting.host_cache, self._everything, self.profile))

    @property
    def _everything(self) -> int:
        """Return the bytes of all experts."""
        return sum(map(self.profile.bytes_of, range(self.profile.moe_layers))) * self.profile.experts

    def _within(self, wanted: float) -> int:
        """Return the room in so many bytes, at least for what one event computes at once, at most for all experts."""
        profile = self.profile
        wanted = min(max(wanted, profile.top_k * profile.expert_bytes), self._everything)
        return round(wanted) if profile.differing_bytes else max(1, int(wanted / profile.expert_bytes + 1e-6))

    @property
    def slots_per_layer(self) -> float:
        """Of the cache, in the mean; of host memory, where that is over a disk."""
        return self._per_layer(self._host_room if self.row.setting.host_cache else self.room)

    def _per_layer(self, room: int) -> float:
        """Return how many experts of a layer fit a room, in the mean."""
        sizes = self.profile.differing_bytes
        return float(room / (np.mean(sizes) if sizes else 1) / self.profile.moe_layers)

    @property
    def stand_in(self) -> str:
        """The model whose routing statistics stand for the row's; empty where none do."""
        setting = self.row.setting
        if self.static or setting.whole_layers or setting.trace or setting.hit_rate >= 0 or not self._caches:
            return ""
        return setting.like or routing.nearest(self.profile.experts)

    @property
    def _caches(self) -> bool:
        """Whether the cache or host memory holds more than a token's experts of a layer, and less than all."""
        rooms = [self.room, *([self._host_room] if self.row.setting.host_cache else [])]
        return any(self.profile.top_k <= self._per_layer(room) < self.profile.experts for room in rooms)

    @cached_property
    def requests(self) -> Sequence[RequestSteps]:
        """The routing."""
        setting, profile = self.row.setting, self.profile
        L, E, k = profile.moe_layers, profile.experts, profile.top_k
        context = setting.context or table("factors")["context"]
        if setting.trace:
            return routing.traced(setting.trace, setting.prompts == "decoded", (L, E, k), setting.requests)
        if profile.encoder_moe_layers:
            raise InputError(f"{profile.name} is an encoder-decoder, whose routing is not made: give its own (trace)")
        if setting.whole_layers:
            return [routing.all_experts(L, E, STILL, context, i) for i in range(setting.batch)]
        if self.static:
            alone = setting.batch == 1
            reuse = routing.same_each_time(E, k) if alone else np.full(E, k / E)  # of several, each its own experts
            return [routing.made(reuse, L, k, STILL, k if alone else E, context, i) for i in range(setting.batch)]
        if setting.hit_rate >= 0:
            reuse = routing.of_hit_rate(self.aim, self.slots_per_layer, E, k)
        elif self.stand_in:
            reuse = routing.like(self.stand_in, E, k)
        else:
            reuse = np.full(E, k / E)
        loaded = min(int(self.slots_per_layer + 1e-6), E)
        tokens = SETTLING + setting.tokens
        return [routing.made(reuse, L, k, tokens, loaded, context, i) for i in range(setting.batch)]

    @property
    def uncounted(self) -> int:
        """Steps at the beginning that are not counted."""
        if self.row.setting.trace:
            return 0
        return 1 if self.static or self.row.setting.whole_layers else 1 + SETTLING

    def played(self, rates: Rates | None, engine_name: str = AUTO) -> Played:
        """Run it on these rates; None: without a clock."""
        with located(self.row.where):
            log = engine.simulate(engine_name, self.run(rates))
        return self._summary(log, rates is not None)

    def aimed(self, rates: Rates | None, engine_name: str = AUTO) -> "Case":
        """Return the case whose routing reaches the measured hit rate, if there is one, in run.

        Copies that are under way when they are needed are no hits, so the routing has to be made for a little more.
        """
        wanted, case = self.row.setting.hit_rate, replace(self, aim=self.row.setting.hit_rate)
        if wanted < 0 or self.static or self.row.setting.host_cache:
            return case  # of host memory, the log counts reads, not hits
        for _ in range(CORRECTIONS):
            missing = wanted - case.played(rates, engine_name).hit_rate
            most = min(1.0, case.slots_per_layer / case.profile.top_k)
            if abs(missing) < NEAR or case.aim + missing > most:
                break
            case = replace(self, aim=max(case.aim + missing, 0.0))
        return case

    def is_far(self, played: Played) -> bool:
        """Whether the run is far from the measured hit rate, as where nothing fills the cache."""
        wanted = self.row.setting.hit_rate
        return wanted >= 0 and not self.row.setting.host_cache and abs(played.hit_rate - wanted) > FAR

    def cut(self) -> Iterator[str]:
        """Yield what to say of each number of its setting that is above what there is, which is taken in its place."""
        setting, shape = self.row.setting, self.shape
        if setting.slots_per_layer > shape.experts:
            yield f"slots_per_layer {setting.slots_per_layer} is more than a layer's {shape.experts} experts"
        for key, size in (("cache", setting.cache), ("host_cache", setting.host_cache)):
            if exceeds(size, shape.total, self._everything):
                yield f"{key} {size} is larger than all {shape.total:,} experts: it holds them all (100%)"
        if setting.requests > len(self.requests):
            yield f"requests {setting.requests} is more than the trace has ({len(self.requests)})"

    def run(self, rates: Rates | None) -> Run:
        """What an engine takes; None: nothing takes time."""
        setting = self.row.setting
        users = Users(setting.batch) if setting.batch > 1 else None
        timing, link, below = self._times(rates) if rates else (NO_TIME, FREE, FREE)
        host = Tier(self._host_room, None, self._link(below)) if setting.host_cache else None
        link, shape, top_k = self._link(link), self.shape, self.profile.top_k
        window = experts_per_layer(timing, link, shape.layers, top_k)
        if setting.blocking or setting.whole_layers or overheads_of(self.row.system).get("blocking"):
            timing = Blocking(timing, shape.layers, shape.experts, top_k)
        policy = parse(self.policy)
        return gpu_run(self.requests, shape, self.room, policy, timing, link, False, window, host, users)

    def _times(self, rates: Rates) -> tuple[Timing, Link, Link]:
        """Return durations with each expert computed by itself, the link to the cache, and that below host memory."""
        setting, profile = self.row.setting, self.profile
        cpu = setting.all_on == "cpu" or not rates.gpu_gb_per_s
        disk = setting.misses_from == "disk" or (cpu and setting.misses_from != "host" and not self.static)
        rates.require(*self._needed(cpu, disk))
        system = overheads_of(self.row.system)
        if setting.copy_back:
            rates = replace(rates, link_gb_per_s=rates.link_gb_per_s / 2)
        if system.get("dequantises") and profile.expert_bytes_per_parameter < WHOLE and rates.gpu_gb_per_s:
            moved_us = 2 * WHOLE * profile.expert_parameters / rates.gpu_gb_per_s / 1e3
            rates = replace(rates, us_per_expert=rates.us_per_expert + moved_us)
        hardware = rates.hardware(cpu, disk and not setting.host_cache)
        timing = Roofline(hardware, profile)
        link = FREE if setting.free_copies or self.static else host_link(hardware, profile)
        below = host_link(rates.hardware(cpu, disk_link=True), profile) if setting.host_cache else FREE
        return timing, link, below

    def _needed(self, cpu: bool, disk: bool) -> list[str]:
        """Rates that the run goes by."""
        setting = self.row.setting
        host = cpu or (parse(self.policy).uses_host and setting.host_layers != 0)
        link = not (self.static or setting.free_copies or (disk and not setting.host_cache))
        wanted = {
            "gpu_gb_per_s": not cpu,
            "host_gb_per_s": host,
            "link_gb_per_s": link,
            "disk_gb_per_s": disk or bool(setting.host_cache),
        }
        return [key for key, needed in wanted.items() if needed]

    def _link(self, link: Link) -> Link:
        sizes = self.profile.differing_bytes or None
        return replace(link, expert_bytes=self.profile.expert_bytes, layer_bytes=sizes)

    def _summary(self, log: RunLog, timed: bool) -> Played:
        decoded = (log.phase == DECODE) & (np.arange(len(log.step_ns)) >= self.uncounted)
        prompts = self.row.setting.trace and self.row.setting.prompts == "counted"
        counted = np.ones(len(decoded), bool) if prompts and not timed else decoded
        tokens = int(log.tokens[decoded].sum())
        lookups = (log.hits + log.late + log.misses)[counted].sum()
        reads = (log.reads_demand + log.reads_prefetch)[decoded].sum() * log.expert_bytes
        sent = (log.demand_bytes + log.prefetch_bytes)[decoded].sum()
        return Played(
            seconds=float(log.step_ns[decoded].mean() / 1e9) if timed else None,
            step_tokens=tokens / max(int(decoded.sum()), 1),
            hit_rate=float(log.hits[counted].sum() / max(lookups, 1)),
            bytes_read=float((reads if self.row.setting.host_cache else sent) / max(tokens, 1)),
            log=log,
        )


def _bytes_of_cache(text: str, everything: float, profile: ModelProfile) -> float:
    """`25%` (of equal experts the nearest whole number, halves up), `64` experts or `8GiB`; 0 is possible."""
    text = text.strip()
    try:
        if not text.endswith("%"):
            if (whole := parse_whole(text)) is None:
                return parse_bytes(text, "cache")
            return whole * everything / profile.moe_layers / profile.experts
        share = float(text[:-1])
    except ValueError:
        raise InputError(f"setting: cache {text!r}: write 25%, a number of experts (64) or bytes (8GiB)") from None
    if not 0 <= share <= 100:
        raise InputError(f"setting: a cache of {text}: a share is 0% to 100%")
    if profile.differing_bytes:
        return share / 100 * everything
    experts = Fraction(str(share)) * profile.moe_layers * profile.experts / 100
    return math.floor(experts + Fraction(1, 2)) * profile.expert_bytes


def parsed(case: Case) -> None:
    """Raise InputError if the row's policy is invalid, or its figure is not counted."""
    with located(case.row.where):
        if case.shape.total > MOST_EXPERTS:
            layers, experts = case.shape.layers, case.shape.experts
            raise InputError(f"model: {layers} layers of {experts} experts: at most {MOST_EXPERTS} experts are run")
        policy = parse(case.policy)
        if policy.needs_lookahead and not (case.row.setting.trace and all(one.lookahead for one in case.requests)):
            raise InputError(f"setting: {policy.text} needs a trace with what routers pick early (column lookahead)")
        if case.row.metric == "bytes read" and case.row.setting.host_cache and case.profile.differing_bytes:
            raise InputError("setting: host_cache: reads of the disk have no bytes where experts differ in size")
