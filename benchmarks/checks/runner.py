"""Run a plan: its cells on a GPU or a disk beside what the simulator predicts, what others do, and accelerate itself.

For each model's shapes, with random weights. On a GPU kernels are compared with float64, and the machine is calibrated
once a model; one host memory, pinned once, serves all models, and where it is short of one, experts share buffers,
which every cell states (`host_experts`). On a disk the machine is measured before and behind each cell, whose experts
have all been read once before it. The file is written again after each cell; what does not end in time is left out, and
listed.
"""

import math
import time
import tomllib
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from shutil import disk_usage
from statistics import mean
from tempfile import TemporaryDirectory

import torch

from benchmarks.checks.baselines import PAGE_CACHE, UNDER_A_POLICY, fill, run_baseline
from benchmarks.checks.bounds import ratios, verdict
from benchmarks.checks.cells import POLICIES, QUARTER, Cell, Plan, load
from benchmarks.checks.limits import page_cache_of, read_through
from benchmarks.checks.peers import FAMILIES, accelerate_offload
from policies.core.policy import Shape
from policies.core.spec import parse
from replay.calibration import calibrate
from replay.calibration.measure import Measurement
from replay.calibration.rates import rates
from replay.choice import Choice, first_tokens
from replay.comparison.cell import MODES
from replay.comparison.errors import accuracy, rankings
from replay.comparison.record import Record
from replay.comparison.sweep import Machine, ceiling_gb_per_s, copy_gb_per_s, head_of
from replay.device_choice import DeviceChoice
from replay.devices.expert_file import write
from replay.devices.gpu import Gpu, Task, pinned
from replay.devices.lanes import page_up
from replay.devices.stage import Stage, driver, machine_name
from replay.devices.store import RESERVE_BYTES, HostMemory, Stamps
from replay.keys import code_digest, key_of
from replay.model.network import expert_output
from replay.warmup import decide, undisturbed
from sim.engines import compiled_engine
from sim.loop.device import Device
from sim.loop.requests import Requests
from sim.loop.run import gpu_run
from sim.probe.limits import available_memory_bytes
from sim.profiles.measured import MeasuredModel
from sim.profiles.timing import FixedTiming, Link
from sim.quantities import parse_cache_size, show_bytes
from sim.results.metrics import Row
from traces.errors import InputError
from traces.models import profile as model_profile
from traces.models.profile import ModelProfile
from traces.steps import DECODE
from traces.synthetic import synthetic
from traces.typed import typed

HOST_BYTES, LEAST_HOST_BYTES = 32 << 30, 8 << 30
BUFFER_BYTES = 1 << 20
"""The host memory is filled in windows of this size."""
FILE_BYTES = 4 << 30
"""Of a model's file on a disk at least, unless others are run on it: its experts share what fits."""

PASSES = 3

TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-5}
"""Relative error of the sum of experts, in the 2-norm: inner activations and weights have 8 or 24 bits."""

KEY = ("model", "trace", "policy", "mode", "cache_experts", "requests")


class OutOfTimeError(Exception):
    """The budget is spent."""


@dataclass
class Check:
    """A plan on this machine. `models`: profiles in the order in which they are run."""

    plan: Plan
    record: Record
    say: Callable[[str], None]
    models: Sequence[str]
    traces: Path | None = None  # a folder of trace folders; models without one get synthetic routing
    folder: Path = Path()  # for the files of experts, on the disk that is checked
    tokens: int | None = None  # of a cell; None: as the plan says
    budget_s: float = math.inf
    peers: bool = True  # whether accelerate is run
    gpu: Gpu | None = None  # None: a disk is checked
    host_bytes: int = HOST_BYTES
    found: calibrate.Calibration = field(default_factory=calibrate.Calibration)

    def run(self) -> None:
        """Run all of it; a cell that cannot be run is recorded with its reason."""
        if (
            len(self.record) and self.record.facts.get("code") != code_digest()
        ):  # its cells would be judged beside new ones
            raise InputError(f"{self.record.path} is of other code than this: run without --resume")
        if self.gpu:
            self.say("compiling (the result is kept for later runs)")
            compile_all()
        self._began = time.monotonic()
        self._known = calibrated_before(self.record)
        before = {name: self.record.facts.get(name) or [] for name in ("kernels", "transfers")}
        name = self.gpu.name if self.gpu else machine_name("disk")
        of_gpu = {"gpu": name, "driver": driver()} if self.gpu else {}
        kept = {what: [row for row in rows if row["model"] in self._known] for what, rows in before.items()}
        facts = {"machine": name, "device": self.plan.device, "torch": torch.__version__, **of_gpu, **kept}
        self.record.begin(**facts, left_out=[], fallbacks=[])
        try:
            with self._host_memory() as memory:
                self._rates()
                for name in self.models:
                    self._model(name, memory)
                    self._release()
                for name in self.models if self.peers else ():
                    if name in self.plan.compared and name in FAMILIES:
                        self._peer(name)
                self._rates()
        finally:
            self._finish()

    def _finish(self) -> None:
        """Record what all cells together say."""
        self._record_profile()
        cells, set_facts = list(self.record), self.record.set_facts
        set_facts(copy_gb_per_s=copy_gb_per_s(self.record), accuracy=accuracy(cells), ratios=ratios(cells))
        set_facts(rankings=rankings(cells, self._noise()))
        if self.gpu:
            set_facts(verdict=verdict(self.record.facts, cells))
        self.record.write()

    def _noise(self) -> float:
        """Return by how much calibrations differ: policies that are closer count as equal."""
        spreads = [one.noise for passes in self.found.passes.values() for one in passes]
        return max([self.found.disagreement()[0] if self.found.rates else 0.0, *spreads])

    def _record_profile(self) -> None:
        if self.found.models and self.found.rates:
            self.record.set_facts(hardware=calibrate.profile(self.found))
            self.record.write()

    def _release(self) -> None:
        if self.gpu:
            self.gpu.release()

    def _rates(self) -> None:
        if self.gpu:
            with self._recorded("the machine", {"model": None, "mode": "rates", "policy": None}):
                self._in_time()
                self.found.rates.append(rates(self.gpu if self.gpu.device.type == "cuda" else None))
                self._release()

    @contextmanager
    def _host_memory(self) -> Iterator[HostMemory | None]:
        """Pin it; less of it where the driver refuses so much. None for a disk."""
        if not self.gpu:
            yield None
            return
        free, least = available_memory_bytes(), min(LEAST_HOST_BYTES, self.host_bytes)
        wanted = max(least, min(self.host_bytes, int(0.7 * (free - RESERVE_BYTES))))
        with ExitStack() as opened:
            while True:
                self.say(f"{show_bytes(wanted)} of host memory")
                memory = HostMemory(max(1, wanted // BUFFER_BYTES), BUFFER_BYTES, seed=0)
                try:
                    opened.enter_context(pinned(memory, self.gpu, is_required=True))
                    break
                except InputError:
                    if wanted // 2 < least:
                        raise
                    wanted //= 2
            self.record.set_facts(host_bytes=memory.nbytes, host_free_bytes=free)
            yield memory

    # One cell

    def _in_time(self, row: object = None) -> None:
        """Raise OutOfTimeError once the budget is spent, before any cell and after any step."""
        if time.monotonic() - self._began > self.budget_s:
            raise OutOfTimeError

    @contextmanager
    def _recorded(self, what: str, head: Row, key: str | None = None) -> Iterator[None]:
        """Record whatever goes wrong in a cell as the cell's; list what does not end in time as left out."""
        self.say(what)
        try:
            yield
        except OutOfTimeError:
            self.record.facts["left_out"].append(what)
        except Exception as error:
            if not isinstance(error, InputError):
                last = traceback.extract_tb(error.__traceback__)[-1]
                error = InputError(f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})")
            self.say(f"failed: {head['model']}: {error}")
            self.record.fail(key or key_of(**head), head, error)

    def _run(self, what: str, key: str, head: Row, run: Callable[[], Row]) -> None:
        """Run and record a cell, unless it is finished."""
        if key not in self.record:
            with self._recorded(what, head, key):
                self._in_time()
                self.record.put(key, head | run())

    def _cell(self, cell: Cell, choice: Choice, stage: Stage, machine: Machine) -> None:
        head = head_of(choice, cell.mode, stage)
        tokens = self._tokens(head["model"], cell)
        loaded = first_tokens(choice.loaded, tokens)
        choice = replace(choice, loaded=loaded, policy=parse(cell.policy), slots=loaded.slots(cell.size))
        head = head_of(choice, cell.mode, stage) | {"lanes": stage.lanes if choice.target.store else None}
        run, what = partial(self._other, choice, cell.mode, stage), f"{head['model']}: {cell.mode}"
        if cell.mode in MODES:
            run = partial(self._predicted, choice, cell.mode, machine)
            what = f"{head['model']}: {cell.policy} at {head['cache_fraction']:.0%}, {cell.mode}"
        elif cell.mode in UNDER_A_POLICY:
            what += f" under {cell.policy}"
        else:
            head["policy"] = None
        key = key_of(**{name: head[name] for name in KEY}, tokens=tokens, content=loaded.trace.fingerprint)
        self._run(what, key, head, run)

    def _predicted(self, choice: Choice, mode: str, machine: Machine) -> Row:
        if choice.target.store:
            read_through(choice.target.store)
        outcome = machine.outcome(choice, mode, self._in_time)
        log = outcome.measured.log
        first_ms = log.step_ns[log.phase == DECODE][: self.plan.other_tokens].mean() / 1e6
        return {**outcome.figures(), "tpot_first_ms": float(first_ms)}

    def _other(self, choice: Choice, name: str, stage: Stage) -> Row:
        ran = run_baseline(choice, name, stage, self._in_time)
        more = {"warms_up": True, "memory_bytes": choice.slots * stage.store.stride} if name == PAGE_CACHE else {}
        return {"tokens": int((ran.log.phase == DECODE).sum()), **more, "measured": ran.figures}

    # One model

    def _tokens(self, model: str, cell: Cell) -> int:
        return self.tokens if self.tokens and cell.mode in MODES else self.plan.tokens_of(model, cell)

    def _model(self, name: str, memory: HostMemory | None) -> None:
        """Open its stage, verify, calibrate, run."""
        with self._recorded(name, {"model": name, "mode": None, "policy": None}), ExitStack() as opened:
            self._in_time()
            profile = model_profile.model(name)
            loaded = load(profile, self.traces, max(self._tokens(profile.name, cell) for cell in self.plan.cells))
            store, slots = self._store(profile, opened), loaded.slots(QUARTER)
            choice = Choice(loaded, parse("lru"), slots, DeviceChoice(self.plan.device, store=store))
            stage = opened.enter_context(choice.stage(memory, self.gpu))
            if not self.record.facts["ceiling_gb_per_s"]:
                self.record.set_facts(ceiling_gb_per_s=ceiling_gb_per_s(stage))
            if self.gpu:
                choice = self._calibrated(choice, stage)
            else:
                here = {"name": "this machine as measured", "threads": stage.facts["torch_threads"]}
                self.record.set_facts(hardware=here, past_cache=stage.facts["past_cache"])
            machine = Machine(choice, stage, self.gpu is not None, choice.slots)
            for cell in (*self.plan.cells, *(self.plan.others if profile.name in self.plan.compared else ())):
                self._cell(cell, choice, stage, machine)

    def _store(self, profile: ModelProfile, opened: ExitStack) -> Path | None:
        """Write the file of a disk's experts: all where others are run on it, else as many as FILE_BYTES hold."""
        if self.gpu:
            return None
        experts, stride = profile.moe_layers * profile.experts, page_up(profile.expert_bytes)
        is_whole = profile.name in self.plan.compared
        distinct = experts if is_whole else min(experts, max(1, FILE_BYTES // stride))
        needed, free = distinct * stride, disk_usage(self.folder).free
        if needed > free:
            raise InputError(
                f"a file of {show_bytes(needed)} does not fit: {show_bytes(free)} are free in {self.folder}"
            )
        self.say(f"{profile.name}: writing {distinct} of {experts} experts, {show_bytes(needed)}")
        folder = opened.enter_context(TemporaryDirectory(prefix="disk-check-", dir=self.folder))
        path = Path(folder) / f"{profile.name}.experts"
        write(path, profile, Stamps(distinct, profile.expert_bytes, seed=0).write, "random weights, seed 0", distinct)
        return path

    def _calibrated(self, choice: Choice, stage: Stage) -> Choice:
        """Return the same on a machine that is described by what was measured just now."""
        profile, found = choice.loaded.profile, self.found
        assert profile
        assert choice.loaded.hardware
        found.facts = found.facts or stage.facts
        if known := self._known.get(profile.name):  # its finished cells were predicted so
            found.models[profile.name] = known
            found.passes[profile.name] = [Measurement(known, noise=0.0)]
            found.shapes[profile.name] = profile.moe_layers, profile.top_k
        else:
            with stage.device(choice.slots, choice.contexts) as device, undisturbed(choice.run):
                self.say(f"{profile.name}: kernels against float64")
                self.record.facts["kernels"].append(verify(stage, device, choice.slots, profile.top_k))
                calibrate.add_model(found, choice, device, [*map(parse, POLICIES)], PASSES, self.say)
            model = found.models[profile.name]
            transfer = {"expert_bytes": model.expert_bytes, "gb_per_s": model.expert_bytes / model.transfer_ns}
            self.record.facts["transfers"].append({"model": profile.name, **transfer})  # one behind another
        self._record_profile()
        if fallbacks := stage.facts["fallbacks"]:
            self.record.facts["fallbacks"].append(f"{profile.name}: {fallbacks}")
        machine = replace(choice.loaded.hardware, name="calibrated", measured=(found.models[profile.name],))
        return replace(choice, loaded=replace(choice.loaded, hardware=machine))

    def _peer(self, name: str) -> None:
        """Decode with accelerate, which holds the whole model in host memory."""
        head = {"model": name, "mode": self.plan.peer, "policy": None}
        profile, tokens = model_profile.model(name), self.plan.peer_tokens
        what, free = f"{name}: accelerate's offload", available_memory_bytes()
        total = profile.moe_layers * profile.experts
        needed = total * profile.expert_bytes + round(profile.dense_bytes)
        if needed > free - RESERVE_BYTES:
            self.record.facts["left_out"].append(f"{what}: {show_bytes(needed)} of host memory are not free")
            return

        def run() -> Row:
            if self.gpu:
                peer, limit = accelerate_offload(profile, self.gpu.device, tokens), {}
            else:
                slots = parse_cache_size(QUARTER, total, profile.expert_bytes, profile.moe_layers)
                budget = slots * profile.expert_bytes
                with TemporaryDirectory(prefix="disk-check-", dir=self.folder) as below:
                    files, limit = Path(below), {"memory_bytes": budget}
                    within = page_cache_of(budget, files)
                    peer = accelerate_offload(profile, torch.device("cpu"), tokens, folder=files, within=within)
            figures = {"tpot_mean_ms": mean(peer.tpot_ms), "tpot_ms": list(peer.tpot_ms)}
            return {"version": peer.version, "tokens": len(peer.tpot_ms), **limit, "measured": figures}

        self._run(what, key_of(**head), head, run)
        self._release()


def calibrated_before(record: Record) -> dict[str, MeasuredModel]:
    """Return what a check that continues has calibrated, by model."""
    text = record.facts.get("hardware")
    if not (len(record) and isinstance(text, str)):
        return {}
    models = [typed(MeasuredModel, table) for table in tomllib.loads(text)["measured"]]
    return {model.model: model for model in models}


def verify(stage: Stage, device: Device, slots: int, experts: int) -> Row:
    """Compare one token through that many experts, as decoded tokens go, with float64; overwrites the first slots."""
    network, profile = stage.network, stage.network.profile
    assert stage.gpu
    assert stage.launches
    experts = min(experts, slots, stage.store.distinct)
    fill(device, experts, stage.store.expert_bytes)
    hidden = torch.randn(profile.hidden_size, generator=torch.Generator().manual_seed(1)).to(network.hidden.dtype)
    network.hidden[0].copy_(hidden)
    network.experts_out.zero_()
    pool, fused = device.pool, stage.launches.experts  # type: ignore[attr-defined]
    tasks: list[Task] = [partial(network.expert, network.weights(pool[slot]), 1) for slot in range(experts)]
    if fused:
        tasks = [partial(fused, pool, list(range(experts)))]
    stream = stage.gpu.compute_stream()
    stage.gpu.synchronize()
    for task in tasks:
        stream.run(task)
    stage.gpu.synchronize()
    computed = network.experts_out[0].double().cpu()
    network.experts_out.zero_()
    token = hidden.to(network.expert_dtype).double()[None]
    exact = torch.zeros(profile.hidden_size, dtype=torch.float64)
    for expert in range(experts):
        first, down = network.weights(torch.from_numpy(stage.host[expert]))
        exact += expert_output((first.double(), down.double()), token, profile.expert_matrices)[0]
    exact *= network.router_weight
    return {
        "model": profile.name,
        "kernel": "fused" if fused else "matmul",
        "experts": experts,
        "relative_error": float((computed - exact).norm() / exact.norm()),
        "tolerance": TOLERANCE[network.expert_dtype],
    }


def compile_all() -> None:
    """Compile everything that a check calls: the simulator's kernel, policies, residency."""
    trace = synthetic(4, 6, layers=3, experts=8, top_k=2, seed=1, prompt_tokens=3)
    for policy in POLICIES:
        timing, link = FixedTiming(9, 2, 0, 1, 1), Link(0, 1, 1, 64)
        run = gpu_run(Requests(trace), Shape(3, 8), 9, parse(policy), timing, link, experts_per_layer=1.0)
        decide(run)
        compiled_engine.simulate(run)
