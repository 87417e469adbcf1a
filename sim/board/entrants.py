"""The policies that ship and that the board's traces can run, and whose systems decide like them.

Left out is what needs a file (a profile, a predictor), a trace with lookahead or a slot for each layer, and what
computes misses on the host or moves whole layers, which is no cache policy: `moe-sim systems` has those.
"""

from collections.abc import Iterator

from policies.core.catalog import available
from policies.core.policy import Shape
from policies.core.spec import FETCHED, GLOBAL, PolicySpec, parse
from policies.core.systems import System, systems
from traces.errors import InputError

POLICIES = ("lfu", "lrfu", "eamc", "eamc-blend")
"""Those that are run where none are named."""

FASTEST = "belady+oracle1"
"""Belady that fetches what the next layer will use: the ceiling in time."""


def every() -> list[str]:
    """Return the policies that ship, each once: of those that decide alike, the first."""
    found: dict[PolicySpec, str] = {}
    built_in = [
        f"lru+{each.name}" if each.kind == "prefetch" else each.name
        for each in available()
        if each.kind != "prefetch" or not (each.oracle or each.name == "none")
    ]
    for text in (*built_in, *(policy for _, policy in _of_systems()), FASTEST):
        policy = parse(text)
        if _runs(policy):
            found.setdefault(policy, text)
    return list(found.values())


def also(text: str) -> list[str]:
    """Return the systems, and presets of none of them, that decide as a policy does."""
    policy = parse(text)
    named = {system.name: system.title for system, other in _of_systems() if parse(other) == policy}
    presets = [each.name for each in available() if each.kind == "preset" and parse(each.name) == policy]
    return [*named.values(), *(name for name in presets if name not in {*named, text})]


def _of_systems() -> Iterator[tuple[System, str]]:
    """Yield systems whose policy is one of a cache, with the policy for traces without lookahead."""
    for system in systems().values():
        for policy in (system.runs, system.without_lookahead):
            of_a_cache = policy and "{" not in policy and not (system.whole_layers or system.preload)
            if of_a_cache and _runs(parse(policy)):
                yield system, policy


def _runs(policy: PolicySpec) -> bool:
    if policy.needs_lookahead or policy.placement != FETCHED or policy.scope != GLOBAL:
        return False
    try:
        policy.require(Shape(1, 1))
    except InputError:
        return False
    return True
