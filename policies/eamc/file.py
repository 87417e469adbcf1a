"""EAMCs as files: what `moe-sim eamc build` writes and `eamc:collection=FILE` starts from.

One npz without pickles: `about` (a JSON text: shape, options, trace) and for each collection, the prefill's and the
decode's or the one of both, `eams` and `waiting` (int64 [n, L, E], in the order learned) and `uses` (int64 [n]).
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from policies.core.policy import Int, Shape
from policies.eamc.collection import EamcOptions
from traces.arrays import read_described

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
        options = {**dataclasses.asdict(self.options), "collection": ""}
        about = {"format": FORMAT, "layers": self.shape.layers, "experts": self.shape.experts, "trace": self.trace}
        arrays = {f"{name}{i}": array for i, part in enumerate(self.parts) for name, array in vars(part).items()}
        np.savez_compressed(file, about=np.array(json.dumps({**about, "options": options})), **arrays)

    @staticmethod
    def read(path: Path | str) -> "SavedEamc":
        """Read what `write` wrote. Raise InputError, one line, for a file that is missing or another."""
        about, held = read_described(path, FORMAT, "EAMC", ADVICE)
        options = EamcOptions(**about["options"])
        kinds = [field.name for field in dataclasses.fields(Part)]
        parts = tuple(Part(**{kind: held[f"{kind}{i}"] for kind in kinds}) for i in range(1 + options.split))
        return SavedEamc(Shape(about["layers"], about["experts"]), options, about["trace"], parts)
