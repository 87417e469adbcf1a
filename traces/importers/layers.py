"""Which of a dump's layers are MoE layers. Servers that count dense layers too leave them empty or constant;
such a layer is never taken as routed, and never dropped unless the user names those that count.
"""

import json
import re
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from traces.errors import InputError

HINT = "if dense layers are counted, say which are MoE layers, such as --layer-map 1-{last} or --layer-map 1:"


def parse_layer_map(spec: str, layers: int) -> tuple[int, ...]:
    """The layers that `spec` names, of `layers`: "1-26", "3:", "0,2,4-8" or a JSON list; ascending.

    Raises InputError.
    """
    try:
        numbers = json.loads(spec) if spec.lstrip().startswith("[") else _ranges(spec, layers)
    except (ValueError, RecursionError):
        numbers = None
    if not isinstance(numbers, list) or not numbers or not all(type(number) is int for number in numbers):
        raise InputError(f"--layer-map {spec!r} is no list of layers, such as 1-26, 3: or 0,2,4-8")
    if wrong := [number for number in numbers if not 0 <= number < layers]:
        raise InputError(f"--layer-map {spec!r} names layer {wrong[0]}, but the dump has {layers} (0 to {layers - 1})")
    if any(b <= a for a, b in pairwise(numbers)):
        raise InputError(f"--layer-map {spec!r} must ascend, each layer once")
    return tuple(numbers)


def _ranges(spec: str, layers: int) -> list[int] | None:
    numbers: list[int] = []
    for part in spec.split(","):
        match = _PART.fullmatch(part.strip())
        if not match:
            return None
        first, sign, last = match["first"], match["sign"], match["last"]
        if (sign == "-" and not (first and last)) or (not sign and not first):
            return None
        low = int(first or 0)
        high = min(int(last), layers) if last else low if not sign else layers - 1
        numbers += range(low, high + 1)
    return numbers


_PART = re.compile(r"(?P<first>\d{0,6})(?P<sign>[-:]?)(?P<last>(?<=-)\d{1,6})?")
"""One layer, an inclusive range with "-", or "N:" for all from N on."""


def first_dense(experts: NDArray[np.integer]) -> tuple[int, str] | None:
    """The first layer that looks dense, and why. experts: [tokens, layers, k], -1: not routed."""
    rows, layers, k = experts.shape
    for layer in range(layers):
        first = int(experts[0, layer, 0])
        if first > 0 and k == 1:
            continue
        if not (experts[:64, layer] == first).all() or not (experts[:, layer] == first).all():
            continue
        if first < 0:
            return layer, "routes nothing in any row"
        if k > 1 or rows > 1:
            return layer, f"has expert id {first} everywhere"
    return None
