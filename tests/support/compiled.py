"""What tests run compiled, in two halves that take about as long: numba keeps it for the processes that come after."""

import numpy as np

from policies.core.dispatch import Native, hooks_of
from policies.core.policy import Policy, Shape
from policies.core.spec import parse
from sim.engines import compiled_engine
from sim.engines.untimed import count
from tests.support.runs import PLAIN
from traces.steps import RequestSteps


def policies() -> None:
    """Compile what the built-in policies decide with."""
    for cls in PLAIN:
        half = cls(Shape(1, 1), cls.Options())
        Native(half)
        if isinstance(half, Policy):
            hooks_of(half)


def engines() -> None:
    """Compile both versions of the engine, and the one that counts."""
    compiled_engine.prepare([False, True])
    one, none = np.ones(1, np.int64), np.zeros(0, np.int64)
    count([RequestSteps(0, np.ones(1, np.uint8), one, one, np.zeros(2, np.int64), none, none)], 1, 1, 1, parse("lru"))
