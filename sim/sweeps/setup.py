"""A cell: one policy at one cache size over one trace on one machine, run whole and in order.

`Setup` is what a user asks for and all cells of a sweep share; `Loaded` is the same with its files read.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TypedDict, overload

import numpy as np

from policies.core.policy import Int, Shape
from policies.core.spec import FETCHED, Policy, parse
from sim import profiles
from sim.defaults import HARDWARE
from sim.engines import engine
from sim.loop.log import Ended, RunLog, joined
from sim.loop.run import Run, Tier, Users, gpu_run
from sim.profiles import model_profile
from sim.profiles.expert_sizes import expert_bytes_by_layer
from sim.profiles.hardware_profile import Hardware, hardware
from sim.profiles.measured import MeasuredModel
from sim.profiles.model_profile import ModelProfile
from sim.profiles.policy_overhead import cost_us
from sim.profiles.roofline import Roofline, disk_link, host_link
from sim.profiles.timing import Link, Timing, experts_per_layer
from sim.quantities import CacheSize, exceeds, parse_cache_bytes, parse_cache_size, show_bytes
from sim.results.metrics import Cell
from traces.errors import InputError
from traces.reader import HEARD, open_folder
from traces.shards import Shards
from traces.steps import RequestSteps
from traces.trace import Trace

CLOSED, TRACE, POISSON = "closed", "trace", "poisson"
MOST = 10**9
"""Of requests, and of microseconds that a policy takes for an event: a clock of 64 bits counts what comes of it."""


class Options(TypedDict, total=False):
    """Options of a run, all with a default: the fields of `Setup` but the trace, which says what each is."""

    hardware: str | Path
    model_profile: str | Path | None
    requests: int | None
    warmup_requests: int
    as_decode: bool
    cold: bool
    untimed: bool
    seed: int
    chunk_bytes: int | None
    predictor_us: float | None
    host_memory: CacheSize | None
    expert_sizes: str | Path | None
    max_batch: int | None
    arrivals: str
    arrival_rate: float | None
    engine: str


ARRIVALS = (CLOSED, TRACE, POISSON)
"""When requests arrive, where several run at a time: as soon as there is room (a closed loop), as recorded, drawn."""


@dataclass(frozen=True)
class Setup:
    """What all cells share, by names and paths."""

    trace: str  # a folder or a URL
    hardware: str = HARDWARE
    model_profile: str | None = None  # None: by the trace's model
    requests: int | None = None  # None: all
    warmup_requests: int = field(default=0, metadata=profiles.MAY_BE_ZERO)  # run, not counted
    as_decode: bool = False
    cold: bool = False
    untimed: bool = False
    seed: int = field(default=0, metadata=profiles.below(2**63))  # of arrivals and weights, and in Python of policies
    # that draw and name none
    chunk_bytes: int | None = None  # None: the whole expert
    predictor_us: float | None = field(default=None, metadata=profiles.MAY_BE_ZERO)  # of every policy; None: of each
    # as measured (`policy_overhead`)
    host_memory: str | None = None  # size of it over the disk (rule 17); None: it holds all experts
    expert_sizes: str | None = None  # GGUF or safetensors whose header states them by layer (rule 19)
    max_batch: int | None = None  # requests at a time (rule 18); None: one after another
    arrivals: str = field(default=CLOSED, metadata=profiles.one_of(ARRIVALS))  # when they come
    arrival_rate: float | None = None  # requests a second, with `POISSON`
    engine: str = field(default=engine.AUTO, metadata=profiles.one_of(engine.ENGINES))  # that runs timed cells

    def __post_init__(self) -> None:
        object.__setattr__(self, "trace", str(self.trace))
        profiles.check(self)
        self._check_together()

    def _check_together(self) -> None:
        """InputError for options that do not go together."""
        if self.arrivals != CLOSED and self.max_batch is None:
            raise InputError("`arrivals` and `arrival_rate` need `max_batch`, how many requests run at a time")
        if (self.arrivals == POISSON) != (self.arrival_rate is not None):
            raise InputError("`arrivals` poisson and `arrival_rate`, in requests per second, need each other")
        timed = ("max_batch", "host_memory", "chunk_bytes", "predictor_us")
        if self.untimed and (given := [f"`{option}`" for option in timed if getattr(self, option) is not None]):
            raise InputError(f"`untimed` counts without a clock: it cannot have {' or '.join(given)}")

    def load(self, trace: Trace | None = None) -> "Loaded":
        """Return the setup with its files read. trace: one in memory, instead of the one named by `self.trace`.

        Raises InputError for whatever cannot be used.
        """
        return self._load(Shards.open(self.trace) if trace is None else trace, trace is not None)

    def _load(self, trace: Shards | Trace, in_memory: bool) -> "Loaded":
        trace.require_sequences()
        if self.requests is not None:
            trace = trace.head(self.requests)
        if self.as_decode:
            trace = trace.as_decode()
        if self.warmup_requests >= len(trace.requests):
            raise InputError(
                f"{self.warmup_requests} warm-up requests leave none of {len(trace.requests)} to count: "
                "use a smaller `warmup_requests`"
            )
        if not int(trace.offsets[-1]):
            raise InputError(f"{self.trace} has no tokens: there is nothing to run")
        profile = self._sized(self._profile(trace))
        if self.as_decode and profile and profile.encoder_moe_layers:
            raise InputError(
                f"{profile.name} is an encoder-decoder, and encoders decode nothing: leave `as_decode` out"
            )
        if self.untimed:
            return Loaded(self, trace, None, profile, in_memory)
        loaded = Loaded(self, trace, hardware(self.hardware), profile, in_memory)
        loaded.check_memory()
        loaded.users()
        return loaded

    def _sized(self, profile: ModelProfile | None) -> ModelProfile | None:
        """Return the profile with the sizes of experts that `expert_sizes` states."""
        if self.expert_sizes is None:
            return profile
        if profile is None:
            raise InputError("`expert_sizes` needs a model profile: name one with `model_profile`")
        sizes = tuple(expert_bytes_by_layer(Path(self.expert_sizes), profile.experts).tolist())
        if len(sizes) != profile.moe_layers:
            raise InputError(
                f"{self.expert_sizes} has {len(sizes)} MoE layers, {profile.name} has {profile.moe_layers}"
            )
        return replace(profile, layer_expert_bytes=sizes)

    def _profile(self, trace: Shards | Trace) -> ModelProfile | None:
        """Counting needs no sizes: do without them where none are known."""
        sized = trace.meta.hidden_size and trace.meta.expert_intermediate_size and trace.meta.expert_bytes
        if not self.untimed or self.model_profile or sized or model_profile.known(trace.meta.model):
            return model_profile.of_trace(trace.meta, self.model_profile)
        return None


@dataclass(frozen=True)
class Loaded:
    """A setup with its files read; `play` runs one cell of it. A policy is whatever `parse` takes."""

    setup: Setup
    trace: Shards | Trace  # the first where only its requests are run, in order
    hardware: Hardware | None  # None: untimed
    profile: ModelProfile | None  # None: untimed, and nothing states the sizes
    in_memory: bool = False  # whether the trace is in this process alone, so that no other can open it

    @cached_property
    def whole(self) -> Trace:
        """The trace in memory, to take requests from in any order."""
        if isinstance(self.trace, Trace):
            return self.trace
        trace = Trace.read(self.setup.trace, HEARD)
        trace = trace if self.setup.requests is None else trace.head(self.setup.requests)
        return trace.as_decode() if self.setup.as_decode else trace

    @cached_property
    def fingerprint(self) -> str:
        """Return a digest of the trace: another one for other content."""
        in_files = isinstance(self.trace, Shards) or self.in_memory
        return self.trace.fingerprint if in_files else open_folder(self.setup.trace).fingerprint

    @property
    def all_experts(self) -> int:
        """Of all MoE layers."""
        return self.trace.layers * self.trace.num_experts

    @property
    def expert_bytes(self) -> int | None:
        """Of one expert; None if nothing states it."""
        return self.profile.expert_bytes if self.profile else self.trace.meta.expert_bytes

    @property
    def sizes(self) -> Int | None:
        """Bytes of every expert, int64[L*E], where layers differ; None where all are alike."""
        layers = self.profile.differing_bytes if self.profile else ()
        return np.repeat(np.array(layers, np.int64), self.trace.num_experts) if layers else None

    def slots(self, cache_size: str) -> int:
        """Return the room of a cache of this size: slots, or bytes where experts differ in size. Raise InputError.

        The size is a share, a number of experts (of mean size, where they differ), or bytes.
        """
        if self.sizes is None:
            return parse_cache_size(cache_size, self.all_experts, self.expert_bytes)
        return parse_cache_bytes(cache_size, self.sizes)

    def exceeds(self, cache_size: str) -> bool:
        """Return whether a cache of this size, as given, is larger than all experts."""
        if self.sizes is not None:
            return exceeds(cache_size, self.all_experts, int(self.sizes.sum()))
        return exceeds(cache_size, self.all_experts, self.expert_bytes and self.all_experts * self.expert_bytes)

    def experts_in(self, room: int) -> int:
        """Return how many experts such a cache holds, of mean size where they differ."""
        return room if self.sizes is None else round(room * self.all_experts / int(self.sizes.sum()))

    @property
    def mean_expert_bytes(self) -> float:
        """Of one expert; of its layers' mean where they differ. Where a profile states it."""
        assert self.profile
        return self.profile.expert_bytes if self.sizes is None else float(self.sizes.mean())

    def check_memory(self) -> None:
        """InputError where the GPU's memory does not hold even what is no expert."""
        assert self.hardware
        assert self.profile
        memory = self.hardware.memory_gib * 2**30
        if memory < self.profile.dense_bytes:
            raise InputError(
                f"{self.hardware.name} has {show_bytes(memory)} of memory, and {self.profile.name} needs "
                f"{show_bytes(self.profile.dense_bytes)} without any expert: choose another `hardware`"
            )

    def users(self) -> Users | None:
        """Return who asks, and when; None: one request after another. InputError for arrivals that cannot be."""
        setup = self.setup
        if setup.max_batch is None:
            return None
        most = min(setup.max_batch, len(self.trace.requests))  # memory is taken for each
        if setup.arrivals == TRACE:
            return Users(most, self._recorded_arrivals())
        if setup.arrivals == POISSON:
            assert setup.arrival_rate
            draws = np.random.default_rng(setup.seed).exponential(1e9 / setup.arrival_rate, len(self.trace.requests))
            arrivals_ns = np.cumsum(np.ceil(draws))
            if arrivals_ns[-1] >= 2**62:
                raise InputError(
                    f"`arrival_rate` {setup.arrival_rate}: its last request comes after more than a century"
                )
            return Users(most, tuple(arrivals_ns.astype(np.int64).tolist()))
        return Users(most)

    def _recorded_arrivals(self) -> tuple[int, ...]:
        """When each request of the trace arrived, counted from the first."""
        recorded = self.trace.requests["arrival_ns"]
        if recorded.isna().any():
            raise InputError(f"{self.setup.trace} does not say when its requests arrived: use `arrival_rate`")
        ns = recorded.astype("int64").to_numpy()
        if (back := np.flatnonzero(np.diff(ns) < 0)).size:
            before, after = self.trace.requests["id"].iloc[[back[0], back[0] + 1]]
            raise InputError(
                f"{self.setup.trace}: request {after} arrives before {before}, which comes before it in the trace"
            )
        return tuple((ns - ns[0]).tolist())

    @property
    def token_experts(self) -> int:
        """Distinct experts that one decoded token needs."""
        layers = self.profile.decode_layers if self.profile else self.trace.layers
        return layers * self.trace.top_k

    @property
    def measured(self) -> MeasuredModel | None:
        """What was measured with this model on this machine, which then stands for its rates; None: nothing was."""
        return self.hardware.measured_with(self.profile) if self.hardware and self.profile else None

    def predictor_us(self, policy: Policy) -> float | None:
        """What policy overhead takes an event, by the setup, the machine, or the shipped table; None: unknown."""
        policy = parse(policy)
        if self.setup.predictor_us is not None:
            return self.setup.predictor_us
        if self.measured and policy.text in self.measured.predictor_us:
            return self.measured.predictor_us[policy.text]
        return cost_us(policy, self.trace.layers, self.trace.num_experts)

    def timing(self, policy: Policy) -> Timing:
        """Durations on this machine under a policy, whose work is free where its cost is unknown; timed setups only."""
        assert self.hardware
        assert self.profile
        predictor_ns = round((self.predictor_us(policy) or 0.0) * 1_000)
        if self.measured:
            return self.measured.timing(predictor_ns, Roofline(self.hardware, self.profile))
        return Roofline(self.hardware, self.profile, predictor_ns)

    @property
    def link(self) -> Link:
        """This machine's host link; timed setups only."""
        assert self.hardware
        assert self.profile
        if self.measured:
            return self.measured.link(self.setup.chunk_bytes)
        return host_link(self.hardware, self.profile, self.setup.chunk_bytes)

    def compiled(self, policy: Policy) -> bool:
        """Whether the compiled engine runs the policy's cells."""
        shape = Shape(self.trace.layers, self.trace.num_experts)
        return self.hardware is not None and engine.compiles(self.setup.engine, parse(policy), shape)

    def simulated_alone(self, policy: Policy) -> str | None:
        """Return what of a cell no real device runs so far; None: nothing."""
        found = {
            f"the placement {parse(policy).placement.term}": parse(policy).placement != FETCHED,
            "a disk below host memory (`host_memory`)": self.setup.host_memory is not None,
            "several users (`max_batch`)": self.setup.max_batch is not None,
            "experts of several sizes": self.sizes is not None,
        }
        return next((what for what, asked in found.items() if asked), None)

    def versions(self, policies: Iterable[Policy]) -> Iterator[bool]:
        """Yield, of each policy that the compiled engine runs, which version does (`compiled_engine.tiered`)."""
        more = self.setup.host_memory is not None or self.sizes is not None
        for policy in map(parse, policies):
            if self.compiled(policy):
                yield more or policy.placement != FETCHED

    def require(self, policy: Policy, slots: int) -> None:
        """InputError for what the policy lacks: slots for its scope, a file; timed, a column or an engine."""
        shape, policy = Shape(self.trace.layers, self.trace.num_experts), parse(policy)
        policy.divide(shape, slots)
        policy.build(shape)  # what it refuses, such as a file of its own
        if self.hardware and policy.needs_lookahead and not self.trace.has_lookahead:
            raise InputError(
                f"{policy.text}: the trace {self.setup.trace} has no lookahead column; "
                "record it with `moe-trace record --lookahead`"
            )
        if self.hardware:
            engine.require(self.setup.engine, policy, shape)

    def play(self, policy: Policy, slots: int, ended: Ended) -> None:
        """Run one cell; `ended` takes the log of each request as it ends."""
        if self.hardware is None:
            from sim.engines import untimed

            shape, size = (self.trace.layers, self.trace.num_experts), self.expert_bytes or 0
            return untimed.play(Requests(self.trace), *shape, slots, policy, ended, self.setup.cold, size, self.sizes)
        return engine.play(self.setup.engine, self.run(policy, slots), ended)

    def run(self, policy: Policy, slots: int) -> Run:
        """One cell as an engine takes it; timed setups only."""
        trace, timing, link = self.trace, self.timing(policy), self.link
        window = experts_per_layer(timing, link, trace.layers, trace.top_k)
        shape = Shape(trace.layers, trace.num_experts)
        requests, cold, host, users = Requests(trace), self.setup.cold, self._host(), self.users()
        return gpu_run(requests, shape, slots, parse(policy), timing, link, cold, window, host, users)

    def _host(self) -> Tier | None:
        """Host memory over the disk, if it does not hold all experts."""
        if self.setup.host_memory is None:
            return None
        assert self.hardware
        assert self.profile
        try:
            room = self.slots(self.setup.host_memory)
        except InputError as error:
            raise InputError(f"`host_memory`: {error}") from None
        return Tier(room, None, disk_link(self.hardware, self.profile))

    def log(self, policy: Policy, slots: int) -> RunLog:
        """The same, the log kept whole."""
        parts: list[RunLog] = []
        self.play(policy, slots, parts.append)
        return joined(parts)

    @property
    def _machine(self) -> str | None:
        """The machine's name, and whether its times are measured or computed from rates."""
        if self.hardware is None:
            return None
        return f"{self.hardware.name} (measured)" if self.measured else self.hardware.name

    def cell(self, policy: Policy, slots: int) -> Cell:
        """What the rows of that cell say of it."""
        policy = parse(policy)
        return Cell(
            policy=policy.text,
            options=policy.options(),
            oracle=policy.oracle,
            trace=self.trace.name,
            phase=self.trace.phases,
            model=self.profile.name if self.profile else self.trace.meta.model,
            hardware=self._machine,
            predictor_us=self.timing(policy).predictor_ns / 1_000 if self.hardware else None,
            cache_experts=self.experts_in(slots),
            cache_bytes=slots if self.sizes is not None else slots * self.expert_bytes if self.expert_bytes else None,
            all_experts=self.all_experts,
            host_memory=self.setup.host_memory,
            max_batch=self.setup.max_batch,
            arrivals=self.setup.arrivals if self.setup.max_batch else None,
            arrival_rate=self.setup.arrival_rate,
            cold=self.setup.cold,
            warmup_requests=self.setup.warmup_requests,
            seed=policy.seed,
        )


class Requests(Sequence[RequestSteps]):
    """A trace's requests as an engine runs them, laid out again each time: only one is held at once."""

    def __init__(self, trace: Shards | Trace):
        self._trace = trace

    def __len__(self) -> int:
        return len(self._trace.requests)

    @overload
    def __getitem__(self, i: int) -> RequestSteps: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[RequestSteps]: ...
    def __getitem__(self, i: int | slice) -> RequestSteps | Sequence[RequestSteps]:
        if isinstance(i, slice):
            return [self._trace.steps(j) for j in range(*i.indices(len(self)))]
        if not 0 <= i < len(self):
            raise IndexError(i)
        return self._trace.steps(i)

    def __iter__(self) -> Iterator[RequestSteps]:
        return (self._trace.steps(i) for i in range(len(self)))
