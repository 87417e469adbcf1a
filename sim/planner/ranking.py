"""Which of the models that people run now a machine runs, at which precision, how fast, and limited by what."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sim.planner import placements
from sim.planner.placements import DISK
from sim.planner.plan import Speed, TooSmallError, chosen_or_smaller, expected, saved
from sim.prediction.described import Machine

CURRENT = (
    "lfm2-8b-a1b",
    "gpt-oss-20b",
    "ernie-4.5-21b-a3b",
    "gemma-4-26b-a4b",
    "qwen3-30b-a3b",
    "glm-4.7-flash",
    "nemotron-3-nano-30b-a3b",
    "qwen3.6-35b-a3b",
    "qwen3-next-80b-a3b",
    "glm-4.5-air",
    "gpt-oss-120b",
    "qwen3.5-122b-a10b",
    "minimax-m2",
    "qwen3-235b-a22b",
    "deepseek-v4-flash",
    "deepseek-v3.2",
    "glm-5.2",
    "kimi-k2.5",
)
"""By size."""


@dataclass(frozen=True)
class Ranked:
    """A model on a machine; without a speed it does not run, and `lack` says why."""

    model: str
    precision: str = ""
    total_bytes: int = 0
    speed: Speed | None = None
    limit: str = ""  # the part of the machine that takes most of a token's time
    from_disk: bool = False
    not_understood: tuple[str, ...] = ()
    lack: str = ""
    below_4_bits: bool = False
    cached: float = 0.0  # tokens a second with llama.cpp's expert cache, where that is faster


def ranked(
    machine: Machine, context: int, models: Sequence[str] = CURRENT, precision: str | None = None
) -> Iterator[Ranked]:
    """Yield each model. Raise InputError for an unknown one."""
    for name in models:
        try:
            layout, _ = chosen_or_smaller(name, machine, context, precision)
        except TooSmallError as error:
            yield Ranked(name, lack=str(error))
            continue
        placement = placements.today(layout)
        (speed, _), cache, shares = expected(placement), placements.cached(layout), saved(placement, layout.hardware)
        cached = 1 / cache.seconds() if cache else 0.0
        yield Ranked(
            layout.profile.name,
            layout.precision,
            int(layout.total_bytes),
            speed,
            max(shares, key=lambda tier: shares[tier]),
            placement.kind == DISK,
            layout.profile.notes,
            below_4_bits=layout.loses_quality,
            cached=cached if cached > speed.tokens_per_s else 0.0,
        )
