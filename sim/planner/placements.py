"""What fits where, and the placements with which a model may run on a machine.

A placement states where each part of a model lies and who computes it, as a setting of the back-test. The embedding is
in host memory: a lookup needs no bandwidth.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from policies.core.systems import system_of
from sim.catalogue.parts import Gpu
from sim.planner.resources import GIB, HOST_RESERVED, margins, reserved
from sim.prediction import errors
from sim.prediction.case import Case, Outcome
from sim.prediction.described import Assumed, Machine, Model, Row, Setting
from sim.prediction.machine import hardware_of
from sim.prediction.model import profile_of
from sim.profiles.hardware_profile import Hardware
from sim.quantities import show_bytes
from traces.models.names import name_of
from traces.models.profile import LayerKind, ModelProfile

TOKENS = 12
"""Decoded tokens that are simulated where a cache is; where nothing moves, one is like another."""

RESIDENT, SPLIT, CPU, CACHE, DISK = "resident", "split", "cpu", "cache", "disk"
"""Kinds of placements: all on the GPU; experts of whole layers on the CPU; all on the CPU; an expert cache in GPU
memory over host memory; anything that reads experts from the disk."""

GOOD = 4.0 / 8
"""Bytes of a parameter below which answers get noticeably worse."""

RUNTIME = "llama.cpp"
"""Whose overheads count: those of a compiled runtime."""


@dataclass(frozen=True)
class Layout:
    """A model on a machine: what lies where, in bytes."""

    model: Model
    machine: Machine
    context: int
    misses: float = 1.0  # times those of the routing that stands in

    def changed(self, fields: Mapping[str, Any]) -> "Layout":
        """Return the layout with other values of what is assumed: of its machine, or of the misses."""
        if "misses" in fields:
            return replace(self, **fields)
        return replace(self, machine=replace(self.machine, **fields))

    @cached_property
    def profile(self) -> ModelProfile:
        return profile_of(self.model)

    @cached_property
    def layer_bytes(self) -> list[int]:
        """Of all experts of each layer."""
        return [self.profile.bytes_of(layer) * self.profile.experts for layer in range(self.profile.moe_layers)]

    @property
    def experts_bytes(self) -> int:
        return sum(self.layer_bytes)

    @property
    def fixed_bytes(self) -> float:
        """Of what a token reads beside experts, and of the KV cache."""
        return self.profile.dense_bytes - self.profile.head_bytes + self.profile.kv_cache_bytes(self.context)

    @property
    def total_bytes(self) -> float:
        return self.experts_bytes + self.fixed_bytes + self.profile.head_bytes

    @property
    def gpu_free(self) -> float:
        """Bytes of GPU memory for experts; below 0 where not even the rest fits."""
        return self.machine.gpu_memory - sum(reserved(self.machine)) - self.fixed_bytes

    @property
    def gpu_needs(self) -> float:
        """Bytes of GPU memory that the model takes where all of it is there, with what is kept free."""
        return self.experts_bytes + self.fixed_bytes + sum(reserved(self.machine))

    @property
    def on_gpu(self) -> bool:
        """Whether the GPU computes attention and all else beside experts; of unified memory, experts too."""
        needed = self.experts_bytes if self.machine.unified else 0
        return bool(self.machine.gpus) and self.gpu_free >= needed and bool(self._split)

    @property
    def computing(self) -> Machine:
        """The machine as a row takes it: GPUs that take turns are as one, by the bytes that a token reads."""
        if not self.on_gpu:
            return replace(self.machine, gpus=())
        read, last = [0.0] * len(self.machine.gpus), self.layers_by_gpu
        for layer, size in enumerate(self._read_bytes):
            gpu = next(i for i in range(len(last)) if layer < sum(last[: i + 1]))
            read[gpu] += size
        gpus = list(zip(read, self.machine.gpus, strict=True))
        seconds = sum(size / gpu.gb_per_s for size, gpu in gpus)
        known = all(gpu.tflop_per_s for gpu in self.machine.gpus)
        flop_s = sum(size / gpu.tflop_per_s for size, gpu in gpus) if known else 0.0
        one = Gpu(sum(read) / seconds, sum(read) / flop_s if flop_s else 0.0, kind=self.machine.gpus[0].kind)
        return replace(self.machine, gpus=(one,))

    @property
    def hardware(self) -> Hardware:
        return hardware_of(self.computing, system_of(RUNTIME), self.profile)

    @property
    def host_free(self) -> float:
        """Bytes of host memory for experts."""
        kept = self.profile.head_bytes + (0 if self.on_gpu else self.fixed_bytes)
        return self.machine.host_memory - HOST_RESERVED - kept if self.machine.host_memory else 0.0

    @cached_property
    def host_layers(self) -> int:
        """MoE layers whose experts are not on a GPU: the first ones, as few as can be."""
        return self._split[0] if self.on_gpu and self._split else self.profile.moe_layers

    @property
    def layers_by_gpu(self) -> tuple[int, ...]:
        """Layers of the file that each GPU has, the vocabulary matmul counted as one more."""
        return self._split[1] if self._split else ()

    @cached_property
    def _split(self) -> tuple[int, tuple[int, ...]] | None:
        """Return the layers whose experts the host has, and those of each GPU; None where nothing fits."""
        kept = [self._kept(kind) for kind in self.profile.order]
        rest = self.fixed_bytes - sum(kept)  # the vocabulary matmul, on the last GPU
        for n in range(self.profile.moe_layers + 1):
            here = kept.copy()
            for layer, place in enumerate(self.profile.places):
                here[place] += self.layer_bytes[layer] if layer >= n else 0
            if counts := self._filled([*here, rest]):
                return n, counts
        return None

    def _filled(self, sizes: list[float]) -> tuple[int, ...]:
        """Return how many of these layers each GPU takes, each filled before the next; empty where they do not fit."""
        gpus, counts = zip(self.machine.gpus, reserved(self.machine), strict=True), list[int]()
        free = -1.0
        for size in sizes:
            while size > free:
                if not (gpu := next(gpus, None)):
                    return ()
                free = gpu[0].memory_gib * GIB - gpu[1]
                counts.append(0)
            free -= size
            counts[-1] += 1
        return tuple(counts + [0] * (len(self.machine.gpus) - len(counts)))

    def _kept(self, kind: LayerKind) -> float:
        """Return the bytes of a layer and of its part of the KV cache, routed experts aside."""
        profile = self.profile
        cache = kind.kept(self.context) * profile.kv_bytes_per_value + kind.state
        return kind.parameters * profile.dense_bytes_per_parameter + cache

    @property
    def _read_bytes(self) -> list[float]:
        """Of each layer of the file and of the vocabulary matmul, as far as GPUs read them for a token."""
        profile, read = self.profile, [self._kept(kind) for kind in self.profile.order]
        for layer, place in enumerate(profile.places):
            read[place] += profile.top_k * profile.bytes_of(layer) if layer >= self.host_layers else 0
        return [*read, profile.head_bytes]

    @property
    def host_bytes(self) -> int:
        return sum(self.layer_bytes[: self.host_layers])

    @property
    def missing_bytes(self) -> float:
        """Bytes by which GPU and host memory are too small together; 0: it fits."""
        return max(0.0, self.host_bytes - max(self.host_free, 0.0)) if self.host_layers else 0.0

    @property
    def cached_layers(self) -> int:
        """First layers of whose experts an expert cache holds some: as many as host memory holds, the rest stays."""
        free, layers = self.host_free, 0
        for size in self.layer_bytes:
            if size > free and not self.missing_bytes:
                break
            free, layers = free - size, layers + 1
        return layers

    @property
    def more_bytes(self) -> float:
        """Bytes of host memory with which the model fits."""
        if self.machine.host_memory:
            return self.missing_bytes + max(0.0, -self.host_free)
        return self.host_bytes + HOST_RESERVED + self.profile.head_bytes

    @property
    def lack(self) -> str:
        """What is missing where the machine cannot run the model at all, and what to do; empty where it can."""
        profile, machine, kv_cache = self.profile, self.machine, f"the KV cache of {self.context:,} tokens"
        if not self.on_gpu and not machine.host_memory:
            return (
                f"{show_bytes(machine.gpu_memory)} of GPU memory do not hold the dense part of {profile.name} and "
                f"{kv_cache} ({show_bytes(self.fixed_bytes)}) beside {show_bytes(sum(reserved(machine)))} for the "
                f"runtime and a desktop: {show_bytes(-self.gpu_free)} are missing, or --host-memory for a run on the "
                "CPU"
            )
        least = profile.top_k * profile.expert_bytes * 2
        if not self.missing_bytes or (machine.disk_reads and machine.host_memory and self.host_free >= least):
            return ""
        if machine.disk_reads and machine.host_memory:
            return (
                f"{show_bytes(machine.host_memory)} of host memory do not hold what {profile.name} needs there "
                f"beside experts ({show_bytes(machine.host_memory - self.host_free)}) and {show_bytes(least)} of "
                f"them: {show_bytes(least - self.host_free)} are missing"
            )
        disk = " or --disk 3GB/s to read the rest from" if machine.host_memory else ""
        memory = -(-int(machine.host_memory + self.more_bytes) // 2**30)
        return (
            f"{profile.name} at {self.precision} and {kv_cache} have {show_bytes(self.total_bytes)}, the machine "
            f"{show_bytes(machine.gpu_memory * (not machine.unified) + machine.host_memory)}, of which "
            f"{show_bytes(sum(margins(machine)))} are kept free: {show_bytes(self.more_bytes)} are missing; give "
            f"--host-memory {memory}GiB{disk}"
        )

    @property
    def precision(self) -> str:
        """That of the experts: the stated one where there are such files, else as the model was published."""
        named = "mixed" if self.profile.differing_bytes else self.profile.precision
        return named or name_of(self.profile.expert_width)

    @property
    def loses_quality(self) -> bool:
        """Whether answers get noticeably worse, since experts have less than 4 bits."""
        profile = self.profile
        return self.experts_bytes < GOOD * profile.moe_layers * profile.experts * profile.expert_parameters

    def static(self, host_layers: int, context: int) -> Setting:
        """Return the setting in which the CPU computes the experts of so many layers; without a GPU all."""
        if not self.on_gpu:
            return Setting(all_on="cpu", context=context)
        return Setting(host_layers=host_layers, context=context)

    def at(self, precision: str) -> "Layout":
        return replace(self, model=replace(self.model, precision=precision, dense_precision=""))


@dataclass(frozen=True)
class Placement:
    """Where a model's experts lie, and who computes them.

    parts: settings whose seconds a token are added (True) or subtracted (False), each over so many MoE layers; layers
    that read from a disk are run alone, with the disk and without.
    """

    kind: str
    policy: str  # of GPU memory; "static" where nothing moves
    layout: Layout
    gpu_experts: int
    cache_bytes: int
    parts: tuple[tuple[Setting, int, bool], ...]

    def at(self, **changed: Any) -> "Placement":
        """Return the same placement in a setting that differs: its context, for which it has room, or its batch."""
        parts = tuple((replace(setting, **changed), layers, added) for setting, layers, added in self.parts)
        return replace(self, parts=parts)

    def seconds(self, hardware: Hardware | None = None) -> float:
        return self.simulated(hardware)[0]

    def simulated(self, hardware: Hardware | None = None) -> tuple[float, Outcome]:
        """Return the seconds of a decoded token, and what came of the first part."""
        outcomes = [case.simulated(hardware or self.layout.hardware) for case in self.cases]
        signs = (1 if added else -1 for _, _, added in self.parts)
        return sum((one.seconds or 0.0) * sign for one, sign in zip(outcomes, signs, strict=True)), outcomes[0]

    @cached_property
    def cases(self) -> list[Case]:
        model, L = self.layout.model, self.layout.profile.moe_layers
        cases = []
        for setting, layers, _ in self.parts:
            part = model if layers == L else replace(model, layers=layers)
            row = Row("plan", self.kind, RUNTIME, "speed", "tok/s", "", 1.0, part, self.layout.computing, setting)
            cases.append(Case(row))
        return cases

    @property
    def slowest(self) -> Case:
        """The part that reads from the disk, if one does, else the first."""
        reads = (case for case in self.cases if case.row.setting.host_cache or case.row.setting.misses_from)
        return next(reads, self.cases[0])

    @property
    def assumed(self) -> list[Assumed]:
        return list({fact.what: fact for case in self.cases for fact in errors.assumed(case)}.values())

    @property
    def stand_in(self) -> str:
        """The model whose routing stands in; empty where no routing matters."""
        return next(filter(None, (case.stand_in for case in self.cases)), "")


def today(layout: Layout, mmap: bool = True) -> Placement:
    """Return the placement that llama.cpp's flags make: as few whole layers' experts on the CPU as can be.

    mmap: what memory does not hold is read through the page cache, as llama.cpp does.
    """
    context, L, n = layout.context, layout.profile.moe_layers, layout.host_layers
    static, experts = layout.static(n, context), (L - n) * layout.profile.experts
    parts = [(static, L, True)]
    kind = (SPLIT if n else RESIDENT) if layout.on_gpu else CPU
    if not layout.missing_bytes:
        return Placement(kind, "static", layout, experts, 0, tuple(parts))
    host = f"{int(layout.host_free)}B"
    alike: dict[str, Any] = {"context": context, "tokens": TOKENS, "misses": layout.misses, "mmap": mmap}
    reading = Setting(policy="lru", cache=host, misses_from="disk", **alike)
    if layout.on_gpu:
        reading = Setting(policy="lru/host", cache="0", host_cache=host, **alike)
    parts += [(reading, n, True), (static, n, False)]
    policy = "static, lru of pages in host memory" if layout.on_gpu else "lru of pages in host memory"
    return Placement(DISK, policy, layout, experts, 0, tuple(parts))


def break_even(layout: Layout) -> float | None:
    """Return the share of drafted tokens, one a step, from which on speculation pays; None without MTP layers.

    A step of two tokens uses the experts of two that are not alike, and drafting takes as long as a layer.
    """
    if not layout.profile.mtp_layers or layout.missing_bytes:
        return None
    plain = today(layout)
    return plain.at(batch=2).seconds() / plain.seconds() - 1 + 1 / len(layout.profile.order)


def cached(layout: Layout) -> Placement | None:
    """Return llama.cpp's own expert cache in GPU memory (`--moe-cache-mib`); None where there is no room for one."""
    profile, L, n, sizes = layout.profile, layout.profile.moe_layers, layout.cached_layers, layout.layer_bytes
    size = min(int(layout.gpu_free) - sum(sizes[n:]), sum(sizes[:n]))
    if not layout.on_gpu or not layout.host_layers or size < profile.top_k * profile.expert_bytes:
        return None
    if n < L and len(layout.machine.gpus) > 1:
        return None  # layers that stay on the last GPU, and a share of the cache, cannot be split at once
    experts = size * n * profile.experts // sum(sizes[:n])
    resident = Setting(host_layers=0, context=layout.context)
    cache = Setting(policy="lru", cache=f"{size}B", context=layout.context, tokens=TOKENS, misses=layout.misses)
    parts = [(cache, n, True)]
    if n < L:
        parts += [(resident, L, True), (resident, n, False)]
    if layout.missing_bytes:
        parts = [(replace(cache, host_cache=f"{int(layout.host_free)}B", mmap=True), L, True)]
    return Placement(DISK if layout.missing_bytes else CACHE, "lru", layout, experts, size, tuple(parts))
