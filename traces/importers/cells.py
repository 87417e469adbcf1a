"""Cells of tables, lists and JSON as numbers: the one place that decides what an id, a count or a weight is.

A cell is judged by its text, since pandas and numpy take True for 1, cut fractions and read NA as nothing. The first
one that is invalid ends the import, by its place.
"""

import re
import reprlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from traces.errors import InputError

T = TypeVar("T")
Place = Callable[[int], str]
"""Returns the text of where a cell stands, by its number."""

UINT32, INT32 = 2**32 - 1, 2**31 - 1
FLOAT16 = 65_504.0
REAL = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", re.ASCII)
WHOLE = re.compile(r"\s*([+-]?\d{1,18})(\.0*)?\s*", re.ASCII)
CUT = re.compile(r"\s*[,;|]\s*|\s+")
BRACKETS = "[](){} \n"


def parsed(cells: "pd.Series[Any]", place: Place, parse: Callable[[str], T | None], why: str) -> NDArray[Any]:
    """Return what `parse` makes of the text of each cell. Raises InputError for the first of which it makes None."""
    number, texts = _texts(cells)
    values = [parse(text) for text in texts]
    if None in values:
        first = int(np.argmax(number == values.index(None)))
        cell = repr(texts[number[first]]) if texts[number[first]] else "an empty cell"
        raise InputError(f"{place(first)}: {cell} is {why}")
    return np.array(values)[number] if values else np.zeros(0, np.int64)


def numbers(
    cells: "pd.Series[Any]", place: Place, least: float = 0, most: float = UINT32, real: bool = False, hint: str = ""
) -> NDArray[Any]:
    """Return cells as int64, or float64 if `real`. Raises InputError, with `hint`, for the first invalid one."""

    def number(text: str) -> float | None:
        match = (REAL if real else WHOLE).fullmatch(text)
        value = None if match is None else float(text) if real else int(match[1])
        return value if value is not None and least <= value <= most else None

    why = f"no {'' if real else 'whole '}number from {least:.0f} to {most:.0f}{hint}"
    return parsed(cells, place, number, why).astype(np.float64 if real else np.int64)


def whole(values: Any, place: str, ndim: int, least: float = 0, most: float = INT32) -> NDArray[np.int64]:
    """Return nested lists of whole numbers, or one (ndim 0), as an array. Raises InputError for the first invalid."""
    array = np.array(values, object)
    if array.ndim != ndim:
        raise InputError(f"{place} is {reprlib.repr(values)}; lists of whole numbers, {ndim} deep, are needed")

    def at(number: int) -> str:
        return place + "".join(f"[{axis}]" for axis in np.unravel_index(number, array.shape))

    return numbers(pd.Series(array.ravel()), at, least, most).reshape(array.shape)


def lists(
    cells: "pd.Series[Any]", place: Place, fill: float, least: float = 0, most: float = UINT32, real: bool = False
) -> NDArray[Any]:
    """Return cells that are numbers, lists of them, or texts of lists such as `1;5` or `[1, 5]`, as an array [n, k]."""
    if fits(cells):
        return numbers(cells, place, least, most, real)[:, None]
    rows = cells.tolist()
    texts = 2 * sum(isinstance(row, str) for row in rows) >= len(rows)
    kind = str if texts else list | tuple | np.ndarray
    parts = [_parts(row) if isinstance(row, kind) else [f"{row!r} beside lists"] for row in rows]
    lengths = np.array([len(part) for part in parts], np.int64)
    row = np.repeat(np.arange(len(rows)), lengths)
    flat = pd.Series([one for part in parts for one in part], dtype=object)
    filled = np.full((len(rows), max(1, lengths.max(initial=0))), fill, np.float64 if real else np.int64)
    slot = np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    filled[row, slot] = numbers(flat, lambda at: place(int(row[at])), least, most, real)
    return filled


def fits(cells: "pd.Series[Any]", accepts: Callable[[str], object] = REAL.fullmatch) -> bool:
    """Return whether at least half of the cells are such, by default numbers: any other is then invalid."""
    number, texts = _texts(cells)
    return len(cells) > 0 and bool(np.array([bool(accepts(text)) for text in texts])[number].mean() >= 0.5)


def labels(cells: "pd.Series[Any]") -> "pd.Series[bool]":
    """Return which cells are texts or numbers: no lists, and not empty."""
    return cells.notna() & cells.map(lambda cell: not isinstance(cell, list | dict | np.ndarray) and cell != "")


def _texts(cells: "pd.Series[Any]") -> tuple[NDArray[np.intp], list[str]]:
    """Return the different texts of cells, and which one each cell has; '' where nothing is."""
    if pd.api.types.infer_dtype(cells, skipna=False) not in ("string", "integer", "floating"):
        cells = cells.astype(object).where(cells.notna(), "").map(str)
    number, different = pd.factorize(cells, use_na_sentinel=False)
    return number, [str(one) for one in different]


def _parts(row: Any) -> Sequence[Any]:
    if not isinstance(row, str):
        return list(row)
    inner = row.strip(BRACKETS)
    if ("," in inner) + (";" in inner) + ("|" in inner) > 1:
        return [row]
    return CUT.split(inner) if inner or not row.strip() else []
