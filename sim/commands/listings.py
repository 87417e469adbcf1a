"""The commands `moe-sim policies`, `moe-sim hardware` and `moe-sim models`: what can be named."""

from dataclasses import asdict
from typing import Annotated

import typer

from policies.core.catalog import PolicyInfo, available
from sim.commands.options import Json
from sim.profiles.hardware_profile import MACHINES
from sim.profiles.hardware_profile import hardware as read_hardware
from sim.quantities import show_bytes
from terminal import console
from traces.errors import unknown
from traces.models.profile import shipped


def policies(
    name: Annotated[str | None, typer.Argument(help="Show the details of this policy.")] = None, as_json: Json = False
) -> None:
    """List the policies: eviction policies, prefetchers, pairs of both, and presets.

    [b]moe-sim policies pre-gated[/b]
    """
    by_name = {policy.name: policy for policy in available()}
    if name is not None and name not in by_name:
        raise unknown("policy", name, by_name)
    if as_json:
        console.say_json([asdict(each) for each in by_name.values()] if name is None else asdict(by_name[name]))
    elif name is not None:
        console.say(_whole(by_name[name]))
    else:
        rows = [
            (
                *(policy.name, policy.kind + (", oracle" if policy.oracle else ""), policy.summary),
                f"= {policy.stands_for}" if policy.stands_for else _written(policy.options),
            )
            for policy in by_name.values()
        ]
        console.say(console.listing("name", "kind", "what it does", "options (defaults)", rows=rows))


def hardware(as_json: Json = False) -> None:
    """List the hardware profiles."""
    machines = [read_hardware(name) for name in MACHINES.names()]
    if as_json:
        console.say_json([asdict(machine) for machine in machines])
        return
    rows = [
        (
            machine.name,
            machine.title,
            f"{machine.memory_gib:g} GiB",
            f"{machine.link_bandwidth_gb_per_s:g} GB/s",
            f"{machine.memory_bandwidth_gb_per_s:,g} GB/s",
            f"{machine.compute_tflop_per_s:g} TFLOP/s",
        )
        for machine in machines
    ]
    console.say(console.listing("name", "GPU", "memory", "link", "memory bandwidth", "bf16", rows=rows))


def models(as_json: Json = False) -> None:
    """List the model profiles."""
    known = shipped()
    if as_json:
        sizes = ("expert_bytes", "token_bytes")
        console.say_json([{**asdict(each), **{of: getattr(each, of) for of in sizes}} for each in known])
        return
    rows = [
        (
            *(profile.name, f"{profile.moe_layers} x {profile.experts}, {profile.top_k}"),
            *(show_bytes(profile.expert_bytes), show_bytes(profile.token_bytes), profile.hub_ids[0]),
        )
        for profile in known
    ]
    headings = "layers x experts, top-k", "expert", "needed per token", "models"
    console.say(console.listing("name", *headings, rows=rows))


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
