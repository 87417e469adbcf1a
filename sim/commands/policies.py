"""The command `moe-sim policies`: what can be named as a policy."""

from dataclasses import asdict
from typing import Annotated

import typer

from policies.core.catalog import PolicyInfo, available
from sim.commands.options import Json
from terminal import console
from traces.errors import unknown


def policies(
    name: Annotated[str | None, typer.Argument(help="Show the details of this policy.")] = None,
    as_json: Json = False,
) -> None:
    """List the policies: eviction policies, prefetchers, pairs of both, and presets.

    [b]moe-sim policies pre-gated[/b]
    """
    listed = available()
    if name is not None:
        by_name = {policy.name: policy for policy in listed}
        if name not in by_name:
            raise unknown("policy", name, by_name)
        if as_json:
            console.say_json(asdict(by_name[name]))
        else:
            console.say(_whole(by_name[name]))
        return
    if as_json:
        console.say_json([asdict(policy) for policy in listed])
        return
    table = console.listing("name", "kind", "what it does", "options (defaults)")
    for policy in listed:
        written = f"= {policy.stands_for}" if policy.stands_for else _written(policy.options)
        table.add_row(policy.name, policy.kind + (", oracle" if policy.oracle else ""), policy.summary, written)
    console.say(table)


def _whole(policy: PolicyInfo) -> str:
    head = f"{policy.name} ({policy.kind}{', oracle' if policy.oracle else ''}): {policy.summary}"
    if not policy.stands_for:
        return "\n\n".join([head, policy.theory, f"Options: {_written(policy.options) or 'none'}"])
    lines = [f"Stands for {policy.stands_for}"]
    for part, resolved in policy.options.items():
        options = {key: value for key, value in resolved.items() if key != "name"}
        lines.append(f"{part}: {resolved['name']} {_written(options)}".rstrip())
    return "\n\n".join([head, "\n  ".join(lines), f"What differs: {policy.theory}"])


def _written(options: dict[str, object]) -> str:
    return " ".join(f"{name}={value}" for name, value in options.items())
