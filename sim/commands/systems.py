"""The command `moe-sim systems`: what each competing system would take for a trace, on one machine."""

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table

from policies.core.grammar import policy_title, split_list
from sim.commands import options
from sim.engines import compiling
from sim.experiment import SIZES
from sim.loaded import TimedRun
from sim.quantities import show_bytes, show_ms
from sim.results.metrics import size_text
from sim.systems.predict import HOST_MEMORY, Prediction, Setting, chosen
from terminal.console import progress, table


def systems(
    trace: options.Trace = None,
    systems: Annotated[str | None, typer.Option(help="Systems, as in moe-infinity,vllm. Default: all.")] = None,
    cache_size: Annotated[
        str | None,
        typer.Option(
            help=f"GPU memory for experts, one for all systems: {SIZES}. "
            "Default: what the dense part and the KV cache leave."
        ),
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="Precision of the experts (Q4_K_M). Default: as the model profile has it.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="Trace to take popular experts from. Default: the trace that is run.")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Host memory for experts over a disk, for llama-cpp-mmap. Default: 16GiB.")
    ] = None,
    *,
    stated: Annotated[
        options.Stated, options.some("hardware", "model_profile", "requests", "as_decode", "warmup_requests")
    ],
    output: options.OutputOptions,
) -> None:
    """Predict how fast other systems would run a trace: MoE-Infinity, vLLM, Ollama, llama.cpp and others.

    All systems get the same GPU memory and the same link. The table is for decoded tokens: time per token, what of it
    is declared as overhead of the framework, its 99th percentile, idle time of the GPU, share of lookups that hit, and
    bytes over the link. docs/systems.md lists the assumptions.

    [b]moe-sim systems my-trace --systems moe-infinity,vllm --cache-size 8GiB[/b]
    """
    loaded = TimedRun.of(options.experiment(stated, trace))
    systems_to_run = chosen(split_list(systems))
    uses_profile = any("{profile}" in each.runs for each in systems_to_run)
    setting = Setting(loaded, cache_size, profile or "", host_memory or HOST_MEMORY, precision)
    defaults = {
        f"the shipped trace {loaded.experiment.trace}": not trace,
        f"hardware {loaded.experiment.hardware}": "hardware" not in stated,
        f"the GPU memory that is left, {setting.slots():,} experts": not cache_size,
    }
    if uses_profile:
        _ = setting.popularity  # a profile of another model is refused before anything is run
    output.note(*options.taken(defaults), *loaded.notes)
    predictions = []
    output.note(*compiling.notes([True]))
    with progress(len(systems_to_run), output.quiet, "systems") as advance:
        for each in systems_to_run:
            predictions.append(setting.predicted(each))
            advance(1)
    texts = [f"{each.system.name} is left out: {each.reason}" for each in predictions if each.reason]
    said = [*_verdict(setting, predictions), "", _title(setting), *_notes(setting)]
    output.show(lambda: _json(setting, predictions), lambda: [*said, _table(predictions), *texts])


def _title(setting: Setting) -> str:
    model, slots = setting.model(), setting.slots()
    size = size_text({"cache_experts": slots, "cache_fraction": slots / setting.loaded.shape.total})
    memory = show_bytes(slots * model.expert_bytes)
    return f"{model.name} on {setting.loaded.hardware.title}: {memory} of GPU memory, {size} of the experts"


def _notes(setting: Setting) -> list[str]:
    loaded, notes = setting.loaded, []
    if loaded.trace.meta.mode == "synthetic":
        notes.append(f"a stand-in: {loaded.trace.name} is synthetic")
    if loaded.experiment.as_decode:
        notes.append("a prefill run token by token: the model did not write these tokens")
    if setting.slots() == loaded.shape.total:
        notes.append("all experts fit: a smaller --cache-size shows what systems do where they do not")
    return notes


def _verdict(setting: Setting, predictions: list[Prediction]) -> list[str]:
    texts, model, total = [], setting.model(), setting.loaded.shape.total
    if setting.slots() == total:
        size = show_bytes(total * model.expert_bytes)
        texts.append(f"All {total:,} experts ({size}) fit this GPU memory: no cache is needed.")
    run = [(each.tpot_mean_ms, each) for each in predictions if each.tpot_mean_ms is not None and not each.oracle]
    ranked = sorted(run, key=lambda one: one[0])
    if len(ranked) > 1:
        (ms, first), (next_ms, second) = ranked[:2]
        texts.append(
            f"{first.system.title} would be the fastest: {show_ms(ms)} ms a token, {next_ms / ms:.2f} times as fast as "
            f"{second.system.title}, the next."
        )
        texts.append(
            "How sure: what frameworks take themselves (overhead) is declared from published figures and differs "
            "between their versions; docs/systems.md has predictions beside measurements."
        )
    return texts


def _table(predictions: list[Prediction]) -> Table:
    shown = table("system", "TPOT ms", "overhead", "p99 ms", "idle ms", "hits", "MB a token")
    for each in predictions:
        if each.tpot_mean_ms is not None:
            times = [
                f"{ms or 0.0:,.1f}" for ms in (each.tpot_mean_ms, each.overhead_ms, each.tpot_p99_ms, each.idle_ms)
            ]
            figures = [*times, f"{each.hit_rate:.1%}", f"{each.mb_per_token:,.0f}"]
            shown.add_row(policy_title(each.system.name, each.oracle), *figures)
    return shown


def _json(setting: Setting, predictions: list[Prediction]) -> dict[str, Any]:
    model = setting.model()
    return {
        "trace": setting.loaded.trace.name,
        "model": model.name,
        "hardware": setting.loaded.hardware.name,
        "cache_experts": setting.slots(),
        "cache_bytes": setting.slots() * model.expert_bytes,
        "notes": _notes(setting),
        "systems": [{**asdict(each), "system": each.system.name, "title": each.system.title} for each in predictions],
    }
