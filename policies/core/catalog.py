"""Every policy there is, described: what `moe-sim policies` lists."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from policies.core import registry
from policies.core.policy import Listener
from policies.core.spec import Part, make_policy
from policies.core.systems import presets


@dataclass(frozen=True)
class PolicyInfo:
    """One policy of `moe-sim policies`."""

    name: str
    kind: str  # "preset", "retention", "prefetch", or "pair" for a name that stands for both
    summary: str
    oracle: bool
    options: dict[str, Any]  # defaults; of a preset as `PolicySpec.options` has them
    theory: str  # of a policy its module's docstring, of a preset what the real system does otherwise
    stands_for: str = ""  # of a preset: a policy as given


def available() -> list[PolicyInfo]:
    """Return every registered policy: pairs first, then retention, then prefetch, then presets, by name."""
    retention, prefetch = registry.tables()
    both = retention.keys() & prefetch.keys()
    kinds: list[tuple[str, Mapping[str, type[Listener]], set[str]]] = [
        ("pair", retention, both),
        ("retention", retention, retention.keys() - both),
        ("prefetch", prefetch, prefetch.keys() - both),
    ]
    policies = [_described(table[name], kind) for kind, table, names in kinds for name in sorted(names)]
    for preset in sorted(presets(), key=lambda preset: preset.name):
        spec = make_policy(preset.name)
        own = preset.summary, spec.oracle, spec.resolved(), preset.differs, preset.policy
        policies.append(PolicyInfo(preset.name, "preset", *own))
    return policies


def _described(cls: type[Listener], kind: str) -> PolicyInfo:
    summary = (cls.__doc__ or "").strip().split("\n")[0]
    theory = (sys.modules[cls.__module__].__doc__ or "").strip()
    return PolicyInfo(cls.name, kind, summary, cls.oracle, Part.of(cls).values, theory)
