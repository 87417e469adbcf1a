"""The plan: what to expect, which tier is the wall, how far the physical limit is, and what would help.

What is expected is what compiled runtimes have flags for today (`placements.today`), beside it an expert cache. The
physical limit reads each byte that a token needs once, at the bandwidth that a data sheet states, from the tier where
Belady's optimal policy would have it, all tiers at the same time and nothing else taking time. Where the host would
wait for the GPU's memory, also because that holds all experts, the host reads more, until both end at the same time.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from os.path import exists  # of any name, however long
from pathlib import Path
from typing import Any

from sim import profiles
from sim.backtest.file import Model
from sim.backtest.machine import Rates, rates
from sim.planner import errors, flags, placements
from sim.planner.placements import DISK, RUNTIME, Layout, Placement
from sim.planner.resources import GPU_RESERVED, Resources, described, resources
from sim.profiles.model_profile import known, model
from sim.profiles.precision import canonical, name_of
from sim.quantities import show_bytes
from traces.errors import InputError
from traces.files import expanded

CONTEXT = 8192

GIB = 2**30

FAST = 1e6
"""A tier that is this much faster takes no time."""

TIERS: Mapping[str, tuple[str, ...]] = {
    "GPU memory": ("gpu_gb_per_s", "gpu_tflop_per_s"),
    "CPU and host memory": ("host_gb_per_s", "host_tflop_per_s"),
    "link": ("link_gb_per_s",),
    "disk": ("disk_gb_per_s",),
}
OVERHEADS = ("hop_us", "cpu_us_per_layer", "us_per_layer", "us_per_expert", "us_per_token")

UNITS: Mapping[str, tuple[str, float, str]] = {
    "GPU memory": ("gpu_memory", 1 * GIB, "+1 GiB"),
    "host memory": ("host_memory", 8 * GIB, "+8 GiB"),
    "GPU bandwidth": ("gpu_gb_per_s", 100.0, "+100 GB/s"),
    "CPU bandwidth": ("host_gb_per_s", 10.0, "+10 GB/s"),
    "link": ("link_gb_per_s", 8.0, "+8 GB/s"),
    "disk": ("disk_gb_per_s", 1.0, "+1 GB/s"),
}
"""Resources by name: their field of Resources, a unit more, and its text."""

PRECISIONS = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q3_k_m", "iq2_m")
GOOD = 4.0 / 8
"""Bytes of a parameter below which answers get noticeably worse."""

MXFP4 = "mxfp4"
"""Of experts alone: the files that llama.cpp runs have Q8_0 for all else."""

POLICY = "eamc-blend"
"""To be recommended where there is a cache. Times are of LRU, which the stand-in routing is made for."""

PLACES = {
    placements.RESIDENT: "everything on the GPU",
    placements.CPU: "everything on the CPU, in host memory",
}


@dataclass(frozen=True)
class Speed:
    """Tokens a second, and between what they lay on the machines of the back-test."""

    tokens_per_s: float
    low: float
    high: float


@dataclass(frozen=True)
class CachePlan:
    """The best expert cache: no released runtime has flags for it so far."""

    speed: Speed
    policy: str
    placement: str  # of misses
    experts: int
    cache_bytes: int
    hit_rate: float
    routing: str  # that stands in for the model's
    way: str  # the policy that was simulated


@dataclass(frozen=True)
class Upgrade:
    """What one more unit of a resource buys. with_cache: tokens a second of the expert cache, None without one."""

    resource: str
    unit: str
    tokens_per_s: float
    gain: float
    with_cache: float | None


@dataclass(frozen=True)
class Precision:
    """The same plan at a lower precision."""

    name: str
    total_bytes: int
    fits: str
    tokens_per_s: float
    times: float
    loses_quality: bool


@dataclass(frozen=True)
class Plan:
    """What a model does on a machine; `moe-sim plan` prints it."""

    model: str
    precision: str
    context: int
    machine: str
    speed: Speed
    kind: str
    placement: str
    policy: str
    cache_experts: int
    all_experts: int
    cache_bytes: int
    host_bytes: int
    disk_bytes: int
    wall: str
    shares: dict[str, float]  # of the time of a token that each tier takes: saved if it took none
    limit_tokens_per_s: float
    cache: CachePlan | None
    upgrades: tuple[Upgrade, ...]
    precisions: tuple[Precision, ...]
    llama_cpp: tuple[str, ...]
    vllm: tuple[str, ...]
    interval: errors.Interval
    notes: tuple[str, ...]

    @property
    def of_limit(self) -> float:
        """Share of the physical limit that is reached, by the cache where that is faster."""
        best = max(self.speed.tokens_per_s, self.cache.speed.tokens_per_s if self.cache else 0.0)
        return best / self.limit_tokens_per_s

    @property
    def better_precision(self) -> Precision | None:
        """The fastest lower precision that keeps the quality, if it is faster."""
        faster = [each for each in self.precisions if not each.loses_quality and each.times > 1]
        return max(faster, key=lambda each: each.tokens_per_s, default=None)

    def facts(self) -> dict[str, Any]:
        """Return all of it for JSON, tokens_per_s first."""
        values = asdict(self)
        speed, cache = values.pop("speed"), values["cache"]
        return {
            "tokens_per_s": speed["tokens_per_s"],
            "tokens_per_s_low": speed["low"],
            "tokens_per_s_high": speed["high"],
            **values,
            "cache": cache and {**cache.pop("speed"), **cache},
            "of_limit": self.of_limit,
            "better_precision": asdict(self.better_precision) if self.better_precision else None,
        }


def plan(
    model: str | Path,
    *,
    gpu_memory: str | None = None,
    host_memory: str | None = None,
    link: str | None = None,
    disk: str | None = None,
    cpu_bandwidth: str | None = None,
    context: int = CONTEXT,
    precision: str | None = None,
    gpu: str | None = None,
    gpu_bandwidth: str | None = None,
) -> Plan:
    """Return what `model`, a profile's name or a path, does on this machine, options as `moe-sim plan` takes them.

    All are texts, such as gpu_memory="12GiB" and link="pcie4x8", but context, a number of tokens.
    A model that does not fit at its published precision is planned at the highest one of at least 4 bits that does,
    unless `precision` names one. Raise InputError for an option that cannot be, and where the model does not fit.
    """
    machine = resources(gpu_memory, host_memory, link, disk, cpu_bandwidth, gpu, gpu_bandwidth)
    layout, notes = _layout(str(model), machine, context, precision)
    placement, own = placements.today(layout), rates(layout.machine, RUNTIME)
    seconds, _ = placement.simulated(own)
    shares, cache = _shares(placement, own, seconds), _cache(layout)
    kind = _kind(placement)
    return Plan(
        model=layout.profile.name,
        precision=layout.precision,
        context=layout.context,
        machine=described(layout.resources),
        speed=_speed(seconds, kind),
        kind=placement.kind,
        placement=_words(placement),
        policy=placement.policy,
        cache_experts=placement.gpu_experts,
        all_experts=layout.profile.moe_layers * layout.profile.experts,
        cache_bytes=layout.experts_bytes - layout.host_bytes if layout.on_gpu else 0,
        host_bytes=int(layout.host_bytes - layout.missing_bytes),
        disk_bytes=int(layout.missing_bytes),
        wall=max(shares, key=lambda tier: shares[tier]),
        shares=shares,
        limit_tokens_per_s=1 / _limit_s(layout),
        cache=cache,
        upgrades=_upgrades(layout, 1 / seconds, cache.way if cache else None),
        precisions=tuple(_at(each, 1 / seconds) for each in _lower(layout) if not each.lack),
        llama_cpp=tuple(flags.llama_cpp(layout)),
        vllm=tuple(flags.vllm(layout)),
        interval=errors.interval(kind),
        notes=(*notes, *layout.resources.assumed, *_notes(placement)),
    )


def quick(model: str, context: int = CONTEXT, precision: str | None = None, **machine: str) -> Speed:
    """Return what `plan` expects, and nothing else of it. Raise InputError likewise."""
    placement = placements.today(_layout(model, resources(**machine), context, precision)[0])
    return _speed(placement.simulated()[0], _kind(placement))


def _layout(text: str, machine: Resources, context: int, precision: str | None) -> tuple[Layout, list[str]]:
    """Return the model on the machine, and what to note about its precision. Raise InputError where it does not fit."""
    if context < 1:
        raise InputError(f"--context is {context}; a whole number of at least 1 is needed")
    layout = Layout(_model(text, precision), machine, context)
    lack = layout.lack
    lower = next((each for each in _lower(layout) if not each.lack), None) if lack else None
    if lower and not precision and not _loses_quality(lower):
        return lower, [f"{lower.precision}, since {lack}"]
    if lack:
        fits = f"; at --precision {lower.model.precision} it fits ({show_bytes(lower.total_bytes)})" if lower else ""
        raise InputError(lack + fits)
    return layout, []


def _model(text: str, precision: str | None) -> Model:
    """Return the model of a name or a path.

    Raise InputError with near names for one that is not known, and for an encoder-decoder: routing that stands in has
    every layer in each token, and an encoder's layers are in none that is decoded.
    """
    shipped = known(text) if text not in profiles.names("models") and not exists(expanded(text)) else None
    profile = shipped or model(text)
    if profile.encoder_moe_layers:
        raise InputError(f"{profile.name} is an encoder-decoder: plans are of models without an encoder")
    stated = canonical(precision) if precision else ""
    experts = stated or name_of(profile.expert_bytes_per_parameter)
    dense = "q8_0" if experts == MXFP4 and profile.dense_bytes_per_parameter > 1 else ""
    return Model(profile.name, shipped.name if shipped else text, stated, dense)


def _lower(layout: Layout) -> list[Layout]:
    models = [replace(layout.model, precision=name, dense_precision="") for name in PRECISIONS]
    layouts = [replace(layout, model=each) for each in models]
    return [each for each in layouts if each.experts_bytes < 0.97 * layout.experts_bytes]


def _loses_quality(layout: Layout) -> bool:
    profile = layout.profile
    return layout.experts_bytes < GOOD * profile.moe_layers * profile.experts * profile.expert_parameters


def _kind(placement: Placement) -> str:
    return errors.MOVING if placement.kind == DISK else errors.STATIC


def _speed(seconds: float, kind: str) -> Speed:
    each = errors.interval(kind)
    return Speed(1 / seconds, each.low / seconds, each.high / seconds)


def _words(placement: Placement) -> str:
    layout, L = placement.layout, placement.layout.profile.moe_layers
    if placement.kind in PLACES:
        return PLACES[placement.kind]
    experts, missing = show_bytes(layout.host_bytes), show_bytes(layout.missing_bytes)
    if not layout.on_gpu:
        return f"everything on the CPU; {missing} of {experts} of experts do not fit host memory: from the disk"
    return (
        f"attention, shared experts and the experts of {L - layout.host_layers} of {L} MoE layers on the GPU; "
        f"the experts of {layout.host_layers} layers ({experts}) computed by the CPU"
        + (f", {missing} of them not in host memory but on the disk" if layout.missing_bytes else "")
    )


def _notes(placement: Placement) -> list[str]:
    layout, notes = placement.layout, []
    if layout.model.dense_precision:
        notes.append(f"all but the experts is {layout.model.dense_precision}, as in the GGUF files of such models")
    if layout.resources.has_gpu and not layout.on_gpu:
        notes.append(
            f"the GPU is not used: its memory does not hold the dense part and the KV cache "
            f"({show_bytes(layout.fixed_bytes)}) beside {show_bytes(GPU_RESERVED)} for the runtime"
        )
    if placement.kind == DISK:
        notes.append(
            "reads past the page cache; through mmap (llama.cpp's default) a token took up to 4.3 times as long "
            "(replay/results/README.md)"
        )
        notes.append(f"how often experts are used again is taken from a trace of {placement.stand_in}")
    return notes


def _shares(placement: Placement, own: Rates, seconds: float) -> dict[str, float]:
    """Return what share of a token's time would be saved if a tier took none."""
    faster = {
        tier: replace(own, **{name: getattr(own, name) * FAST for name in names}) for tier, names in TIERS.items()
    }
    faster["link"] = replace(faster["link"], link_latency_us=0.0)
    faster["disk"] = replace(faster["disk"], disk_latency_us=0.0)
    faster["overheads of launches and hops"] = replace(own, **dict.fromkeys(OVERHEADS, 0.0))
    return {tier: max(0.0, 1 - placement.simulated(each)[0] / seconds) for tier, each in faster.items()}


def _cache(layout: Layout) -> CachePlan | None:
    simulated = [(placement, *placement.simulated()) for placement in placements.cached(layout)]
    if not simulated:
        return None
    placement, seconds, outcome = min(simulated, key=lambda each: each[1])
    split = placement.policy.endswith("/split")
    return CachePlan(
        speed=_speed(seconds, errors.MOVING),
        policy=POLICY + ("/split" if split else ""),
        placement="computed on the CPU or copied to the GPU, whichever is done first" if split else "copied to the GPU",
        experts=placement.gpu_experts,
        cache_bytes=min(int(layout.gpu_free), layout.experts_bytes),
        hit_rate=outcome.hit_rate,
        routing=placement.stand_in,
        way=placement.policy,
    )


def _limit_s(layout: Layout) -> float:
    """Return the seconds of a token at the physical limit: see the head of this file."""
    profile, machine, read = layout.profile, layout.resources, layout.fixed_bytes
    beyond = _belady(layout, layout.gpu_free if layout.on_gpu else layout.host_free)
    if not layout.on_gpu:
        disk_s = beyond / machine.disk_gb_per_s if beyond else 0.0
        return max((read + profile.token_bytes) / machine.host_gb_per_s, disk_s) / 1e9
    elsewhere = _belady(layout, layout.gpu_free + max(layout.host_free, 0.0))
    gpu, host = machine.gpu_gb_per_s, machine.host_reads
    own = profile.token_bytes - beyond
    if layout.host_free > 0:  # as much as the GPU reads while the host reads the rest, in the same time
        own = min(own, max(0.0, (gpu * profile.token_bytes - host * read) / (gpu + host)))
    times = [(read + own) / gpu, (profile.token_bytes - own) / host]
    return max(*times, elsewhere / machine.disk_gb_per_s if elsewhere else 0.0) / 1e9


def _belady(layout: Layout, capacity: float) -> float:
    """Return the bytes of experts a token that Belady's policy misses in so many bytes, over the stand-in routing."""
    if capacity >= layout.experts_bytes:
        return 0.0
    if capacity < layout.profile.top_k * layout.profile.expert_bytes:
        return layout.profile.token_bytes
    return placements.missed_bytes(layout, "belady", capacity)


def _upgrades(layout: Layout, speed: float, cached: str | None) -> tuple[Upgrade, ...]:
    upgrades = []
    for resource, (field, more, unit) in UNITS.items():
        if not getattr(layout.resources, field):
            continue
        grown = replace(layout, resources=layout.resources.with_more(**{field: more}))
        faster = 1 / placements.today(grown).simulated()[0]
        with_cache = [1 / each.simulated()[0] for each in placements.cached(grown) if each.policy == cached]
        upgrades.append(Upgrade(resource, unit, faster, faster / speed - 1, with_cache[0] if with_cache else None))
    return tuple(upgrades)


def _at(layout: Layout, speed: float) -> Precision:
    faster = 1 / placements.today(layout).simulated()[0]
    memory = "GPU memory" if not layout.host_layers else "GPU and host memory"
    memory = memory if layout.on_gpu else "host memory"
    return Precision(
        name=layout.model.precision,
        total_bytes=int(layout.total_bytes),
        fits=f"{memory} with the disk" if layout.missing_bytes else memory,
        tokens_per_s=faster,
        times=faster / speed,
        loses_quality=_loses_quality(layout),
    )
