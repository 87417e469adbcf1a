"""The plan: what to expect, which tier is the wall, how far the physical limit is, and what would help.

What is expected is what compiled runtimes have flags for today (`ways.today`); an expert cache is set beside it. The
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
from sim.planner import errors, flags, ways
from sim.planner.resources import GPU_RESERVED, Resources, described, resources
from sim.planner.ways import DISK, RUNTIME, Fit, Way
from sim.profiles.model_profile import known, model
from sim.profiles.precision import canonical, name_of
from sim.quantities import show_bytes
from traces.errors import InputError
from traces.facts import text as text_of
from traces.facts import whole
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
"""Resources by name: their field of Resources, a unit more, and how to say it."""

PRECISIONS = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q3_k_m", "iq2_m")
GOOD = 4.0 / 8
"""Bytes of a parameter below which answers get noticeably worse."""

MXFP4 = "mxfp4"
"""Of experts alone: the files that llama.cpp runs have Q8_0 for all else."""

POLICY = "eamc-blend"
"""To be recommended where there is a cache. Times are of LRU, which the stand-in routing is made for."""

PLACES = {
    ways.RESIDENT: "everything on the GPU",
    ways.CPU: "everything on the CPU, in host memory",
}


_STAND_IN = "how often experts are used again is taken from a trace of {}"


@dataclass(frozen=True)
class Speed:
    """Tokens a second of a way, and between what it lay on the machines of the back-test."""

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
        found = [each for each in self.precisions if not each.loses_quality and each.times > 1]
        return max(found, key=lambda each: each.tokens_per_s, default=None)

    def facts(self) -> dict[str, Any]:
        """Return all of it for JSON, tokens_per_s first."""
        held = asdict(self)
        speed = held.pop("speed")
        cache = held["cache"]
        return {
            "tokens_per_s": speed["tokens_per_s"],
            "tokens_per_s_low": speed["low"],
            "tokens_per_s_high": speed["high"],
            **held,
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
    return _planned(*_fit(str(model), machine, context, precision))


def quick(model: str, context: int = CONTEXT, precision: str | None = None, **machine: str) -> Speed:
    """Return what `plan` expects, and nothing else of it. Raise InputError likewise."""
    way = ways.today(_fit(model, resources(**machine), context, precision)[0])
    return _speed(way.play()[0], _kind(way))


def _fit(model: str, machine: Resources, context: int, precision: str | None) -> tuple[Fit, list[str]]:
    """Return the model on the machine, and what to note about its precision. Raise InputError where it does not fit."""
    fit = Fit(_model(model, precision), machine, whole("--context", context))
    try:
        fit.require()
    except InputError as error:
        lower = [each for each in _lower(fit) if _fits(each)]
        if not lower:
            raise
        first = lower[0]
        if precision or _loses_quality(first):
            advice = f"at --precision {first.model.precision} it fits ({show_bytes(first.total_bytes)})"
            raise InputError(f"{error}; {advice}") from None
        return first, [f"{first.precision}, since {error}"]
    return fit, []


def _model(text: str, precision: str | None) -> Model:
    """Return the model of a name or a path.

    Raise InputError with near names for one that is not known, and for an encoder-decoder: routing that stands in has
    every layer in each token, and an encoder's layers are in none that is decoded.
    """
    shipped = known(text) if text not in profiles.names("models") and not exists(expanded(text)) else None
    profile = shipped or model(text)
    if profile.encoder_moe_layers:
        raise InputError(f"{profile.name} is an encoder-decoder: plans are of models without an encoder")
    stated = canonical(text_of("--precision", precision)) if precision else ""
    experts = stated or name_of(profile.expert_bytes_per_parameter)
    dense = "q8_0" if experts == MXFP4 and profile.dense_bytes_per_parameter > 1 else ""
    return Model(profile.name, shipped.name if shipped else text, stated, dense)


def _fits(fit: Fit) -> bool:
    try:
        fit.require()
    except InputError:
        return False
    return True


def _lower(fit: Fit) -> list[Fit]:
    """Return the same at lower precisions, the highest first."""
    found = [replace(fit, model=replace(fit.model, precision=name, dense_precision="")) for name in PRECISIONS]
    return [each for each in found if each.experts_bytes < 0.97 * fit.experts_bytes]


def _loses_quality(fit: Fit) -> bool:
    profile = fit.profile
    return fit.experts_bytes < GOOD * profile.moe_layers * profile.experts * profile.expert_parameters


def _planned(fit: Fit, notes: list[str]) -> Plan:
    way = ways.today(fit)
    own = rates(fit.machine, RUNTIME)
    seconds, _ = way.play(own)
    shares = _shares(way, own, seconds)
    cache = _cache(fit)
    return Plan(
        model=fit.profile.name,
        precision=fit.precision,
        context=fit.context,
        machine=described(fit.resources),
        speed=_speed(seconds, _kind(way)),
        kind=way.kind,
        placement=_placement(way),
        policy=way.policy,
        cache_experts=way.gpu_experts,
        all_experts=fit.profile.moe_layers * fit.profile.experts,
        cache_bytes=fit.experts_bytes - fit.host_bytes if fit.on_gpu else 0,
        host_bytes=int(fit.host_bytes - fit.missing_bytes),
        disk_bytes=int(fit.missing_bytes),
        wall=max(shares, key=lambda tier: shares[tier]),
        shares=shares,
        limit_tokens_per_s=1 / _limit_s(fit),
        cache=cache,
        upgrades=_upgrades(fit, 1 / seconds, cache.way if cache else None),
        precisions=tuple(_at(each, 1 / seconds) for each in _lower(fit) if _fits(each)),
        llama_cpp=tuple(flags.llama_cpp(way)),
        vllm=tuple(flags.vllm(fit)),
        interval=errors.interval(_kind(way)),
        notes=(*notes, *fit.resources.assumed, *_notes(fit, way)),
    )


def _kind(way: Way) -> str:
    return errors.MOVING if way.kind == DISK else errors.STATIC


def _speed(seconds: float, kind: str) -> Speed:
    each = errors.interval(kind)
    return Speed(1 / seconds, each.low / seconds, each.high / seconds)


def _placement(way: Way) -> str:
    fit, L = way.fit, way.fit.profile.moe_layers
    if way.kind in PLACES:
        return PLACES[way.kind]
    held = f"{show_bytes(fit.host_bytes)} of experts"
    if not fit.on_gpu:
        return f"everything on the CPU; {show_bytes(fit.missing_bytes)} of {held} do not fit host memory: from the disk"
    text = (
        f"attention, shared experts and the experts of {L - fit.host_layers} of {L} MoE layers on the GPU; "
        f"the experts of {fit.host_layers} layers ({show_bytes(fit.host_bytes)}) computed by the CPU"
    )
    if fit.missing_bytes:
        return f"{text}, {show_bytes(fit.missing_bytes)} of them not in host memory but on the disk"
    return text


def _notes(fit: Fit, way: Way) -> list[str]:
    found = []
    if fit.model.dense_precision:
        found.append(f"all but the experts is {fit.model.dense_precision}, as in the GGUF files of such models")
    if fit.resources.has_gpu and not fit.on_gpu:
        found.append(
            f"the GPU is not used: its memory does not hold the dense part and the KV cache "
            f"({show_bytes(fit.fixed_bytes)}) beside {show_bytes(GPU_RESERVED)} for the runtime"
        )
    if way.kind == DISK:
        found.append(
            "reads past the page cache; through mmap (llama.cpp's default) a token took up to 4.3 times as long "
            "(replay/results/README.md)"
        )
        found.append(_STAND_IN.format(way.stand_in))
    return found


def _shares(way: Way, own: Rates, seconds: float) -> dict[str, float]:
    """Return what share of a token's time would be saved if a tier took none."""
    faster = {
        tier: replace(own, **{name: getattr(own, name) * FAST for name in names}) for tier, names in TIERS.items()
    }
    faster["link"] = replace(faster["link"], link_latency_us=0.0)
    faster["disk"] = replace(faster["disk"], disk_latency_us=0.0)
    faster["overheads of launches and hops"] = replace(own, **dict.fromkeys(OVERHEADS, 0.0))
    return {tier: max(0.0, 1 - way.play(each)[0] / seconds) for tier, each in faster.items()}


def _cache(fit: Fit) -> CachePlan | None:
    played = [(way, *way.play()) for way in ways.cached(fit)]
    if not played:
        return None
    way, seconds, log = min(played, key=lambda each: each[1])
    split = way.policy.endswith("/split")
    return CachePlan(
        speed=_speed(seconds, errors.MOVING),
        policy=POLICY + ("/split" if split else ""),
        placement="computed on the CPU or copied to the GPU, whichever is done first" if split else "copied to the GPU",
        experts=way.gpu_experts,
        cache_bytes=min(int(fit.gpu_room), fit.experts_bytes),
        hit_rate=log.hit_rate,
        routing=way.stand_in,
        way=way.policy,
    )


def _limit_s(fit: Fit) -> float:
    """Return the seconds of a token at the physical limit: see the head of this file."""
    profile, machine = fit.profile, fit.resources
    read = fit.fixed_bytes
    if not fit.on_gpu:
        elsewhere = _belady(fit, fit.host_room)
        disk_s = elsewhere / machine.disk_gb_per_s if elsewhere else 0.0
        return max((read + profile.token_bytes) / machine.host_gb_per_s, disk_s) / 1e9
    beyond = _belady(fit, fit.gpu_room)
    elsewhere = _belady(fit, fit.gpu_room + max(fit.host_room, 0.0))
    gpu, host = machine.gpu_gb_per_s, machine.host_reads
    own = profile.token_bytes - beyond
    if fit.host_room > 0:  # as much as the GPU reads while the host reads the rest, in the same time
        own = min(own, max(0.0, (gpu * profile.token_bytes - host * read) / (gpu + host)))
    times = [(read + own) / gpu, (profile.token_bytes - own) / host]
    return max(*times, elsewhere / machine.disk_gb_per_s if elsewhere else 0.0) / 1e9


def _belady(fit: Fit, room: float) -> float:
    """Return the bytes of experts a token that Belady's policy misses in so many bytes, over the stand-in routing."""
    if room >= fit.experts_bytes:
        return 0.0
    if room < fit.profile.top_k * fit.profile.expert_bytes:
        return fit.profile.token_bytes
    return ways.missed_bytes(fit, "belady", room)


def _upgrades(fit: Fit, speed: float, cached: str | None) -> tuple[Upgrade, ...]:
    found = []
    for resource, (field, more, unit) in UNITS.items():
        if not getattr(fit.resources, field):
            continue
        grown = replace(fit, resources=fit.resources.with_more(**{field: more}))
        faster = 1 / ways.today(grown).play()[0]
        with_cache = [1 / way.play()[0] for way in ways.cached(grown) if way.policy == cached]
        found.append(Upgrade(resource, unit, faster, faster / speed - 1, with_cache[0] if with_cache else None))
    return tuple(found)


def _at(fit: Fit, speed: float) -> Precision:
    faster = 1 / ways.today(fit).play()[0]
    where = (
        "GPU memory" if fit.on_gpu and not fit.host_layers else "GPU and host memory" if fit.on_gpu else "host memory"
    )
    return Precision(
        name=fit.model.precision,
        total_bytes=int(fit.total_bytes),
        fits=f"{where} with the disk" if fit.missing_bytes else where,
        tokens_per_s=faster,
        times=faster / speed,
        loses_quality=_loses_quality(fit),
    )
