"""The command `moe-sim systems`: what each competing system would take for a trace, on one machine."""

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table

from policies.core.grammar import policy_title, split_list
from sim.commands import options
from sim.commands.printed import progress, table
from sim.engines import compiling
from sim.experiment import SIMPY
from sim.loaded import TimedRun
from sim.quantities import show_bytes
from sim.results.metrics import size_text
from sim.systems import table1
from sim.systems import table1 as paper
from sim.systems.play import HOST_MEMORY, Prediction, Setting
from sim.systems.system import chosen
from sim.systems.table1 import Row
from traces.errors import InputError


@options.expanded
def systems(
    trace: options.Trace = None,
    systems: Annotated[str | None, typer.Option(help="Systems, as in moe-infinity,vllm. Default: all.")] = None,
    cache_size: Annotated[
        str | None,
        typer.Option(
            help="GPU memory for experts, one for all systems: a share (25%), experts (64) or bytes (8GiB). "
            "Default: what the dense part and the KV cache leave."
        ),
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="Precision of the experts (Q4_K_M). Default: as the model profile has it.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="Trace to take popular experts from. Default: the trace that is run.")
    ] = None,
    predictor: Annotated[str | None, typer.Option(help="Predictor of moe-sim train-stride, for promoe.")] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Host memory for experts over a disk, for llama-cpp-mmap. Default: 16GiB.")
    ] = None,
    table1: Annotated[
        bool, typer.Option("--table1", help="Only the systems of Table 1 of the MoE-Infinity paper, beside it.")
    ] = False,
    *,
    stated: Annotated[
        options.Stated,
        options.some("hardware", "model_profile", "requests", "as_decode", "warmup_requests", "engine"),
    ],
    output: options.OutputOptions,
) -> None:
    """Predict how fast other systems would run a trace: MoE-Infinity, vLLM, Ollama, llama.cpp and others.

    All systems get the same GPU memory and the same link. The table is for decoded tokens: time per token, its 99th
    percentile, idle time of the GPU, share of lookups that hit, and bytes over the link. A trace of DeepSeek-V2-Lite on
    the a5000 is also compared with Table 1 of the MoE-Infinity paper. docs/systems.md lists the assumptions.

    [b]moe-sim systems my-trace --systems moe-infinity,vllm --cache-size 8GiB[/b]
    """
    loaded = TimedRun.of(options.experiment(stated, trace))
    engine = loaded.experiment.engine
    if table1:
        paper.require(loaded)
        for option, given in (("--systems", systems), ("--precision", precision)):
            if given:
                raise InputError(f"--table1 says which systems and which precision: leave out {option}")
    names = list(paper.printed()) if table1 else split_list(systems)
    if systems is not None and not names:
        raise InputError("--systems names none: leave it out for all")
    wanted = chosen(names)
    taken = {
        "--profile": (profile, any("{profile}" in each.policy for each in wanted)),
        "--predictor": (predictor, any("{predictor}" in each.policy for each in wanted)),
        "--host-memory": (host_memory, any(each.mmap for each in wanted)),
    }
    for option, (given, is_used) in taken.items():
        if given and not is_used:
            raise InputError(f"{option} is used by none of the systems that are to run: leave it out")
    setting = Setting(loaded, cache_size, profile or "", predictor, host_memory or HOST_MEMORY, precision)
    slots = setting.slots()
    if any("{profile}" in each.policy for each in wanted):
        _ = setting.popularity
    output.note(
        *options.taken(
            {
                f"the shipped trace {loaded.experiment.trace}": not trace,
                f"hardware {loaded.experiment.hardware}": "hardware" not in stated,
                f"the GPU memory that is left, {slots:,} experts": not cache_size,
            }
        )
    )
    found = []
    output.note(*compiling.notes([engine != SIMPY]))
    with progress(len(wanted), output.quiet, "systems") as advance:
        for each in wanted:
            found.append(setting.predicted(each, engine))
            advance(1)
    beside = paper.rows(found) if paper.applies(loaded) and not precision else []
    other = paper.of_other_model(loaded, found) if not precision else None
    output.show(
        lambda: _json(setting, found, beside, other),
        lambda: [_title(setting), *_notes(setting), _table(found), *_missing(found), *_paper(beside), *_other(other)],
    )


def _title(setting: Setting) -> str:
    model, slots = setting.model(), setting.slots()
    size = size_text({"cache_experts": slots, "cache_fraction": slots / setting.shape.total})
    room = show_bytes(slots * model.expert_bytes)
    return f"{model.name} on {setting.hardware.title}: {room} of GPU memory, {size} of the experts"


def _notes(setting: Setting) -> list[str]:
    """What a reader has to know of the trace."""
    loaded, notes = setting.loaded, []
    meta = loaded.trace.meta
    if meta.mode == "synthetic":
        like = meta.settings.get("like")
        notes.append(f"a stand-in: {loaded.trace.name} is synthetic" + (f", fitted to {like}" if like else ""))
    if loaded.experiment.as_decode:
        notes.append("a prefill run token by token: the model did not write these tokens")
    if setting.slots() == setting.shape.total:
        notes.append("all experts fit: a smaller --cache-size shows what systems do where they do not")
    return notes


def _table(found: list[Prediction]) -> Table:
    shown = table("system", "TPOT ms", "p99 ms", "GPU idle ms", "hit rate", "MB a token", gap=1)
    for each in found:
        if each.tpot_mean_ms is None:
            continue
        times = (each.tpot_mean_ms, each.tpot_p99_ms or 0.0, each.idle_ms or 0.0)
        figures = [*(f"{ms:,.1f}" for ms in times), f"{each.hit_rate:.1%}", f"{each.mb_per_token:,.0f}"]
        shown.add_row(policy_title(each.system.name, each.oracle), *figures)
    return shown


def _missing(found: list[Prediction]) -> list[str]:
    return [f"{each.system.name} is left out: {each.reason}" for each in found if each.reason]


def _paper(rows: list[Row]) -> list[str | Table]:
    """Table 1 beside the predictions, rows beyond 15% with the cause, and the headline."""
    if not rows:
        return []
    shown = table("predicted / Table 1", "mean ms     ", "GPU idle ms     ", "tail ms     ", gap=1)
    for row in rows:
        paper, one = row.paper, row.prediction
        parts = (
            (one.tpot_mean_ms, paper.mean_ms, row.deviation),
            (one.idle_ms, paper.idle_ms, row.idle_deviation),
            (one.tpot_p99_ms, paper.tail_ms, row.tail_deviation),
        )
        shown.add_row(paper.name, *(_beside(*part) for part in parts))
    named = [f"{row.paper.name} is {_percent(row.deviation)}: {row.paper.cause}" for row in rows if row.beyond]
    lines: list[str | Table] = [shown, *named]
    if found := table1.ratios(rows):
        predicted, printed = ([pair[i] for pair in found.values()] for i in (0, 1))
        least, most = table1.HEADLINE
        lines.append(
            f"latency over {table1.OURS}'s: predicted {min(predicted):.1f} to {max(predicted):.1f}x, printed "
            f"{min(printed):.1f} to {max(printed):.1f}x for these rows; the paper's headline: {least} to {most}x"
        )
    return lines


def _other(pair: tuple[float, float] | None) -> list[str]:
    if pair is None:
        return []
    ours, theirs = pair
    return [f"moe-infinity: predicted {ours:,.0f} ms, the paper prints {theirs:,.0f} ({_percent(ours / theirs - 1)})"]


def _beside(ours: float | None, theirs: float, deviation: float | None) -> str:
    return f"{ours:,.0f} / {theirs:,.0f} {_percent(deviation):>5}" if theirs else f"{ours:,.0f} / -      "


def _percent(deviation: float | None) -> str:
    return "-" if deviation is None else f"{deviation:+.0%}"


def _json(
    setting: Setting, found: list[Prediction], rows: list[Row], other: tuple[float, float] | None
) -> dict[str, Any]:
    model = setting.model()
    shown: dict[str, Any] = {
        "trace": setting.loaded.trace.name,
        "model": model.name,
        "hardware": setting.hardware.name,
        "cache_experts": setting.slots(),
        "cache_bytes": setting.slots() * model.expert_bytes,
        "notes": _notes(setting),
        "systems": [{**asdict(each), "system": each.system.name, "title": each.system.title} for each in found],
    }
    if other:
        shown["paper_moe_infinity_ms"] = other[1]
    if rows:
        shown["table1"] = [
            {
                "system": row.paper.name,
                "paper_mean_ms": row.paper.mean_ms,
                "paper_idle_ms": row.paper.idle_ms or None,
                "paper_tail_ms": row.paper.tail_ms or None,
                "deviation": row.deviation,
                "idle_deviation": row.idle_deviation,
                "tail_deviation": row.tail_deviation,
                "cause": row.paper.cause if row.beyond else None,
            }
            for row in rows
        ]
        shown["ratios"] = {
            name: {"predicted": ours, "paper": theirs} for name, (ours, theirs) in table1.ratios(rows).items()
        }
    return shown
