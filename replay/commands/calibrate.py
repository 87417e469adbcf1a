"""`moe-replay calibrate`: measure this machine and models on it, and write the profile that `moe-sim` takes."""

from pathlib import Path
from typing import Annotated

import typer

from policies.core.grammar import split_list
from policies.core.spec import parse
from replay.calibration.calibrate import AGREES, Calibration, choices, profile, steps_of
from replay.calibration.calibrate import calibrate as measured
from replay.commands.device_options import Calibrated
from replay.device_choice import DeviceChoice
from sim import defaults
from sim.commands import options
from terminal import console
from terminal.console import progress
from traces import demo_trace
from traces.errors import refuse
from traces.output import check_file, replacing


def calibrate(
    model_profile: Annotated[
        list[str] | None, typer.Option(help="Profile or TOML file of a model to measure; several times for several.")
    ] = None,
    trace: Annotated[
        list[str] | None, typer.Option(help="Folder or URL with routing of a model; else routing is synthetic.")
    ] = None,
    *,
    on: Calibrated,
    policies: Annotated[str, typer.Option(help="Policies whose overhead is measured.")] = defaults.POLICIES,
    repeat: Annotated[int, typer.Option(max=10_000, help="Passes over everything; the medians count.")] = 2,
    out: Annotated[Path, typer.Option(help="The profile to write.")] = Path("this-machine.toml"),
    strict: Annotated[
        bool, typer.Option("--strict", help="Write nothing where the passes differ by more than 3%.")
    ] = False,
    overwrite: options.Overwrite = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure this machine and write a hardware profile.

    Exits with status 1 if the passes differ by more than 3%. Without a model and a trace, it measures the model of the
    shipped trace. A trace is used with the first model that has its layers, experts and top-k; otherwise with its own
    model.

    [b]moe-replay calibrate --model-profile olmoe-1b-7b --out here.toml[/b]

    [b]moe-sim sweep --hardware here.toml ...[/b]
    """
    refuse(
        (repeat < 2, f"--repeat {repeat}: whether passes agree takes two at least"),
        (on["device"] == "virtual", "--device virtual: has nothing to measure; auto, cpu, disk or cuda"),
    )
    target = DeviceChoice.of(on)
    traces = trace or ([] if model_profile else [str(demo_trace())])
    wanted = [parse(text) for text in dict.fromkeys(split_list(policies))]
    chosen = choices(model_profile or [], traces, target)
    check_file(out, overwrite)  # better now than when all is measured
    with replacing(out, overwrite=overwrite) as part:  # locks the file while it measures
        with progress(
            steps_of(chosen, wanted, repeat), quiet, "", done=-1
        ) as advance:  # a step is shown when it starts
            found = measured(chosen, wanted, repeat, lambda what: advance(1, what))
        apart, what = found.disagreement()
        noisy = f"this machine is too noisy: {what} differs by {apart:.1%} between passes, more than {AGREES:.0%}"
        if apart > AGREES and strict:
            console.fail("moe-replay", f"{noisy}; nothing was written", 1)
        part.write_text(profile(found), encoding="utf-8")
    if not quiet:
        _print_calibration(found, out)
    if apart > AGREES:
        console.fail("moe-replay", f"{noisy}; {out} was written all the same", 1)


def _print_calibration(found: Calibration, path: Path) -> None:
    for name, model in found.models.items():
        gb_per_s = model.expert_bytes / model.transfer_ns
        costs = ", ".join(f"{policy} {us:.1f}" for policy, us in model.predictor_us.items())
        console.say(
            f"{name}: an expert in {model.transfer_ns / 1e6:.4g} ms ({gb_per_s:.4g} GB/s); the host "
            f"{model.turnaround_ns / 1e3:.1f} us a layer, {model.launch_ns / 1e3:.1f} us an expert; "
            f"policies, us an event: {costs}",
        )
    apart, what = found.disagreement()
    console.say(f"passes differ by at most {apart:.1%} ({what})")
    console.say(f"wrote {path}: moe-sim --hardware {path}")
