"""Class LRU, after llama.cpp's expert cache: the expert whose age / 2^class is greatest goes. Rebuilt, unverified.

The class is the whole part of log2(1 + count), the count of an expert's lookups, halved every `half_life` tokens; the
age is the number of events since its latest lookup or transfer. So what is used often may stay unused for longer.
An excerpt of the source (commit c4fb579) states decayed counts, the half-life of 128 tokens and age / 2^class. Chosen
here are how a class follows from a count, what an age counts, and that counts outlive an eviction. A token is a step,
of however many requests. Ties: the least recently used, then the lower id.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from policies.core.compiled import compiled
from policies.core.policy import KEEP_ROWS, Compiled, Event, Float, Int, Options, ScorePolicy, Shape, bounded
from policies.core.registry import retention
from policies.retention.least_stale import NOT_BEGUN, begin_request, begins

LATEST, COUNT, WEIGHT = 1, KEEP_ROWS, KEEP_ROWS + 1
"""Rows of `keep`: the event of the latest lookup or transfer, the decayed count, and 1 / 2^class."""


@dataclass(frozen=True)
class ClassOptions(Options, policy="class-lru"):
    """half_life: tokens after which a lookup counts half."""

    half_life: int = bounded(128, least=1, below=2**53)


class Passes(NamedTuple):
    """The pass that runs."""

    fade: float  # what is left of a count one token later
    steps: Int  # [batch_slots] each request's step in it


def begin(shape: Shape, options: ClassOptions) -> Passes:
    return Passes(0.5 ** (1 / options.half_life), np.full(shape.batch_slots, NOT_BEGUN))


@compiled
def weight_of(count: float) -> float:
    """Return 1 / 2^class."""
    weight = 1.0
    while count >= 1.0:
        count, weight = (count - 1) / 2, weight / 2
    return weight


@compiled
def observe(passes: Passes, keep: Float, event: Event) -> None:
    """Let the counts fade where a step begins, count the lookups, and score all experts by their age."""
    if begins(passes.steps, event):
        for expert in range(keep.shape[1]):
            keep[COUNT, expert] *= passes.fade
            keep[WEIGHT, expert] = weight_of(keep[COUNT, expert])
    for expert in event.experts:
        keep[COUNT, expert] += 1
        keep[WEIGHT, expert] = weight_of(keep[COUNT, expert])
        keep[LATEST, expert] = event.serial
    for expert in range(keep.shape[1]):
        keep[0, expert] = (keep[LATEST, expert] - event.serial) * keep[WEIGHT, expert]


@compiled
def on_insert(keep: Float, expert: int, serial: int, start: int) -> None:
    keep[0, expert], keep[LATEST, expert] = 0.0, serial


@retention("class-lru")
class ClassLRU(ScorePolicy):
    """LRU whose ages count less in classes of frequent use (llama.cpp's, rebuilt)."""

    Options = ClassOptions
    compiled = Compiled(begin, observe, begin_request=begin_request, on_insert=on_insert, more_rows=2)
