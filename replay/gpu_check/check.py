"""One check of everything that only a GPU can show, in one file of results: `make gpu-check`.

For each model's shapes, with random weights: kernels against float64, calibration, then cells of policy x cache size
run on the GPU beside what the simulator predicts from that calibration; for some, what others do instead
(`baselines`) and accelerate itself (`peer`). One host memory, pinned once, serves all models; where it is short of one,
experts share buffers, which every cell states (`host_experts`).

The file is written again after each cell. What would not end in time is left out, and said so.
"""

import time
import tomllib
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean

import torch

from policies.core.policy import Shape
from policies.core.spec import parse
from replay.calibration import calibrate
from replay.calibration.measure import Measurement
from replay.calibration.rates import rates
from replay.choice import Choice, first_tokens
from replay.comparison.cell import CLOSED_LOOP, LOCKSTEP, play_cell
from replay.comparison.record import Record
from replay.comparison.summary import rankings
from replay.comparison.sweep import ceiling_gb_per_s, copy_gb_per_s, head_of
from replay.device_choice import DeviceChoice
from replay.devices.cuda import CudaDevice
from replay.devices.device_facts import driver
from replay.devices.gpu import Gpu
from replay.devices.pinning import REQUIRE, pinned
from replay.devices.stage import Stage
from replay.devices.store import RESERVE_BYTES, HostMemory, available_memory_bytes
from replay.gpu_check.accelerate_baseline import FAMILIES, accelerate_offload
from replay.gpu_check.baselines import LAYER_STREAM, LRU_SWAP, SCHEDULES, SYNC_PER_COPY, play_baseline
from replay.gpu_check.bounds import ratios, verdict
from replay.gpu_check.routing import content_of, load
from replay.gpu_check.verify import verify
from replay.keys import key_of
from replay.prediction import under_contention
from replay.warmup import decide, undisturbed
from sim.engines import engine
from sim.experiment import AUTO
from sim.loop.requests import Requests
from sim.loop.run import gpu_run
from sim.profiles import model_profile
from sim.profiles.measured import MeasuredModel
from sim.profiles.model_profile import ModelProfile
from sim.profiles.timing import FixedTiming, Link
from sim.quantities import show_bytes
from sim.results.metrics import Row
from traces.errors import InputError
from traces.steps import DECODE
from traces.synthetic import synthetic
from traces.typed import typed

POLICIES = ("lru", "eamc", "eamc-blend")
ORACLE = "belady"
QUARTER = "25%"
OTHER_SIZES = ("10%", "50%")

FULL_TOKENS = 500
"""Of the cells whose 99th percentile is judged."""
SHORT_TOKENS = {
    "deepseek-v2-lite": 60,
    "mixtral-8x7b": 20,
    "olmoe-1b-7b": 60,
    "qwen3-30b-a3b": 50,
    "gpt-oss-20b-bf16": 40,
}
"""Of every other cell, by model, in the order in which they are run."""
FULL = ("deepseek-v2-lite", "olmoe-1b-7b")
WITH_BASELINES = FULL
BASELINE_TOKENS, PEER_TOKENS = 20, 3
RATES = "rates"  # of the machine, where they cannot be measured
PEER, PEER_BYTES_PER_S = "accelerate", 5e9  # what it may come to

HOST_BYTES = 32 << 30
LEAST_HOST_BYTES = 8 << 30
BUFFER_BYTES = 1 << 20
"""The host memory is filled in windows of this size."""

BASELINES = (
    *((name, "lru") for name in SCHEDULES),
    *((SYNC_PER_COPY, policy) for policy in POLICIES),
    (LRU_SWAP, "lru"),
)
PASSES = 3

BUDGET_S = 540.0
RATES_S, MODEL_S = 8.0, 30.0
"""What the machine's rates take, and opening and calibrating a model, at most."""

Told = Callable[[str], None]


class OutOfTimeError(InputError):
    """A cell that would outlast the check."""


class GpuLostError(Exception):
    """The GPU has failed or is stuck: nothing more can be run, but what is known can be written."""


@dataclass
class Check:
    """What is checked, and what is known so far. `models`: profiles in the order in which they are run."""

    gpu: Gpu
    record: Record
    told: Told
    models: tuple[str, ...] = tuple(SHORT_TOKENS)
    traces: Path | None = None  # a folder of trace folders; models without one get synthetic routing
    budget_s: float = BUDGET_S
    commit: str | None = None  # None: as git says
    peers: bool = True  # whether they are run
    host_bytes: int = HOST_BYTES
    found: calibrate.Found = field(default_factory=calibrate.Found)
    left_out: list[str] = field(default_factory=list)
    _known: dict[str, MeasuredModel] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)
    _peers_s: float = 0.0

    def run(self) -> None:
        """All of it. InputError where nothing can be run; a cell that cannot is recorded with its reason."""
        self.record.require_code()
        self.told("compiling (the result is kept for later runs)")
        compile_all()
        self._began = time.monotonic()
        self._peers_s = sum(peer_s(name) for name in self._peers())
        self._known = {model.model: model for model in calibrated_before(self.record)}
        before = {name: self.record.facts.get(name) or [] for name in ("kernels", "transfers")}
        self.record.begin(
            gpu=self.gpu.name,
            machine=self.gpu.name,
            device="cuda",
            driver=driver(),
            torch=torch.__version__,
            **{name: [row for row in rows if row["model"] in self._known] for name, rows in before.items()},
            left_out=self.left_out,
            fallbacks=[],
        )
        if self.commit:
            self.record.tell(commit=self.commit)
        try:
            self._played()
        except GpuLostError as error:
            self.left_out.append(f"everything after: {error}")
        finally:
            self._finish()

    def _played(self) -> None:
        with self._host_memory() as memory:
            self.told("the machine")
            self._rates()
            for name in self.models:
                self._model(name, memory)
                self.gpu.release()
            for name in self._peers():
                self._peer(name)
            self._rates()

    def _finish(self) -> None:
        """What is known of all cells together."""
        self._tell_profile()
        self.record.tell(rankings=rankings(list(self.record), self._noise()))
        cells = list(self.record)
        self.record.tell(verdict=verdict(self.record.facts, cells), ratios=ratios(cells))
        self.record.write()

    def _noise(self) -> float:
        """By how much passes of the calibration and repeats in them differ: closer policies need not be told apart."""
        spreads = [one.noise for passes in self.found.passes.values() for one in passes]
        return max([self.found.disagreement()[0] if self.found.rates else 0.0, *spreads])

    def _tell_profile(self) -> None:
        if self.found.models and self.found.rates:
            self.record.tell(hardware=calibrate.profile(self.found))
            self.record.write()

    def _rates(self) -> None:
        if self.found.rates and self._left_s() < RATES_S:
            return
        with self._recorded(key_of(mode=RATES), {"model": None, "mode": RATES, "policy": None}):
            self.found.rates.append(rates(self.gpu if self.gpu.device.type == "cuda" else None))

    @contextmanager
    def _host_memory(self) -> Iterator[HostMemory]:
        """Pinned; less of it where the driver refuses so much."""
        free = available_memory_bytes()
        least = min(LEAST_HOST_BYTES, self.host_bytes)
        wanted = self.host_bytes if free is None else min(self.host_bytes, int(0.7 * (free - RESERVE_BYTES)))
        wanted = max(least, wanted)
        with ExitStack() as opened:
            while True:
                self.told(f"{show_bytes(wanted)} of host memory")
                memory = HostMemory(max(1, wanted // BUFFER_BYTES), BUFFER_BYTES, seed=0)
                try:
                    opened.enter_context(pinned(memory, REQUIRE, self.gpu))
                    break
                except InputError:
                    if wanted // 2 < least:
                        raise
                    wanted //= 2
            self.record.tell(host_bytes=memory.nbytes, host_free_bytes=free)
            yield memory

    # Time

    def _left_s(self, with_peers: bool = False) -> float:
        """Until the budget is spent; what peers are going to take is theirs."""
        reserved_s = 0.0 if with_peers else self._peers_s
        return self.budget_s - (time.monotonic() - self._began) - reserved_s

    def _affords(self, what: str, seconds: float, with_peers: bool = False) -> bool:
        """Whether something that takes about so long ends in time; what does not is left out."""
        left = self._left_s(with_peers)
        self.told(f"{what} (about {seconds:.0f} s, {left:.0f} s left)")
        if seconds > left:
            self.left_out.append(what)
        return seconds <= left

    def _in_time(self, row: object) -> None:
        """At each step: an estimate may be wrong, the budget is not."""
        if self._left_s() < 0:
            raise OutOfTimeError("out of time")

    @contextmanager
    def _recorded(self, key: str, head: Row) -> Iterator[None]:
        """Whatever goes wrong in a cell is the cell's, unless the GPU is lost with it."""
        try:
            yield
        except GpuLostError:
            raise
        except Exception as error:
            told = str(error)
            if not isinstance(error, InputError):
                told = f"{type(error).__name__}: {told} ({_where(error)})"
            self.record.fail(key, head, InputError(told))
            if self.gpu.is_stuck or isinstance(error.__cause__ or error, torch.AcceleratorError):
                raise GpuLostError(" ".join(told.split())) from error

    def _play(
        self, what: str, seconds: float, key: str, head: Row, play: Callable[[], Row], with_peers: bool = False
    ) -> None:
        """Run and record a cell, unless it is finished or would not end in time."""
        if key not in self.record and self._affords(what, seconds, with_peers):
            with self._recorded(key, head):
                self.record.put(key, head | play())

    # One model

    def _model(self, name: str, memory: HostMemory) -> None:
        """Open its stage, verify, calibrate, run."""
        if not self._affords(name, MODEL_S):
            return
        with self._recorded(key_of(model=name), {"model": name, "mode": None, "policy": None}):
            profile = model_profile.model(name)
            loaded = load(profile, self.traces, FULL_TOKENS if name in FULL else SHORT_TOKENS.get(name, 20))
            choice = Choice(loaded, parse("lru"), loaded.slots(QUARTER), DeviceChoice("cuda"))
            self.told(f"{name}: weights and graphs")
            with choice.stage(memory, self.gpu) as stage:
                if not self.found.facts:
                    self.found.facts = stage.facts
                    self.record.tell(ceiling_gb_per_s=ceiling_gb_per_s(stage))
                choice = self._calibrated(choice, stage)
                for cell, mode, tokens in _cells(name, choice):
                    self._cell(cell, mode, tokens, stage)
                if name in WITH_BASELINES:
                    self._baselines(choice, stage)

    def _calibrated(self, choice: Choice, stage: Stage) -> Choice:
        """The same on a machine that is described by what was measured just now."""
        profile = choice.loaded.profile
        if profile.name in self._known:  # its finished cells were predicted so
            known = self._known[profile.name]
            self.found.models[profile.name] = known
            self.found.passes[profile.name] = [Measurement(known, noise=0.0)]
            self.found.shapes[profile.name] = profile.moe_layers, profile.top_k
            self.found.costs[profile.name] = dict(known.predictor_us)
        else:
            self._calibrate(choice, profile, stage)
        self._tell_profile()
        if fallbacks := stage.facts["fallbacks"]:
            self.record.facts["fallbacks"].append(f"{profile.name}: {fallbacks}")
        machine = replace(choice.loaded.hardware, name="calibrated", measured=(self.found.settled(profile.name),))
        return replace(choice, loaded=replace(choice.loaded, hardware=machine))

    def _calibrate(self, choice: Choice, profile: ModelProfile, stage: Stage) -> None:
        """Kernels, then times."""
        with stage.device(choice.slots, choice.contexts) as device, undisturbed(choice.run):
            assert isinstance(device, CudaDevice)
            self.told(f"{profile.name}: kernels against float64")
            self.record.facts["kernels"].append(verify(stage, device, profile.top_k))
            policies = [parse(policy) for policy in POLICIES]
            calibrate.add_model(self.found, choice, device, policies, PASSES, self.told)
        model = self.found.settled(profile.name)
        gb_per_s = model.expert_bytes / model.transfer_ns
        self.record.facts["transfers"].append(
            {"model": profile.name, "expert_bytes": model.expert_bytes, "gb_per_s": gb_per_s}  # one behind another
        )

    def _cell(self, choice: Choice, mode: str, tokens: int, stage: Stage) -> None:
        choice = replace(choice, loaded=first_tokens(choice.loaded, tokens))
        head = head_of(choice, mode, stage)
        what = f"{head['model']}: {head['policy']} at {head['cache_fraction']:.0%}, {mode}"
        names = ("model", "trace", "policy", "mode", "cache_experts", "requests")
        key = key_of(**{name: head[name] for name in names}, tokens=tokens, content=content_of(choice.loaded))
        moved = 1.5 * (1 - choice.slots / choice.loaded.all_experts)  # of the lookups, with prefetches

        def play() -> Row:
            assert choice.loaded.measured
            machine = under_contention(choice, choice.loaded.measured, choice.loaded.timing(choice.policy).predictor_ns)
            outcome = play_cell(choice, mode, *machine, stage, self._in_time)
            log = outcome.measured.log
            first_ms = log.step_ns[log.phase == DECODE][:BASELINE_TOKENS].mean() / 1e6
            return {**outcome.figures(), "tpot_first_ms": float(first_ms)}

        self._play(what, _seconds(choice, moved), key, head, play)
        self.record.tell(copy_gb_per_s=copy_gb_per_s(self.record))

    # What others do

    def _baselines(self, choice: Choice, stage: Stage) -> None:
        choice = replace(choice, loaded=first_tokens(choice.loaded, BASELINE_TOKENS))
        layer, content = choice.loaded.profile.experts / choice.loaded.profile.top_k, content_of(choice.loaded)
        for name, policy in BASELINES:
            one = replace(choice, policy=parse(policy))
            head = head_of(one, name, stage) | ({"policy": None} if name in SCHEDULES else {})
            what = f"{head['model']}: {name}" + (f" under {policy}" if head["policy"] else "")
            key = key_of(**{name: head[name] for name in ("model", "trace")}, mode=name, policy=policy, content=content)

            def play(one: Choice = one, name: str = name) -> Row:
                played = play_baseline(one, name, stage, self._in_time)
                return {"tokens": int((played.log.phase == DECODE).sum()), "measured": played.row}

            self._play(what, _seconds(one, layer if name == LAYER_STREAM else 1.5), key, head, play)

    def _peers(self) -> list[str]:
        """Models that are still to be decoded by accelerate."""
        if not self.peers:
            return []
        with_family = (name for name in WITH_BASELINES if name in self.models and name in FAMILIES)
        return [name for name in with_family if key_of(model=name, mode=PEER) not in self.record]

    def _peer(self, name: str) -> None:
        profile, key, needed = model_profile.model(name), key_of(model=name, mode=PEER), peer_bytes(name)
        what, free = f"{name}: accelerate's offload", available_memory_bytes()
        if free is not None and needed > free - RESERVE_BYTES:
            self.left_out.append(f"{what}: {show_bytes(needed)} of host memory are not free")
            return

        def play() -> Row:
            peer = accelerate_offload(profile, self.gpu.device, PEER_TOKENS)
            figures = {"tpot_mean_ms": mean(peer.tpot_ms), "tpot_ms": list(peer.tpot_ms)}
            return {"version": peer.version, "tokens": len(peer.tpot_ms), "measured": figures}

        self._play(what, peer_s(name), key, {"model": name, "mode": PEER, "policy": None}, play, with_peers=True)
        self.gpu.release()


def peer_bytes(name: str) -> int:
    """Of a whole model, which a peer holds in host memory."""
    profile = model_profile.model(name)
    return profile.experts * profile.moe_layers * profile.expert_bytes + round(profile.dense_bytes)


def peer_s(name: str) -> float:
    """About what a peer takes: to make the weights, the prompt, a token for warm-up, and those that count."""
    return (PEER_TOKENS + 3) * peer_bytes(name) / PEER_BYTES_PER_S


def calibrated_before(record: Record) -> Sequence[MeasuredModel]:
    """Models that a check which continues has calibrated: its profile is never edited."""
    text = record.facts.get("hardware")
    return [typed(MeasuredModel, table) for table in tomllib.loads(text)["measured"]] if len(record) and text else ()


def _cells(name: str, choice: Choice) -> Iterator[tuple[Choice, str, int]]:
    """(choice, mode, tokens), what matters most first."""
    short = SHORT_TOKENS.get(name, 20)
    for policy in POLICIES:
        yield replace(choice, policy=parse(policy)), CLOSED_LOOP, FULL_TOKENS if name in FULL else short
    yield replace(choice, policy=parse(ORACLE)), LOCKSTEP, short
    for size in OTHER_SIZES:
        for policy in POLICIES:
            yield replace(choice, policy=parse(policy), slots=choice.loaded.slots(size)), CLOSED_LOOP, short
    yield replace(choice, policy=parse("eamc")), LOCKSTEP, short


def _seconds(choice: Choice, transfers: float) -> float:
    """About what a cell takes that moves so many experts a lookup."""
    model = choice.loaded.measured
    assert model
    lookups = sum(len(request.experts) for request in choice.run.requests)
    return 2 + lookups * transfers * model.transfer_ns / 1e9


def _where(error: BaseException) -> str:
    """File and line of what raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(last.filename).name}:{last.lineno}"


def compile_all() -> None:
    """Everything compiled that the check calls: the simulator's kernel, policies, residency."""
    trace = synthetic(4, 6, layers=3, experts=8, top_k=2, seed=1, prompt_tokens=3)
    for policy in POLICIES:
        timing, link = FixedTiming(9, 2, 0, 1, 1), Link(0, 1, 1, 64)
        run = gpu_run(Requests(trace), Shape(3, 8), 9, parse(policy), timing, link, experts_per_layer=1.0)
        decide(run)
        engine.simulate(AUTO, run)
