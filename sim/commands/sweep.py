"""The command `moe-sim sweep`: from flags and a TOML file to results on disk, a table and a winner."""

import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sim import defaults
from sim.commands import options
from sim.commands.printed import progress
from sim.commands.resuming import keeping, refuse_others, require_resume
from sim.quantities import parse_whole
from traces import demo_trace
from traces.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from sim.sweeps.config import Config
    from sim.sweeps.grid import Outcome, Table
    from sim.sweeps.setup import Loaded
    from sim.sweeps.store import Store
    from sim.sweeps.workers import Workers

MANY = 10_000
"""Cells that are asked about before they are run."""


@options.expanded
def sweep(
    traces: Annotated[
        list[str] | None, typer.Argument(help="Folders or URLs of traces. Default: the shipped trace.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file with the sweep (keys: sim/README.md); options override it.")
    ] = None,
    policies: options.SomePolicies = None,
    scope: options.Scope = None,
    evict: Annotated[str | None, typer.Option(help="Eviction policies, each with every --prefetch.")] = None,
    prefetch: Annotated[str | None, typer.Option(help="Prefetchers, each with every --evict.")] = None,
    cache_sizes: options.SomeCacheSizes = None,
    hardware: Annotated[
        str | None, typer.Option(help=f"Hardware profiles or TOML files. Default: {defaults.HARDWARE}.")
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds: policies that draw are run once with each.")] = None,
    *,
    timed: options.SimulatedOptions,
    max_batch: Annotated[
        str | None,
        typer.Option(help="Requests that run at the same time, one number or several (1,4,8). Default: one by one."),
    ] = None,
    untimed: options.Untimed = False,
    engine: options.Engine = None,
    workers: options.Workers = None,
    scheduler: Annotated[
        str | None, typer.Option(help="Dask cluster that runs the cells (tcp://HOST:8786). Default: none.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help=f"Do not ask before running more than {MANY:,} cells.")] = False,
    output: options.ResumableOptions,
) -> None:
    """Run several policies at several cache sizes over traces, and name the best.

    Writes results.parquet (a row per policy and size), requests.parquet (a row per request of each), winner.toml,
    plots, and sweep.toml, which runs the same sweep again. Several traces or machines get a folder each, and one table
    of all rows. After an interruption, finished cells stay in OUT/cells, and --resume continues.

    [b]moe-sim sweep --cache-sizes 10%,25%,50%[/b]

    [b]moe-sim sweep my-trace --policies lru,lru+eamc,belady --cache-sizes 8GiB --hardware rtx4090,h200[/b]

    [b]moe-sim sweep my-trace --policies 'eamc:capacity=100|300,random' --seeds 1,2,3[/b]
    """
    from policies.core.grammar import split_list
    from sim.sweeps.config import read
    from sim.sweeps.grid import names
    from sim.sweeps.store import MAKER, WRITTEN
    from sim.sweeps.workers import Cluster, Local
    from traces.location import name_of
    from traces.output import claim, claimed

    processes = options.processes(workers)
    given = options.typed(
        timed,
        traces=tuple(traces) if traces else None,
        policies=_names(policies, evict, prefetch),
        cache_sizes=None if cache_sizes is None else split_list(cache_sizes),
        hardware=None if hardware is None else split_list(hardware),
        seeds=None if seeds is None else tuple(map(_seed, split_list(seeds))),
        max_batch=None if max_batch is None else tuple(map(_users, split_list(max_batch) or [max_batch])),
        scope=scope,
        untimed=untimed,
        engine=engine,
    )
    asked = {**(read(config) if config else {}), **given}
    made, defaults = _with_defaults(asked)
    options.require_clock(made.untimed, hardware)
    _ask(made.cells, yes)
    name = "sweep" if len(made.traces) > 1 else name_of(made.traces[0])
    folder = output.out or _free(Path("results"), name, output)
    tables = _tables(made, folder)
    output.note(*options.taken(defaults), *_surprises(tables, made.cache_sizes))
    if seeds is not None and not made.seeds_count:
        output.note("--seeds has no effect: no policy draws random numbers, but for those that name a seed themselves")
    players = Cluster(scheduler) if scheduler else Local(processes)
    with claimed(folder, MAKER, names(tables, folder)):
        for table in tables:
            if table.folder.exists():
                claim(table.folder, MAKER, WRITTEN)
        store = _open(tables, folder, output)
        _run(made, tables, store, players, output)


def _free(parent: Path, name: str, output: options.ResumableOptions) -> Path:
    """The folder of that name or, unless it is to be resumed or dropped, the first one behind it without a sweep."""
    from sim.sweeps.store import held

    taken = output.resume or output.overwrite
    names = (name if n == 1 else f"{name}-{n}" for n in itertools.count(1))
    folder = next(parent / each for each in names if taken or not held(parent / each))
    if folder.name != name:
        output.note(
            f"{parent / name} holds a sweep; this one is written to {folder} "
            "(use --resume, --overwrite or --out to choose)"
        )
    return folder


def _with_defaults(asked: dict[str, Any]) -> "tuple[Config, dict[str, bool]]":
    """Return the sweep, and which defaults it takes."""
    from policies.core.grammar import split_list
    from sim.sweeps.config import Config

    shipped = str(demo_trace())
    lists = {"policies": defaults.POLICIES, "cache_sizes": defaults.CACHE_SIZES, "hardware": defaults.HARDWARE}
    made = Config(**{"traces": (shipped,), **{name: split_list(text) for name, text in lists.items()}, **asked})
    taken = {f"the shipped trace {shipped}": "traces" not in asked}
    taken |= {f"{name.replace('_', ' ')} {text}": name not in asked for name, text in lists.items()}
    taken[f"hardware {defaults.HARDWARE}"] &= not made.untimed
    return made, taken


def _names(policies: str | None, evict: str | None, prefetch: str | None) -> tuple[str, ...] | None:
    """All policies asked for, as one list: --policies, and --evict with --prefetch; None if nothing was asked."""
    from policies.core.grammar import split_list

    if policies is evict is prefetch is None:
        return None
    if prefetch and not evict:
        raise InputError("--prefetch needs --evict: name the eviction policy")
    keeps, fetches = split_list(evict), split_list(prefetch)
    pairs = [f"{kept}+{fetched}" for kept in keeps for fetched in fetches]
    return (*split_list(policies), *(pairs or keeps))


def _seed(text: str) -> int:
    seed = parse_whole(text)
    if seed is None:
        raise InputError(f"--seeds {text!r}: a seed is a whole number from 0 to below 2**63")
    return seed


def _users(text: str) -> int:
    users = parse_whole(text)
    if not users:
        raise InputError(f"--max-batch {text!r}: write how many requests run at a time, as in 1,4,8")
    return users


def _ask(cells: int, yes: bool) -> None:
    """Whether so many cells are meant."""
    if cells <= MANY or yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise InputError(f"this sweep has {cells:,} cells: make it smaller, or use --yes")
    typer.confirm(f"This sweep has {cells:,} cells. Run them all?", abort=True, err=True)


def _tables(config: "Config", folder: Path) -> "list[Table]":
    """What is to be run, its files read. InputError for whatever cannot be."""
    from sim.sweeps.grid import Table, grid_of

    specs = config.specs()
    loaded = [setup.load() for setup in config.setups()]
    several = len(loaded) > 1
    names = _folders(loaded) if several else [""]
    return [
        Table(each, grid_of(each, specs, config.cache_sizes), folder / name)
        for each, name in zip(loaded, names, strict=True)
    ]


def _folders(loaded: "Sequence[Loaded]") -> list[str]:
    """A name for each trace, machine and number of users: of what differs."""
    from sim.sweeps.store import NAME

    traces, machines = {each.setup.trace for each in loaded}, {each.setup.hardware for each in loaded}
    users = {each.setup.max_batch for each in loaded}
    names: list[str] = []
    for each in loaded:
        machine = [each.hardware.name] if each.hardware and len(machines) > 1 else []
        batch = [f"users-{each.setup.max_batch}"] if len(users) > 1 else []
        name = "-".join([each.trace.name] * (len(traces) > 1) + machine + batch)
        name = f"{name}-trace" if name == NAME else name  # the store's
        names.append(name if name not in names else f"{name}-{len(names) + 1}")
    return names


def _surprises(tables: "list[Table]", cache_sizes: "Sequence[str]") -> Iterator[str]:
    """Yield what sizes of experts come from, which caches are not run, and which policies do less than they say."""
    from sim.quantities import show_bytes
    from sim.sweeps import report

    for table in {table.loaded.setup.trace: table for table in tables}.values():
        loaded = table.loaded
        yield from report.sizes_note(loaded, table.grid, cache_sizes)
        if loaded.profile and not loaded.profile.hub_ids and not loaded.setup.model_profile:
            yield f"{loaded.profile.name} has no model profile: derived one from the sizes in its trace"
        recorded, counted = loaded.trace.meta.expert_bytes, loaded.expert_bytes
        if recorded and counted and recorded != counted:
            sizes = f"trace says {show_bytes(recorded)}, profile says {show_bytes(counted)}"
            yield f"expert size: {sizes} (the profile is used)"
    yield from report.untimed_note(tables[0].loaded, tables[0].grid.policies)


def _open(tables: "list[Table]", folder: Path, output: options.ResumableOptions) -> "Store":
    """What is already there, as far as it is wanted. InputError where anything would be lost unasked."""
    from sim.sweeps.store import Store, drop

    if output.overwrite:
        drop(folder)
    found = Store(folder)
    require_resume(len(found), folder, output.resume)
    wanted = {key for table in tables for key in table.tasks()}
    refuse_others(sum(key not in wanted for key in found), folder, "sweep")
    return found


def _run(
    config: "Config", tables: "list[Table]", store: "Store", workers: "Workers", output: options.OutputOptions
) -> None:
    """Sweep, write, report."""
    from sim.engines import compiling
    from sim.sweeps import report
    from sim.sweeps.config import NAME
    from sim.sweeps.grid import missing, outcome, save, sweep
    from sim.sweeps.workers import Local

    for warning in dict.fromkeys(warning for table in tables for warning in report.warnings(table.loaded, table.grid)):
        options.warn(warning)
    folder = store.folder
    config.resolved().write(folder / NAME)
    tasks = missing(tables, store)
    if len(store):
        output.note(f"resuming {folder}: {len(store)} cells done, {len(tasks)} to go")
    if isinstance(workers, Local):
        cells = ((table.loaded, [spec for spec, _ in table.grid.cells()]) for table in tables if tasks)
        versions = (version for loaded, specs in cells for version in loaded.versions(specs))
        compiling.start_if_needed(versions, output.quiet)
    due = sum(task.requests for task in tasks.values())
    with keeping("moe-sim", store, folder), progress(due, output.quiet) as advance:
        sweep(tables, store, workers, advance)
    outcomes = [outcome(table, store) for table in tables]
    files = save(outcomes, store, folder)
    names = [str(file.relative_to(folder)) for file in files]
    folders = [f"{table.folder.name}/" for table in tables if table.folder != folder]
    output.show(
        lambda: [row for found in outcomes for row in found.rows],
        lambda: (*_shown(outcomes), f"wrote {', '.join([*names, NAME, *folders])} to {folder}"),
    )
    compiling.finish(output.quiet)


def _shown(outcomes: "Sequence[Outcome]") -> "Iterator[str | RichTable]":
    from sim.results import diagnosis
    from sim.sweeps import report

    for found in outcomes:
        yield from report.shown(found)
        loaded = found.table.loaded
        yield from diagnosis.lines(found.rows, found.bound, loaded.token_experts / loaded.all_experts)
        yield ""
