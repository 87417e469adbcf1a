"""The command `moe-sim plan`: which models this machine runs, or what one does on a machine, and what would help."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from sim.commands import options
from sim.planner import plan as planner
from sim.planner.calibration import Calibration, bench_on_path, calibrate
from sim.planner.placements import DISK, Layout, today
from sim.planner.plan import AssumedFact, CachePlan, Plan, Speed
from sim.planner.ranking import CURRENT, Ranked, ranked
from sim.planner.resources import resources, show_gib
from sim.planner.verification import Checked, verify
from sim.prediction.errors import CONFIDENCE, NARROWER
from sim.probe import busy
from sim.probe.detection import Facts, detected, of_profile, with_stated
from sim.probe.detection import options as of_facts
from sim.quantities import show_bytes
from terminal.console import progress, table
from traces.errors import InputError, refuse
from traces.models.profile import is_gguf_file
from traces.typed import Option, Positive

DESCRIBED = ("gpu", "gpu_memory", "host_memory", "unified")
"""Options that describe a machine, so that nothing is taken from this one."""

SHORT = {"CPU and host memory": "CPU and RAM", "overheads of launches and hops": "overheads"}
"""Names of what limits, where they are long."""

SLOWS = 1.1
"""A context that makes a token so many times as slow is worth a second figure."""


@dataclass(frozen=True)
class MachineOptions:
    """The machine: the keywords of `sim.plan`."""

    gpu_memory: Annotated[
        str | None, Option("GPU memory (12GB, the same as 12GiB; of two: '24GB, 12GB'), 0 for none. Default: none.")
    ] = None
    host_memory: Annotated[
        str | None, Option("Host memory (32GB, the same as 32GiB; '64GB DDR5-5600'). Default: none.")
    ] = None
    link: Annotated[str | None, Option("Link to the GPU (pcie4x8) or its bandwidth (12GB/s). Default: the GPU's.")] = (
        None
    )
    disk: Annotated[
        str | None, Option("Disk bandwidth (3GB/s, or nvme), for what memory does not hold. Default: no disk.")
    ] = None
    cpu_bandwidth: Annotated[
        str | None,
        Option(
            "Host memory bandwidth: of the data sheet (50GB/s), or as STREAM measures it ('40GB/s measured'). "
            "Default: a desktop's of the link's time."
        ),
    ] = None
    gpu: Annotated[
        str | None,
        Option("GPU ('RTX 3090'; '2 x RTX 3090'): its memory, bandwidth and link. Default: one of that size."),
    ] = None
    gpu_bandwidth: Annotated[
        str | None, Option("GPU memory bandwidth of the data sheet (936GB/s). Default: of --gpu.")
    ] = None
    threads: Annotated[Positive | None, Option("Threads of the CPU. Default: 24, of a server 56.")] = None
    cpu: Annotated[
        str | None, Option("CPU ('Ryzen 7 7800X3D'), for what each of --threads does. Default: a usual one.")
    ] = None
    unified: Annotated[bool, Option("CPU and GPU share --host-memory. Default: of Apple's GPUs.")] = False

    def stated(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value not in (None, False)}


@dataclass(frozen=True)
class HereOptions:
    """What is taken from this machine, and what is run on it."""

    detect: Annotated[
        bool, Option("Detect what no option states. Default: if no option describes a GPU or memory.")
    ] = False
    hardware: Annotated[str | None, Option("Machine whose profile moe-sim probe has written. Default: this one.")] = (
        None
    )
    calibrate: Annotated[bool, Option("Time cuts of the model's shape in llama.cpp first: about a minute.")] = False
    verify: Annotated[Path | None, Option("GGUF file: run the plan's flags and two neighbours in llama.cpp.")] = None
    even_if_busy: Annotated[bool, Option("Calibrate and verify also while others use the machine.")] = False


def plan(
    model: Annotated[
        str,
        typer.Option(
            help="Model (moe-sim models lists them), GGUF file, profile file, or transformers config or its folder. "
            "Several (a,b): a table. Default: a table of current models."
        ),
    ] = "",
    context: Annotated[int, typer.Option(min=1, max=1 << 32, help="Tokens in the KV cache.")] = planner.CONTEXT,
    prompt: Annotated[int, typer.Option(min=1, max=1 << 32, help="Tokens of a prompt.")] = planner.PROMPT,
    precision: Annotated[
        str | None,
        typer.Option(
            help="Precision of the weights (q4_k_m, q8_0, fp8). Default: the fastest of 4 bits and more, the published "
            "one among them."
        ),
    ] = None,
    details: Annotated[bool, typer.Option("--details", help="Print all of a model's plan.")] = False,
    *,
    machine: MachineOptions,
    here: HereOptions,
    output: options.OutputOptions,
) -> None:
    """Plan for this machine, or for one that options describe: what runs, how fast, limited by what, with which flags.

    The expected speed is that of llama.cpp with the printed flags, reads through mmap included. Times come from data
    sheets and from what moe-sim probe measured, as in moe-sim backtest; the interval comes from its errors. How often
    experts are used again is taken from a trace of another model. docs/planner.md shows the accuracy.

    [b]moe-sim plan[/b]

    [b]moe-sim plan --model qwen3-30b-a3b --calibrate[/b]

    [b]moe-sim plan --model qwen3-30b-a3b --precision q4_k_m --gpu-memory 12GiB --host-memory 32GiB --link pcie4x8[/b]
    """
    model = model or (str(here.verify) if here.verify else "")
    names = list(filter(None, map(str.strip, model.split(","))))
    refuse(
        (here.calibrate and len(names) != 1, "--calibrate is of one model: name it (--model)"),
        (here.verify and model != str(here.verify), "--verify runs its file: leave --model out"),
    )
    facts = _facts(here, machine.stated())
    sources = {name: vars(fact) for name, fact in facts.items()}
    where = resources(**(of_facts(facts) if facts else machine.stated()))
    if len(names) != 1:
        found = list(ranked(where, context, names or CURRENT, precision))
        typed = _typed({**machine.stated(), **({"precision": precision} if precision else {})}, here.hardware)
        models = [{**vars(each), "speed": each.speed and vars(each.speed)} for each in found]
        output.show(lambda: {"machine": sources, "models": models}, lambda: _ranking(facts, found, context, typed))
        return
    layout, notes = planner.chosen_or_smaller(model, where, context, precision)
    calibration, checked = _measured(model, layout, here, output.quiet or output.as_json)
    result = planner.of_layout(layout, notes, prompt, calibration)
    output.show(
        lambda: {**result.facts(), "detected": sources, "verified": [_checked_facts(each) for each in checked]},
        lambda: _shown(result, model, facts, checked, details),
    )


def _facts(here: HereOptions, stated: dict[str, Any]) -> Facts:
    """Return the machine with where each fact is from; empty where options alone describe it."""
    if here.hardware:
        return with_stated(of_profile(here.hardware), stated)
    if stated.keys() & set(DESCRIBED) and not here.detect:
        refuse(
            (here.calibrate, "--calibrate measures this machine: leave --gpu, --gpu-memory and --host-memory out"),
            (
                here.verify,
                "--verify runs on this machine: leave --gpu, --gpu-memory and --host-memory out, or --detect",
            ),
        )
        return {}
    return with_stated(detected(Path.cwd(), quick="cpu_bandwidth" not in stated), stated)


def _measured(model: str, layout: Layout, here: HereOptions, quiet: bool) -> tuple[Calibration | None, list[Checked]]:
    if not (here.calibrate or here.verify):
        return None, []
    bench, flags = bench_on_path(), ["-t", str(layout.machine.host_threads)]
    if today(layout).kind == DISK:
        raise InputError(f"{layout.profile.name} does not fit memory: what is read from a disk is not calibrated")
    if not here.even_if_busy:
        busy.require_quiet(busy.load())
    with progress(1, quiet, "llama.cpp") as advance:
        say = partial(advance, 0)
        path = model if is_gguf_file(model) and not layout.model.precision else ""
        calibration = calibrate(layout, path, bench, flags, say) if here.calibrate else None
        checked = verify(layout, here.verify, bench, calibration, say) if here.verify else []
    return calibration, checked


# Printing


def _machine(facts: Facts) -> Table:
    shown = table("this machine", "", "from", left=3, gap=2)
    for name, fact in facts.items():
        value = "?" if fact.value is None else "yes" if fact.value is True else str(fact.value)
        shown.add_row(name.replace("_", " ").replace("gpu", "GPU").replace("cpu", "CPU"), value, fact.source)
    return shown


def _typed(stated: Mapping[str, Any], hardware: object) -> str:
    given = {"hardware": hardware, **stated} if hardware else stated
    words = ([f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])] for name, value in given.items())
    return "".join(f" {shlex.join(each)}" for each in words)


def _ranking(facts: Facts, found: list[Ranked], context: int, typed: str) -> Iterator[str | Table]:
    if facts:
        yield _machine(facts)
    shown = table("model", "at", "size", "tokens/s", "between", "cached", "limited by", left=2)
    shown.columns[-1].justify = "left"
    for each in found:
        if each.speed is None:
            shown.add_row(each.model, "", "", "-", "", "", "memory: too small")
            continue
        limit = SHORT.get(each.limit, each.limit)
        size, speed = show_bytes(each.total_bytes), _digits(each.speed.tokens_per_s)
        cached, where = _digits(each.cached) if each.cached else "-", f"{limit}*" if each.from_disk else limit
        shown.add_row(each.model, each.precision, size, speed, _between(each.speed), cached, where)
    yield shown
    yield from (f"{each.model}: sizes may be wrong: {note}." for each in found for note in each.not_understood)
    if any(each.from_disk for each in found):
        yield "* memory does not hold all of it: the rest is read from the disk."
    if below := sorted({each.precision for each in found if each.below_4_bits}):
        yield f"{', '.join(below)}: none of 4 bits or more fits; below, answers get noticeably worse."
    if any(each.cached for each in found):
        yield "cached: with llama.cpp's expert cache, which no measurement supports."
    yield f"At {context:,} tokens of context. Flags of one:"
    yield f"  moe-sim plan --model {found[0].model}{typed}"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}" if value < 10 else f"{value:.1f}"


def _shown(plan: Plan, model: str, facts: Facts, checked: list[Checked], details: bool) -> Iterator[str | Table]:
    speed, limit = plan.speed, SHORT.get(plan.wall, plan.wall)
    differs = plan.first_tokens_per_s > SLOWS * speed.tokens_per_s
    first = f", {_digits(plan.first_tokens_per_s)} with an empty one" if differs else ""
    behind = f" with a full context of {plan.context:,} tokens{first}" if differs else ""
    yield from (f"Sizes may be wrong: {note}." for note in plan.not_understood)
    yield (
        f"{plan.model} at {plan.precision}: about {_digits(speed.tokens_per_s)} tokens/s ({CONFIDENCE:.0%}: "
        f"{_between(speed)}){behind}, limited by {limit}; {_place(plan)}."
    )
    if plan.overruled:
        yield plan.overruled
    is_planned = is_gguf_file(model) and not plan.overruled
    file = shlex.quote(model) if is_planned else f"{plan.model}-{plan.precision.replace(' ', '-')}.gguf"
    yield f"\n  llama-server -m {file} {plan.llama_cpp[0]}\n"
    if checked:
        yield _verified(checked)
    if details:
        yield from _details(plan, facts)
        return
    yield from _faster(plan, file)
    yield from plan.advice
    if helps := [each for each in plan.upgrades if each.gain > SLOWS - 1]:
        yield "Faster with " + ", ".join(f"{each.resource} ({_digits(each.tokens_per_s)})" for each in helps) + "."
    if assumed := "; ".join(f"{each.what} ({each.option})" for each in plan.assumed if each.matters):
        yield f"Assumed: {assumed}."
    known = f"Not calibrated; narrower: --calibrate {'(a minute)' if facts else 'on the machine itself'}."
    if plan.calibration:
        known = "Calibrated with llama-bench."
    yield f"{known} All of it: --details."


def _faster(plan: Plan, file: str) -> Iterator[str]:
    cache, better, faster = plan.cache, plan.better_precision, plan.faster_precision
    if cache and cache.speed.tokens_per_s > SLOWS * plan.speed.tokens_per_s:
        yield (
            f"Worth a try: llama.cpp's expert cache (b11480 or later), {_digits(cache.speed.tokens_per_s)} tokens/s "
            f"({_between(cache.speed)}: no measurement supports it) by routing like "
            f"{cache.routing or 'none'}'s:\n\n  llama-server -m {file} {cache.llama_cpp}\n"
        )
    if fitting := plan.fitting_precision:
        yield (
            f"At {fitting.name}{', below 4 bits' * fitting.loses_quality}, memory holds all of it: "
            f"{_digits(fitting.tokens_per_s)} tokens/s (--precision {fitting.name})."
        )
    elif faster and faster.times > SLOWS:
        yield f"At {faster.name} it would be {faster.times:.1f} times as fast (--precision {faster.name})."
    elif better:
        cost = f"{_digits(better.tokens_per_s)} tokens/s, {better.times:.2g} times the speed"
        yield f"At {better.name}, the next better precision: {cost} (--precision {better.name})."


def _place(plan: Plan) -> str:
    if plan.disk_bytes:
        return f"{show_bytes(plan.disk_bytes)} of it are read from the disk"
    if not plan.cache_experts or plan.cache_experts == plan.all_experts:
        return "all of it on the GPU" if plan.cache_experts else "all of it in host memory"
    return f"{plan.cache_experts / plan.all_experts:.0%} of the experts on the GPU, the rest computed by the CPU"


def _verified(checked: list[Checked]) -> Table:
    shown = table("llama.cpp", "behind", "predicted", "measured", "error", gap=2)
    for each in checked:
        name = f"{each.flags}{' (the plan)' if each.variant.planned else ''}"
        measured = f"{each.measured:,.2f}" if each.measured else "does not run"
        error = f"{each.error:+.1%}" if each.measured else ""
        shown.add_row(name, f"{each.depth:,}", f"{each.predicted:,.2f}", measured, error)
    return shown


def _checked_facts(each: Checked) -> dict[str, Any]:
    facts = {key: getattr(each, key) for key in ("flags", "depth", "predicted", "measured", "failure")}
    return {**facts, "error": each.error if each.measured else None}


def _details(plan: Plan, facts: Facts) -> Iterator[str | Table]:
    if facts:
        yield _machine(facts)
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
    }
    if plan.past_cache:
        lines["no mmap"] = (
            f"{_speed(plan.past_cache)} tokens/s past the page cache, as moe-replay generate reads experts"
        )
    if plan.cache and plan.cache.speed.tokens_per_s > SLOWS * plan.speed.tokens_per_s:
        lines["its cache"] = f"{_cache(plan.cache, plan)}; {plan.cache.llama_cpp} (llama.cpp b11480 or later)"
    lines["llama.cpp"] = plan.llama_cpp[0]
    if len(plan.llama_cpp) > 1:
        lines["or"] = plan.llama_cpp[1]
    if plan.llama_cpp_fit:
        lines["or fit"] = f"{plan.llama_cpp_fit}: it measures what fits; -ngl, --n-cpu-moe and -ot switch that off"
    lines["vLLM"] = plan.vllm[0] if plan.vllm else "not on this machine: it needs the GPU, and the rest in host memory"
    yield "\n".join(f"  {name:<10} {text}" for name, text in lines.items())
    bought = ((each.resource, _digits(each.tokens_per_s), f"{each.gain:+.0%}") for each in plan.upgrades)
    yield table("with", "tokens/s", "gain", rows=bought, gap=1)
    if plan.precisions:
        yield _precisions(plan)
    each = plan.interval
    yield (
        f"The interval is to hold {CONFIDENCE:.0%} of machines of which as much is known ({each.kind}), and rests on "
        f"{each.machines} of moe-sim backtest. It would be narrower with {NARROWER[each.kind]}."
        if not plan.calibration
        else f"Calibrated with llama-bench: {plan.calibration['fixed_ms']:.3g} ms a token and "
        f"{plan.calibration['ms_per_layer']:.3g} ms a layer on the CPU, and "
        f"{plan.calibration['ms_per_layer_and_1000_tokens']:.3g} ms a layer for 1,000 tokens of context."
    )
    if plan.assumed:
        rows = ((each.what, each.option, _between(each), _between(each.without)) for each in plan.assumed)
        yield table("assumed", "stated by", "tokens/s over its range", "80% if it were stated", rows=rows, left=2)
    yield from (f"Taken: {note}." for note in plan.notes)


def _shares(plan: Plan) -> str:
    others = [f"{tier} {share:.0%}" for tier, share in plan.shares.items() if tier != plan.wall and share >= 0.005]
    return f"{plan.shares[plan.wall]:.0%}" + (f"; {', '.join(others)}" if others else "")


def _margins(plan: Plan) -> str:
    gpu, host = plan.gpu_margin_bytes, plan.host_margin_bytes
    margins = [f"{show_gib(gpu)} of GPU memory, for the runtime and 0.5 GiB of a desktop"] if gpu else []
    return "; ".join([*margins, *([f"{show_gib(host)} of host memory, for the system"] if host else [])])


def _between(speed: Speed | AssumedFact) -> str:
    return f"{_digits(speed.low)} to {_digits(speed.high)}"


def _speed(speed: Speed) -> str:
    return f"{_digits(speed.tokens_per_s)} ({_between(speed)})"


def _cache(cache: CachePlan, plan: Plan) -> str:
    times = cache.speed.tokens_per_s / plan.speed.tokens_per_s
    return (
        f"{_speed(cache.speed)} tokens/s with {cache.policy} over {cache.experts:,} experts, misses {cache.placement}: "
        f"{times:.2f} times as fast; hit rate {cache.hit_rate:.0%} under LRU, routing like {cache.routing or 'even'}"
    )


def _precisions(plan: Plan) -> Table:
    shown = table("precision", "model and KV cache", "fits", "tokens/s", "quality", gap=1)
    for each in plan.precisions:
        quality = "below 4 bits" if each.loses_quality else ""
        shown.add_row(each.name, show_bytes(each.total_bytes), each.fits, _digits(each.tokens_per_s), quality)
    return shown
