"""What to keep and what to fetch, and the residency bookkeeping around it. No clocks, no bandwidths, no devices."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from policies.checker import check_policy
    from policies.core.policy import Event, Prefetcher, ScorePolicy, Shape
    from policies.core.policy import RetentionPolicy as Policy
    from policies.core.spec import make_policy

__all__ = ["Event", "Policy", "Prefetcher", "ScorePolicy", "Shape", "check_policy", "make_policy"]

_HOME = {
    "Event": ("policies.core.policy", "Event"),
    "Policy": ("policies.core.policy", "RetentionPolicy"),
    "Prefetcher": ("policies.core.policy", "Prefetcher"),
    "ScorePolicy": ("policies.core.policy", "ScorePolicy"),
    "Shape": ("policies.core.policy", "Shape"),
    "check_policy": ("policies.checker", "check_policy"),
    "make_policy": ("policies.core.spec", "make_policy"),
}
"""Where the public names are defined, which are imported when they are first asked for."""


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOME[name]
    return getattr(import_module(module), attribute)
