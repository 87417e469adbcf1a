"""The command `moe-replay run`: run one cell on a device, in closed loop, and set it beside what is predicted."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from replay import files
from replay.choice import Choice, first_part
from replay.commands import shown
from replay.commands.device_options import Measured, Replayed, chosen
from replay.devices.expert_file import command_of
from replay.run import Outcome, replay
from sim import defaults
from sim.commands import options
from sim.experiment import OPTIONS, Experiment, from_file
from sim.loaded import TimedRun
from sim.loop.log import StepRow
from sim.loop.requests import Requests
from sim.quantities import show_bytes
from sim.sweeps import winner
from sim.sweeps.notes import overhead_notes
from sim.timeline.file import writing
from terminal import console
from terminal.console import progress
from terminal.options import typed
from traces.errors import InputError, refuse
from traces.output import claimed

STAND_IN = "demo-stand-in"
"""A model of the shipped trace's shape whose experts can be timed."""

TIMED_BYTES = 1_000_000
"""Of an expert that threads copy and compute in a time that is worth predicting."""


@dataclass(frozen=True)
class CellOptions(options.CellOptions):
    """The cell; `run` takes its trace as an option, as a group takes no argument."""

    trace: Annotated[str | None, typer.Option(help="Folder or URL of a trace. Default: the shipped trace.")] = None


def run(
    cell: CellOptions,
    hardware: Annotated[str | None, typer.Option(help=OPTIONS["hardware"].help)] = None,
    *,
    replayed: Replayed,
    on: Measured,
    from_: Annotated[
        Path | None, typer.Option("--from", help="Results of moe-sim sweep: replay the winner, as it was swept.")
    ] = None,
    trust_folder: options.TrustFolder = False,
    timeline: Annotated[
        Path | None, typer.Option(help="File for a timeline, measured and predicted (.json, .json.gz).")
    ] = None,
    output: options.ResumableOptions,
) -> None:
    """Run a trace through a policy on a device, one request after another.

    Writes results.parquet (the columns of a sweep, then those of the device), requests.parquet and per_token.csv. The
    first line sets predicted beside measured. https://ui.perfetto.dev opens a timeline. In a run of more than 2,000
    steps, it shows the first 100 tokens.

    [b]moe-replay --policy eamc --cache-size 25%[/b]

    [b]moe-replay --from results/demo --device cpu[/b]
    """
    replayed |= typed(hardware=hardware)
    target = chosen(on, replayed)
    if target.device != "virtual" and not (from_ or cell.trace or "model_profile" in replayed):
        replayed |= {"model_profile": STAND_IN}
        output.note(f"taking the experts of {STAND_IN}: the shipped trace's own are too small to be timed")
    swept_experts = None
    if from_:
        experiment, cell, swept_experts, taken = _of_sweep(from_, cell, replayed, trust_folder)
    else:
        experiment = options.experiment(replayed, cell.trace)
        taken = cell.taken(experiment, replayed)
    loaded = TimedRun.of(experiment)
    policy, slots = cell.chosen(loaded)
    if swept_experts not in (None, experts := loaded.experts_in(slots)):
        was = f"a cache of {cell.size} was {swept_experts} experts in the sweep and is {experts} with this trace"
        raise InputError(f"{was}: it is of another model")
    if "requests" not in replayed:
        loaded = first_part(loaded, target.device)
    choice, us = Choice(loaded, policy, slots, target), loaded.measured_us([policy])
    choice = replace(choice, loaded=loaded.charging(us))
    output.note(*taken, *loaded.notes, *_notes(choice, experiment.requests, on["device"]), *overhead_notes(us))
    folder = output.folder(choice.loaded.experiment.trace, "-replay")
    cut_off = (folder / "per_token.csv").exists() and not (folder / "results.parquet").exists()
    is_real = choice.device != "virtual"
    refuse(
        (
            cut_off and is_real and not (output.resume or output.overwrite),
            f"{folder} holds steps of an interrupted run: continue with --resume, drop them with --overwrite, or name "
            "another folder with --out",
        ),
        (output.resume and timeline, "--resume: a timeline needs the whole run: leave it out"),
        (output.resume and not is_real, "--resume: a run on a logical clock takes seconds: leave it out"),
    )
    outcome = _replay(choice, folder, timeline, output)
    output.show(lambda: {**outcome.row, "predictions": outcome.predictions}, lambda: _shown(outcome, folder))


def _of_sweep(
    folder: Path, cell: CellOptions, replayed: options.Stated, trust: bool
) -> tuple[Experiment, CellOptions, int | None, list[str]]:
    """Return the sweep's winner at the cache size (25% if it was swept, else the first); typed options prevail.

    Behind it stand what the size came to in experts, unless policy and size are typed, and notes.
    """
    experiment, winners = winner.read(folder, {"untimed": False, **replayed, **typed(trace=cell.trace)}, trust)
    if cell.policy and cell.cache_size:
        return experiment, cell, None, []
    sizes = {one.cache_size: one for one in winners}
    if not sizes:
        raise InputError(f"the sweep in {folder} has no winner: name --policy and --cache-size")
    size = cell.cache_size or (defaults.CACHE_SIZE if defaults.CACHE_SIZE in sizes else next(iter(sizes)))
    if size not in sizes:
        raise InputError(f"the sweep in {folder} did not try a cache of {size}; it tried {', '.join(sizes)}")
    best = sizes[size]
    note = f"taking {best.policy}, the winner of {folder} at {size}"
    if len(sizes) > 1:
        note += f" (--cache-size: it has others at {', '.join(other for other in sizes if other != size)})"
    policy = cell.policy or from_file(folder / winner.NAME, "policy", best.policy, trust)
    found = replace(cell, policy=policy, cache_size=size)
    return experiment, found, best.cache_experts, [] if cell.policy else [note]


def _notes(choice: Choice, requests: int | None, device_typed: str) -> Iterator[str]:
    """Yield on what is run, and what keeps the figures from being a machine's. requests: those of the experiment."""
    device = f"device {choice.device}" + (" (auto)" if device_typed == "auto" else "")
    count, all_of_it = len(choice.loaded.trace.requests), choice.loaded.experiment.requests == requests
    yield f"{device}, " + (f"{count} requests" if all_of_it else f"the first {count} requests (--requests N for more)")
    if choice.device != "virtual":
        yield "this machine is measured before the run and after it, which can take minutes each"
    size = choice.loaded.expert_bytes or 0
    if choice.device in ("cpu", "disk") and size < TIMED_BYTES:
        yield (
            f"experts of {show_bytes(size)} are too small to be timed: threads take longer to hand them over than to "
            f"copy and compute them; with --model-profile others are run ({STAND_IN} for the shipped trace)"
        )


def _replay(choice: Choice, folder: Path, timeline: Path | None, output: options.ResumableOptions) -> Outcome:
    """Run and write, each step as it ends; a folder in which nothing was written does not stay."""
    requests, key = Requests(choice.loaded.trace), choice.key
    steps = sum(len(request.tokens) for request in requests)
    with claimed(folder, files.MAKER, files.NAMES):
        done = files.done_before(folder, key, requests) if output.resume else []
        if done and len(done) == steps:
            if (folder / files.RESULTS_FILE).exists():
                raise InputError(f"--resume: the run in {folder} has ended; see {files.RESULTS_FILE} there")
            last = done[-1].shares[0].request  # cut off behind its last step: the last request is run again
            done = [row for row in done if row.shares[0].request != last]
        if done:
            output.note(f"resuming after {len(done)} of {steps} steps")
        ended = len(done)
        try:
            with (
                files.step_writer(folder, key, done, _commands(choice, folder)) as write,
                progress(steps, output.quiet, "steps replayed", ended) as advance,
                writing(timeline, lambda: {"made by": "moe-replay"}, output.overwrite)
                if timeline
                else nullcontext() as drawing,
            ):

                def on_step(row: StepRow) -> None:
                    nonlocal ended
                    write(row)
                    ended += 1
                    advance(1)

                outcome = replay(choice, on_step, drawing, done)
        except KeyboardInterrupt:
            goes_on = ", and --resume continues after the last whole request" if choice.device != "virtual" else ""
            kept = f": they are in {folder / files.STEPS}{goes_on}" if ended else ""
            console.fail("moe-replay", f"interrupted after {ended} of {steps} steps{kept}", 130)
        files.save(outcome, folder)
    return outcome


def _commands(choice: Choice, folder: Path) -> list[str]:
    """Return what to type to make this replay again, the file of its experts included."""
    store = choice.target.store
    written_by = [command_of(store)] if store else []
    return [*filter(None, written_by), shown.typed_again("--out", str(folder))]


def _shown(outcome: Outcome, folder: Path) -> Iterator[str | Table]:
    yield shown.verdict(outcome)
    yield shown.title(outcome)
    yield shown.table(outcome)
    yield from shown.notes(outcome)
    yield options.written((files.RESULTS_FILE, files.REQUESTS_FILE, files.STEPS), folder)
