"""The command `moe-sim plan`: what a model would do on a machine, and what would help."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.table import Table

from sim.backtest.errors import CONFIDENCE
from sim.commands import options
from sim.commands.printed import table
from sim.planner import plan as planner
from sim.planner.plan import CachePlan, Plan, Speed
from sim.planner.resources import show_gib
from sim.quantities import show_bytes
from traces.errors import InputError


@dataclass(frozen=True)
class PlanOptions:
    """The machine, and how the model is run on it: the keywords of `sim.plan`."""

    gpu_memory: Annotated[
        str | None,
        typer.Option(help="GPU memory (12GB, the same as 12GiB; of two: '24GB, 12GB'), 0 for none. Default: none."),
    ] = None
    host_memory: Annotated[str | None, typer.Option(help="Host memory (32GB, the same as 32GiB). Default: none.")] = (
        None
    )
    link: Annotated[
        str | None, typer.Option(help="Link to the GPU (pcie4x8) or its bandwidth (12GB/s). Default: the GPU's.")
    ] = None
    disk: Annotated[
        str | None, typer.Option(help="Disk bandwidth (3GB/s), for what memory does not hold. Default: no disk.")
    ] = None
    cpu_bandwidth: Annotated[
        str | None,
        typer.Option(
            help="Host memory bandwidth: of the data sheet (50GB/s), or as STREAM measures it ('40GB/s measured'). "
            "Default: a desktop's of the link's time."
        ),
    ] = None
    context: Annotated[int, typer.Option(min=1, max=1 << 32, help="Tokens in the KV cache.")] = planner.CONTEXT
    prompt: Annotated[int, typer.Option(min=1, max=1 << 32, help="Tokens of a prompt.")] = planner.PROMPT
    precision: Annotated[
        str | None,
        typer.Option(
            help="Precision of the weights (q4_k_m, q8_0, fp8). Default: as published, or the best of at least 4 bits "
            "that fits without a disk."
        ),
    ] = None
    gpu: Annotated[
        str | None,
        typer.Option(
            help="GPU ('RTX 3090'; '2 x RTX 3090'): its memory, bandwidth and link. Default: one of that size."
        ),
    ] = None
    gpu_bandwidth: Annotated[
        str | None, typer.Option(help="GPU memory bandwidth of the data sheet (936GB/s). Default: of --gpu.")
    ] = None
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of the CPU. Default: 24, of a server 48.")] = None
    unified: Annotated[
        bool, typer.Option("--unified", help="CPU and GPU share --host-memory. Default: of Apple's GPUs.")
    ] = False


def plan(
    model: Annotated[
        str, typer.Option(help="Model (moe-sim models lists them), profile file, or transformers config or its folder.")
    ] = "",
    *,
    machine: PlanOptions,
    output: options.OutputOptions,
) -> None:
    """Predict what a model would do on a machine: tokens per second, where to put what, and what would help.

    The expected speed is that of llama.cpp with the printed flags, reads through mmap included; the speed with its
    expert cache stands next to it. Times come from data sheets, as in moe-sim backtest; the interval comes from its
    errors. How often experts are used again is taken from a trace of another model. docs/planner.md shows the accuracy.

    [b]moe-sim plan --model qwen3-30b-a3b --precision q4_k_m --gpu-memory 12GiB --host-memory 32GiB --link pcie4x8[/b]
    """
    if not model:
        raise InputError("which model? Give --model qwen3-30b-a3b (moe-sim models lists them) or a transformers config")
    result = planner.plan(model, **vars(machine))
    output.show(result.facts, lambda: _shown(result))


def _shown(plan: Plan) -> Iterator[str | Table]:
    yield f"{plan.model} at {plan.precision}, {plan.context:,} tokens of context, on {plan.machine}"
    lines = {
        "expect": f"{_speed(plan.speed)} tokens/s",
        "prompt": f"{plan.prompt_tokens_per_s:,.0f} tokens/s, {plan.prompt / plan.prompt_tokens_per_s:,.1f} s for "
        f"{plan.prompt:,} tokens (an estimate without an interval)",
        "placement": plan.placement,
        "on the GPU": f"{plan.cache_experts:,} of {plan.all_experts:,} experts ({show_bytes(plan.cache_bytes)})",
        "kept free": _margins(plan),
        "policy": plan.policy,
        "wall": f"{plan.wall} (share of a token's time that a tier of no time would save: {_shares(plan)})",
        "limit": f"{plan.limit_tokens_per_s:,.1f} tokens/s by the bytes and bandwidths alone, of which "
        f"{plan.speed.tokens_per_s / plan.limit_tokens_per_s:.0%} are reached",
    }
    if plan.past_cache:
        lines["no mmap"] = (
            f"{_speed(plan.past_cache)} tokens/s past the page cache, as moe-replay generate reads experts"
        )
    if plan.cache and plan.best_cache:
        lines["its cache"] = f"{_cache(plan.cache, plan)}; {plan.cache.llama_cpp} (llama.cpp b11480 or later)"
        reads = ", reads past the page cache" if plan.past_cache else ""
        lines["best cache"] = f"{_cache(plan.best_cache, plan)}{reads}; no program offers it yet"
    lines["precision"] = _precision(plan)
    lines["llama.cpp"] = plan.llama_cpp[0]
    if len(plan.llama_cpp) > 1:
        lines["or"] = plan.llama_cpp[1]
    if plan.llama_cpp_fit:
        lines["or fit"] = f"{plan.llama_cpp_fit}: it measures what fits; -ngl, --n-cpu-moe and -ot switch that off"
    lines["vLLM"] = plan.vllm[0] if plan.vllm else "not on this machine: it needs the GPU, and the rest in host memory"
    yield "\n".join(f"  {name:<10} {text}" for name, text in lines.items())
    yield _upgrades(plan)
    if plan.precisions:
        yield _precisions(plan)
    each = plan.interval
    yield (
        f"The interval holds {CONFIDENCE:.0%} of machines of which as much is known ({each.kind}; {each.machines} in "
        f"moe-sim backtest). It would be narrower with {each.narrower}."
    )
    yield from (f"Assumed: {note}." for note in plan.notes)


def _shares(plan: Plan) -> str:
    others = [f"{tier} {share:.0%}" for tier, share in plan.shares.items() if tier != plan.wall and share >= 0.005]
    return f"{plan.shares[plan.wall]:.0%}" + (f"; {', '.join(others)}" if others else "")


def _margins(plan: Plan) -> str:
    gpu, host = plan.gpu_margin_bytes, plan.host_margin_bytes
    margins = [f"{show_gib(gpu)} of GPU memory, for the runtime and 0.5 GiB of a desktop"] if gpu else []
    return "; ".join([*margins, *([f"{show_gib(host)} of host memory, for the system"] if host else [])])


def _speed(speed: Speed) -> str:
    return f"{speed.tokens_per_s:,.1f} ({speed.low:,.1f} to {speed.high:,.1f})"


def _cache(cache: CachePlan, plan: Plan) -> str:
    times = cache.speed.tokens_per_s / plan.speed.tokens_per_s
    verdict = f"{times:.2f} times as fast" if times >= 1.02 else "it does not help"
    return (
        f"{_speed(cache.speed)} tokens/s with {cache.policy} over {cache.experts:,} experts, misses {cache.placement}: "
        f"{verdict}; hit rate {cache.hit_rate:.0%} under LRU, routing like {cache.routing or 'even'}; "
        f"{cache.speed.tokens_per_s / plan.limit_tokens_per_s:.0%} of the limit"
    )


def _precision(plan: Plan) -> str:
    best = plan.better_precision
    if best is None:
        return "no lower one of at least 4 bits that fits would be faster"
    return (
        f"{best.name} ({show_bytes(best.total_bytes)}, fits {best.fits}) would be {best.times:.1f} times as fast: "
        f"{best.tokens_per_s:,.1f} tokens/s"
    )


def _upgrades(plan: Plan) -> Table:
    shown = table("one unit more", "", "tokens/s", "gain", "with a cache", gap=1)
    for each in plan.upgrades:
        with_cache = "-" if each.with_cache is None else f"{each.with_cache:,.1f}"
        shown.add_row(each.resource, each.unit, f"{each.tokens_per_s:,.1f}", f"{each.gain:+.1%}", with_cache)
    return shown


def _precisions(plan: Plan) -> Table:
    shown = table("precision", "model and KV cache", "fits", "tokens/s", "quality", gap=1)
    for each in plan.precisions:
        quality = "below 4 bits" if each.loses_quality else ""
        shown.add_row(each.name, show_bytes(each.total_bytes), each.fits, f"{each.tokens_per_s:,.1f}", quality)
    return shown
