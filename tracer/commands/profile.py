"""`moe-trace profile` and `architectures`: what a model is, as a profile, and which models can be recorded."""

from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from terminal import console
from tracer.commands.shared import Overwrite
from traces.files import expanded
from traces.models.architectures import architectures as known
from traces.models.profile import model as read_model
from traces.models.profile import written
from traces.output import check_file, replacing


def profile(
    model: Annotated[
        str, typer.Argument(help="config.json of transformers, a folder that holds one, or a .gguf file or its URL.")
    ],
    out: Annotated[Path | None, typer.Option(help="TOML file to write. Default: it is printed.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Count a model's layers, experts and bytes, and write them as a profile for `--model-profile` and `plan`.

    The sizes are those of the model that transformers itself builds, on torch's meta device, without weights; of a GGUF
    file those of its tensors, whose header alone is read.

    Example: moe-trace profile Qwen3-30B-A3B/config.json --out qwen3.toml
    """
    counted = read_model(model)
    for note in counted.notes:
        console.warn(f"sizes may be wrong: {note}")
    tools = "" if ".gguf" in model else f", transformers {version('transformers')}"
    text = written(counted, f"# Counted by moe-trace profile, moe-expert-cache {version('moe-expert-cache')}{tools}.\n")
    if out is None:
        console.say(text.rstrip())
        return
    target = expanded(out)
    check_file(target, overwrite)
    with replacing(target) as file:
        file.write_text(text, "utf-8")
    console.say(f"{target}: {counted.name}, {counted.moe_layers} MoE layers x {counted.experts} experts")


def architectures(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the MoE architectures of the installed transformers, and how the routing of each is observed.

    Example: moe-trace architectures
    """
    found = known()
    if as_json:
        console.say_json([asdict(one) for one in found])
        return
    width = max(len(one.name) for one in found)
    for one in found:
        console.say(f"{one.name:<{width}}  {'' if one.recorded else 'refused: '}{one.how}")
