"""Names of policies: how a class gets one, and which class a name stands for.

A name may stand for an eviction policy, a prefetcher, or both, which share what they learn then. Packages add policies
under the entry point group `moe_expert_cache.policies`, each naming a module whose import registers them.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any, TypeVar

from policies.core import grammar, user_file
from policies.core.admission import ADMISSIONS
from policies.core.placement import PLACEMENTS
from policies.core.policy import Compiled, Listener, Policy, Prefetcher
from policies.core.scope import SCOPES
from policies.core.systems import System, presets, systems
from traces.errors import InputError, unknown

BUILT_IN = (
    "retention.lru",
    "retention.lfu",
    "retention.fifo",
    "eamc.eamc",
    "retention.belady",
    "prefetch.oracle",
    "prefetch.popular",
    "retention.lfu_perfect",
    "retention.lfu_aged",
    "retention.lrfu",
    "retention.clock",
    "retention.sieve",
    "retention.s3fifo",
    "retention.arc",
    "retention.random_victim",
    "retention.static",
    "retention.least_stale",
    "blend.eamc_blend",
    "prefetch.layer_stream",
    "prefetch.previous",
    "prefetch.markov",
    "eamc.expert_map",
    "prefetch.gate",
    "retention.multi_criteria",
    "retention.class_lru",
    "prefetch.lookahead",
    "blend.foresight",
    "prefetch.fewest_reads",
)
"""Modules of this package that register policies."""

_retention: dict[str, type[Policy]] = {}
_prefetch: dict[str, type[Prefetcher]] = {}

R = TypeVar("R", bound=type[Policy])
P = TypeVar("P", bound=type[Prefetcher])

OTHERS: dict[str, Mapping[str, type[Any]]] = {"scope": SCOPES, "placement": PLACEMENTS, "admission": ADMISSIONS}
"""The parts of a policy beside its two halves."""


def retention(name: str, oracle: bool = False) -> Callable[[R], R]:
    """Register an eviction policy under `name`; `oracle` marks one that sees the future, as its class may."""
    return _register(_retention, name, oracle)


def prefetcher(name: str, oracle: bool = False) -> Callable[[P], P]:
    """Register a prefetcher under `name`; `oracle` as there."""
    return _register(_prefetch, name, oracle)


def _register(table: dict[str, Any], name: str, oracle: bool) -> Callable[[Any], Any]:
    def register(cls: Any) -> Any:
        taken = [_source(held[name]) for held in (_retention, _prefetch) if name in held]
        taken += ["a preset"] * (preset(name) is not None)
        if other := next((source for source in taken if source != _source(cls)), ""):
            raise InputError(f"{name!r} names a policy of {_source(cls)} and {other}: register one by another name")
        cls.name, cls.oracle = name, oracle or cls.oracle
        table[name] = cls
        return cls

    return register


def _source(cls: type) -> str:
    """Return the file that defines a class: the halves of a pair are of one, and one that has changed is run again."""
    return getattr(sys.modules.get(cls.__module__), "__file__", None) or cls.__module__


def preset(name: str) -> System | None:
    """Return the system of that name if it stands for a policy."""
    system = systems().get(name)
    return system if system and system.policy else None


@prefetcher("none")
class NoPrefetch(Prefetcher):
    """Nothing is fetched before it is asked for."""

    compiled = Compiled()
    proposes = False


@cache
def _load() -> None:
    """Import every module that registers policies, once."""
    for module in BUILT_IN:
        importlib.import_module(f"policies.{module}")
    for entry in entry_points(group="moe_expert_cache.policies"):
        entry.load()


def built_in() -> list[type[Listener]]:
    """Return the policies of the modules in BUILT_IN, in their order."""
    _load()
    places = {f"policies.{module}": place for place, module in enumerate(BUILT_IN)}
    held = [cls for table in (_retention, _prefetch) for cls in table.values() if cls.__module__ in places]
    return sorted(held, key=lambda cls: places[cls.__module__])


def find(kind: str, policy: str | type[Any]) -> type[Any]:
    """Return the class that a text names as a part of this kind; a class stands for itself. Raise InputError.

    kind: "evict" or "prefetch", which a user's file may define as well, or one of OTHERS.
    """
    if kind in OTHERS:
        if not isinstance(policy, type) and policy not in OTHERS[kind]:
            raise unknown(kind, policy, OTHERS[kind])
        return policy if isinstance(policy, type) else OTHERS[kind][policy]
    keeps, cls = kind == "evict", _found(policy, kind)
    if cls is None:
        names = [*_retention, *(preset.name for preset in presets())] if keeps else _prefetch
        raise unknown("policy" if keeps else "prefetcher", str(policy), names)
    called = getattr(policy, "__name__", policy)
    if keeps and not issubclass(cls, Policy):
        how = f"lru+{policy}" if isinstance(policy, str) else f"PolicySpec.of(evict='lru', prefetch={cls.__name__})"
        raise InputError(f"{called!r} is a prefetcher: name what to keep as well, as in {how}")
    if not keeps and not issubclass(cls, Prefetcher):
        raise InputError(f"{called!r} decides what to keep, not what to fetch: it cannot stand after a +")
    return cls


def _found(policy: str | type[Listener], kind: str) -> type[Listener] | None:
    if not isinstance(policy, str):
        return user_file.checked(policy, policy.__name__)
    if grammar.file_and_class(policy):
        return user_file.load(policy)
    retention, prefetch = tables()
    named = retention.get(policy), prefetch.get(policy)
    return next(filter(None, named if kind == "evict" else reversed(named)), None)


def tables() -> tuple[dict[str, type[Policy]], dict[str, type[Prefetcher]]]:
    _load()
    return _retention, _prefetch


def is_pair(name: str) -> bool:
    return all(name in table for table in tables())
