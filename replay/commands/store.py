"""The command `moe-replay store`: write a model's experts to a file that `--device disk` reads."""

from pathlib import Path
from typing import Annotated

import typer

from replay.commands.shown import typed_again
from replay.devices.expert_file import Fill, stride_of, write
from replay.devices.store import Stamps
from replay.model.weights import Checkpoint
from sim.commands.printed import progress
from sim.quantities import show_bytes
from traces.commands import console
from traces.errors import InputError
from traces.models.profile import model
from traces.output import check_file


def store(
    file: Annotated[Path, typer.Argument(help="File to write.")],
    model_profile: Annotated[
        str | None, typer.Option(help="Model profile or TOML file, whose shapes are used.")
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="Folder of a safetensors checkpoint. Default: random weights of the shapes.")
    ] = None,
    dedup: Annotated[
        int | None, typer.Option(help="Write N experts only, which all others share. Default: all of the model.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of random weights.")] = 0,
    *,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Write the experts of a model to one file, which moe-replay --device disk reads.

    The file is a safetensors file with a checksum for each expert. It is written completely or not at all.

    [b]moe-replay store olmoe.experts --model-profile olmoe-1b-7b[/b]

    [b]moe-replay store olmoe.experts --model-profile olmoe-1b-7b --weights ~/models/OLMoE-1B-7B[/b]

    [b]moe-replay store qwen3.experts --model-profile qwen3-30b-a3b --dedup 1024[/b]
    """
    if model_profile is None:
        raise InputError("--model-profile says whose experts they are: name one (moe-replay store --help)")
    check_file(file, overwrite)
    profile = model(model_profile)
    experts = profile.moe_layers * profile.experts
    distinct = experts if dedup is None else dedup
    if not 1 <= distinct <= experts:
        raise InputError(f"--dedup {dedup}: must be 1 to {experts}, the number of experts of {profile.name}")
    fill: Fill
    if weights:
        fill, source = Checkpoint(weights, profile).fill, f"weights of {weights.name}"
    else:
        fill, source = Stamps(distinct, profile.expert_bytes, seed).write, f"random weights, seed {seed}"
    with progress(distinct, quiet, "experts written") as advance:
        write(file, profile, fill, source, distinct, lambda: advance(1), overwrite, typed_again())
    if not quiet:
        size = show_bytes(distinct * stride_of(profile.expert_bytes))
        console.say(f"wrote {distinct} of {experts} experts of {profile.name} to {file}: {size}, {source}")
