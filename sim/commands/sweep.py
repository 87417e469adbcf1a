"""The command `moe-sim sweep`: from flags and a TOML file to results on disk, a table and a winner."""

import itertools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sim.commands.analysis import SCOPE_HELP
from traces import console, demo_trace
from traces.errors import InputError

if TYPE_CHECKING:
    from sim.sweep.config import Config
    from sim.sweep.grid import Outcome, Table
    from sim.sweep.setup import Loaded
    from sim.sweep.store import Store
    from sim.sweep.workers import Workers

POLICIES = "lru,lfu,eamc"
CACHE_SIZES = "10%,25%,50%"
HARDWARE = "a5000"
ENGINE_HELP = "Of timed runs: auto, simpy, or compiled, which is the same, faster, for built-in policies."

MANY = 10_000
"""Cells that are asked about before they are played."""


def sweep(
    traces: Annotated[
        list[str] | None, typer.Argument(help="Folders or URLs of traces; the shipped one if left out.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file that says what to play (keys: sim/README.md); flags override it.")
    ] = None,
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
    hardware: Annotated[str | None, typer.Option(help=f"Profiles or TOML files; else {HARDWARE}.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Whole numbers: policies that draw play once with each.")] = None,
    model_profile: Annotated[
        str | None, typer.Option(help="A profile or TOML file; else by the trace's model.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; else results/NAME.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on: play no cell again that --out holds.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Drop the cells that --out holds.")] = False,
    requests: Annotated[int | None, typer.Option(help="Only the first N requests.")] = None,
    warmup_requests: Annotated[int | None, typer.Option(help="The first N are played, but not counted.")] = None,
    as_decode: Annotated[bool | None, typer.Option("--as-decode", help="Play a prefill token by token.")] = None,
    cold: Annotated[bool | None, typer.Option("--cold", help="Empty the cache between requests.")] = None,
    untimed: Annotated[bool | None, typer.Option("--untimed", help="Count hits and misses exactly; no times.")] = None,
    chunk_bytes: Annotated[
        str | None, typer.Option(help="A prefetch may be interrupted after each (4MiB); else never.")
    ] = None,
    predictor_us: Annotated[
        float | None, typer.Option(help="Of every policy's own work, an event; else of each as measured (make bench).")
    ] = None,
    engine: Annotated[str | None, typer.Option(help=ENGINE_HELP)] = None,
    workers: Annotated[int | None, typer.Option(help="Cells at a time; else one for each core.")] = None,
    scheduler: Annotated[
        str | None, typer.Option(help="Play on a Dask cluster (tcp://HOST:8786) instead of here.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help=f"Play more than {MANY:,} cells unasked.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON, not as a table.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print warnings and errors only.")] = False,
) -> None:
    """Play traces through caches of several sizes under several policies, and name the best.

    Writes results.parquet (a row per policy and size), requests.parquet (the same per request), winner.toml, sweep.toml
    (which plays the same again) and plots; of several traces or machines a folder each, and one table of all. Whatever
    ends it early, cells that were finished are kept in OUT/cells, and --resume goes on.

    [b]moe-sim sweep --cache-sizes 10%,25%,50%[/b]

    [b]moe-sim sweep my-trace --policies lru,lru+eamc,belady --cache-sizes 8GiB --hardware rtx4090,h200[/b]

    [b]moe-sim sweep my-trace --policies 'eamc:capacity=100|300,random' --seeds 1,2,3[/b]
    """
    from policies.core.grammar import split_list
    from sim.sweep.config import read
    from sim.sweep.store import only_one
    from traces.location import name_of

    if workers is not None and workers < 1:
        raise InputError(f"--workers {workers}: at least one process has to work")
    given = {
        "traces": tuple(traces) if traces else None,
        "policies": _names(policies, evict, prefetch),
        "cache_sizes": None if cache_sizes is None else split_list(cache_sizes),
        "hardware": None if hardware is None else split_list(hardware),
        "seeds": None if seeds is None else tuple(map(_seed, split_list(seeds))),
        "scope": scope,
        "model_profile": model_profile,
        "requests": requests,
        "warmup_requests": warmup_requests,
        "as_decode": as_decode,
        "cold": cold,
        "untimed": untimed,
        "chunk_bytes": chunk_bytes,
        "predictor_us": predictor_us,
        "engine": engine,
    }
    asked = {**(read(config) if config else {}), **{name: value for name, value in given.items() if value is not None}}
    made, taken = _with_defaults(asked)
    _ask(made.cells, yes)
    name = "sweep" if len(made.traces) > 1 else name_of(made.traces[0])
    folder = out or _free(Path("results"), name, resume or overwrite, quiet)
    tables = _tables(made, folder)
    if not quiet:
        _say_what_was_taken(taken, tables)
    players = _workers(workers, scheduler)
    with only_one(folder):
        store = _open(tables, folder, resume, overwrite)
        _run(made, tables, store, players, as_json, quiet)


def _free(parent: Path, name: str, taken: bool, quiet: bool) -> Path:
    """The folder of that name or, unless it may be `taken`, the first one behind it without a sweep."""
    from sim.sweep.store import held

    names = (name if n == 1 else f"{name}-{n}" for n in itertools.count(1))
    folder = next(parent / each for each in names if taken or not held(parent / each))
    if folder.name != name and not quiet:
        console.note(
            f"{parent / name} holds a sweep, this one goes to {folder} (--resume, --overwrite or --out choose)"
        )
    return folder


def _with_defaults(asked: dict[str, Any]) -> "tuple[Config, list[str]]":
    """The sweep, and which defaults it takes."""
    from policies.core.grammar import split_list
    from sim.sweep.config import Config

    defaults: dict[str, tuple[Any, str]] = {
        "traces": ((str(demo_trace()),), f"the shipped trace {demo_trace()}"),
        "policies": (split_list(POLICIES), f"policies {POLICIES}"),
        "cache_sizes": (split_list(CACHE_SIZES), f"cache sizes {CACHE_SIZES}"),
        "hardware": ((HARDWARE,), "" if asked.get("untimed") else f"hardware {HARDWARE}"),
    }
    taken = [text for name, (_, text) in defaults.items() if text and name not in asked]
    return Config(**{**{name: value for name, (value, _) in defaults.items()}, **asked}), taken


def _names(policies: str | None, evict: str | None, prefetch: str | None) -> tuple[str, ...] | None:
    """All policies asked for, as one list: --policies, and --evict with --prefetch; None if nothing was asked."""
    from policies.core.grammar import split_list

    if policies is evict is prefetch is None:
        return None
    if prefetch and not evict:
        raise InputError("--prefetch says what to fetch: name what to keep with --evict")
    keeps, fetches = split_list(evict), split_list(prefetch)
    pairs = [f"{kept}+{fetched}" for kept in keeps for fetched in fetches]
    return (*split_list(policies), *(pairs or keeps))


def _seed(text: str) -> int:
    if not (text.isdecimal() and int(text) < 2**63):
        raise InputError(f"--seeds {text!r}: a seed is a whole number from 0 to below 2**63")
    return int(text)


def _ask(cells: int, yes: bool) -> None:
    """Whether so many cells are meant."""
    if cells <= MANY or yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise InputError(f"this grid has {cells:,} cells: make it smaller, or play them with --yes")
    typer.confirm(f"This grid has {cells:,} cells. Play them all?", abort=True, err=True)


def _tables(config: "Config", folder: Path) -> "list[Table]":
    """What is to be played, its files read. InputError for whatever cannot be."""
    from sim.sweep.grid import Table, grid_of

    specs = config.specs()
    loaded = [setup.load() for setup in config.setups()]
    several = len(loaded) > 1
    names = _folders(loaded) if several else [""]
    return [
        Table(each, grid_of(each, specs, config.cache_sizes), folder / name)
        for each, name in zip(loaded, names, strict=True)
    ]


def _folders(loaded: "Sequence[Loaded]") -> list[str]:
    """A name for each trace and machine: of what differs."""
    from sim.sweep.store import NAME

    traces, machines = {each.setup.trace for each in loaded}, {each.setup.hardware for each in loaded}
    names: list[str] = []
    for each in loaded:
        machine = [each.hardware.name] if each.hardware and len(machines) > 1 else []
        name = "-".join([each.trace.name] * (len(traces) > 1) + machine)
        name = f"{name}-trace" if name == NAME else name  # the store's
        names.append(name if name not in names else f"{name}-{len(names) + 1}")
    return names


def _say_what_was_taken(taken: list[str], tables: "list[Table]") -> None:
    from sim.quantities import show_bytes

    if taken:
        console.note(f"taking {', '.join(taken)}")
    for loaded in {table.loaded.setup.trace: table.loaded for table in tables}.values():
        if loaded.profile and not loaded.profile.hub_ids and not loaded.setup.model_profile:
            console.note(f"{loaded.profile.name} has no model profile: derived one from the sizes in its trace")
        recorded, counted = loaded.trace.meta.expert_bytes, loaded.expert_bytes
        if recorded and counted and recorded != counted:
            sizes = f"{show_bytes(recorded)} where the trace was made, {show_bytes(counted)} in its model profile"
            console.note(f"an expert has {sizes}, which counts")
    fetching = [policy.text for policy in tables[0].grid.policies if policy.prefetches]
    if fetching and not tables[0].loaded.hardware:
        console.note(f"untimed nothing is fetched early: of {', '.join(fetching)} the retention alone counts")


def _open(tables: "list[Table]", folder: Path, resume: bool, overwrite: bool) -> "Store":
    """What is already there, as far as it is wanted. InputError where anything would be lost unasked."""
    from sim.sweep.store import Store, drop

    if overwrite and not resume:
        drop(folder)
    found = Store(folder)
    if len(found) and not resume:
        raise InputError(
            f"{folder} holds {len(found)} finished cells: go on with --resume, drop them with --overwrite, "
            "or name another folder with --out"
        )
    wanted = {key for table in tables for key in table.tasks()}
    if others := [key for key in found if key not in wanted]:
        raise InputError(
            f"{folder} holds {len(others)} cells that this sweep does not have (other options, files or code): "
            "drop all with --overwrite, or name another folder with --out"
        )
    return found


def _workers(workers: int | None, scheduler: str | None) -> "Workers":
    from sim.sweep.workers import Cluster, Local

    return Cluster(scheduler) if scheduler else Local(workers or os.cpu_count() or 1)


def _run(
    config: "Config", tables: "list[Table]", store: "Store", workers: "Workers", as_json: bool, quiet: bool
) -> None:
    """Sweep, write, report."""
    from sim.engines import compiling
    from sim.sweep import report
    from sim.sweep.config import NAME
    from sim.sweep.grid import missing, outcome, save, sweep
    from sim.sweep.workers import Local

    for warning in dict.fromkeys(warning for table in tables for warning in report.warnings(table.loaded, table.grid)):
        console.warn(warning)
    folder = store.folder
    config.resolved().write(folder / NAME)
    tasks = missing(tables, store)
    if len(store) and not quiet:
        console.note(f"{len(store)} cells of before in {folder}: {len(tasks)} are left to play")
    if isinstance(workers, Local):
        compiling.start_if_needed((task.compiled for task in tasks.values()), quiet)
    try:
        with report.progress(sum(task.requests for task in tasks.values()), quiet) as advance:
            sweep(tables, store, workers, advance)
    except KeyboardInterrupt:
        console.fail("moe-sim", f"interrupted{_kept(store)}", 130)
    except InputError as error:
        raise InputError(f"{error}{_kept(store)}") from error
    outcomes = [outcome(table, store) for table in tables]
    files = save(outcomes, store, folder)
    if as_json:
        typer.echo(json.dumps([row for found in outcomes for row in found.rows], indent=1))
    elif not quiet:
        _print(outcomes)
        names = [str(file.relative_to(folder)) for file in files] if len(tables) == 1 else [files[0].name]
        folders = [f"{table.folder.name}/" for table in tables if table.folder != folder]
        written = f"wrote {', '.join([*names, NAME, *folders])} to {folder}"
        console.out.print(written, markup=False, soft_wrap=True)
    compiling.finish(quiet)


def _kept(store: "Store") -> str:
    return f" ({len(store)} finished cells are kept in {store.folder}: go on with --resume)" if len(store) else ""


def _print(outcomes: "Sequence[Outcome]") -> None:
    from sim.results import diagnosis
    from sim.sweep import report

    for found in outcomes:
        console.out.print(report.title(found), markup=False, soft_wrap=True)
        console.out.print(report.table(found))
        loaded = found.table.loaded
        for line in diagnosis.lines(found.rows, found.bound, loaded.token_experts / loaded.all_experts):
            console.out.print(line, markup=False, soft_wrap=True)
        console.out.print()
