"""The command `moe-replay store`: write a model's experts to a file that `--device disk` reads."""

from pathlib import Path
from typing import Annotated

import typer

from replay.commands.shown import typed_again
from replay.devices.expert_file import write
from replay.devices.lanes import page_up
from replay.devices.store import Stamps
from sim.experiment import OPTIONS
from sim.quantities import show_bytes
from terminal import console
from terminal.console import progress
from traces.errors import InputError
from traces.models.expert_sizes import with_sizes_of
from traces.models.profile import model, of_trace
from traces.output import check_file
from traces.reader import open_folder


def store(
    file: Annotated[Path, typer.Argument(help="File to write.")],
    model_profile: Annotated[
        str | None, typer.Option(help="Model profile or TOML file, whose shapes are used.")
    ] = None,
    trace: Annotated[str | None, typer.Option(help="Folder or URL of a trace, whose model is used.")] = None,
    expert_sizes: Annotated[str | None, typer.Option(help=OPTIONS["expert_sizes"].help)] = None,
    dedup: Annotated[
        int | None, typer.Option(help="Write N experts only, which all others share. Default: all of the model.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of random weights.")] = 0,
    *,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Write the experts of a model to one file, which moe-replay --device disk reads.

    The file is a safetensors file with a checksum for each expert. It is written completely or not at all. Name the
    model as for the run: by its profile, by a trace, and with the file that gives experts' sizes by layer.

    [b]moe-replay store olmoe.experts --model-profile olmoe-1b-7b[/b]

    [b]moe-replay store qwen3.experts --model-profile qwen3-30b-a3b --dedup 1024[/b]
    """
    if trace is not None:
        profile = of_trace(open_folder(trace).meta, model_profile)
    elif model_profile is not None:
        profile = model(model_profile)
    else:
        raise InputError("--model-profile says whose experts they are: name one (moe-replay store --help)")
    if expert_sizes is not None:
        profile = with_sizes_of(profile, expert_sizes)
    check_file(file, overwrite)
    experts = profile.moe_layers * profile.experts
    distinct = experts if dedup is None else dedup
    if not 1 <= distinct <= experts:
        raise InputError(f"--dedup {dedup}: must be 1 to {experts}, the number of experts of {profile.name}")
    fill, source = Stamps(distinct, profile.expert_bytes, seed).write, f"random weights, seed {seed}"
    with progress(distinct, quiet, "experts written") as advance:
        write(file, profile, fill, source, distinct, lambda: advance(1), overwrite, typed_again())
    if not quiet:
        size = show_bytes(sum(page_up(profile.bytes_of(each // profile.experts)) for each in range(distinct)))
        console.say(f"wrote {distinct} of {experts} experts of {profile.name} to {file}: {size}, {source}")
