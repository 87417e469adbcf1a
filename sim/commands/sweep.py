"""The command `moe-sim sweep`: from flags and a TOML file to results on disk, a table and a winner."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from os import cpu_count
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table as RichTable

from policies.core.grammar import split_list
from sim import defaults
from sim.commands import options
from sim.engines import compiling
from sim.loaded import Loaded, TimedRun, load
from sim.quantities import parse_whole
from sim.results.compare import SweptRun
from sim.results.files import write_figure
from sim.results.plot import DRAWN
from sim.sweeps import notes, verdict
from sim.sweeps.config import NAME as TOML
from sim.sweeps.config import Sweep, read
from sim.sweeps.grid import Outcome, Table, drawn, grid_of, missing, names, outcome, runs, save
from sim.sweeps.grid import sweep as run_missing
from sim.sweeps.store import CELLS, MAKER, WRITTEN, Store, drop, held
from sim.sweeps.workers import Cluster, Local, Workers
from terminal import console
from terminal.options import typed
from terminal.resuming import keeping, refuse_others, require_resume
from traces.errors import InputError
from traces.location import name_of
from traces.output import claim, claimed


def sweep(
    traces: Annotated[
        list[str] | None, typer.Argument(help="Folders or URLs of traces. Default: the shipped trace.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file with the sweep (keys: sim/README.md); options override it.")
    ] = None,
    trust_folder: options.TrustFolder = False,
    policies: options.SomePolicies = None,
    scope: options.Scope = None,
    admission: options.Admission = None,
    cache_sizes: options.SomeCacheSizes = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            help=f"Hardware profiles or TOML files. Default: {defaults.HARDWARE}, for the shipped trace demo."
        ),
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds: policies that draw are run once with each.")] = None,
    *,
    stated: Annotated[options.Stated, options.all_but("hardware", "max_batch")],
    max_batch: Annotated[
        str | None,
        typer.Option(help="Requests that run at the same time, one number or several (1,4,8). Default: one by one."),
    ] = None,
    workers: options.Workers = None,
    scheduler: Annotated[
        str | None, typer.Option(help="Dask cluster that runs the cells (tcp://HOST:8786). Default: none.")
    ] = None,
    figure: options.Figure = None,
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
    options.check_figure(figure, output.overwrite)
    if stated.get("untimed") and hardware:
        raise InputError("--untimed counts without a clock: it cannot have --hardware")
    axes = typed(
        traces=traces,
        policies=None if policies is None else split_list(policies),
        cache_sizes=None if cache_sizes is None else split_list(cache_sizes),
        hardware=None if hardware is None else split_list(hardware),
        seeds=None if seeds is None else _numbers("--seeds", seeds),
        max_batch=None if max_batch is None else _numbers("--max-batch", max_batch),
        scope=scope,
        admission=admission,
    )
    values = {**axes, **stated}
    values = {**(read(config, values, trust_folder) if config else {}), **values}
    shipped = {} if values.keys() & {"traces", "hardware", "model_profile"} else defaults.OF_SHIPPED_TRACE
    made = Sweep.of({**shipped, **values}, str(config or ""))
    name = "sweep" if len(made.traces) > 1 else name_of(made.traces[0])
    folder = output.out or _free(Path("results"), name, output)
    made, tables = _charging(made, _tables(made, folder), Store(folder) if output.resume else None, output)
    output.note(*_taken(made, values), *_surprises(tables, made.cache_sizes))
    players = Cluster(scheduler) if scheduler else Local(workers or cpu_count() or 1)
    with claimed(folder, MAKER, names(tables, folder)):
        for table in tables:
            if table.folder.exists():
                claim(table.folder, MAKER, WRITTEN)
        store = _open(tables, folder, output)
        _run(made, tables, store, players, output, figure)


def _free(parent: Path, name: str, output: options.ResumableOptions) -> Path:
    """The folder of that name or, unless it is to be resumed or dropped, the first one behind it without a sweep."""
    taken = output.resume or output.overwrite
    names = (name if n == 1 else f"{name}-{n}" for n in itertools.count(1))
    folder = next(parent / each for each in names if taken or not held(parent / each))
    if folder.name != name:
        output.note(
            f"{parent / name} holds a sweep; this one is written to {folder} "
            "(use --resume, --overwrite or --out to choose)"
        )
    return folder


def _taken(made: Sweep, values: Mapping[str, Any]) -> list[str]:
    lists = {"policies": defaults.POLICIES, "cache_sizes": defaults.CACHE_SIZES}
    taken = {f"the shipped trace {made.traces[0]}": "traces" not in values}
    if "traces" not in values:
        taken[f"model profile {made.shared.model_profile}"] = "model_profile" not in values
    taken |= {f"{name.replace('_', ' ')} {text}": name not in values for name, text in lists.items()}
    taken[f"hardware {made.hardware[0]}"] = "hardware" not in values and not made.shared.untimed
    return options.taken(taken)


def _numbers(flag: str, text: str) -> list[int]:
    numbers = [parse_whole(each) for each in split_list(text)]
    if not numbers or None in numbers:
        raise InputError(f"{flag} {text!r}: write whole numbers, as in 1,4,8")
    return [number for number in numbers if number is not None]


def _tables(made: Sweep, folder: Path) -> list[Table]:
    loaded = [load(experiment) for experiment in made.experiments()]
    several = len(loaded) > 1
    names = _folders(loaded) if several else [""]
    return [
        Table(each, grid_of(each, made.specs, made.cache_sizes), folder / name)
        for each, name in zip(loaded, names, strict=True)
    ]


def _charging(
    made: Sweep, tables: list[Table], finished: Store | None, output: options.OutputOptions
) -> tuple[Sweep, list[Table]]:
    """Return both with what policies of a user's own cost: as finished cells have it, or as measured now.

    One figure for all tables, of the model with the most experts.
    """
    before = {row["policy"]: row["predictor_us"] for row in map(finished.row, finished)} if finished else {}
    us: dict[str, float] = {}
    for table in sorted(tables, key=lambda table: -table.loaded.all_experts):
        us |= table.loaded.charging(us).measured_us(made.specs, before)
    output.note(*notes.overhead_notes(us))
    charged = [replace(table, loaded=table.loaded.charging(us)) for table in tables]
    return replace(made, shared=made.shared.charging(us)), charged


def _folders(loaded: Sequence[Loaded]) -> list[str]:
    traces, machines = {each.experiment.trace for each in loaded}, {each.experiment.hardware for each in loaded}
    users = {each.experiment.max_batch for each in loaded}
    names: list[str] = []
    for each in loaded:
        machine = [each.hardware.name] if isinstance(each, TimedRun) and len(machines) > 1 else []
        batch = [f"users-{each.experiment.max_batch}"] if len(users) > 1 else []
        name = "-".join([each.trace.name] * (len(traces) > 1) + machine + batch)
        name = f"{name}-trace" if name == CELLS else name  # the store's
        names.append(name if name not in names else f"{name}-{len(names) + 1}")
    return names


def _surprises(tables: list[Table], cache_sizes: "Sequence[str]") -> Iterator[str]:
    """Yield what sizes of experts come from, which caches are not run, and which policies do less than they say."""
    for table in {table.loaded.experiment.trace: table for table in tables}.values():
        loaded = table.loaded
        yield from notes.sizes_note(loaded, table.grid, cache_sizes)
        if loaded.profile and not loaded.profile.hub_ids and not loaded.experiment.model_profile:
            yield f"{loaded.profile.name} has no model profile: derived one from the sizes in its trace"
        yield from loaded.notes
    yield from notes.untimed_note(tables[0].loaded, tables[0].grid.policies)


def _open(tables: list[Table], folder: Path, output: options.ResumableOptions) -> Store:
    if output.overwrite:
        drop(folder)
    found = Store(folder)
    require_resume(len(found), folder, output.resume)
    wanted = {key for table in tables for key in table.cells}
    refuse_others(sum(key not in wanted for key in found), folder, "sweep")
    return found


def _run(
    made: Sweep, tables: list[Table], store: Store, workers: Workers, output: options.OutputOptions, figure: Path | None
) -> None:
    for warning in dict.fromkeys(warning for table in tables for warning in notes.warnings(table.loaded, table.grid)):
        options.warn(warning)
    folder = store.folder
    made.write(folder / TOML)
    groups = missing(tables, store)
    if len(store):
        output.note(f"resuming {folder}: {len(store)} cells done, {sum(len(keys) for keys, _ in groups)} to go")
    if isinstance(workers, Local):
        cells = ((table.loaded, [spec for spec, _ in table.grid.cells()]) for table in tables if groups)
        versions = (version for loaded, specs in cells for version in loaded.versions(specs))
        output.note(*compiling.notes(versions))
    due = sum(task.requests for _, task in groups)
    with keeping("moe-sim", store, folder), console.progress(due, output.quiet) as advance:
        run_missing(tables, store, workers, advance)
    outcomes = [outcome(table, store) for table in tables]
    swept = [runs(found, store) for found in outcomes]
    if figure:
        by = outcomes[0].judged_by if outcomes[0].judged_by in DRAWN else "hit_rate"
        write_figure(drawn(outcomes[0], swept[0], by), figure)
    files = save(outcomes, store, folder)
    names = [str(file.relative_to(folder)) for file in files]
    folders = [f"{table.folder.name}/" for table in tables if table.folder != folder]
    output.show(
        lambda: [row for found in outcomes for row in found.rows],
        lambda: (
            *_shown(outcomes, swept),
            f"wrote {', '.join([*names, TOML, *folders])} to {folder}",
            f"next: moe-sim report {folder}",
        ),
    )


def _shown(outcomes: Sequence[Outcome], runs: Sequence[Sequence[SweptRun]]) -> Iterator[str | RichTable]:
    for found, of_it in zip(outcomes, runs, strict=True):
        marks = notes.marks(found, of_it)
        yield from verdict.sentences(found.rows, of_it)
        yield ""
        yield _title(found)
        yield _cells(found, marks)
        yield from notes.legend(marks, of_it, found.judged_by)
        yield ""
    if one_for_all := verdict.joint([found.rows for found in outcomes]):
        yield from (*one_for_all, "")


def _title(outcome: Outcome) -> str:
    first, loaded = outcome.rows[0], outcome.table.loaded
    machine = f" on {loaded.hardware.title}" if isinstance(loaded, TimedRun) else ", untimed"
    counts = f"{first['requests']} requests of {first['trace']}, {first['tokens']:,} tokens"
    return f"{first['model']}{machine}: {counts}"


def _cells(outcome: Outcome, marks: Mapping[tuple[int, str], str]) -> RichTable:
    rows, grid = outcome.rows, outcome.table.grid
    stated = {slots: text for text, slots in grid.sizes.items()}
    typed = [stated[slots] for _, slots in grid.requested()]
    found = notes.columns(rows) | {"cache": typed, "policy": [row["policy"] for row in rows]}
    left_out = (*notes.IN_REPORTS, "misses" if "idle" in found else "idle")
    names = [name for name in found if name not in left_out]
    shown = console.table(*names, "")
    shown.columns[names.index("policy")].justify = "left"
    cells = zip(*(found[name] for name in names), strict=True)
    for texts, size, row, following in zip(cells, typed, rows, [*typed[1:], None], strict=True):
        mark = marks.get((row["cache_experts"], row["policy"]), "oracle" if row["oracle"] else "")
        style = {notes.BEST: "bold green", notes.EQUAL: "green", notes.NO_ROOM: "dim"}.get(mark)
        shown.add_row(*texts, mark, style=style, end_section=following != size)
    return shown
