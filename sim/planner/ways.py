"""What fits where, and the ways to run a model on a machine.

A way says where each part of a model lies and who computes it, as a setting of the back-test. The dense part and the KV
cache are on the GPU if there is one, the embedding in host memory (a lookup needs no bandwidth), experts in the rest.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from sim.backtest.file import Machine, Model, Row, Setting
from sim.backtest.machine import Rates, rates
from sim.backtest.model import profile_of
from sim.backtest.play import Case, Played
from sim.experiment import SIMPY
from sim.planner.resources import GPU_RESERVED, HOST_RESERVED, Resources
from sim.profiles.model_profile import ModelProfile
from sim.profiles.precision import name_of
from sim.quantities import show_bytes
from traces.errors import InputError

TOKENS = 12
"""Decoded tokens that are simulated where a cache is; where nothing moves, one is like another."""

RESIDENT, SPLIT, CPU, CACHE, DISK = "resident", "split", "cpu", "cache", "disk"
"""Kinds of ways: all on the GPU; experts of whole layers on the CPU; all on the CPU; an expert cache in GPU memory over
host memory; anything that reads experts from the disk."""

NEXT_TO_NOTHING = 1e-6
"""GB/s of a CPU to which the link leaves nothing of host memory's bandwidth."""

RUNTIME = "llama.cpp"
"""Whose overheads count: those of a compiled runtime."""


@dataclass(frozen=True)
class Fit:
    """A model on a machine: what lies where, in bytes."""

    model: Model
    resources: Resources
    context: int

    @cached_property
    def profile(self) -> ModelProfile:
        """The model at its precision."""
        return profile_of(self.model)

    @property
    def layer_bytes(self) -> list[int]:
        """Of all experts of each layer."""
        return [self.profile.bytes_of(layer) * self.profile.experts for layer in range(self.profile.moe_layers)]

    @property
    def experts_bytes(self) -> int:
        """Of all experts."""
        return sum(self.layer_bytes)

    @property
    def fixed_bytes(self) -> float:
        """Of what a token reads beside experts, and of the KV cache."""
        return self.profile.dense_bytes - self.profile.head_bytes + self.profile.kv_cache_bytes(self.context)

    @property
    def total_bytes(self) -> float:
        """Of the model and its KV cache."""
        return self.experts_bytes + self.fixed_bytes + self.profile.head_bytes

    @property
    def gpu_room(self) -> float:
        """Bytes of GPU memory for experts; below 0 where not even the rest fits."""
        return self.resources.gpu_memory - GPU_RESERVED - self.fixed_bytes

    @property
    def on_gpu(self) -> bool:
        """Whether the GPU computes attention and all else beside experts."""
        return self.resources.has_gpu and self.gpu_room >= 0

    @property
    def machine(self) -> Machine:
        """The machine, without a GPU that is not used."""
        machine = self.resources.machine
        return machine if self.on_gpu else replace(machine, gpu="", gpu_data_sheet_gb_per_s=0.0)

    @property
    def host_room(self) -> float:
        """Bytes of host memory for experts."""
        kept = self.profile.head_bytes + (0 if self.on_gpu else self.fixed_bytes)
        return self.resources.host_memory - HOST_RESERVED - kept if self.resources.host_memory else 0.0

    @cached_property
    def host_layers(self) -> int:
        """The fewest layers whose experts do not fit the GPU."""
        room, fitting = self.gpu_room, 0
        for size in reversed(self.layer_bytes):
            if not self.on_gpu or size > room:
                break
            room, fitting = room - size, fitting + 1
        return self.profile.moe_layers - fitting

    @property
    def host_bytes(self) -> int:
        """Of the experts of those layers."""
        return sum(self.layer_bytes[: self.host_layers])

    @property
    def missing_bytes(self) -> float:
        """Bytes by which GPU and host memory are too small together; 0: it fits."""
        return max(0.0, self.host_bytes - max(self.host_room, 0.0)) if self.host_layers else 0.0

    def require(self) -> None:
        """Raise InputError where the machine cannot run the model at all, saying what is missing."""
        profile, resources = self.profile, self.resources
        if resources.has_gpu and not self.on_gpu and not resources.host_memory:
            raise InputError(
                f"{show_bytes(resources.gpu_memory)} of GPU memory do not hold the dense part of {profile.name} and "
                f"the KV cache of {self.context:,} tokens ({show_bytes(self.fixed_bytes)}) beside "
                f"{show_bytes(GPU_RESERVED)} for the runtime: {show_bytes(-self.gpu_room)} are missing, or "
                f"--host-memory for a run on the CPU"
            )
        if not self.missing_bytes:
            return
        if resources.disk_gb_per_s and resources.host_memory:
            least = profile.top_k * profile.expert_bytes * 2
            if self.host_room < least:
                kept = resources.host_memory - self.host_room
                raise InputError(
                    f"{show_bytes(resources.host_memory)} of host memory do not hold what {profile.name} needs there "
                    f"beside experts ({show_bytes(kept)}) and {show_bytes(least)} of them: "
                    f"{show_bytes(least - self.host_room)} are missing"
                )
            return
        have = resources.gpu_memory + resources.host_memory
        reserved = GPU_RESERVED * resources.has_gpu + HOST_RESERVED * bool(resources.host_memory)
        ways = [
            f"--host-memory {-(-int(resources.host_memory + self.missing_with_reserve) // 2**30)}GiB",
            "--disk 3GB/s to read the rest from" if resources.host_memory else "",
        ]
        raise InputError(
            f"{profile.name} at {self.precision} and the KV cache of {self.context:,} tokens have "
            f"{show_bytes(self.total_bytes)}, the machine {show_bytes(have)}, of which "
            f"{show_bytes(reserved)} are reserved: "
            f"{show_bytes(self.missing_with_reserve)} are missing; give {' or '.join(filter(None, ways))}"
        )

    @property
    def missing_with_reserve(self) -> float:
        """Bytes of host memory that are missing, with what a machine without host memory would keep of it."""
        if self.resources.host_memory:
            return self.missing_bytes + max(0.0, -self.host_room)
        return self.host_bytes + HOST_RESERVED + self.profile.head_bytes

    @property
    def precision(self) -> str:
        """As asked for, or as the model was published."""
        own = "mixed" if self.profile.differing_bytes else name_of(self.profile.expert_width)
        return self.model.precision or own


@dataclass(frozen=True)
class Way:
    """A way to run a model.

    parts: settings whose seconds a token are added (True) or subtracted (False), each over so many of the model's MoE
    layers. From a disk, the layers that read from it are run alone, with the disk and without.
    """

    kind: str
    policy: str  # of GPU memory; "static" where nothing moves
    fit: Fit
    gpu_experts: int
    parts: tuple[tuple[Setting, int, bool], ...]

    def play(self, rates_: Rates | None = None) -> tuple[float, Played]:
        """Return the seconds of a decoded token, and how the first part went."""
        found = rates_ or self._rates
        seconds, first = 0.0, None
        for setting, layers, added in self.parts:
            played = self._case(setting, layers).played(found, SIMPY)
            assert played.seconds
            seconds += played.seconds if added else -played.seconds
            first = first or played
        assert first
        return seconds, first

    @property
    def _rates(self) -> Rates:
        """Where link and CPU read host memory at the same time, the CPU has what the link leaves of its bandwidth."""
        found = rates(self.fit.machine, RUNTIME)
        if not self.policy.endswith("/split"):
            return found
        left = max(self.fit.resources.host_reads - found.link_gb_per_s, NEXT_TO_NOTHING)
        return replace(found, host_gb_per_s=min(found.host_gb_per_s, left))

    @property
    def stand_in(self) -> str:
        """The model whose routing stands in; empty where no routing matters."""
        return next(filter(None, (self._case(setting, layers).stand_in for setting, layers, _ in self.parts)), "")

    def play_untimed(self) -> Played:
        """Return how the first part goes where nothing takes time."""
        setting, layers, _ = self.parts[0]
        return self._case(setting, layers).played(None, SIMPY)

    def _case(self, setting: Setting, layers: int) -> Case:
        model = self.fit.model if layers == self.fit.profile.moe_layers else replace(self.fit.model, layers=layers)
        row = Row("plan", self.kind, RUNTIME, "speed", "tok/s", "", 1.0, model, self.fit.machine, setting)
        return Case(row)


def today(fit: Fit) -> Way:
    """Return the way that compiled runtimes have flags for: whole layers' experts on the CPU, as few as possible."""
    profile, context = fit.profile, fit.context
    L, E, n = profile.moe_layers, profile.experts, fit.host_layers
    if not fit.on_gpu:
        if not fit.missing_bytes:
            return Way(CPU, "static", fit, 0, ((Setting(all_on="cpu", context=context), L, True),))
        cached = Setting(
            policy="lru", cache=f"{int(fit.host_room)}B", misses_from="disk", context=context, tokens=TOKENS
        )
        return Way(DISK, "lru of pages in host memory", fit, 0, ((cached, L, True),))
    split = (Setting(host_layers=n, context=context), L, True)
    if not fit.missing_bytes:
        return Way(SPLIT if n else RESIDENT, "static", fit, (L - n) * E, (split,))
    reading = Setting(policy="lru/host", cache="0", host_cache=f"{int(fit.host_room)}B", context=context, tokens=TOKENS)
    return Way(
        DISK,
        "static, lru of pages in host memory",
        fit,
        (L - n) * E,
        (split, (reading, n, True), (Setting(host_layers=n, context=context), n, False)),
    )


def cached(fit: Fit) -> list[Way]:
    """Return the ways of an expert cache in GPU memory: misses copied over the link, or split between link and CPU."""
    profile = fit.profile
    room = min(int(fit.gpu_room), fit.experts_bytes)
    if not fit.on_gpu or not fit.host_layers or room < profile.top_k * profile.expert_bytes:
        return []
    common = Setting(policy="lru", cache=f"{room}B", context=fit.context, tokens=TOKENS)
    if fit.missing_bytes:
        common = replace(common, host_cache=f"{int(fit.host_room)}B")
    experts = room * profile.moe_layers * profile.experts // fit.experts_bytes
    kind = DISK if fit.missing_bytes else CACHE
    return [
        Way(kind, policy, fit, experts, ((replace(common, policy=policy), profile.moe_layers, True),))
        for policy in ("lru", "lru/split")
    ]


def missed_bytes(fit: Fit, policy: str, room: float) -> float:
    """Return the bytes of experts a token that a policy in so many bytes misses, over the stand-in routing."""
    setting = Setting(policy=policy, cache=f"{int(room)}B", context=fit.context, tokens=TOKENS)
    way = Way(CACHE, policy, fit, 0, ((setting, fit.profile.moe_layers, True),))
    return way.play_untimed().bytes_read
