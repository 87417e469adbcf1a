"""The command `moe-sim train-stride`: the learned predictor that the prefetcher `stride` reads."""

from fractions import Fraction
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from policies.prefetch.stride_training import Tokens, Training, recall, recall_of_previous, train
from sim.commands.options import Overwrite, Quiet
from sim.commands.printed import progress
from traces.commands import console
from traces.errors import InputError
from traces.output import check_file, replacing
from traces.trace import Trace


def train_stride(
    trace: Annotated[str, typer.Argument(help="Folder or URL of a trace.")],
    out: Annotated[Path, typer.Option(help="File for the predictor.")],
    stride: Annotated[int, typer.Option(help="Layers ahead that are predicted.")] = 1,
    back: Annotated[int, typer.Option(help="Latest layers that a prediction reads, as many as there are.")] = 8,
    epochs: Annotated[int, typer.Option(help="Passes over the tokens.")] = 3,
    held_out: Annotated[float, typer.Option(help="Share of the requests, the last ones, to test on.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Of the order of tokens.")] = 0,
    as_decode: Annotated[bool, typer.Option("--as-decode", help="Learn from prompts as if decoded.")] = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Train a predictor of the experts of later layers on the decoded tokens of a trace.

    Reports how many choices of the held-out requests are among the likeliest, next to the baseline "same as the last
    token".

    [b]moe-sim train-stride my-trace --out stride.npz[/b]

    [b]moe-sim sweep other-trace --policies lru+stride:model=stride.npz[/b]
    """
    training = Training(stride, back, epochs, seed)
    if not 0 <= held_out < 1:
        raise InputError(f"--held-out {held_out}: a share of the requests, 0 or more and below 1")
    check_file(out, overwrite)
    known = Trace.read(trace)
    known.require_sequences()
    if as_decode:
        known = known.as_decode()
    tested = int(Fraction(str(held_out)) * len(known.requests))  # the float 0.29 times 100 is below 29
    tokens = Tokens.of(known.head(len(known.requests) - tested))
    with replacing(out, overwrite=overwrite) as part:
        with progress(tokens.layers, quiet, "layers trained") as advance:
            predictor = train(tokens, training, lambda: advance(1))
        predictor.save(part)
    if quiet:
        return
    unseen = Tokens.of(known.select(np.arange(len(known.requests) - tested, len(known.requests))))
    if len(unseen):
        console.say(
            f"of the choices of the last {tested} requests, {recall(predictor, unseen):.1%} are among the "
            f"{known.top_k} likeliest; the token before had {recall_of_previous(unseen):.1%}",
        )
    elif tested:
        console.say(f"no accuracy: the last {tested} requests, which were held out, have no decoded tokens")
    else:
        console.say(f"no accuracy: --held-out {held_out:g} of {len(known.requests)} requests is less than one")
    console.say(f"wrote {out}: --policies lru+stride:model={out}")
