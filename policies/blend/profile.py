"""What `eamc-blend` has learned of a model, as a file that `moe-sim profile build` writes and `profile=FILE` names.

One npz without pickles: `about` (a JSON text: shape and what it was learned from) and the arrays of the policy's state
that outlive a request: a run that starts from it continues the one that wrote it, but for the cache.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from policies.core.policy import Shape
from traces.arrays import read_described
from traces.errors import InputError, located
from traces.facts import short

FORMAT = "moe-expert-cache eamc-blend profile 1"
MOST = 1 << 20
"""Layers or experts: no model has so many."""

ADVICE = "make one with moe-sim profile build TRACE --out FILE"

Learned = Mapping[str, NDArray[Any]]
"""By name, arrays of a policy's state: the state's own, not copies."""


@dataclass(frozen=True)
class Profile:
    """What was learned, at rest."""

    shape: Shape
    traces: tuple[str, ...]  # what it was learned from, in order
    learned: Learned

    def write(self, file: BinaryIO) -> None:
        """Write it whole."""
        about = {"format": FORMAT, "layers": self.shape.layers, "experts": self.shape.experts, "traces": self.traces}
        held: dict[str, Any] = {"about": np.array(json.dumps(about)), **self.learned}
        np.savez_compressed(file, **held)

    @staticmethod
    def read(path: Path | str) -> "Profile":
        """Raise InputError, one line, for a file that is missing, another, or damaged."""
        about, held = read_described(path, FORMAT, "profile of eamc-blend", ADVICE)
        with located(f"{path} is damaged"):
            return Profile(*_said(about), held)

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


def _said(about: dict[str, Any]) -> tuple[Shape, tuple[str, ...]]:
    if not (isinstance(about.get("traces"), list) and all(_is_size(about.get(key)) for key in ("layers", "experts"))):
        raise InputError(f"it does not say what it was learned from: {ADVICE}")
    return Shape(about["layers"], about["experts"]), tuple(short("traces", name) for name in about["traces"])


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value < MOST
