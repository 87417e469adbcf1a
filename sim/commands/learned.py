"""The commands `moe-sim eamc` and `moe-sim profile`: what policies learn of traces, as files to start a run from."""

from pathlib import Path
from typing import Annotated

import typer

from policies.blend.build import build as learn_profile
from policies.core.policy import Shape
from policies.eamc.build import build as learn
from sim.commands.options import Overwrite
from sim.loop.requests import Requests
from terminal import console
from traces.errors import InputError
from traces.output import check_file, replacing
from traces.shards import Shards
from traces.trace import Trace


def build_eamc(
    trace: Annotated[str, typer.Argument(help="Folder or URL of a trace; one of EAMs alone will do.")],
    out: Annotated[Path, typer.Option(help="File to write, as in eamc.npz.")],
    policy: Annotated[str, typer.Option(help="eamc with options, or a preset of it.")] = "eamc",
    capacity: Annotated[int | None, typer.Option(help="EAMs kept for each phase; else the policy's.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Learn the EAMs of a trace's requests, in order, as the policy would.

    [b]moe-sim eamc build my-trace --capacity 300 --out eamc.npz[/b]

    [b]moe-sim sweep other-trace --policies lru,eamc:capacity=300:collection=eamc.npz[/b]
    """
    check_file(out, overwrite)
    source = Trace.read(trace)
    saved = learn(source, policy, capacity).saved(source.name)
    with replacing(out, overwrite=overwrite) as part, part.open("wb") as file:
        saved.write(file)
    names = ("prefill", "decode") if saved.options.split else ("both phases",)
    held = ", ".join(f"{len(part.eams)} EAMs of {name}" for name, part in zip(names, saved.parts, strict=True))
    console.say(f"learned {len(source.requests)} requests of {source.name}: {held}")
    console.say(f"wrote {out}")


def build_profile(
    traces: Annotated[list[str], typer.Argument(help="Folders or URLs of traces of one model, learned in order.")],
    out: Annotated[Path, typer.Option(help="File to write, as in model.profile.npz.")],
    start: Annotated[Path | None, typer.Option(help="A profile to continue.")] = None,
    as_decode: Annotated[bool, typer.Option("--as-decode", help="Run prefills token by token.")] = False,
    overwrite: Overwrite = False,
) -> None:
    """Learn from traces what eamc-blend would learn of a model while it runs them.

    [b]moe-sim profile build my-trace --out model.npz[/b]

    [b]moe-sim sweep other-trace --policies lru,eamc-blend,eamc-blend:profile=model.npz[/b]
    """
    check_file(out, overwrite)
    opened = [Shards.open(trace) for trace in traces]
    for each in opened:
        each.require_sequences()
    if as_decode:
        opened = [each.as_decode() if each.phases != "decode" else each for each in opened]
    shapes = [(each.layers, each.num_experts) for each in opened]
    for each, shape in zip(opened, shapes, strict=True):
        if shape != shapes[0]:
            raise InputError(f"{each.path} is of another model than {opened[0].path}: a profile is of one model")
    built = learn_profile([(each.name, Requests(each)) for each in opened], Shape(*shapes[0]), start)
    with replacing(out, overwrite=overwrite) as part, part.open("wb") as file:
        built.write(file)
    console.say(f"learned {sum(len(each.requests) for each in opened)} requests of {', '.join(built.traces)}")
    console.say(f"wrote {out}")
