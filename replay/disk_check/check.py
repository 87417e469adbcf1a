"""One check of what any computer can show, in one file of results: `make disk-check`.

For each model's shapes, with random weights in a file on the disk: cells of policy x cache size, run by lanes that
read and a CPU that computes, each beside what the simulator predicts from calibrations before and behind the cell; and
what people use instead, with as much memory: the page cache (`mapped`), accelerate's offload to a disk, reads without a
cache. The results are written again after each cell, whose experts have all been read once before it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import disk_usage, rmtree
from statistics import mean
from tempfile import mkdtemp

import torch

from policies.core.spec import parse
from replay.choice import Choice, first_tokens
from replay.comparison.cell import CLOSED_LOOP, LOCKSTEP, play_cell, play_on
from replay.comparison.lockstep import FixedOrder
from replay.comparison.record import Record
from replay.comparison.summary import accuracy, rankings
from replay.comparison.sweep import Machine, ceiling_gb_per_s, copy_gb_per_s, head_of
from replay.device_choice import DeviceChoice
from replay.devices.expert_file import ExpertFile, read_through, stride_of, write
from replay.devices.stage import Stage
from replay.devices.store import RESERVE_BYTES, Stamps, available_memory_bytes
from replay.disk_check.mapped import MappedDevice, page_cache_of
from replay.gpu_check.accelerate_baseline import FAMILIES, accelerate_offload
from replay.gpu_check.baselines import ON_DEMAND, Resident, play_baseline
from replay.gpu_check.bounds import ratios
from replay.gpu_check.routing import content_of, load
from replay.keys import key_of
from replay.warmup import undisturbed
from sim.profiles import model_profile
from sim.profiles.model_profile import ModelProfile
from sim.quantities import show_bytes
from sim.results.metrics import Row
from traces.errors import InputError
from traces.steps import DECODE

POLICIES = ("lru", "eamc", "eamc-blend")
QUARTER, TENTH = "25%", "10%"
PAGE_CACHE, ACCELERATE = "page cache", "accelerate, disk offload"

TOKENS = {"olmoe-1b-7b": 40, "gpt-oss-20b-bf16": 15, "deepseek-v2-lite": 20, "qwen3-30b-a3b": 12}
"""Of a cell, by model, in the order in which they are run."""
WITH_PEERS = "olmoe-1b-7b"
"""Its file is written whole, and what people use is run on it."""
PEER_TOKENS, ACCELERATE_TOKENS = 15, 2
FILE_BYTES = 4 << 30
"""Of any other model's file at least: its experts share what fits."""

Told = Callable[[str], None]


@dataclass(frozen=True)
class Check:
    """What is checked. `models`: profiles in the order in which they are run."""

    record: Record
    told: Told
    folder: Path  # for the files of experts, on the disk that is checked
    models: tuple[str, ...] = tuple(TOKENS)
    traces: Path | None = None  # a folder of trace folders; models without one get synthetic routing
    tokens: int | None = None  # of a cell; None: as TOKENS says

    def run(self) -> None:
        """All of it; a cell that cannot be run is recorded with its reason."""
        self.record.require_code()
        self.record.begin(device="disk", torch=torch.__version__)
        for name in self.models:
            with self._recorded(key_of(model=name), {"model": name, "mode": None, "policy": None}), self._below() as at:
                self._model(model_profile.model(name), at)
        cells = list(self.record)
        self.record.tell(copy_gb_per_s=copy_gb_per_s(self.record), ratios=ratios(cells))
        self.record.tell(rankings=rankings(cells), accuracy=accuracy(cells))
        self.record.write()

    @contextmanager
    def _below(self) -> Iterator[Path]:
        """A folder of our own that goes afterwards."""
        folder = Path(mkdtemp(prefix="disk-check-", dir=self.folder))
        try:
            yield folder
        finally:
            rmtree(folder)

    @contextmanager
    def _recorded(self, key: str, head: Row) -> Iterator[None]:
        try:
            yield
        except InputError as error:
            self.told(f"{head['model']}: {error}")
            self.record.fail(key, head, error)

    def _play(self, what: str, key: str, head: Row, play: Callable[[], Row]) -> None:
        """Run and record a cell, unless it is finished."""
        if key not in self.record:
            self.told(what)
            with self._recorded(key, head):
                self.record.put(key, head | play())

    def _model(self, profile: ModelProfile, folder: Path) -> None:
        tokens = self.tokens or TOKENS.get(profile.name, 15)
        loaded = first_tokens(load(profile, self.traces, tokens), tokens)
        store = self._store(profile, folder)
        choice = Choice(loaded, parse("lru"), loaded.slots(QUARTER), DeviceChoice("disk", store=store))
        with choice.stage() as stage:
            self.record.tell(
                machine=stage.facts["device_name"],
                hardware={"name": "this machine as measured", "threads": stage.facts["torch_threads"]},
                past_cache=stage.facts["past_cache"],
                ceiling_gb_per_s=ceiling_gb_per_s(stage),
            )
            machine = Machine(choice, stage, is_calibrated=False, slots=loaded.slots(QUARTER))
            for one, mode in self._cells(choice):
                self._cell(one, mode, stage, machine)
            if profile.name == WITH_PEERS:
                self._peers(choice, stage)
        if profile.name == WITH_PEERS and profile.name in FAMILIES:
            store.unlink()
            self._accelerate(choice, profile, folder)

    def _store(self, profile: ModelProfile, folder: Path) -> Path:
        """The file: whole where peers are run on it, else of as many experts as FILE_BYTES hold."""
        experts, stride = profile.moe_layers * profile.experts, stride_of(profile.expert_bytes)
        distinct = experts if profile.name == WITH_PEERS else min(experts, max(1, FILE_BYTES // stride))
        needed, free = distinct * stride, disk_usage(folder).free
        if needed > free:
            raise InputError(
                f"a file of {show_bytes(needed)} does not fit: {show_bytes(free)} are free in {self.folder}"
            )
        self.told(f"{profile.name}: writing {distinct} of {experts} experts, {show_bytes(needed)}")
        path = folder / f"{profile.name}.experts"
        write(path, profile, Stamps(distinct, profile.expert_bytes, seed=0).write, "random weights, seed 0", distinct)
        return path

    def _cells(self, choice: Choice) -> Iterator[tuple[Choice, str]]:
        """What is compared with what people use first."""
        for policy in POLICIES:
            yield replace(choice, policy=parse(policy)), CLOSED_LOOP
        yield choice, LOCKSTEP
        for policy in (POLICIES[0], POLICIES[-1]):
            yield replace(choice, policy=parse(policy), slots=choice.loaded.slots(TENTH)), CLOSED_LOOP

    def _cell(self, choice: Choice, mode: str, stage: Stage, machine: Machine) -> None:
        head = {**head_of(choice, mode, stage), "lanes": stage.lanes}
        names = ("model", "trace", "policy", "mode", "cache_experts", "requests")
        content = content_of(choice.loaded)
        key = key_of(**{name: head[name] for name in names}, tokens=self.tokens, content=content)

        def play() -> Row:
            assert choice.target.store
            read_through(choice.target.store)
            outcome = play_cell(choice, mode, *machine.under(choice), stage)
            machine.measure()
            outcome = machine.predicted_again(outcome)
            log = outcome.measured.log
            first_ms = log.step_ns[log.phase == DECODE][:PEER_TOKENS].mean() / 1e6
            return {**outcome.figures(), "tpot_first_ms": float(first_ms)}

        self._play(f"{head['model']}: {head['policy']} at {head['cache_fraction']:.0%}, {mode}", key, head, play)

    # What people use

    def _peers(self, choice: Choice, stage: Stage) -> None:
        """Reads without a cache, and the page cache with the memory of the slots."""
        choice = replace(choice, loaded=first_tokens(choice.loaded, PEER_TOKENS))
        for name, play in ((ON_DEMAND, self._on_demand), (PAGE_CACHE, self._page_cache)):
            head = head_of(choice, name, stage) | {"policy": None}
            key = key_of(model=head["model"], trace=head["trace"], mode=name, content=content_of(choice.loaded))
            self._play(f"{head['model']}: {name}", key, head, lambda play=play: play(choice, stage))  # type: ignore[misc]

    @staticmethod
    def _on_demand(choice: Choice, stage: Stage) -> Row:
        played = play_baseline(choice, ON_DEMAND, stage)
        return {"tokens": int((played.log.phase == DECODE).sum()), "measured": played.row}

    @staticmethod
    def _page_cache(choice: Choice, stage: Stage) -> Row:
        assert isinstance(stage.store, ExpertFile)
        run, budget = choice.run, choice.slots * stage.store.stride
        device = MappedDevice(stage.store, stage.network)
        try:
            with undisturbed(run), page_cache_of(budget, stage.store.path):
                decider = FixedOrder(Resident(run.shape, stage.store.distinct))
                played = play_on(choice, run.with_slots(stage.store.distinct), device, decider)
        finally:
            device.close()
        tokens = int((played.log.phase == DECODE).sum())
        return {"tokens": tokens, "warms_up": True, "memory_bytes": budget, "measured": played.row}

    def _accelerate(self, choice: Choice, profile: ModelProfile, folder: Path) -> None:
        needed = profile.parameters * profile.dense_bytes_per_parameter
        head = {"model": profile.name, "mode": ACCELERATE, "policy": None}

        def play() -> Row:
            free = available_memory_bytes()
            if free is not None and needed > free - RESERVE_BYTES:
                raise InputError(f"it builds a model of {show_bytes(needed)}; {show_bytes(free)} of memory are free")
            budget, files = choice.slots * profile.expert_bytes, folder / "accelerate"
            within = page_cache_of(budget, files)
            peer = accelerate_offload(profile, torch.device("cpu"), ACCELERATE_TOKENS, folder=files, within=within)
            figures = {"tpot_mean_ms": mean(peer.tpot_ms), "tpot_ms": list(peer.tpot_ms)}
            return {"version": peer.version, "tokens": len(peer.tpot_ms), "memory_bytes": budget, "measured": figures}

        self._play(f"{profile.name}: {ACCELERATE}", key_of(model=profile.name, mode=ACCELERATE), head, play)
