"""The commands `moe-sim hardware` and `moe-sim models`: the shipped profiles."""

from dataclasses import asdict

from sim.commands.options import Json
from sim.profiles.hardware_profile import MACHINES
from sim.profiles.hardware_profile import hardware as read_hardware
from sim.quantities import show_bytes
from terminal import console
from traces.models.profile import shipped


def hardware(as_json: Json = False) -> None:
    """List the hardware profiles."""
    machines = [read_hardware(name) for name in MACHINES.names()]
    if as_json:
        console.say_json([asdict(machine) for machine in machines])
        return
    table = console.listing("name", "GPU", "memory", "link", "memory bandwidth", "bf16")
    for machine in machines:
        table.add_row(
            machine.name,
            machine.title,
            f"{machine.memory_gib:g} GiB",
            f"{machine.link_bandwidth_gb_per_s:g} GB/s",
            f"{machine.memory_bandwidth_gb_per_s:,g} GB/s",
            f"{machine.compute_tflop_per_s:g} TFLOP/s",
        )
    console.say(table)


def models(as_json: Json = False) -> None:
    """List the model profiles."""
    known = shipped()
    if as_json:
        sizes = ("expert_bytes", "token_bytes")
        console.say_json([{**asdict(each), **{of: getattr(each, of) for of in sizes}} for each in known])
        return
    table = console.listing("name", "layers x experts, top-k", "expert", "needed per token", "models")
    for profile in known:
        shape = f"{profile.moe_layers} x {profile.experts}, {profile.top_k}"
        sizes = show_bytes(profile.expert_bytes), show_bytes(profile.token_bytes)
        table.add_row(profile.name, shape, *sizes, profile.hub_ids[0])
    console.say(table)
