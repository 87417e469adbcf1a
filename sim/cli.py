"""The command `moe-sim`: which expert-cache policy serves a trace best, on which hardware, how large a cache.

Bad input is told in one line before anything is written.
"""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table

from sim.commands import options
from sim.commands.adapt import adapt
from sim.commands.analysis import analyze, compare
from sim.commands.backtest import backtest
from sim.commands.eamc import eamc
from sim.commands.plan import plan
from sim.commands.profile import profile as profile_commands
from sim.commands.report import report
from sim.commands.run import run
from sim.commands.sensitivity import sensitivity
from sim.commands.sweep import sweep
from sim.commands.systems import systems
from sim.commands.train import train_stride
from sim.commands.tune import tune
from traces import console

if TYPE_CHECKING:
    from policies.core.catalog import PolicyInfo

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

app = typer.Typer(
    help="Which expert-cache policy serves a trace best: on which hardware, with how large a cache.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)


app.command()(sweep)
app.command()(run)
app.command()(plan)
app.command()(report)


@app.command()
def policies(
    name: Annotated[str | None, typer.Argument(help="Show the details of this policy.")] = None,
    as_json: Json = False,
) -> None:
    """List the policies: eviction policies, prefetchers, pairs of both, and presets.

    [b]moe-sim policies pre-gated[/b]
    """
    from policies.core.catalog import available
    from traces.errors import unknown

    listed = available()
    if name is not None:
        found = [policy for policy in listed if policy.name == name]
        if not found:
            raise unknown("policy", name, [policy.name for policy in listed])
        if as_json:
            console.say_json(asdict(found[0]))
        else:
            console.say(_whole(found[0]))
        return
    if as_json:
        console.say_json([asdict(policy) for policy in listed])
        return
    table = _table("name", "kind", "what it does", "options (defaults)")
    for policy in listed:
        options = f"= {policy.stands_for}" if policy.stands_for else _written(policy.options)
        table.add_row(policy.name, policy.kind + (", oracle" if policy.oracle else ""), policy.summary, options)
    console.say(table)


def _whole(policy: "PolicyInfo") -> str:
    """Everything that is known of a policy."""
    head = f"{policy.name} ({policy.kind}{', oracle' if policy.oracle else ''}): {policy.summary}"
    if not policy.stands_for:
        return "\n\n".join([head, policy.theory, f"Options: {_written(policy.options) or 'none'}"])
    lines = [f"Stands for {policy.stands_for}"]
    for part, resolved in policy.options.items():
        options = {key: value for key, value in resolved.items() if key != "name"}
        lines.append(f"{part}: {resolved['name']} {_written(options)}".rstrip())
    return "\n\n".join([head, "\n  ".join(lines), f"What differs: {policy.theory}"])


def _table(name: str, *headings: str) -> Table:
    return Table(Column(name, no_wrap=True), *headings, box=None, header_style="bold")


def _written(options: dict[str, object]) -> str:
    return " ".join(f"{name}={value}" for name, value in options.items())


@app.command()
def hardware(as_json: Json = False) -> None:
    """List the hardware profiles."""
    from sim import profiles
    from sim.profiles.hardware_profile import hardware as read

    machines = [read(name) for name in profiles.names("hardware")]
    if as_json:
        console.say_json([asdict(machine) for machine in machines])
        return
    table = _table("name", "GPU", "memory", "link", "memory bandwidth", "bf16")
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


@app.command()
def models(as_json: Json = False) -> None:
    """List the model profiles."""
    from sim import profiles
    from sim.profiles.model_profile import model as read
    from sim.quantities import show_bytes

    found = [read(name) for name in profiles.names("models")]
    if as_json:
        sizes = ("expert_bytes", "token_bytes")
        console.say_json([{**asdict(each), **{of: getattr(each, of) for of in sizes}} for each in found])
        return
    table = _table("name", "layers x experts, top-k", "expert", "needed per token", "models")
    for profile in found:
        shape = f"{profile.moe_layers} x {profile.experts}, {profile.top_k}"
        sizes = show_bytes(profile.expert_bytes), show_bytes(profile.token_bytes)
        table.add_row(profile.name, shape, *sizes, profile.hub_ids[0])
    console.say(table)


@app.command()
def conformance(
    cases: Annotated[Path, typer.Argument(help="One case a line, in the engine-neutral JSON format.")],
    out: Annotated[Path | None, typer.Option(help="File for the results; else standard output.")] = None,
    engine: options.Engine = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Run engine-neutral cases and write one result line for each.

    [b]moe-sim conformance cases.jsonl --engine simpy --out results.jsonl[/b]
    """
    import sys

    from sim.engines.cases import run_file
    from traces.output import check_file, replacing

    if out is None:
        run_file(cases, sys.stdout, engine or "auto", console.warn)
        return
    check_file(out, overwrite, read=cases)
    with replacing(out, overwrite=overwrite) as part, part.open("w", encoding="utf-8") as lines:
        run_file(cases, lines, engine or "auto", console.warn)


app.command()(analyze)
app.command()(sensitivity)
app.command()(tune)
app.command()(adapt)
app.command()(train_stride)
app.command()(compare)
app.command()(backtest)
app.command()(systems)
app.add_typer(eamc, name="eamc")
app.add_typer(profile_commands, name="profile")


def main() -> None:
    """Run the command."""
    console.main(app, "moe-sim")
