"""What each check runs, as data: models, and of each the cells, what matters most first; and the routing of a cell."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.checks.baselines import (
    LAYER_STREAM,
    LRU_SWAP,
    ON_DEMAND,
    PAGE_CACHE,
    RESIDENT,
    SYNC_PER_COPY,
    ZERO_COPY,
)
from replay.choice import first_tokens
from replay.comparison.cell import CLOSED_LOOP, LOCKSTEP
from sim.experiment import Experiment
from sim.loaded import TimedRun
from sim.profiles.hardware_profile import hardware
from traces.errors import InputError
from traces.models import profile as model_profile
from traces.models.profile import ModelProfile
from traces.schema import TraceMeta
from traces.shards import Shards
from traces.synthetic import synthetic
from traces.trace import Trace, concatenate

POLICIES = ("lru", "eamc", "eamc-blend")
QUARTER = "25%"


class Cell(NamedTuple):
    """A policy with a cache, or what others do in place of it, in a mode."""

    policy: str = "lru"
    mode: str = CLOSED_LOOP  # of `replay.comparison`, or the name of a baseline
    size: str = QUARTER
    long: bool = False  # of the models with others: so long that its 99th percentile is judged


class Plan(NamedTuple):
    """A check."""

    device: str
    tokens: Mapping[str, int]  # of each cell, by model, in the order in which they are run
    cells: tuple[Cell, ...]
    compared: tuple[str, ...]  # models beside which what others do is run
    others: tuple[Cell, ...]
    other_tokens: int
    peer: str  # accelerate's mode
    peer_tokens: int
    long_tokens: int = 0

    def tokens_of(self, model: str, cell: Cell) -> int:
        """Return how many tokens a cell decodes."""
        if cell.mode not in (CLOSED_LOOP, LOCKSTEP):
            return self.other_tokens
        return self.long_tokens if cell.long and model in self.compared else self.tokens.get(model, 20)


GPU = Plan(
    device="cuda",
    tokens={
        "deepseek-v2-lite": 60,
        "mixtral-8x7b": 20,
        "olmoe-1b-7b": 60,
        "qwen3-30b-a3b": 50,
        "gpt-oss-20b-bf16": 40,
    },
    cells=(
        *(Cell(policy, long=True) for policy in POLICIES),
        Cell("belady", LOCKSTEP),
        *(Cell(policy, size=size) for size in ("10%", "50%") for policy in POLICIES),
        Cell("eamc", LOCKSTEP),
    ),
    compared=("deepseek-v2-lite", "olmoe-1b-7b"),
    others=(
        *(Cell(mode=mode) for mode in (RESIDENT, ON_DEMAND, LAYER_STREAM, ZERO_COPY)),
        *(Cell(policy, SYNC_PER_COPY) for policy in POLICIES),
        Cell(mode=LRU_SWAP),
    ),
    other_tokens=20,
    peer="accelerate",
    peer_tokens=3,
    long_tokens=500,
)

DISK = Plan(
    device="disk",
    tokens={"olmoe-1b-7b": 40, "gpt-oss-20b-bf16": 15, "deepseek-v2-lite": 20, "qwen3-30b-a3b": 12},
    cells=(
        *(Cell(policy) for policy in POLICIES),
        Cell(mode=LOCKSTEP),
        Cell("lru", size="10%"),
        Cell("eamc-blend", size="10%"),
    ),
    compared=("olmoe-1b-7b",),  # its file is written whole
    others=(Cell(mode=ON_DEMAND), Cell(mode=PAGE_CACHE)),
    other_tokens=15,
    peer="accelerate, disk offload",
    peer_tokens=2,
)

REQUEST_TOKENS, PROMPT_TOKENS = 20, 96
"""Of a request that is synthetic: what it decodes, and the prompt of the first one."""


def load(profile: ModelProfile, traces: Path | None, tokens: int) -> TimedRun:
    """Return the first requests of a trace of that model among `traces`, as many as decode `tokens` tokens.

    Prefills are decoded where it has nothing else. Routing is synthetic where there is no such trace.
    """
    machine = hardware("h200")
    for folder in sorted(traces.iterdir()) if traces else ():
        try:
            trace = Shards.open(str(folder))
        except InputError:
            continue
        if _is_of(trace.meta, profile):
            experiment = Experiment(str(folder), hardware="h200", as_decode=trace.phases == "prefill")
            trace = trace.as_decode() if experiment.as_decode else trace
            return first_tokens(TimedRun(experiment, trace, profile, machine), tokens)
    made = synthetic_trace(profile, tokens)
    return first_tokens(TimedRun(Experiment(made.name, hardware="h200"), made, profile, machine), tokens)


def _is_of(meta: TraceMeta, profile: ModelProfile) -> bool:
    """Return whether a trace is of the same model, or at least of its shape under a name that is unknown."""
    known = model_profile.known(meta.model)
    shape = (meta.layers, meta.experts, meta.top_k) == (profile.moe_layers, profile.experts, profile.top_k)
    return shape and (known is None or known.hidden_size == profile.hidden_size)


def synthetic_trace(profile: ModelProfile, tokens: int) -> Trace:
    """Return a request with a prompt, then short ones, together at least `tokens` decoded tokens."""
    shape = profile.moe_layers, profile.experts, profile.top_k
    first = synthetic(1, REQUEST_TOKENS, *shape, seed=0, prompt_tokens=PROMPT_TOKENS)
    more = -(-tokens // REQUEST_TOKENS) - 1
    trace = concatenate([first, synthetic(more, REQUEST_TOKENS, *shape, seed=1)]) if more else first
    return replace(trace, meta=replace(trace.meta, model=profile.name))
