"""A cell: one policy at one cache size over one trace on one machine, played whole and in order.

`Setup` is what a user asks for and all cells of a sweep share; `Loaded` is the same with its files read.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import overload

from policies.core.policy import Shape
from policies.core.spec import Policy, parse
from sim.engines import engine
from sim.loop.log import Ended, RunLog, joined
from sim.loop.run import Run, gpu_run
from sim.profiles import model_profile
from sim.profiles.hardware_profile import Hardware, hardware
from sim.profiles.measured import MeasuredModel
from sim.profiles.model_profile import ModelProfile
from sim.profiles.policy_overhead import cost_us
from sim.profiles.roofline import Roofline, host_link
from sim.profiles.timing import Link, Timing, experts_per_layer
from sim.quantities import parse_cache_size
from sim.results.metrics import Cell
from traces.errors import InputError
from traces.reader import open_folder
from traces.schema import AGGREGATE
from traces.shards import Shards
from traces.steps import RequestSteps
from traces.trace import Trace


@dataclass(frozen=True)
class Setup:
    """What all cells share, by names and paths."""

    trace: str  # a folder or a URL
    hardware: str = "a5000"
    model_profile: str | None = None  # None: by the trace's model
    requests: int | None = None  # None: all
    warmup_requests: int = 0  # played, not counted
    as_decode: bool = False
    cold: bool = False
    untimed: bool = False
    seed: int = 0
    chunk_bytes: int | None = None  # None: the whole expert
    predictor_us: float | None = None  # of every policy; None: of each as measured (`policy_overhead`)
    engine: str = engine.AUTO  # that plays timed cells

    def __post_init__(self) -> None:
        object.__setattr__(self, "trace", str(self.trace))
        least_zero = {"--warmup-requests": self.warmup_requests, "--predictor-us": self.predictor_us or 0}
        for option, value in least_zero.items():
            if not 0 <= value < math.inf:
                raise InputError(f"{option} {value}: must be at least 0")
        if not 0 <= self.seed < 2**63:
            raise InputError(f"--seed {self.seed}: must be at least 0 and below 2**63")
        engine.check(self.engine)
        if self.chunk_bytes == 0:
            raise InputError("--chunk-bytes: a chunk has at least one byte")

    def load(self) -> "Loaded":
        """Open everything. InputError for whatever cannot be used."""
        trace = Shards.open(self.trace)
        if trace.meta.mode == AGGREGATE:
            raise InputError(
                f"{self.trace} holds EAMs only, no sequences that could be played: its source counted tokens"
            )
        if self.requests is not None:
            trace = trace.head(self.requests)
        if self.as_decode:
            trace = trace.as_decode()
        if self.warmup_requests >= len(trace.requests):
            raise InputError(f"{self.warmup_requests} warm-up requests leave none of {len(trace.requests)} to count")
        if self.untimed:
            return Loaded(self, trace, None, self._profile_if_any(trace))
        return Loaded(self, trace, hardware(self.hardware), model_profile.of_trace(trace.meta, self.model_profile))

    def _profile_if_any(self, trace: Shards) -> ModelProfile | None:
        """Counting needs no sizes: do without them where none are known."""
        sized = trace.meta.hidden_size and trace.meta.expert_intermediate_size and trace.meta.expert_bytes
        if self.model_profile or sized or model_profile.known(trace.meta.model):
            return model_profile.of_trace(trace.meta, self.model_profile)
        return None


@dataclass(frozen=True)
class Loaded:
    """A setup with its files read; `play` runs one cell of it. A policy is whatever `parse` takes."""

    setup: Setup
    trace: Shards | Trace  # the first where only its requests are played, in order
    hardware: Hardware | None  # None: untimed
    profile: ModelProfile | None  # None: untimed, and nothing states the sizes

    @cached_property
    def whole(self) -> Trace:
        """The trace in memory, to take requests from in any order."""
        if isinstance(self.trace, Trace):
            return self.trace
        trace = Trace.read(self.setup.trace, ["lookahead"])
        trace = trace if self.setup.requests is None else trace.head(self.setup.requests)
        return trace.as_decode() if self.setup.as_decode else trace

    @cached_property
    def fingerprint(self) -> str:
        """Of the trace's files: another one for other content."""
        return self.trace.fingerprint if isinstance(self.trace, Shards) else open_folder(self.setup.trace).fingerprint

    @property
    def all_experts(self) -> int:
        """Of all MoE layers."""
        return self.trace.layers * self.trace.num_experts

    @property
    def expert_bytes(self) -> int | None:
        """Of one expert; None if nothing states it."""
        return self.profile.expert_bytes if self.profile else self.trace.meta.expert_bytes

    def slots(self, cache_size: str) -> int:
        """Return the slots of a cache of this size: a share, a number of experts, or bytes. Raise InputError."""
        return parse_cache_size(cache_size, self.all_experts, self.expert_bytes)

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
        """What the policy's own work takes an event, by the setup, the machine, or the shipped table; None: unknown."""
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
            return self.measured.timing(predictor_ns)
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
        """Whether the compiled engine plays the policy's cells."""
        shape = Shape(self.trace.layers, self.trace.num_experts)
        return self.hardware is not None and engine.compiles(self.setup.engine, parse(policy), shape)

    def require(self, policy: Policy, slots: int) -> None:
        """InputError for what the policy lacks: slots for its scope; timed, a column or an engine."""
        shape, policy = Shape(self.trace.layers, self.trace.num_experts), parse(policy)
        policy.divide(shape, slots)
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

            def sized(log: RunLog) -> None:
                ended(replace(log, expert_bytes=self.expert_bytes or 0))

            shape = self.trace.layers, self.trace.num_experts
            return untimed.play(Requests(self.trace), *shape, slots, policy, sized, self.setup.cold)
        return engine.play(self.setup.engine, self.run(policy, slots), ended)

    def run(self, policy: Policy, slots: int) -> Run:
        """One cell as an engine takes it; timed setups only."""
        trace, timing, link = self.trace, self.timing(policy), self.link
        window = experts_per_layer(timing, link, trace.layers, trace.top_k)
        shape = Shape(trace.layers, trace.num_experts)
        return gpu_run(Requests(trace), shape, slots, parse(policy), timing, link, self.setup.cold, window)

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
            cache_experts=slots,
            all_experts=self.all_experts,
            cold=self.setup.cold,
            warmup_requests=self.setup.warmup_requests,
            seed=policy.seed,
        )


class Requests(Sequence[RequestSteps]):
    """A trace's requests as an engine plays them, laid out anew each time: only one is held at once."""

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
