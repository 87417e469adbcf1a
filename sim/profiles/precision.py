"""How many bytes a parameter takes, by the name of a precision: one table, `precisions.toml`."""

import tomllib
from functools import cache
from pathlib import Path

from traces.errors import unknown


@cache
def _bits() -> dict[str, float]:
    return tomllib.loads((Path(__file__).parent / "precisions.toml").read_text("utf-8"))


def canonical(name: str) -> str:
    """Return the table's name of a precision such as `bf16` or `UD-Q4_K_M`; InputError with near names."""
    key = name.strip().lower().replace("-", "_").replace(" ", "_").removeprefix("ud_")
    if key not in _bits():
        raise unknown("precision", name, _bits())
    return key


def bytes_per_parameter(name: str) -> float:
    """Return the bytes of one parameter at a precision. Raise InputError as `canonical` does."""
    return _bits()[canonical(name)] / 8


def name_of(bytes_per_parameter: float) -> str:
    """Return the first precision with so many bytes a parameter, or how many bits that are."""
    bits = 8 * bytes_per_parameter
    return next((name for name, each in _bits().items() if each == bits), f"{bits:.3g} bits a weight")
