"""The options of `eamc`: every choice that the paper leaves open, or that the public code makes otherwise."""

import math
from dataclasses import dataclass

from policies.core.policy import Options, bounded
from traces.errors import InputError, unknown

CHOICES = {
    "source": ("iteration", "request", "both"),
    "layers": ("all", "past", "future"),
    "cosine": ("flat", "rows"),
    "replacement": ("nearest", "least-used", "fifo", "k-means"),
    "decay": ("first", "none", "next"),
    "keep": ("ratio", "most-visited", "least-visited"),
}


@dataclass(frozen=True)
class EamcOptions(Options, policy="eamc"):
    """The defaults are the paper's where it is explicit (PAPER.md, *Defaults of eamc here*); InputError if unusable."""

    capacity: int = bounded(120, least=1, most=100_000)  # EAMs kept, for each phase if they are split
    eps: float = bounded(1e-8, least=0, below=math.inf)  # what an expert never seen is worth
    source: str = "iteration"  # matched: the iEAM of the current step, the rEAM so far, or both (the mean similarity)
    split: bool = True  # a collection for each phase, or one of prefill and decode counts together
    layers: str = "all"  # rows that count: all of the stored EAM, those up to the current layer, those after it
    cosine: str = "flat"  # of the flattened rows, or the mean over the rows of their cosines
    matches: int = 1  # nearest EAMs that are summed
    replacement: str = "nearest"  # what a full collection gives up: see policies/eamc/collection.py
    threshold: float = bounded(0.0, least=-1, below=1)  # what a candidate's ratio is above; -1: all are
    depth: int = bounded(0, least=0)  # layers ahead that are prefetched; 0: all later ones
    decay: str = "first"  # of the keep score: from the first layer on, none, or with the distance to the next use
    keep: str = "ratio"  # what goes: the least ratio (Algorithm 1), or the most or least visited
    collection: str = ""  # file of `moe-sim eamc build` to start from; none: empty

    def __post_init__(self) -> None:
        super().__post_init__()
        for option, known in CHOICES.items():
            if getattr(self, option) not in known:
                raise unknown(f"{option} of eamc", getattr(self, option), known)
        if not 1 <= self.matches <= self.capacity:
            raise InputError(f"eamc needs matches of 1 to its capacity, {self.capacity}, not {self.matches}")
        if self.layers == "future" and self.source != "request":
            raise InputError(
                "eamc matches layers=future with source=request only: the iEAM has no rows after the current layer"
            )
        if self.keep != "ratio" and self.decay != "first":
            raise InputError(f"eamc:keep={self.keep} has no use for decay={self.decay}, which weighs ratios")
