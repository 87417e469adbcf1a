"""The command `moe-sim run`: one cell in full and, with a timeline, moment by moment."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from policies.core.spec import PolicySpec
from sim.commands import options
from sim.engines import compiling
from sim.loaded import TimedRun
from sim.loop.requests import Requests
from sim.quantities import show_bytes
from sim.results.compare import swept_run
from sim.results.metrics import LATENCIES, Row, Summary, cell_text, engine_words, users_text
from sim.sweeps import notes, verdict
from sim.sweeps.grid import LRU, Grid, grid_of, measures, run_grid, summed
from sim.timeline import window as timeline_window
from sim.timeline.file import writing
from sim.timeline.observer import play as play_onto
from sim.timeline.window import Window
from terminal.console import progress
from traces.errors import InputError


def run(
    cell: options.CellOptions,
    stated: Annotated[options.Stated, options.all_but("untimed")],
    admission: options.Admission = None,
    *,
    timeline: Annotated[
        Path | None, typer.Option(help="File for a timeline (.json, .json.gz) that https://ui.perfetto.dev opens.")
    ] = None,
    tokens: Annotated[str | None, typer.Option(help="Decode steps that the timeline shows, FROM:TO.")] = None,
    overwrite: options.Overwrite = False,
    output: options.OutputOptions,
) -> None:
    """Run one policy at one cache size, and report where the time went.

    With --timeline, writes a file for https://ui.perfetto.dev: the compute stream with the cause of each stall, every
    transfer, which expert is in which slot, and the queues. In a run of more than 2,000 steps it shows the first 100
    decode steps, unless you choose a window; the run then stops at the end of the last request in the window.

    [b]moe-sim run --policy lru --cache-size 50%[/b]

    [b]moe-sim run my-trace --chunk-bytes 1MiB --timeline out.json.gz --tokens 100:140[/b]
    """
    if tokens and not timeline:
        raise InputError("name the file of the timeline whose window is chosen: --timeline out.json")
    loaded = TimedRun.of(options.experiment(stated, cell.trace))
    spec, slots = cell.chosen(loaded, admission)
    requests = Requests(loaded.trace)
    window = timeline_window.chosen(tokens, requests) if tokens else None
    output.note(*cell.taken(loaded.experiment, stated), *loaded.notes)
    for warning in notes.warnings(loaded, Grid((spec,), {cell.size: slots})):
        options.warn(warning)
    us = loaded.measured_us([spec])
    output.note(*notes.overhead_notes(us))
    loaded = loaded.charging(us)
    if timeline:
        window = window or timeline_window.first_steps(requests)
        summary = _shown(loaded, spec, slots, timeline, overwrite, window, output)
    else:
        output.note(*compiling.notes(loaded.versions([spec])))
        with progress(len(loaded.trace.requests), output.quiet) as advance:
            (summary,) = summed(loaded, spec, [slots], advance)
    row = {**summary.row(), **summary.latencies()}
    a_layer, *memory = engine_words(row)
    size = ", ".join([f"{a_layer} a layer", *(f"{mib} MiB" for mib in memory)])
    title = f"{row['model']} on {loaded.hardware.title}: {cell_text(row)} of the experts ({size}); requests "
    title += f"{row['requests']:,}, tokens {row['tokens']:,} of {row['trace']}"
    output.show(lambda: row, lambda: (*_verdict(loaded, cell.size, summary), "", title, _block(row)))


def _verdict(loaded: TimedRun, size: str, summary: Summary) -> list[str]:
    """Return what the run means beside LRU and Belady, which are run too; nothing of a run that stopped early."""
    found, requests = run_grid(loaded, grid_of(loaded, [LRU], [size]))
    (lru,), row = found.rows, summary.row()
    if row["requests"] != lru["requests"]:
        return list(verdict.lossy([row]))
    row["resident_ms"] = lru["resident_ms"]
    for belady in found.bound:
        row |= measures(row, lru, belady, found.judged_by)
    return verdict.of_run(row, [swept_run(lru, requests), swept_run(row, summary.requests().to_pandas())])


def _shown(
    loaded: TimedRun,
    policy: PolicySpec,
    slots: int,
    path: Path,
    overwrite: bool,
    window: Window,
    output: options.OutputOptions,
) -> Summary:
    row: Row = {}
    with writing(path, lambda: {"made by": "moe-sim run", **row}, overwrite) as timeline:
        names = loaded.trace.requests["id"].astype(str).tolist()
        play = partial(play_onto, timeline=timeline, names=names, window=window)
        with progress(len(names), output.quiet) as advance:
            (summary,) = summed(replace(loaded, engine=play), policy, [slots], advance)
            row |= {**summary.row(), **summary.latencies()}
    if not window.stops:
        output.note(
            f"the run has more than {timeline_window.SHOWN_WHOLE:,} steps: the timeline shows its first "
            f"{window.last} {'decode steps' if window.decodes else 'prefills'}; --tokens FROM:TO chooses others"
        )
    elif row["requests"] + loaded.experiment.warmup_requests < len(loaded.trace.requests):
        output.note("run up to the end of the request in which the window ends; the figures are of that")
    output.note(f"wrote {path} ({show_bytes(path.stat().st_size)}): open it at https://ui.perfetto.dev")
    return summary


def _block(row: Row) -> str:
    elapsed = row["gpu_idle_ms"] + row["compute_busy_ms"]

    def busy(stream: str) -> str:
        return f"busy {_share(row[f'{stream}_busy_ms'], elapsed)}"

    stalls = {cause: row[f"stall_{cause}_ms"] for cause in ("demand", "late", "behind_prefetch", "slot", "predictor")}
    stalls |= {cause: ms for cause in ("disk", "host") if (ms := row[f"stall_{cause}_ms"])}
    moved = ", ".join(f"{kind} {show_bytes(row[f'bytes_{kind}'])}" for kind in ("demand", "prefetch", "wasted"))
    lookups = ", ".join(
        f"{title} {_share(row[column], row['lookups'])}"
        for column, title in (("hits", "hit"), ("late", "late"), ("misses", "miss"))
    )
    lines = {"lookups": f"{lookups} of {row['lookups']:,}"}
    if row["phase"] == "both":
        lines["decode"] = f"{_share(row['decode_hit_rate'], 1)} of the lookups of decoded tokens hit"
    lines |= {
        "TTFT ms": _latencies(row, "ttft"),
        "TPOT ms": _latencies(row, "tpot"),
        "tokens/s": f"{speed:,.1f} decoded, prompts' time included" if (speed := row["tokens_per_s"]) else "-",
        "compute": f"{busy('compute')} of the time",
        "stalls": ", ".join(f"{_CAUSES.get(cause, cause)} {_share(ms, elapsed)}" for cause, ms in stalls.items()),
        "link": f"{busy('link')}, {_share(row['overlap'], 1)} of that behind compute",
        "moved": moved,
    }
    if row["on_host"]:
        share, a_token = _share(row["on_host"], row["misses"]), row["on_host"] / row["tokens"]
        lines["host"] = f"computed {row['on_host']:,} experts ({share} of the misses), {busy('host')} of the time, "
        lines["host"] += f"{a_token:,.1f} a token"
    if row["admitted"] is not None:
        lines["admission"] = f"{_share(row['admitted'], row['misses'])} of the misses admitted, background copies of "
        lines["admission"] += f"{row['copies']:,} experts, {show_bytes(row['bytes_copied'])}"
    if reads := row["reads_demand"] + row["reads_prefetch"]:
        lines["disk"] = f"{reads:,} reads, {row['reads_prefetch']:,} of them prefetches, {busy('disk')} of the time"
    if users := users_text(row):
        figures = ", ".join(f"{name} {row[f'queue_{name}_ms']:,.2f}" for name in ("mean", "p99", "max"))
        lines["queue ms"] = f"{figures}; {users}"
    lines["overhead"] = f"{row['predictor_us']:g} us an event"
    for half, given in json.loads(row["options"]).items():
        if isinstance(given, dict):
            options = (f"{name}={value}" for name, value in given.items() if name != "name")
            lines[half] = " ".join([given["name"], *options])
    return "\n".join(f"  {name:<9} {text}" for name, text in lines.items())


_CAUSES = {"behind_prefetch": "behind prefetch", "predictor": "policy overhead"}


def _latencies(row: Row, kind: str) -> str:
    figures = {name: row[f"{kind}_{name}_ms"] for name in LATENCIES}
    return ", ".join(f"{name} {ms:,.2f}" for name, ms in figures.items() if ms is not None) or "-"


def _share(part: float | None, whole: float | None) -> str:
    return "-" if part is None or not whole else f"{part / whole:.1%}"
