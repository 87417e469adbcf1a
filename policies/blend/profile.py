"""What `eamc-blend` has learned of a model, as a file that `moe-sim profile build` writes and `profile=FILE` names.

One npz without pickles: `about` (a JSON text: shape and what it was learned from) and the arrays of the policy's state
that outlive a request: a run that starts from it continues the one that wrote it, but for the cache.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from policies.blend.decisions import Learned
from policies.core.policy import Shape
from traces.arrays import read_described
from traces.errors import InputError

FORMAT = "moe-expert-cache eamc-blend profile 4"
ADVICE = "make one with moe-sim profile build TRACE --out FILE"


@dataclass(frozen=True)
class Profile:
    """What was learned, at rest."""

    shape: Shape
    traces: tuple[str, ...]  # what it was learned from, in order
    learned: Learned

    def write(self, file: BinaryIO) -> None:
        about = {"format": FORMAT, "layers": self.shape.layers, "experts": self.shape.experts, "traces": self.traces}
        held: dict[str, Any] = {"about": np.array(json.dumps(about)), **self.learned}
        np.savez_compressed(file, **held)

    @staticmethod
    def read(path: Path | str) -> "Profile":
        """Read what `write` wrote. Raise InputError, one line, for a file that is missing or another."""
        about, held = read_described(path, FORMAT, "profile of eamc-blend", ADVICE)
        return Profile(Shape(about["layers"], about["experts"]), tuple(about["traces"]), held)

    def require(self, shape: Shape, path: str) -> None:
        if self.shape != shape:
            ours, theirs = (f"{each.layers} x {each.experts} experts" for each in (shape, self.shape))
            raise InputError(f"{path}: it does not fit this model of {ours}; it was learned from {theirs}")
