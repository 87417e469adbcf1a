"""What to keep and what to fetch, and the residency bookkeeping around it. No clocks, no bandwidths, no devices."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from policies.checker import check_policy
    from policies.core.policy import Event, Policy, Prefetcher, ScorePolicy, Shape
    from policies.core.spec import make_policy
    from policies.expert_cache import ExpertCache

__all__ = ["Event", "ExpertCache", "Policy", "Prefetcher", "ScorePolicy", "Shape", "check_policy", "make_policy"]


def __getattr__(name: str) -> Any:
    """Import a public name where it is defined, when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    elsewhere = {
        "check_policy": "policies.checker",
        "make_policy": "policies.core.spec",
        "ExpertCache": "policies.expert_cache",
    }
    return getattr(import_module(elsewhere.get(name, "policies.core.policy")), name)
