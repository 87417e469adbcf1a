"""The public function of replay: `replay` runs a policy over a trace on a real device, beside the prediction of it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack

from policies.core.spec import PolicyLike
from replay.choice import Choice, first_part
from replay.device_choice import OPTIONS, DeviceChoice
from replay.keywords import ReplayKeywords
from replay.run import replay as run_on_device
from sim import defaults
from sim.api import RunResult, TraceLike, load, result_of, with_options
from sim.loaded import timed
from sim.quantities import CacheSize, cache_text
from sim.results import plot
from sim.results.metrics import Row
from sim.sweeps.config import seeded

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False, repr=False)
class ReplayResult(RunResult):
    """One run on a device. predictions: for each machine, the row of the simulated run, this machine's first."""

    predictions: dict[str, Row]

    def __repr__(self) -> str:
        (machine, predicted), *_ = self.predictions.items()
        column = "tpot_mean_ms" if self.row["tpot_mean_ms"] is not None else "ttft_mean_ms"
        return f"{super().__repr__()[:-1]}; predicted for {machine}: {column} {predicted[column]:.4g}>"

    def plot(self) -> "Figure":
        """Return a figure of the measured time of each step by cause. Needs matplotlib."""
        return plot.steps(self.steps, f"{self.policy} on {self.row['device']}, measured")


@with_options
def replay(
    trace: TraceLike,
    policy: PolicyLike = defaults.POLICY,
    cache_size: CacheSize = defaults.CACHE_SIZE,
    device: str = "auto",
    **options: Unpack[ReplayKeywords],
) -> ReplayResult:
    """Return what one policy does with one cache over a trace, measured on a device, and what was predicted.

    device: auto (cuda, or cpu without it), virtual, cpu, disk or cuda. Without `requests`, a real device runs the
    first requests, of about 1,000 steps (disk: 100 tokens). options: the fields of
    `sim.experiment.Experiment`, and the other ones of `replay.device_choice.DeviceChoice`.

    Raises InputError for whatever cannot be run on this machine, and TypeError for an unknown option.
    """
    of_device = {name: value for name, value in options.items() if name in OPTIONS}
    of_run = {name: value for name, value in options.items() if name not in OPTIONS}
    target, loaded = DeviceChoice.of({"device": device, **of_device}), timed(load(trace, of_run))
    spec = seeded(policy, loaded.experiment.seed)
    slots = loaded.slots_for(spec, cache_text(cache_size))
    if loaded.experiment.requests is None:
        loaded = first_part(loaded, target.device)
    loaded = loaded.charging(loaded.measured_us([spec]))
    outcome = run_on_device(Choice(loaded, spec, slots, target))
    run = result_of(outcome.row, outcome.log, outcome.requests.to_pandas(), loaded)
    return ReplayResult(run.row, run.steps, run.requests, outcome.predictions)
