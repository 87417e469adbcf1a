"""`moe-trace architectures`: what can be recorded."""

from dataclasses import asdict
from typing import Annotated

import typer

from traces.commands import console
from traces.models.architectures import architectures as known


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
