"""EAMCs as files: what `moe-sim eamc build` writes and `eamc:collection=FILE` starts from.

One npz without pickles: `about` (a JSON text: shape, options, trace) and for each collection, the prefill's and the
decode's or the one of both, `eams` and `waiting` (int64 [n, L, E], in the order learned) and `uses` (int64 [n]).
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from policies.core.policy import Int, Shape
from policies.eamc.options import EamcOptions
from traces.arrays import read_described
from traces.errors import InputError, located
from traces.facts import short

FORMAT = "moe-expert-cache EAMC 1"
ADVICE = "make one with moe-sim eamc build TRACE --out FILE"


@dataclass(frozen=True)
class Part:
    """One collection."""

    eams: Int  # [n, L, E] the oldest first
    uses: Int  # [n] events at which each was among the matched
    waiting: Int  # [w, L, E] for K-means, in order


@dataclass(frozen=True)
class SavedEamc:
    """An EAMC at rest: by phase (prefill, decode), or one part for both."""

    shape: Shape
    options: EamcOptions  # under which it was learned; its own `collection` is not kept
    trace: str  # what it was learned from
    parts: tuple[Part, ...]

    def write(self, file: BinaryIO) -> None:
        """Write it whole."""
        options = {**dataclasses.asdict(self.options), "collection": ""}
        about = {"format": FORMAT, "layers": self.shape.layers, "experts": self.shape.experts, "trace": self.trace}
        arrays = {f"{name}{i}": array for i, part in enumerate(self.parts) for name, array in vars(part).items()}
        np.savez_compressed(file, about=np.array(json.dumps({**about, "options": options})), **arrays)

    @staticmethod
    def read(path: Path | str) -> "SavedEamc":
        """InputError, one line, for a file that is missing, another, or damaged."""
        about, held = read_described(path, FORMAT, "EAMC", ADVICE)
        with located(f"{path} is damaged"):
            return _checked(about, held)


def _checked(about: dict[str, Any], held: dict[str, NDArray[Any]]) -> SavedEamc:
    """What the file says, if it can be true."""
    try:
        shape, options = Shape(about["layers"], about["experts"]), _options(about["options"])
        kinds = [field.name for field in dataclasses.fields(Part)]
        trace = short("trace", about["trace"])
        parts = tuple(Part(**{kind: held[f"{kind}{i}"] for kind in kinds}) for i in range(1 + options.split))
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"it is damaged, or of another version ({error!r}): {ADVICE}") from error
    for part in parts:
        for eams in (part.eams, part.waiting):
            if eams.dtype != np.int64 or eams.shape[1:] != (shape.layers, shape.experts) or (eams < 0).any():
                raise InputError(f"its EAMs do not count tokens of {shape.layers} x {shape.experts} experts: {ADVICE}")
            if not eams.any(axis=(1, 2)).all():
                raise InputError(f"one of its EAMs is all zero, so it counts no tokens: {ADVICE}")
        if part.uses.dtype != np.int64 or part.uses.shape != part.eams.shape[:1] or (part.uses < 0).any():
            raise InputError(f"it does not hold a count of use for each of its EAMs: {ADVICE}")
        if len(part.eams) > options.capacity:
            raise InputError(f"it holds {len(part.eams)} EAMs, more than its capacity {options.capacity}: {ADVICE}")
    return SavedEamc(shape, options, trace, parts)


def _options(held: dict[str, Any]) -> EamcOptions:
    """Return the options of a file. Raise InputError for a value of another type than an option has."""
    kinds = {field.name: type(field.default) for field in dataclasses.fields(EamcOptions)}
    for name, value in held.items():
        kind = kinds.get(name, type(value))
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise InputError(f"its option {name} is {value!r}, not of type {kind.__name__}: {ADVICE}")
    return EamcOptions(**held)
