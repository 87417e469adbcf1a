"""Which of a dump's layers are MoE layers. Servers that count dense layers too leave them empty or constant;
such a layer is never taken as routed, and never dropped unless the user names those that count.
"""

import re
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from traces.errors import InputError

HINT = "if dense layers are counted, say which are MoE layers, such as --layer-map 1-{last} or --layer-map 1:"

_PART = re.compile(r"(\d+)|(\d+)-(\d+)|(\d*):")
"""One layer, an inclusive range, or "N:" for all from N on."""


def parse_layer_map(spec: str, layers: int) -> tuple[int, ...]:
    """Return the layers, of `layers`, that `spec` names, ascending: "1-26", "3:", "0,2,4-8" or in brackets."""
    numbers: list[int] = []
    parts = [_PART.fullmatch(part.strip()) for part in spec.strip().removeprefix("[").removesuffix("]").split(",")]
    for match in filter(None, parts):
        one, first, last, begin = match.groups()
        numbers += range(int(one or first or begin or 0), int(one or last or layers - 1) + 1)
    if None in parts or not numbers or numbers[-1] >= layers or any(b <= a for a, b in pairwise(numbers)):
        raise InputError(f"--layer-map {spec!r} must name layers from 0 to {layers - 1}, as in 1-26, 3: or 0,2,4-8")
    return tuple(numbers)


def first_dense(experts: NDArray[np.integer]) -> tuple[int, str] | None:
    """Return the first layer that looks dense, and why. experts: [tokens, layers, k], -1: not routed."""
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
