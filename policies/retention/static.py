"""Static popularity: evict the expert that the fewest tokens of a profile trace chose, ties to the lower id.

What a profile decided once never changes, as in Fiddler (arXiv 2402.07033) and BrainStorm; but admission is forced,
as for every policy here, so a missed expert takes the place of the least popular one that is evictable. The profile
is a trace folder, all its phases counted; popularity learned while the run continues is `lfu-perfect`.
"""

from dataclasses import dataclass

from policies.core.policy import Compiled, ScorePolicy, Shape
from policies.core.registry import retention
from policies.core.scope import require_profile
from traces.errors import InputError
from traces.steps import DECODE, PREFILL
from traces.trace import Trace


@dataclass(frozen=True)
class StaticOptions:
    """profile: a trace folder of the same model; its path holds no colon, plus sign or @."""

    profile: str = ""


@retention("static")
class Static(ScorePolicy):
    """Popularity in a profile trace, fixed before the run."""

    compiled = Compiled()
    Options = StaticOptions

    @classmethod
    def require(cls, options: StaticOptions, shape: Shape) -> None:
        if not options.profile:
            raise InputError(
                "it needs a trace to take popularity from: its option profile, as in static:profile=FOLDER"
            )
        require_profile(options.profile, shape)

    def __init__(self, shape: Shape, options: StaticOptions) -> None:
        super().__init__(shape, options)
        self.require(options, shape)
        trace = Trace.read(options.profile)
        eams = trace.eams(PREFILL) + trace.eams(DECODE)  # [R, L, E]
        self.keep[0] = eams.sum(axis=0).ravel()
