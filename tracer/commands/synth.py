"""`moe-trace synth`: make a synthetic trace that behaves as a real one, of any model's shape."""

from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from msgspec import Meta
from rich.table import Table

from terminal import console
from tracer.commands.inspect import LENGTH_ROWS, ROWS, cells
from tracer.commands.shared import RECORDED, Out, Overwrite, Quiet, report
from traces.errors import InputError
from traces.fit import fit, thinned
from traces.location import Location
from traces.models.profile import model as read_model
from traces.schema import TraceMeta
from traces.stats import statistics
from traces.trace import Trace
from traces.typed import Option, Positive
from traces.writer import check_target, write_trace

MOST_TOKENS = 10**9
MOST = 1 << 16


Size = Annotated[int, Meta(ge=1, le=MOST)]
Tokens = Annotated[int, Meta(ge=0, le=MOST_TOKENS)]


@dataclass(frozen=True)
class Wanted:
    """What is to differ from the trace that is fitted to."""

    layers: Annotated[Size | None, Option("MoE layers. Default: LIKE's.")] = None
    experts: Annotated[Size | None, Option("Experts of a layer. Default: LIKE's.")] = None
    top_k: Annotated[Size | None, Option("Experts of a token in a layer. Default: LIKE's.")] = None
    requests: Annotated[Positive | None, Option("Requests. Default: as many as LIKE has.")] = None
    prompt_tokens: Annotated[
        Tokens | None, Option("Prompt tokens of each request. Default: drawn from LIKE's requests.")
    ] = None
    decode_tokens: Annotated[
        Tokens | None, Option("Decoded tokens of each request. Default: drawn from LIKE's requests.")
    ] = None


def synth(
    like: Annotated[Path, typer.Option(help="The trace to fit to: a folder with requests.parquet and routing/.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="Model whose shape the trace gets: a name of `moe-sim models`, or FILE.toml. Default: LIKE's."
        ),
    ] = None,
    *,
    wanted: Wanted,
    seed: Annotated[int, typer.Option(min=0, help="Seed; the same seed gives the same trace.")] = 0,
    out: Out = None,
    overwrite: Overwrite = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the statistics as JSON.")] = False,
    quiet: Quiet = False,
) -> None:
    """Make a synthetic trace, fitted to a real one, for a model of which there is no trace.

    Prints the statistics of both side by side: sparsity, reuse, popularity, working sets and similarity of requests.

    Example: moe-trace synth --like traces/recorded/demo --model mixtral-8x7b --out traces/recorded/mixtral-synth
    """
    given = (wanted.layers, wanted.experts, wanted.top_k)
    if model is not None and any(size is not None for size in given):
        raise InputError("--model names the shape of the model: leave --layers, --experts and --top-k out")
    named = read_model(model) if model is not None else None
    if named and named.encoder_layers:
        raise InputError(f"{model} is an encoder-decoder, of which no synthetic trace can be made")
    whole = Trace.read(like)
    real = thinned(whole)
    own = real.layers, real.num_experts, real.top_k
    shape = (
        (named.moe_layers, named.experts, named.top_k)
        if named
        else tuple(a if a is not None else b for a, b in zip(given, own, strict=True))
    )
    settings: dict[str, Any] = {
        "like": real.name,
        "like_model": real.meta.model,
        "requests": wanted.requests or len(whole.requests),
        "seed": seed,
        "prompt_tokens": wanted.prompt_tokens,
        "decode_tokens": wanted.decode_tokens,
    }
    meta = real.meta
    if named or shape != own:
        name = next(iter(named.hub_ids), named.name) if named else "synthetic"
        names = tuple(f"layers.{layer}" for layer in range(shape[0]))
        meta = TraceMeta(model=name, layers=shape[0], experts=shape[1], top_k=shape[2], layer_names=names)
    tools = {"moe-expert-cache": version("moe-expert-cache")}
    meta = replace(meta, mode="synthetic", settings=settings, tools=tools)
    target = out or RECORDED / f"{Path(model).stem if model else 'synthetic'}-like-{real.name}"
    check_target(target, overwrite, read=[Location.of(like)])
    if not quiet and len(real.requests) < len(whole.requests):
        console.note(
            f"fitting to {len(real.requests):,} of the {len(whole.requests):,} requests of {real.name}, "
            "of which the statistics called real are"
        )
    fitted = fit(real)
    lengths = fitted.lengths.of_length(wanted.prompt_tokens, wanted.decode_tokens)
    if not len(lengths.cluster):
        raise InputError("no token is left: raise --prompt-tokens or --decode-tokens")
    tokens = settings["requests"] * float((lengths.prefill_rows + lengths.decode_rows).mean())
    if tokens > MOST_TOKENS:
        raise InputError(
            f"a trace of {tokens:.3g} tokens is not made, as it is made in memory: lower --requests, --prompt-tokens "
            f"or --decode-tokens to {MOST_TOKENS:.0e} together"
        )
    made = replace(fitted, lengths=lengths).scaled(*shape).generate(meta, settings["requests"], seed)
    write_trace(made, target, overwrite)
    clusters = [f"cluster-{number}" for number in fitted.lengths.cluster]  # as tasks, as the synthetic trace has them
    real = replace(real, requests=real.requests.assign(task=clusters))
    statistics = {"real": _statistics(real), "synthetic": _statistics(made)}
    if as_json:
        console.say_json({"out": str(target), **statistics})
        return
    _print(statistics)
    report(target, quiet)


def _statistics(trace: Trace) -> dict[str, Any]:
    prefill = trace.prompts
    lengths = {"prefill": prefill, "decode": np.diff(trace.offsets) - prefill}
    quantiles = {"p10": 0.1, "median": 0.5, "p90": 0.9}
    return {
        phase: {
            **asdict(facts),
            "length": {name: float(np.quantile(lengths[phase], q)) for name, q in quantiles.items()},
        }
        for phase, facts in statistics(trace).items()
    }


def _print(statistics: dict[str, Any]) -> None:
    for phase in ("prefill", "decode"):
        columns = {name: facts[phase] for name, facts in statistics.items() if phase in facts}
        if columns:
            table = Table(phase, *columns, box=None, pad_edge=False)
            for row in (*LENGTH_ROWS, *ROWS):
                table.add_row(row[0], *cells(row, list(columns.values())))
            console.say(table)
