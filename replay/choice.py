"""What is replayed, and on what: an experiment with its files read, a policy, a cache, and a device.

Policy overhead differs between a run and its prediction: on a real device the work is done, on this host, and predicted
from what its first events took; for a profile, and on its logical clock, it takes what the simulator charges
(`sim.profiles.policy_overhead`).
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from policies.core.policy import Int
from policies.core.residency_compiled import places_of
from policies.core.spec import PolicySpec
from replay.device_choice import DeviceChoice
from replay.keys import key_of
from sim.loaded import TimedRun
from sim.loop.requests import Requests
from sim.loop.run import Run
from sim.profiles.timing import Link, Timing, experts_per_layer
from sim.sweeps import grid
from traces.errors import refuse
from traces.shards import Shards

if TYPE_CHECKING:  # needs torch, which the virtual device does not
    from replay.devices.gpu import Gpu
    from replay.devices.stage import Stage
    from replay.devices.store import HostMemory

DEFAULT_STEPS = 1_000
"""By default, a real device runs the first requests that hold this many steps."""

DISK_TOKENS = 100

Described = tuple[Timing, Link]
"""A machine, as the simulator takes it."""


@dataclass(frozen=True)
class Choice:
    """One cell on one device. InputError for what no device runs."""

    loaded: TimedRun
    policy: PolicySpec
    slots: int
    target: DeviceChoice  # resolved

    def __post_init__(self) -> None:
        simulated, policy = self.loaded.simulated_alone(self.policy), self.policy
        instead = "replay the winner of a sweep without it"
        if policy.uses_host or policy.admits:
            fetching = PolicySpec.of(policy.evict, policy.prefetch, policy.scope)
            instead = f"replay the same policy without it (`policy` {fetching.text})"
        refuse(
            (
                self.loaded.trace.drafts and self.device != "virtual",
                "`draft` runs on the virtual device alone so far: use `device` virtual, or leave it out",
            ),
            (simulated, f"hardware does not run {simulated} so far: {instead}, or simulate it (moe-sim run)"),
            (
                self.device == "disk" and self.target.store is None,
                "`device` disk reads experts from a file: write it with "
                f"moe-replay store FILE {self._model_options}, and name it with `store`",
            ),
        )

    @property
    def _model_options(self) -> str:
        """Return what options of `moe-replay store` name this model, with experts of these sizes."""
        experiment = self.loaded.experiment
        options = {
            "trace": experiment.trace if self.loaded.sizes is not None else None,
            "model-profile": experiment.model_profile,
            "expert-sizes": experiment.expert_sizes,
        }
        stated = {name: value for name, value in options.items() if value is not None}
        stated = stated or {"model-profile": self.loaded.profile.name}
        return " ".join(f"--{name} {value}" for name, value in stated.items())

    @property
    def device(self) -> str:
        return self.target.device

    @property
    def key(self) -> str:
        """Return a digest of all that decides what is measured. No real device charges a policy what is stated."""
        loaded, machine = self.loaded, None
        if self.device != "virtual":
            from replay.devices.stage import machine_name

            machine = machine_name(self.device)
            loaded = replace(loaded, experiment=replace(loaded.experiment, predictor_us=0.0))
        cell = grid.key(loaded, self.policy, self.slots)
        return key_of(cell=cell, device={"machine": machine, **vars(self.target)})

    def stage(self, memory: "HostMemory | None" = None, gpu: "Gpu | None" = None) -> "AbstractContextManager[Stage]":
        """Open what the model takes on the device, for this cell and others of its model; see `open_stage`."""
        from replay.devices.stage import open_stage

        seed = self.loaded.experiment.seed
        return open_stage(
            self.target, self.loaded.profile, self.most_tokens, self.most_context, seed, memory=memory, gpu=gpu
        )

    @property
    def device_slots(self) -> int:
        """Return how many experts the cache may hold at once: so many slots a device needs, each for the largest."""
        shape, sizes = self.loaded.shape, self.loaded.sizes
        return int(places_of(shape.total, self.policy.divide(shape, self.slots, sizes), sizes).sum())

    @property
    def run(self) -> Run:
        return self.loaded.run(self.policy, self.slots)

    @property
    def described(self) -> Described:
        return self.loaded.timing(self.policy), self.loaded.link

    def on(self, timing: Timing, link: Link) -> Run:
        window = experts_per_layer(timing, link, self.loaded.trace.layers, self.loaded.trace.top_k)
        return self.run.on(timing, link, window)

    @cached_property
    def steps(self) -> Int:
        """Return the distinct (tokens, context) of all steps: int64[n, 2], ascending."""
        requests = Requests(self.loaded.trace)
        each = [np.unique(np.stack([request.tokens, request.context], axis=1), axis=0) for request in requests]
        return np.unique(np.concatenate([np.ones((1, 2), np.int64), *each]), axis=0)

    @property
    def most_tokens(self) -> int:
        return int(self.steps[:, 0].max())

    @property
    def most_context(self) -> int:
        return int(self.steps[:, 1].max())

    @property
    def contexts(self) -> list[int]:
        contexts: list[int] = self.steps[self.steps[:, 0] == 1, 1].tolist()
        return contexts


def first_steps(loaded: TimedRun, steps: int) -> TimedRun:
    """Return the first requests, as many as hold `steps` steps and all that are warm-up and one more."""
    trace = loaded.trace
    ended = np.cumsum(np.diff(trace.offsets) - trace.prompts + (trace.prompts > 0))
    enough = max(int(np.searchsorted(ended, steps)) + 1, loaded.experiment.warmup_requests + 1)
    if enough >= len(trace.requests):
        return loaded
    return replace(loaded, trace=trace.head(enough), experiment=replace(loaded.experiment, requests=enough))


def first_part(loaded: TimedRun, device: str) -> TimedRun:
    """Return what a device runs by default: all on a logical clock, DISK_TOKENS on a disk, else DEFAULT_STEPS."""
    if device == "virtual":
        return loaded
    if device == "disk" and loaded.trace.phases != "prefill":
        return first_tokens(loaded, DISK_TOKENS)
    return first_steps(loaded, DEFAULT_STEPS)


def first_tokens(loaded: TimedRun, tokens: int) -> TimedRun:
    """Return the first requests, the last one cut off, so that just so many tokens are decoded, or all there are."""
    decoded = np.cumsum(np.diff(loaded.trace.offsets) - loaded.trace.prompts)
    enough = min(int(np.searchsorted(decoded, tokens)) + 1, len(decoded))
    experiment = replace(loaded.experiment, requests=enough)
    trace = loaded.trace.head(enough)
    more = int(decoded[enough - 1]) - tokens
    if more > 0:
        held = replace(loaded, experiment=experiment).whole if isinstance(trace, Shards) else trace
        trace = held.without_last(more)
    return replace(loaded, trace=trace, experiment=experiment)
