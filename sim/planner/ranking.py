"""Which of the models that people run now a machine runs, at which precision, how fast, and limited by what."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sim.planner import placements
from sim.planner.placements import DISK
from sim.planner.plan import Speed, TooSmallError, chosen_or_smaller, expected, saved
from sim.prediction.described import Machine
from traces.files import read_toml

CURRENT: list[str] = read_toml(Path(__file__).parent / "current.toml")["models"]


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
