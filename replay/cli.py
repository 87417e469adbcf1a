"""The command `moe-replay`: play a trace with real transfers and real compute, predicted beside measured.

`moe-replay --policy eamc` is `moe-replay run --policy eamc`. Bad input is told in one line before anything is written.
"""

import json
import math
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from replay.commands.calibrate import calibrate
from replay.commands.compare import compare
from traces import console, demo_trace
from traces.errors import InputError

if TYPE_CHECKING:
    from replay.run import Choice, Outcome
    from sim.loop.log import StepRow
    from sim.sweep.setup import Setup

POLICY = "eamc"
CACHE_SIZE = "25%"


class RunByDefault(TyperGroup):
    """Options without a command belong to `run`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # ctx: click's, or typer's own copy of it
        """Put `run` in front, unless help is asked for."""
        if not args or (args[0].startswith("-") and args[0] != "--help"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=RunByDefault,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.callback()
def replay() -> None:
    """Replay a trace on a device: real transfers, real compute, beside what the simulator predicts.

    [b]moe-replay --policy eamc[/b] is short for [b]moe-replay run --policy eamc[/b]; its options are listed by
    [b]moe-replay run --help[/b].
    """


@app.command()
def run(
    trace: Annotated[str | None, typer.Option(help="Folder or URL of a trace; the shipped one if left out.")] = None,
    policy: Annotated[str | None, typer.Option(help=f"As moe-sim names it (eamc, lru+eamc); else {POLICY}.")] = None,
    cache_size: Annotated[
        str | None, typer.Option(help=f"A share (25%), experts (64) or bytes (8GiB); else {CACHE_SIZE}.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto (cuda, else cpu), virtual, cpu or cuda.")] = "auto",
    hardware: Annotated[
        str | None, typer.Option(help="Profile or TOML file: virtual's clock, and a prediction; else a5000.")
    ] = None,
    model_profile: Annotated[
        str | None, typer.Option(help="Profile or TOML file with the shapes; else by the trace's model.")
    ] = None,
    from_: Annotated[
        Path | None, typer.Option("--from", help="Replay the winner of this moe-sim sweep, as it was swept.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; else results/NAME-replay.")] = None,
    requests: Annotated[int | None, typer.Option(help="Only the first N; else about 1,000 steps of them.")] = None,
    warmup_requests: Annotated[int | None, typer.Option(help="The first N are played, but not counted.")] = None,
    as_decode: Annotated[bool, typer.Option("--as-decode", help="Play a prefill token by token.")] = False,
    cold: Annotated[bool, typer.Option("--cold", help="Empty the cache between requests.")] = False,
    chunk_bytes: Annotated[
        str | None, typer.Option(help="A prefetch may be interrupted after each (4MiB); else never.")
    ] = None,
    host_dedup: Annotated[
        int | None, typer.Option(help="Share N host buffers between all experts, where memory is short.")
    ] = None,
    pin: Annotated[str, typer.Option(help="require, or best-effort: go on with slower copies where it is refused.")] = (
        "require"
    ),
    dense: Annotated[str, typer.Option(help="real, or none: the experts alone.")] = "real",
    weights: Annotated[
        Path | None, typer.Option(help="Folder of a safetensors checkpoint; else random weights of its shapes.")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare slots with the host at each use (slow).")] = False,
    seed: Annotated[int | None, typer.Option(help="Of the weights; else 0.")] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="File for what happened when, measured and predicted (.json, .json.gz).")
    ] = None,
    no_slots: Annotated[bool, typer.Option("--no-slots", help="A timeline without a track for each slot.")] = False,
    nvtx: Annotated[bool, typer.Option("--nvtx", help="Mark steps and layers for NVIDIA's profilers.")] = False,
    min_gb_per_s: Annotated[
        float | None, typer.Option(help="Fail where the link, while busy, reached less (GB/s).")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run that --out holds, behind its last whole request.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Drop steps that a run cut off has left.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the row as JSON, not as a table.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print warnings and errors only.")] = False,
) -> None:
    """Play a trace through a policy on a device, in closed loop.

    Writes results.parquet (the columns of a sweep, then the device's), requests.parquet and per_token.csv.
    The last line sets predicted beside measured. A timeline opens at https://ui.perfetto.dev; of a run of more than
    2,000 steps it shows the first 100 tokens.

    [b]moe-replay --policy eamc --cache-size 25%[/b]

    [b]moe-replay --from results/demo --device cpu[/b]
    """
    from sim.quantities import parse_bytes

    if min_gb_per_s is not None and not 0 < min_gb_per_s < math.inf:
        raise InputError(f"--min-gb-per-s {min_gb_per_s}: must be above 0 and finite")
    asked = {
        "trace": trace,
        "hardware": hardware,
        "model_profile": model_profile,
        "requests": requests,
        "warmup_requests": warmup_requests,
        "as_decode": as_decode or None,
        "cold": cold or None,
        "chunk_bytes": None if chunk_bytes is None else parse_bytes(chunk_bytes, "--chunk-bytes"),
        "seed": seed,
    }
    given = {key: value for key, value in asked.items() if value is not None}
    wish = _of_sweep(from_, policy, cache_size, given) if from_ else _typed(policy, cache_size, given)
    asked_of_device = {"host_dedup": host_dedup, "verify": verify, "dense": dense, "weights": weights, "pin": pin}
    choice = replace(_choose(wish, device), **asked_of_device, nvtx=nvtx)  # type: ignore[arg-type]  # by name
    if not quiet:
        for note in (*wish.notes, _scope(wish, choice, device), *_unpriced(choice)):
            console.note(note)
    from traces.location import name_of

    folder = out or Path("results") / f"{name_of(choice.loaded.setup.trace)}-replay"
    if resume and overwrite:
        raise InputError("--resume keeps what was measured and --overwrite drops it: leave one out")
    cut_off = (folder / "per_token.csv").exists() and not (folder / "results.parquet").exists()
    if cut_off and choice.device != "virtual" and not (resume or overwrite):
        raise InputError(
            f"{folder} holds steps of a run that was cut off: go on with --resume, drop them with --overwrite, or name "
            "another folder with --out"
        )
    if resume and (timeline or choice.device == "virtual"):
        why = "a timeline needs the whole run" if timeline else "a run on a logical clock takes seconds"
        raise InputError(f"--resume: {why}: leave it out")
    reached = _replay(choice, folder, timeline, not no_slots, as_json, quiet, resume).row["copy_gb_per_s"]
    if min_gb_per_s is not None and reached is not None and reached < min_gb_per_s:
        console.fail(
            "moe-replay",
            f"the link reached {reached:.4g} GB/s while busy, less than --min-gb-per-s {min_gb_per_s:g}",
            1,
        )


@dataclass(frozen=True)
class Wish:
    """What is to be replayed, as far as options say, and what was taken where they do not."""

    setup: "Setup"
    policy: str
    cache_size: str
    cache_experts: int | None  # what the size came to in the sweep; None: typed
    whole: bool  # play all that the setup names, however long
    notes: tuple[str, ...]


def _typed(policy: str | None, cache_size: str | None, given: Mapping[str, object]) -> Wish:
    from sim.sweep.setup import Setup

    setup = Setup(**{"trace": str(demo_trace()), **given})  # type: ignore[arg-type]  # by name, from the options
    defaults = {
        f"the shipped trace {setup.trace}": "trace" not in given,
        f"policy {POLICY}": not policy,
        f"cache size {CACHE_SIZE}": not cache_size,
        f"hardware {setup.hardware}": "hardware" not in given,
    }
    taken = ", ".join(text for text, is_default in defaults.items() if is_default)
    notes = (f"taking {taken}",) if taken else ()
    return Wish(setup, policy or POLICY, cache_size or CACHE_SIZE, None, "requests" in given, notes)


def _of_sweep(folder: Path, policy: str | None, cache_size: str | None, given: Mapping[str, object]) -> Wish:
    """The sweep's winner at `cache_size` (25% if it was swept, else the first); options that are typed prevail."""
    from sim.sweep import winner

    swept, winners = winner.read(folder)
    setup = replace(swept, untimed=False, **given)  # type: ignore[arg-type]  # by name, from the options
    if policy and cache_size:
        return Wish(setup, policy, cache_size, None, True, ())
    sizes = {one.cache_size: one for one in winners}
    if not sizes:
        raise InputError(f"the sweep in {folder} has no winner: name --policy and --cache-size")
    size = cache_size or (CACHE_SIZE if CACHE_SIZE in sizes else next(iter(sizes)))
    if size not in sizes:
        raise InputError(f"the sweep in {folder} did not try a cache of {size}; it tried {', '.join(sizes)}")
    best = sizes[size]
    note = f"taking {best.policy}, the winner of {folder} at {size}"
    if len(sizes) > 1:
        note += f" (--cache-size: it has others at {', '.join(other for other in sizes if other != size)})"
    return Wish(setup, policy or best.policy, size, best.cache_experts, True, () if policy else (note,))


def _choose(wish: Wish, device: str) -> "Choice":
    """Read everything; InputError for whatever cannot be used."""
    from policies.core.spec import parse
    from replay.run import DEFAULT_STEPS, Choice, choose_device, first_steps

    policy = parse(wish.policy)
    chosen = choose_device(device)
    loaded = wish.setup.load()
    slots = loaded.slots(wish.cache_size)
    loaded.require(policy, slots)
    if wish.cache_experts not in (None, slots):
        raise InputError(
            f"a cache of {wish.cache_size} was {wish.cache_experts} experts in the sweep and is {slots} with this "
            "trace: it is of another model"
        )
    if not wish.whole and chosen != "virtual":
        loaded = first_steps(loaded, DEFAULT_STEPS)
    return Choice(loaded, policy, slots, chosen)


def _scope(wish: Wish, choice: "Choice", asked: str) -> str:
    """Which device, and how much of the trace."""
    device = f"device {choice.device}" + (" (auto)" if asked == "auto" else "")
    played, setup = choice.loaded.trace, choice.loaded.setup
    if setup.requests == wish.setup.requests:
        return f"{device}, {len(played.requests)} requests"
    return f"{device}, the first {len(played.requests)} requests (--requests N for more)"


def _unpriced(choice: "Choice") -> list[str]:
    """A policy of the user's own, whose work nobody has measured."""
    if choice.loaded.predictor_us(choice.policy) is not None:
        return []
    machine = choice.loaded.setup.hardware
    return [f"nobody has measured what {choice.policy.text} costs an event: it is free in what {machine} is predicted"]


def _replay(
    choice: "Choice", folder: Path, timeline: Path | None, slots: bool, as_json: bool, quiet: bool, resume: bool
) -> "Outcome":
    """Run, write, report; a folder in which nothing was written does not stay."""
    from replay import report
    from replay.run import replay
    from sim.results.metrics import writable
    from sim.sweep.setup import Requests
    from sim.timeline.file import writing

    requests, key, is_new = Requests(choice.loaded.trace), choice.key, not folder.exists()
    steps = sum(len(request.tokens) for request in requests)
    writable(folder, (report.RESULTS_FILE, report.REQUESTS_FILE, report.STEPS))
    done = report.done_before(folder, key, requests) if resume else []
    if len(done) == steps:
        if (folder / report.RESULTS_FILE).exists():
            raise InputError(f"--resume: the run in {folder} has ended; see {report.RESULTS_FILE} there")
        last = done[-1].shares[0].request  # cut off behind its last step: the last request is played again
        done = [row for row in done if row.shares[0].request != last]
    played = len(done)
    if done and not quiet:
        console.note(f"going on behind {played} of {steps} steps")
    try:
        with report.step_writer(folder, key, done) as write, report.progress(steps, quiet, played) as advance:

            def on_step(row: "StepRow") -> None:
                nonlocal played
                write(row)
                played += 1
                advance()

            with writing(timeline, lambda: {"made by": "moe-replay"}) if timeline else nullcontext() as shown:
                outcome = replay(choice, on_step, shown, slots, done)
    except KeyboardInterrupt:
        goes_on = ", and --resume goes on behind the last whole request" if choice.device != "virtual" else ""
        kept = f": they are in {folder / report.STEPS}{goes_on}" if played else ""
        console.fail("moe-replay", f"interrupted after {played} of {steps} steps{kept}", 130)
    finally:
        if is_new and not played:
            with suppress(OSError):
                folder.rmdir()
    report.save(outcome, folder)
    if as_json:
        typer.echo(json.dumps(report.as_json(outcome), indent=1))
    elif not quiet:
        _tell(outcome, folder)
    return outcome


def _tell(outcome: "Outcome", folder: Path) -> None:
    from replay import report

    console.out.print(report.title(outcome), soft_wrap=True, markup=False)
    console.out.print(report.table(outcome))
    for note in report.notes(outcome):
        console.out.print(note, soft_wrap=True, markup=False)
    console.out.print(
        f"wrote results.parquet, requests.parquet, {report.STEPS} to {folder}", soft_wrap=True, markup=False
    )
    console.out.print(report.last_line(outcome), soft_wrap=True, markup=False)


app.command()(calibrate)
app.command()(compare)


def main() -> None:
    """The console script."""
    console.main(app, "moe-replay")
