"""The command `moe-sim`: which expert-cache policy serves a trace best, on which hardware, how large a cache.

Bad input is told in one line before anything is written.
"""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table

from sim.commands_adapt import adapt
from sim.commands_analysis import SCOPE_HELP, analyze, compare
from sim.commands_eamc import eamc
from sim.commands_train import train_stride
from traces import console, demo_trace
from traces.errors import InputError

if TYPE_CHECKING:
    from policies.registry import PolicyInfo
    from sim.cells import Loaded
    from sim.sweep import Grid

POLICIES = "lru,lfu,eamc"
CACHE_SIZES = "10%,25%,50%"
HARDWARE = "a5000"
ENGINE_HELP = "Of timed runs: auto, simpy, or compiled, which is the same, faster, for built-in policies."

app = typer.Typer(
    help="Which expert-cache policy serves a trace best: on which hardware, with how large a cache.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.command()
def sweep(
    trace: Annotated[Path | None, typer.Argument(help="Folder of a trace; the shipped one if left out.")] = None,
    policies: Annotated[
        str | None,
        typer.Option(help=f"Names or FILE.py:CLASS; lru+eamc pairs retention and prefetch; else {POLICIES}."),
    ] = None,
    scope: Annotated[str | None, typer.Option(help=SCOPE_HELP)] = None,
    evict: Annotated[str | None, typer.Option(help="Retention policies, each with every --prefetch.")] = None,
    prefetch: Annotated[str | None, typer.Option(help="Prefetchers, each with every --evict.")] = None,
    cache_sizes: Annotated[
        str | None, typer.Option(help=f"Shares (25%), experts (64) or bytes (8GiB); else {CACHE_SIZES}.")
    ] = None,
    hardware: Annotated[str | None, typer.Option(help=f"A profile or TOML file; else {HARDWARE}.")] = None,
    model_profile: Annotated[
        str | None, typer.Option(help="A profile or TOML file; else by the trace's model.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; else results/NAME.")] = None,
    requests: Annotated[int | None, typer.Option(help="Only the first N requests.")] = None,
    warmup_requests: Annotated[int, typer.Option(help="The first N are played, but not counted.")] = 0,
    as_decode: Annotated[bool, typer.Option("--as-decode", help="Play a prefill token by token.")] = False,
    cold: Annotated[bool, typer.Option("--cold", help="Empty the cache between requests.")] = False,
    untimed: Annotated[bool, typer.Option("--untimed", help="Count hits and misses exactly; no times.")] = False,
    chunk_bytes: Annotated[
        str | None, typer.Option(help="A prefetch may be interrupted after each (4MiB); else never.")
    ] = None,
    predictor_us: Annotated[
        float | None, typer.Option(help="Of every policy's own work, an event; else of each as measured (make bench).")
    ] = None,
    engine: Annotated[str, typer.Option(help=ENGINE_HELP)] = "auto",
    seed: Annotated[int, typer.Option(help="Named in the results.")] = 0,
    workers: Annotated[int | None, typer.Option(help="Processes; else one for each core.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON, not as a table.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print warnings and errors only.")] = False,
) -> None:
    """Play a trace through caches of several sizes under several policies, and name the best.

    Writes results.parquet (a row per policy and size), requests.parquet (the same per request), winner.toml,
    and plots. Ctrl-C keeps what is finished, in a folder of its own.

    [b]moe-sim sweep --cache-sizes 10%,25%,50%[/b]

    [b]moe-sim sweep my-trace --policies lru,lru+eamc,belady --cache-sizes 8GiB --hardware rtx4090[/b]
    """
    from sim.cells import Setup
    from sim.quantities import parse_bytes

    setup = Setup(
        trace=trace or demo_trace(),
        hardware=hardware or HARDWARE,
        model_profile=model_profile,
        requests=requests,
        warmup_requests=warmup_requests,
        as_decode=as_decode,
        cold=cold,
        untimed=untimed,
        seed=seed,
        chunk_bytes=None if chunk_bytes is None else parse_bytes(chunk_bytes, "--chunk-bytes"),
        predictor_us=predictor_us,
        engine=engine,
    )
    if workers is not None and workers < 1:
        raise InputError(f"--workers {workers}: at least one process has to work")
    names = _names(policies, evict, prefetch)
    loaded = setup.load()
    grid = grid_of(
        loaded, POLICIES if names is None else names, CACHE_SIZES if cache_sizes is None else cache_sizes, scope
    )
    defaults = {
        f"the shipped trace {setup.trace}": not trace,
        f"policies {POLICIES}": names is None,
        f"cache sizes {CACHE_SIZES}": cache_sizes is None,
        f"hardware {HARDWARE}": not (hardware or untimed),
    }
    if not quiet:
        _say_what_was_taken([text for text, taken in defaults.items() if taken], loaded, grid)
    folder = out or Path("results") / setup.trace.resolve().name
    _run(loaded, grid, folder, workers or os.cpu_count() or 1, as_json, quiet)


def _names(policies: str | None, evict: str | None, prefetch: str | None) -> str | None:
    """All policies asked for, as one list: --policies, and --evict with --prefetch; None if nothing was asked."""
    if policies is evict is prefetch is None:
        return None
    if prefetch and not evict:
        raise InputError("--prefetch says what to fetch: name what to keep with --evict")
    fetches = _listed(prefetch or "")
    pairs = [f"{kept}+{fetched}" for kept in _listed(evict or "") for fetched in fetches] if fetches else []
    return ",".join([*_listed(policies or ""), *(pairs or _listed(evict or ""))])


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def grid_of(loaded: "Loaded", policies: str, cache_sizes: str, scope: str | None) -> "Grid":
    """The cells, each policy and each number of slots once; `scope` is of the policies that name none."""
    from policies.registry import SHARED, parse
    from sim.quantities import parse_cache_size
    from sim.sweep import Grid

    sizes: dict[str, int] = {}
    for text in _listed(cache_sizes):
        slots = parse_cache_size(text, loaded.all_experts, loaded.expert_bytes)
        if slots not in sizes.values():
            sizes[text] = slots
    if not sizes:
        raise InputError(f"--cache-sizes {cache_sizes!r} names none: write 10%,25% or 64 or 8GiB")
    specs = [parse(name).within(SHARED if scope is None else scope) for name in _listed(policies)]
    if not specs:
        raise InputError("--policies names none: write lru,eamc (moe-sim policies lists them)")
    for spec in specs:
        loaded.require(spec, min(sizes.values()))
    return Grid(tuple({spec.text: spec for spec in specs}.values()), sizes)


def _say_what_was_taken(defaults: list[str], loaded: "Loaded", grid: "Grid") -> None:
    from policies.registry import NO_PREFETCH
    from sim.quantities import show_bytes

    if defaults:
        console.note(f"taking {', '.join(defaults)}")
    if loaded.profile and not loaded.profile.hub_ids and not loaded.setup.model_profile:
        console.note(f"{loaded.profile.name} has no model profile: derived one from the sizes in its trace")
    recorded, counted = loaded.trace.meta.expert_bytes, loaded.expert_bytes
    if recorded and counted and recorded != counted:
        sizes = f"{show_bytes(recorded)} where the trace was made, {show_bytes(counted)} in its model profile"
        console.note(f"an expert has {sizes}, which counts")
    fetching = [policy.text for policy in grid.policies if policy.prefetch != NO_PREFETCH]
    if fetching and not loaded.hardware:
        console.note(f"untimed nothing is fetched early: of {', '.join(fetching)} the retention alone counts")


def _run(loaded: "Loaded", grid: "Grid", folder: Path, workers: int, as_json: bool, quiet: bool) -> None:
    """Sweep, write, report."""
    from sim import report
    from sim.results import writable
    from sim.sweep import save, sweep

    for warning in report.warnings(loaded, grid):
        console.warn(warning)
    writable(folder)
    if loaded.hardware and loaded.setup.engine != "simpy":
        from sim import kernel

        if not kernel.on_disk():
            console.note("compiling the engine, once: this takes half a minute or more")
        kernel.prepare()
    with report.progress(len(grid.cells()) * len(loaded.trace.requests), quiet) as advance:
        outcome = sweep(loaded, grid, workers, advance)
    if not outcome.complete:
        kept = f"kept in {save(outcome, loaded, folder)[0].parent}" if outcome.rows else "nothing to keep"
        console.fail("moe-sim", f"interrupted with {len(outcome.rows)} cells finished: {kept}", 130)
    files = save(outcome, loaded, folder)
    if as_json:
        typer.echo(json.dumps(outcome.rows, indent=1))
    elif not quiet:
        console.out.print(report.title(outcome, loaded), markup=False, soft_wrap=True)
        console.out.print(report.table(outcome, loaded))
        written = f"wrote {', '.join(file.name for file in files)} to {folder}"
        console.out.print(written, markup=False, soft_wrap=True)


@app.command()
def policies(
    name: Annotated[str | None, typer.Argument(help="Tell all of this one.")] = None,
) -> None:
    """List the policies: pairs, what to keep (retention), what to fetch early (prefetch), and presets of these.

    [b]moe-sim policies pre-gated[/b]
    """
    from policies.registry import available
    from traces.errors import unknown

    listed = available()
    if name is not None:
        found = [policy for policy in listed if policy.name == name]
        if not found:
            raise unknown("policy", name, [policy.name for policy in listed])
        console.out.print(_whole(found[0]), markup=False, soft_wrap=True)
        return
    table = Table(
        Column("name", no_wrap=True),
        "kind",
        "what it does",
        "options (defaults)",
        box=None,
        header_style="bold",
    )
    for policy in listed:
        options = f"= {policy.stands_for}" if policy.stands_for else _written(policy.options)
        table.add_row(policy.name, policy.kind + (", oracle" if policy.oracle else ""), policy.summary, options)
    console.out.print(table)


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


def _written(options: dict[str, object]) -> str:
    return " ".join(f"{name}={value}" for name, value in options.items())


@app.command()
def hardware() -> None:
    """List the hardware profiles."""
    from sim import profiles
    from sim.hardware import hardware as read

    table = Table(
        Column("name", no_wrap=True),
        "GPU",
        "memory",
        "link",
        "memory bandwidth",
        "bf16",
        box=None,
        header_style="bold",
    )
    for machine in map(read, profiles.names("hardware")):
        table.add_row(
            machine.name,
            machine.title,
            f"{machine.memory_gib:g} GiB",
            f"{machine.link_bandwidth_gb_per_s:g} GB/s",
            f"{machine.memory_bandwidth_gb_per_s:,g} GB/s",
            f"{machine.compute_tflop_per_s:g} TFLOP/s",
        )
    console.out.print(table)


@app.command()
def models() -> None:
    """List the model profiles."""
    from sim import profiles
    from sim.models import model as read
    from sim.quantities import show_bytes

    table = Table(
        Column("name", no_wrap=True),
        "layers x experts, top-k",
        "expert",
        "needed per token",
        "models",
        box=None,
    )
    for profile in map(read, profiles.names("models")):
        shape = f"{profile.moe_layers} x {profile.experts}, {profile.top_k}"
        sizes = show_bytes(profile.expert_bytes), show_bytes(profile.token_bytes)
        table.add_row(profile.name, shape, *sizes, profile.hub_ids[0])
    console.out.print(table)


@app.command()
def conformance(
    cases: Annotated[Path, typer.Argument(help="One case a line, in the engine-neutral JSON format.")],
    out: Annotated[Path | None, typer.Option(help="File for the results; else standard output.")] = None,
    engine: Annotated[str, typer.Option(help=ENGINE_HELP)] = "auto",
) -> None:
    """Play engine-neutral cases and write one result line for each.

    [b]moe-sim conformance cases.jsonl --engine simpy --out results.jsonl[/b]
    """
    import sys

    from sim.conformance import run_file
    from sim.results import replacing

    if out is None:
        run_file(cases, sys.stdout, engine)
        return
    try:
        with replacing(out) as part, part.open("w", encoding="utf-8") as lines:
            run_file(cases, lines, engine)
    except OSError as error:
        raise InputError(f"cannot write to {out}: {error.strerror or error}") from error


app.command()(analyze)
app.command()(adapt)
app.command()(train_stride)
app.command()(compare)
app.add_typer(eamc, name="eamc")


def main() -> None:
    """Run the command."""
    console.main(app, "moe-sim")
