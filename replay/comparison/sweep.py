"""A comparison: policies x cache sizes x modes of one trace on one machine, each cell kept as it ends.

The stage is opened once. Unless a calibrated profile describes the machine, it is measured before the first cell and
behind each: a cell is predicted by what was measured on both sides of it, so that a machine that drifts is seen. The
ceiling of the link is a large copy by plain calls in the same process, before and after.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from policies.core.spec import PolicySpec
from replay.calibration.pace import OnStep
from replay.choice import Choice, Described
from replay.comparison.cell import MODES, CellOutcome, Observing, require_decoded, run_cell, under_contention
from replay.comparison.errors import accuracy, rankings
from replay.comparison.record import Record
from replay.keys import key_of
from replay.warmup import undisturbed
from sim.loop.log import StepRow
from sim.profiles.measured import MeasuredModel
from sim.results.metrics import Row
from sim.sweeps.grid import Grid, key
from traces.errors import InputError
from traces.output import make_folder, replacing

if TYPE_CHECKING:
    from replay.calibration.measure import Measurement
    from replay.devices.stage import Stage

RECORD, TOKENS = "compare.json", "tokens"
MAKER = "moe-replay compare"
"""In the folder of a comparison: the record, and a folder with a CSV file for each cell."""

CEILING_BYTES = 256 << 20  # of one copy, at most


@dataclass(frozen=True)
class Comparison:
    """What is compared. `choice`: any one cell's; all others differ in policy and slots."""

    choice: Choice
    grid: Grid
    modes: tuple[str, ...]
    is_calibrated: bool  # the hardware profile describes this very machine; else it is measured
    folder: Path
    repeat: int = 1

    def cells(self) -> dict[str, tuple[Choice, str]]:
        """Return (choice, mode) by key, in the order of sizes, policies, modes."""
        choices = [replace(self.choice, policy=policy, slots=slots) for policy, slots in self.grid.requested()]
        decides = {"device": vars(self.choice.target), "calibrated": self.is_calibrated, "repeat": self.repeat}
        return {
            key_of(cell=key(choice.loaded, choice.policy, choice.slots), mode=mode, **decides): (choice, mode)
            for choice in choices
            for mode in self.modes
        }

    def due(self, record: Record) -> dict[str, tuple[Choice, str]]:
        return {key: cell for key, cell in self.cells().items() if key not in record}

    def run(self, record: Record, on_step: OnStep | None = None, say: Callable[[str], None] = lambda _: None) -> None:
        """Run what is due, and record what cannot be run as failed. say: gets a line before each cell."""
        due = self.due(record)
        if not due:
            _sum_up(record)
            return
        with nullcontext() if self.choice.device == "virtual" else self.choice.stage() as stage:
            machine = Machine(self.choice, stage, self.is_calibrated, max(self.grid.sizes.values()))
            record.begin(**self._facts(stage, machine))
            for key, (choice, mode) in due.items():
                head = head_of(choice, mode, stage)
                say(f"{choice.policy.text}, {head['cache_experts']} experts, {mode}")
                try:
                    require_decoded(choice)
                    outcome = machine.outcome(choice, mode, on_step, self.repeat)
                except InputError as error:
                    record.fail(key, head, error)
                    continue
                policy = re.sub(r"[^\w.+-]+", "-", choice.policy.text)[:60].strip("-")
                tokens = f"{TOKENS}/{policy}-{choice.slots}-{mode}-{key[:8]}.csv"
                make_folder(self.folder / TOKENS)
                with replacing(self.folder / tokens) as part:
                    outcome.per_token().to_csv(part, index=False)
                record.put(key, {**head, "per_token": tokens, **outcome.figures()})
                _sum_up(record)
            if stage and (before := record.facts["ceiling_gb_per_s"]):
                record.set_facts(ceiling_gb_per_s=max(before, ceiling_gb_per_s(stage)))
                record.write()

    def _facts(self, stage: "Stage | None", machine: "Machine") -> Row:
        here: Row = stage.facts if stage else {}
        return {
            "gpu": here.get("device_name") if self.choice.device == "cuda" else None,
            "machine": here.get("device_name"),
            **{name: here.get(name) for name in ("driver", "torch", "host_pinned", "computed_in")},
            "device": self.choice.device,
            "ceiling_gb_per_s": ceiling_gb_per_s(stage) if stage else None,
            "hardware": machine.facts,
        }


def _sum_up(record: Record) -> None:
    cells = list(record)
    facts = {"copy_gb_per_s": copy_gb_per_s(record), "rankings": rankings(cells), "accuracy": accuracy(cells)}
    if any(record.facts.get(name) != fact for name, fact in facts.items()):
        record.set_facts(**facts)
        record.write()


class Machine:
    """The machine as the simulator takes it: as a profile says, or as measured on the stage just now."""

    def __init__(self, choice: Choice, stage: "Stage | None", is_calibrated: bool, slots: int) -> None:
        """`slots`: of the greatest cache; the machine is measured with it, unless a profile describes it."""
        self._choice = replace(choice, policy=PolicySpec.of("lru"), slots=slots)
        self._stage = stage
        self._is_measured = stage is not None and not is_calibrated
        self._latest: list[Measurement] = []  # two
        self._policy_ns: dict[str, int] = {}
        if self._is_measured:
            self.facts: Row = {"name": "this machine as measured", "noise": self._measure()}
        else:
            hardware = choice.loaded.hardware
            assert hardware
            self.facts = {"name": hardware.name, "title": hardware.title, **hardware.calibration}

    def outcome(
        self,
        choice: Choice,
        mode: str,
        on_step: OnStep | None = None,
        repeat: int = 1,
        observing: Observing = nullcontext,
        done: Sequence[StepRow] = (),
    ) -> CellOutcome:
        """Run a cell and predict it; where the machine is measured, by what is measured before, during and after it."""
        outcome = run_cell(choice, mode, *self._under(choice), self._stage, on_step, repeat, observing, done)
        if not self._is_measured:
            return outcome
        from replay.calibration.measure import Around

        self._measure()
        before, after = self._latest
        around = Around.of(before, after, outcome.measured.paces)
        return outcome.predicted_again(around, lambda model: self._described(choice, model))

    def _measure(self) -> float:
        from replay.calibration.measure import measure_model

        assert self._stage
        choice = self._choice
        with self._stage.device(choice.device_slots, choice.contexts) as device:
            measurement = measure_model(device, choice.run, choice.most_tokens, "this machine")
        self._latest = [*self._latest[-1:], measurement]
        return measurement.noise

    def _under(self, choice: Choice) -> Described:
        """Return it under that cell's policy, as measured last."""
        if self._is_measured:
            return self._described(choice, self._latest[-1].model)
        if known := choice.loaded.measured:
            return under_contention(choice, known, choice.described[0].predictor_ns)
        return choice.described

    def _described(self, choice: Choice, model: MeasuredModel) -> Described:
        if choice.policy.text not in self._policy_ns:
            from replay.calibration.measure import policy_ns

            assert self._stage
            run = choice.on(model.timing(), model.link(choice.loaded.experiment.chunk_bytes))
            with self._stage.device(choice.device_slots, choice.contexts) as device, undisturbed(run):
                self._policy_ns[choice.policy.text] = policy_ns(run, device)
        return under_contention(choice, model, self._policy_ns[choice.policy.text])


def head_of(choice: Choice, mode: str, stage: "Stage | None") -> Row:
    loaded, policy = choice.loaded, choice.policy
    return {
        "model": loaded.profile.name if loaded.profile else loaded.trace.meta.model,
        "trace": loaded.trace.name,
        "phase": loaded.trace.phases,
        "policy": policy.text,
        "oracle": policy.oracle,
        "options": policy.options(),
        "mode": mode,
        "cache_fraction": choice.slots / loaded.whole_slots,
        "cache_experts": loaded.experts_in(choice.slots),
        "all_experts": loaded.all_experts,
        "requests": len(loaded.trace.requests),
        "warmup_requests": loaded.experiment.warmup_requests,
        "cold": loaded.experiment.cold,
        "chunk_bytes": loaded.experiment.chunk_bytes,
        "expert_bytes": loaded.expert_bytes,
        **({"layer_expert_bytes": loaded.profile.layer_expert_bytes} if loaded.sizes is not None else {}),
        "seed": loaded.experiment.seed,
        "host_experts": stage.store.distinct if stage else None,
        "dense": choice.target.dense,
    }


def copy_gb_per_s(record: Record) -> float | None:
    """Return bytes over the time in which the link was busy, of all cells that were run through the pump."""
    moved = [cell["measured"] for cell in record if cell["mode"] in MODES and "measured" in cell]
    busy_ms = sum(figures["link_busy_ms"] for figures in moved)
    moved_bytes = sum(figures["bytes_demand"] + figures["bytes_prefetch"] for figures in moved)
    return moved_bytes / busy_ms / 1e6 if busy_ms else None


def ceiling_gb_per_s(stage: "Stage") -> float | None:
    """Return GB/s of large copies from where the stage's experts lie, one behind another, by plain calls.

    Of a disk: of whole experts, by as many lanes as the device has. None where none fits on the GPU.
    """
    import torch

    from replay.calibration.rates import seconds
    from replay.devices.lanes import rates

    if stage.target.store:
        return rates(stage.store, (stage.lanes,))[stage.lanes]
    slab = stage.host.memory.slabs[0]
    size = min(len(slab), CEILING_BYTES)
    device, wait = torch.device("cpu"), lambda: None
    if stage.gpu:
        if stage.gpu.free_bytes() < 2 * size:
            return None
        device, wait = stage.gpu.device, stage.gpu.synchronize
    source, target = torch.from_numpy(slab[:size]), torch.empty(size, dtype=torch.uint8, device=device)
    return size / seconds(lambda _: target.copy_(source, non_blocking=True), wait) / 1e9
