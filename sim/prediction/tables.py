"""Tables of the back-test: general factors (data/factors.toml), reuse, errors."""

from functools import cache
from pathlib import Path

from sim.catalogue.parts import Entries, entries

DATA = Path(__file__).parent / "data"


@cache
def table(name: str) -> Entries:
    return entries(DATA / f"{name}.toml")


FACTORS = table("factors")
