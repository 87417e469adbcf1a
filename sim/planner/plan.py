"""The plan: what to expect, which tier is the wall, and what would help.

What is expected is what llama.cpp does with the printed flags (`placements.today`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from os.path import exists  # of any name, however long
from pathlib import Path
from typing import Any

from sim.planner import flags, placements, prefill
from sim.planner.calibration import OFF, Calibration
from sim.planner.placements import DISK, Layout, Placement
from sim.planner.resources import GIB, described, margins, resources, upgrades
from sim.prediction import errors
from sim.prediction.described import Machine, Model
from sim.prediction.machine import FITTED
from sim.profiles.hardware_profile import Hardware
from sim.quantities import show_bytes
from traces.errors import InputError
from traces.files import expanded
from traces.models.names import canonical, name_of, parted
from traces.models.profile import MODELS, is_gguf_file, model

CONTEXT = 8192
PROMPT = 2048

FULL = 0.9
"""Share of host memory from which on a plan says that it fills it."""

WIDE = 1.5
"""Times what an expert needs from which on a plan says that the system's read-ahead is too wide."""

SERVER = 256 * GIB
"""Host memory beyond which a machine may have several sockets."""

FAST = 1e6
"""A tier that is this much faster takes no time."""

TIERS: Mapping[str, tuple[str, ...]] = {
    "GPU memory": ("memory_bandwidth_gb_per_s", "compute_tflop_per_s"),
    "CPU and host memory": ("host_memory_bandwidth_gb_per_s", "host_compute_tflop_per_s"),
    "link": ("link_bandwidth_gb_per_s",),
    "disk": ("disk_bandwidth_gb_per_s",),
}
OVERHEADS = [name for name in FITTED.values() if name.startswith(("host_hop", "host_us", "framework"))]

PRECISIONS = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q3_k_m", "iq2_m")
FOUR = "q4_k_m"
WHOLE = 2.0
"""Bytes of a parameter from which on half of them give answers as good: a file is planned so, a model is not."""

CLOSE = 0.03
"""Shares of bytes by which two precisions are the same."""

MXFP4 = "mxfp4"
"""Of experts alone: the files that llama.cpp runs have Q8_0 for all else."""


@dataclass(frozen=True)
class Speed:
    """Tokens a second, and between what they lay on the machines of the back-test."""

    tokens_per_s: float
    low: float
    high: float


MATTERS = 1.02
"""Times between the slowest and the fastest that a fact may make a plan, from which on it is worth a word."""


@dataclass(frozen=True)
class AssumedFact:
    """A fact that is not stated: what is taken, what states it, and tokens a second over its range, and without it."""

    what: str
    option: str
    low: float
    high: float
    without: Speed  # the interval where it were stated

    @property
    def matters(self) -> bool:
        return self.high > MATTERS * self.low


@dataclass(frozen=True)
class CachePlan:
    """An expert cache in GPU memory, with the options of llama.cpp."""

    speed: Speed
    policy: str
    llama_cpp: str
    placement: str  # of misses
    experts: int
    cache_bytes: int
    hit_rate: float  # under LRU
    routing: str  # that stands in for the model's


@dataclass(frozen=True)
class Upgrade:
    """What somebody may buy, and the speed with it."""

    resource: str
    tokens_per_s: float
    gain: float


@dataclass(frozen=True)
class Precision:
    """The same plan at a lower precision."""

    name: str
    total_bytes: int
    fits: str
    from_disk: bool
    tokens_per_s: float
    times: float
    loses_quality: bool


@dataclass(frozen=True)
class Plan:
    """What a model does on a machine; `moe-sim plan` prints it."""

    model: str
    precision: str
    total_bytes: int  # of the model and its KV cache
    overruled: str  # what to say where that is not the stated one, or not the file's; empty where it is
    context: int
    machine: str
    speed: Speed  # with the options of llama_cpp, behind `context` tokens
    first_tokens_per_s: float  # of the first tokens of a context
    prompt: int  # tokens
    prompt_tokens_per_s: float  # of them, before the first token is decoded; no figure of the back-test supports it
    kind: str
    placement: str
    policy: str
    cache_experts: int
    all_experts: int
    cache_bytes: int
    host_bytes: int
    disk_bytes: int
    gpu_margin_bytes: int  # kept free
    host_margin_bytes: int
    wall: str
    shares: dict[str, float]  # of the time of a token that each tier takes: saved if it took none
    past_cache: Speed | None  # where experts are read from a disk, but not through mmap
    cache: CachePlan | None
    upgrades: tuple[Upgrade, ...]
    precisions: tuple[Precision, ...]
    llama_cpp: tuple[str, ...]
    llama_cpp_fit: str
    vllm: tuple[str, ...]
    interval: errors.Interval
    assumed: tuple[AssumedFact, ...]
    notes: tuple[str, ...]
    advice: tuple[str, ...]
    not_understood: tuple[str, ...]  # of the model's config or file, so that sizes may be wrong
    calibration: dict[str, float] | None

    @property
    def better_precision(self) -> Precision | None:
        """The next better precision, and what it costs: of more bits, the fastest."""
        better = [each for each in self.precisions if each.total_bytes > self.total_bytes]
        return max(better, key=lambda each: each.tokens_per_s, default=None)

    @property
    def fitting_precision(self) -> Precision | None:
        """The best one that memory holds, where it does not hold the planned one."""
        fitting = [each for each in self.precisions if self.disk_bytes and not each.from_disk]
        return max(fitting, key=lambda each: each.total_bytes, default=None)

    @property
    def faster_precision(self) -> Precision | None:
        """The fastest other precision that keeps the quality, where it is faster."""
        faster = [each for each in self.precisions if not each.loses_quality and each.times > 1]
        return max(faster, key=lambda each: each.tokens_per_s, default=None)

    def facts(self) -> dict[str, Any]:
        values = asdict(self)
        speed = values.pop("speed")
        cache = values["cache"] and {**values["cache"].pop("speed"), **values["cache"]}
        return {
            "tokens_per_s": speed["tokens_per_s"],
            "tokens_per_s_low": speed["low"],
            "tokens_per_s_high": speed["high"],
            **values,
            "cache": cache,
            "better_precision": asdict(self.better_precision) if self.better_precision else None,
            "faster_precision": asdict(self.faster_precision) if self.faster_precision else None,
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
    prompt: int = PROMPT,
    precision: str | None = None,
    gpu: str | None = None,
    gpu_bandwidth: str | None = None,
    threads: int | None = None,
    unified: bool = False,
    cpu: str | None = None,
) -> Plan:
    """Return what `model`, a profile's name or a path, does on this machine, options as `moe-sim plan` takes them.

    All are texts, such as gpu_memory="12GiB" and link="pcie4x8", but context and prompt, numbers of tokens, threads,
    and unified, whether CPU and GPU share host_memory. Several GPUs are a list: gpu="RTX 3090, RTX 3060".
    Unless `precision` names one, a model is planned at the fastest precision of 4 bits and more, the published one
    among them. Raise InputError for an option that cannot be, and where the model does not fit.
    """
    machine = resources(gpu_memory, host_memory, link, disk, cpu_bandwidth, gpu, gpu_bandwidth, threads, unified, cpu)
    layout, notes = chosen(str(model), machine, context, precision)
    return of_layout(layout, notes, prompt)


def of_layout(layout: Layout, notes: Sequence[str], prompt: int, calibration: Calibration | None = None) -> Plan:
    """Return the plan of a model on a machine. Of a calibration the expected speed is; all else is scaled by it."""
    placement, own = placements.today(layout), layout.hardware
    shares, cache, past_cache = saved(placement, own), _cache(layout), partial(placements.today, mmap=False)
    gpu_margin, host_margin = margins(layout.machine)
    kind, (speed, assumed) = errors.class_of(placement.slowest), expected(placement)
    modelled, times, first_s = speed.tokens_per_s, 1.0, placement.at(context=1).seconds(own)
    if calibration:
        first_s = calibration.seconds(layout.host_layers, layout.on_gpu, 1)
        seconds = calibration.seconds(layout.host_layers, layout.on_gpu, layout.context)
        speed, times = Speed(1 / seconds, (1 - OFF) / seconds, (1 + OFF) / seconds), 1 / seconds / modelled
        assumed = ()
    return Plan(
        model=layout.profile.name,
        precision=layout.precision,
        total_bytes=int(layout.total_bytes),
        overruled=_overruled(layout),
        context=layout.context,
        machine=described(layout.machine),
        speed=speed,
        first_tokens_per_s=1 / first_s,
        prompt=prompt,
        prompt_tokens_per_s=prompt / prefill.seconds(layout, prompt),
        kind=placement.kind,
        placement=_words(placement),
        policy=placement.policy,
        cache_experts=placement.gpu_experts,
        all_experts=layout.profile.moe_layers * layout.profile.experts,
        cache_bytes=layout.experts_bytes - layout.host_bytes if layout.on_gpu else 0,
        host_bytes=int(layout.host_bytes - layout.missing_bytes),
        disk_bytes=int(layout.missing_bytes),
        gpu_margin_bytes=gpu_margin,
        host_margin_bytes=host_margin,
        wall=max(shares, key=lambda tier: shares[tier]),
        shares=shares,
        past_cache=expected(past_cache(layout), past_cache)[0] if placement.kind == DISK else None,
        cache=cache and replace(cache, speed=Speed(*(each * times for each in vars(cache.speed).values()))),
        upgrades=_upgrades(layout, modelled, times),
        precisions=tuple(_at(each, modelled, times) for each in _others(layout) if not each.lack),
        llama_cpp=tuple(flags.llama_cpp(layout)),
        llama_cpp_fit=flags.fitted(layout),
        vllm=tuple(flags.vllm(layout)),
        interval=errors.interval(kind),
        assumed=assumed,
        notes=(*notes, *_notes(placement)),
        advice=tuple(_advice(layout)),
        not_understood=layout.profile.notes,
        calibration=calibration.facts() if calibration else None,
    )


def expected(
    placement: Placement, again: Callable[[Layout], Placement] = placements.today, kind: str = ""
) -> tuple[Speed, tuple[AssumedFact, ...]]:
    """Return the speed with its interval, and what is assumed.

    again: makes the placement on another machine; kind: the class of its errors, if not that of the machine.
    """
    seconds, each = placement.seconds(), errors.interval(kind or errors.class_of(placement.slowest))
    facts = placement.assumed

    def otherwise(fields: Mapping[str, Any]) -> float:
        layout = placement.layout.changed(fields)
        return seconds if layout.lack else again(layout).seconds()

    spreads = [errors.effect(fact, seconds, otherwise) for fact in facts]

    def speed(some: Sequence[errors.Spread]) -> Speed:
        within = each.with_spread(errors.together(some))
        return Speed(1 / seconds, within.low / seconds, within.high / seconds)

    named = tuple(
        AssumedFact(
            fact.what,
            fact.option,
            math.exp(-one.slower) / seconds,
            math.exp(one.faster) / seconds,
            speed([other for other in spreads if other is not one]),
        )
        for fact, one in zip(facts, spreads, strict=True)
    )
    return speed(spreads), named


class TooSmallError(InputError):
    """A machine holds a model at no precision that keeps the quality. fits: the best one that it holds, if any."""

    def __init__(self, text: str, fits: Layout | None = None) -> None:
        at = f"; at --precision {fits.model.precision} it fits ({show_bytes(fits.total_bytes)})" if fits else ""
        super().__init__(text + at)
        self.fits = fits and fits.model.precision


def chosen(text: str, machine: Machine, context: int, precision: str | None) -> tuple[Layout, list[str]]:
    """Return the model on the machine, and notes on its precision. Raise TooSmallError where it does not fit.

    A file, and the precision that is stated or that a file's name says, are planned as they are.
    """
    layout = Layout(_model(text, precision), machine, context)
    if layout.model.precision or is_gguf_file(text) or layout.profile.layer_expert_bytes:
        if layout.lack:
            raise TooSmallError(layout.lack, _fitting(layout))
        return layout, []
    good = [each for each in _good(layout) if not each.lack]
    if not good:
        raise TooSmallError(layout.lack, _fitting(layout))
    fastest = min(good, key=lambda each: placements.today(each).seconds())
    if fastest is layout:
        return layout, [f"{layout.precision}, as the model is published (--precision)"]
    return fastest, [f"{fastest.precision}, the fastest of those that keep the quality, 4 bits and more (--precision)"]


def _good(layout: Layout) -> list[Layout]:
    """Return the layout as its model is published and at precisions below that keep the quality, smallest last."""
    lower = [each for each in _lower(layout) if not each.loses_quality]
    is_whole = layout.profile.expert_width >= WHOLE and not layout.profile.precisions
    return lower if is_whole and lower else [layout, *lower]


def _fitting(layout: Layout) -> Layout | None:
    return next((each for each in _lower(layout) if not each.lack), None)


def chosen_or_smaller(text: str, machine: Machine, context: int, precision: str | None) -> tuple[Layout, list[str]]:
    """Return `chosen`, or, where none is stated and none of 4 bits fits, the model at the best that does."""
    try:
        return chosen(text, machine, context, precision)
    except TooSmallError as error:
        if precision or not error.fits:
            raise
        return chosen(text, machine, context, error.fits)


def _model(text: str, precision: str | None) -> Model:
    """Return the model of a name or a path.

    Raise InputError with near names for an unknown one, and for an encoder-decoder, for which no routing stands in.
    """
    profile = model(text)
    if profile.encoder_moe_layers:
        raise InputError(f"{profile.name} is an encoder-decoder: plans are of models without an encoder")
    shipped = profile.name in MODELS.names() and not exists(expanded(text))
    stated = canonical(precision) if precision else parted(text)[1] if shipped else ""
    profile = model(profile.name) if shipped else profile
    if is_gguf_file(text) and stated == profile.precision:  # whose own sizes are better than the precision's
        stated = ""
    experts = stated if stated and not profile.precisions else name_of(profile.expert_bytes_per_parameter)
    measured = is_gguf_file(text) and not stated  # what is not an expert has the bytes of its own tensors
    dense = "q8_0" if experts == MXFP4 and profile.dense_bytes_per_parameter > 1 and not measured else ""
    return Model(profile.name, profile.name if shipped else text, stated, dense)


def _overruled(layout: Layout) -> str:
    """Return what there is to say where the planned precision is not the stated one, or not the file's."""
    stated, published = layout.model.precision, model(layout.model.profile)
    if stated and published.precisions and stated not in published.precisions:
        has = ", ".join(published.precisions)
        return f"All files of {published.name} have experts at {has}, whatever their names say: none at {stated}."
    if stated and is_gguf_file(layout.model.profile):
        return f"{layout.model.profile} is {published.precision}: llama-quantize makes the file of this plan of it."
    return ""


def _lower(layout: Layout) -> list[Layout]:
    return [each for each in map(layout.at, PRECISIONS) if each.experts_bytes < (1 - CLOSE) * layout.experts_bytes]


def _others(layout: Layout) -> list[Layout]:
    """Return the model at other precisions, of more bits and of fewer; of published ones alone where it has such."""
    if is_gguf_file(layout.model.profile) and not layout.model.precision:
        return _lower(layout)
    others = map(layout.at, layout.profile.precisions or PRECISIONS)
    return [each for each in others if abs(each.experts_bytes / layout.experts_bytes - 1) > CLOSE]


def _words(placement: Placement) -> str:
    layout, L = placement.layout, placement.layout.profile.moe_layers
    if placement.kind == placements.RESIDENT:
        return "everything on the GPU"
    if placement.kind == placements.CPU:
        return "everything on the CPU, in host memory"
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
    if layout.machine.gpus and not layout.on_gpu and not layout.machine.unified:
        notes.append(
            f"the GPU is not used: its memory does not hold the dense part and the KV cache "
            f"({show_bytes(layout.fixed_bytes)}) beside {show_bytes(margins(layout.machine)[0])} for the runtime "
            f"and a desktop"
        )
    if placement.kind == DISK:
        notes.append(
            f"llama.cpp reads through mmap, {layout.hardware.read_ahead_kib:g} KiB at a missing page (read_ahead_kb)"
        )
    return notes


def _advice(layout: Layout) -> list[str]:
    machine, said = layout.machine, []
    if layout.loses_quality:
        four = layout.at(FOUR)
        lacks = f": {show_bytes(four.more_bytes)} more memory would hold {FOUR}" if four.missing_bytes else ""
        said.append(f"Below 4 bits answers get noticeably worse{lacks}.")
    held = layout.gpu_needs if machine.unified else layout.host_bytes if layout.on_gpu else layout.total_bytes
    share = held / machine.host_memory if machine.host_memory and not layout.missing_bytes else 0.0
    if share > FULL:
        said.append(
            f"It takes {share:.0%} of the memory: close other programs, or take fewer bits or a shorter context."
        )
    if machine.unified and layout.on_gpu:
        wired = math.ceil(layout.gpu_needs / 2**20 / 1024) * 1024
        said.append(
            f"On a Mac the GPU may use {machine.gpu_memory / machine.host_memory:.0%} of the memory "
            f"(sudo sysctl iogpu.wired_limit_mb={wired} changes that); MLX (mlx_lm.server) runs such models too."
        )
    if layout.missing_bytes and (more := layout.hardware.mapped_more(layout.profile)) > WIDE:
        said.append(
            f"The system reads {layout.hardware.read_ahead_kib:g} KiB of the file at a missing page, {more:.1f} times "
            f"what an expert needs: blockdev --setra 256 on the disk makes it 128."
        )
    if (accepted := placements.break_even(layout)) is not None:
        pays = f"where more than {accepted:.0%} of drafts are accepted" if accepted < 1 else "with no share of drafts"
        said.append(f"Speculation (--spec-type draft-mtp, a file with its MTP layers) pays {pays}.")
    if not machine.unified and machine.host_memory > SERVER and layout.host_bytes:
        said.append("On several sockets add --numa distribute.")
    return said


def saved(placement: Placement, own: Hardware) -> dict[str, float]:
    """Return what share of a token's time would be saved if a tier took none."""
    there = {"GPU memory": placement.layout.on_gpu, "link": placement.layout.on_gpu, "disk": placement.kind == DISK}
    faster: dict[str, dict[str, Any]] = {
        tier: {name: getattr(own, name) * FAST for name in names}
        for tier, names in TIERS.items()
        if there.get(tier, True)
    }
    for tier in faster.keys() & {"link", "disk"}:
        faster[tier] |= {f"{tier}_latency_us": 0.0} | ({"page_fault_us": 0.0} if tier == "disk" else {})
    faster["overheads of launches and hops"] = dict.fromkeys(OVERHEADS, 0.0)
    seconds, shares = placement.seconds(own), dict.fromkeys(TIERS, 0.0)
    took = {tier: placement.seconds(replace(own, **changed)) for tier, changed in faster.items()}
    return shares | {tier: max(0.0, 1 - each / seconds) for tier, each in took.items()}


def _cache(layout: Layout) -> CachePlan | None:
    """Return llama.cpp's expert cache; None where it would hold nothing. No row of the back-test times it."""
    placement = placements.cached(layout)
    if not placement:
        return None
    _, outcome = placement.simulated()
    speed, _ = expected(
        placement, lambda other: placements.cached(other) or placements.today(other), kind=errors.UNKNOWN
    )
    return CachePlan(
        speed=speed,
        policy=placement.policy,
        llama_cpp=flags.with_cache(placement),
        placement="copied to the GPU",
        experts=placement.gpu_experts,
        cache_bytes=placement.cache_bytes,
        hit_rate=outcome.hit_rate,
        routing=placement.stand_in,
    )


def _upgrades(layout: Layout, speed: float, times: float) -> tuple[Upgrade, ...]:
    """Return what each would buy at this precision; times: as many times as fast as modelled the machine is."""
    bought = []
    for resource, machine in upgrades(layout.machine).items():
        faster = 1 / placements.today(replace(layout, machine=machine)).seconds()
        bought.append(Upgrade(resource, faster * times, faster / speed - 1))
    return tuple(bought)


def _at(layout: Layout, speed: float, times: float) -> Precision:
    faster = 1 / placements.today(layout).seconds()
    memory = "GPU memory" if not layout.host_layers else "GPU and host memory"
    memory = memory if layout.on_gpu else "host memory"
    return Precision(
        name=layout.model.precision,
        total_bytes=int(layout.total_bytes),
        fits=f"{memory} with the disk" if layout.missing_bytes else memory,
        from_disk=bool(layout.missing_bytes),
        tokens_per_s=faster * times,
        times=faster / speed,
        loses_quality=layout.loses_quality,
    )
