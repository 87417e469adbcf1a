"""Quantities as people type and read them, one parser for each kind: cache sizes, bytes.

A cache is a share of all experts (`25%`), a number of experts (`64`), slots a layer (`12/layer`: as many for all
layers together, which a scope of layers divides) or bytes (`8GiB`). A share rounds to the nearest whole expert, halves
up, at least 1; bytes hold as many whole experts as fit. More than all experts is all.
"""

import math
import re
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from traces.errors import InputError

CacheSize = str | int | float

UNITS = {"": 1} | {
    f"{prefix}{end}": base**power for power, prefix in enumerate("kmgt", 1) for end, base in (("", 1_000), ("i", 1_024))
}

SLOWEST_GB_PER_S = 0.001
"""Of a link, a disk or memory: slower values are taken as typos."""

_NUMBER = r"(\d{1,19}(?:\.\d{1,19})?)"  # of more digits nothing here is, and Python reads no number of thousands
_BYTES = re.compile(_NUMBER + r"\s*((?:[kmgt]i?)?)b", re.IGNORECASE)
_SHARE = re.compile(_NUMBER + r"\s*%")
_OF_A_LAYER = re.compile(r"(\d{1,9})\s*/\s*layer")


def cache_text(size: CacheSize) -> str:
    return f"{100 * size:.10g}%" if isinstance(size, float) else str(size)


def parse_whole(text: str) -> int | None:
    """Return the whole number from 0 to below 2**63 that `text` is; None for anything else."""
    number = int(text) if re.fullmatch(r"\d{1,19}", text) else None
    return number if number is not None and number < 1 << 63 else None


def parse_bytes(text: str, what: str) -> int:
    """Return the bytes of `8GiB`, `500MB`, `64kB` or `4096B`, rounded down. Raise InputError naming `what`."""
    match = _BYTES.fullmatch(text.strip())
    size = math.floor(Fraction(match[1]) * UNITS[match[2].lower()]) if match else -1
    if not 0 <= size < 1 << 63:
        raise InputError(f"{what} {text!r} is not a number of bytes: use 8GiB, 500MB or 4096B")
    return size


def parse_gb_per_s(text: str, what: str) -> float:
    """Return `25GB/s`, `3500MB/s` or `2.4GiB/s` in GB/s. Raise InputError naming `what`, also below 1MB/s."""
    size, slash, unit = text.strip().partition("/")
    stated = slash and unit.strip().lower() in ("s", "sec") and _BYTES.fullmatch(size.strip())
    rate = parse_bytes(size, what) / 1e9 if stated else 0.0
    if rate < SLOWEST_GB_PER_S:
        raise InputError(f"{what} {text!r} is no bandwidth of at least 1MB/s: write it as 25GB/s or 3500MB/s")
    return rate


def parse_cache_size(text: str, total: int, expert_bytes: int | None, layers: int) -> int:
    """Return the slots of a cache size, at most `total` experts of all layers. Raise InputError unless it holds one.

    `expert_bytes` may be None where nothing states it; then a size in bytes is refused too.
    """
    text = text.strip()
    if share := _SHARE.fullmatch(text):
        percent = Fraction(share[1])
        if not 0 < percent <= 100:
            raise InputError(f"a cache of {text} is impossible: a share is above 0% and at most 100% of all experts")
        return max(1, math.floor(percent * total / 100 + Fraction(1, 2)))
    slots = _stated_slots(text, layers)
    if (size := stated_bytes(text)) is not None:
        if not expert_bytes:
            raise InputError(f"cache size {text}: nothing states how large an expert is; give a share or a number")
        slots = size // expert_bytes
    elif slots is None:
        raise InputError(f"invalid cache size {text!r}: use 25%, 64, 12/layer or 8GiB")
    if not slots:
        raise InputError(f"a cache of {text} is impossible: it holds no expert; use 1 to {total}, 25% or 8GiB")
    return min(slots, total)


def _stated_slots(text: str, layers: int) -> int | None:
    """Return the slots of a cache size that is given as a number, or as one for each layer; None for others."""
    each = _OF_A_LAYER.fullmatch(text)
    return int(each[1]) * layers if each else parse_whole(text)


def stated_bytes(text: str) -> int | None:
    return parse_bytes(text, "cache size") if _BYTES.fullmatch(text.strip()) else None


def exceeds(text: str, total: int, all_bytes: int | None, layers: int) -> bool:
    """Return whether a valid cache size is more than all `total` experts, which have so many bytes."""
    text = text.strip()
    if (slots := _stated_slots(text, layers)) is not None:
        return slots > total
    return all_bytes is not None and (stated_bytes(text) or 0) > all_bytes


def parse_cache_bytes(text: str, sizes: NDArray[np.int64], layers: int) -> int:
    """Return the bytes of a cache size, for a model whose experts have these sizes (rule 19).

    A number is of experts of mean size. At most all experts. Raise InputError unless it holds the largest.
    """
    text, whole, largest = text.strip(), int(sizes.sum()), int(sizes.max())
    if (size := stated_bytes(text)) is None:
        slots = len(sizes) if text == "100%" else parse_cache_size(text, len(sizes), None, layers)
        share = _SHARE.fullmatch(text)
        size = round(Fraction(share[1]) * whole / 100) if share else round(Fraction(slots * whole, len(sizes)))
    if size < largest:
        raise InputError(
            f"a cache of {text} is impossible: it has {show_bytes(size)}, the largest expert {show_bytes(largest)}, "
            f"all experts together {show_bytes(whole)}"
        )
    return min(size, whole)


def show_bytes(size: float) -> str:
    """Return bytes in decimal units with three digits: `17.3 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1_000
    return f"{size:.0f} TB"


def show_mib(size: float) -> str:
    """Return bytes in MiB, whole from 100 on: `1,024`, `17.3`."""
    return show_three(size / 2**20)


def show_three(value: float) -> str:
    """Return at least three digits: `1.5`, `480`, `1,580`."""
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.3g}"


def show_memory(size: float) -> str:
    """Return bytes of memory in binary units with three digits: `480 MiB`, `2.4 GiB`."""
    return f"{size / 2**30:.3g} GiB" if size >= 2**30 else f"{size / 2**20:.3g} MiB"


def show_ms(value: float) -> str:
    """Return milliseconds with three digits: `1.79`, `27.5`, `1,204`."""
    decimals = 0 if value >= 99.95 else 1 if value >= 9.995 else 2 if value >= 1 else None
    return f"{value:.3g}" if decimals is None else f"{value:,.{decimals}f}"


def show_share(value: float | None) -> str:
    """Return a percentage with one digit behind the point: `17.3%`; `-` for None."""
    return "-" if value is None else f"{value:.1%}"


def show_gap(share: float | None) -> str:
    """Return a share of the gap from LRU to Belady: `76%`, or on which side of it a policy is."""
    if share is None:
        return "-"
    return "<0" if share < 0 else ">100%" if share > 1 else f"{share:.0%}"
