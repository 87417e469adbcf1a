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
from traces.errors import InputError, located

FORMAT = "moe-expert-cache eamc-blend profile 1"
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
        """Raise InputError, one line, for a file that is missing, another, or damaged."""
        about, held = read_described(path, FORMAT, "profile of eamc-blend", ADVICE)
        try:
            return Profile(Shape(about["layers"], about["experts"]), tuple(about["traces"]), held)
        except (KeyError, TypeError) as error:
            raise InputError(f"{path} is damaged ({error!r}): {ADVICE}") from error

    def require(self, shape: Shape, path: str) -> None:
        """Raise InputError for the profile of another model."""
        if self.shape != shape:
            ours, theirs = (f"{each.layers} x {each.experts} experts" for each in (shape, self.shape))
            raise InputError(f"{path}: it does not fit this model of {ours}; it was learned from {theirs}")

    def fill(self, state: Learned, path: str) -> None:
        """Copy what was learned into a state of the same shape. Raise InputError if it is of another."""
        with located(path):
            if set(self.learned) != set(state):
                raise InputError(f"it is damaged: it holds {', '.join(sorted(self.learned))}; {ADVICE}")
            for name, own in state.items():
                found = self.learned[name]
                if found.shape != own.shape or found.dtype != own.dtype or not np.isfinite(found).all():
                    of = f"{self.shape.layers} x {self.shape.experts} experts"
                    raise InputError(f"what it holds as {name} does not fit this model; it was learned from {of}")
            for name, own in state.items():
                own[...] = self.learned[name]
