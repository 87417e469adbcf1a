"""Names of policies: how a policy gets one, and how what a user types becomes retention plus prefetch.

`lru` is retention alone, `lru+eamc` a pair, `eamc` (a name that stands for both) the pair of its two halves;
options follow colons: `lru+popular:n=8`. A class in a user's own file goes by `my_file.py:MyPolicy` wherever a name
may stand. What shares the cache's slots (`policies.core.scope`) follows an @: `lru+popular@layer`. The first @ begins
the scope and the first + before it divides the halves, so no path on the left of either has one. A preset
(`policies.core.presets`) stands for all of it. Packages add policies under the entry point group
`moe_expert_cache.policies`, each naming a module whose import registers them.
"""

import dataclasses
import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import entry_points
from typing import Any, TypeVar

from policies.core import user_file
from policies.core.per_layer import PerLayer
from policies.core.policy import Listener, Prefetcher, RetentionPolicy, ScorePolicy, Shape
from policies.core.presets import PRESETS, Preset
from policies.core.scope import SCOPES, Scope
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
    "prefetch.stride",
    "retention.multi_criteria",
)
"""Modules of this package that register policies."""

NO_PREFETCH = "none"
SHARED = "global"
"""The scope of a policy that names none."""

_retention: dict[str, type[RetentionPolicy]] = {}
_prefetch: dict[str, type[Prefetcher]] = {}

R = TypeVar("R", bound=type[RetentionPolicy])
P = TypeVar("P", bound=type[Prefetcher])


def retention(name: str, oracle: bool = False) -> Callable[[R], R]:
    """Register a retention policy under `name`; `oracle` marks one that sees the future."""

    def register(cls: R) -> R:
        cls.name, cls.oracle = name, oracle
        _retention[name] = cls
        return cls

    return register


def prefetcher(name: str, oracle: bool = False) -> Callable[[P], P]:
    """Register a prefetcher under `name`; `oracle` marks one that sees the future."""

    def register(cls: P) -> P:
        cls.name, cls.oracle = name, oracle
        _prefetch[name] = cls
        return cls

    return register


@prefetcher(NO_PREFETCH)
class NoPrefetch(Prefetcher):
    """Nothing is fetched before it is asked for."""

    observes = False
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


@dataclass(frozen=True)
class PolicyInfo:
    """One policy of `moe-sim policies`."""

    name: str
    kind: str  # "preset", "retention", "prefetch", or "pair" for a name that stands for both
    summary: str
    oracle: bool
    options: dict[str, Any]  # defaults; of a preset as `PolicySpec.options` has them
    theory: str  # of a policy its module's docstring, of a preset what the real system does otherwise
    stands_for: str = ""  # of a preset: a policy as typed


def available() -> list[PolicyInfo]:
    """Every registered policy: pairs first, then retention, then prefetch, then presets, by name."""
    _load()
    both = _retention.keys() & _prefetch.keys()
    kinds: list[tuple[str, Mapping[str, type[Listener]], set[str]]] = [
        ("pair", _retention, both),
        ("retention", _retention, _retention.keys() - both),
        ("prefetch", _prefetch, _prefetch.keys() - both),
    ]
    policies = [_described(table[name], kind) for kind, table, names in kinds for name in sorted(names)]
    return policies + [_described_preset(preset) for preset in sorted(PRESETS, key=lambda preset: preset.name)]


def _described(cls: type[Listener], kind: str) -> PolicyInfo:
    summary = (cls.__doc__ or "").strip().split("\n")[0]
    theory = (sys.modules[cls.__module__].__doc__ or "").strip()
    return PolicyInfo(cls.name, kind, summary, cls.oracle, _options(cls, ""), theory)


def _described_preset(preset: Preset) -> PolicyInfo:
    spec = parse(preset.name)
    return PolicyInfo(
        preset.name, "preset", preset.summary, spec.oracle, spec.resolved(), preset.differs, preset.policy
    )


@dataclass(frozen=True)
class PolicySpec:
    """A policy as typed, resolved: retention, prefetcher and scope, with which options. Cheap to send about."""

    text: str
    evict: str
    prefetch: str
    evict_options: str = ""
    prefetch_options: str = ""
    scope: str = SHARED
    scope_options: str = ""
    preset: str = ""  # by whose name it was typed

    @property
    def oracle(self) -> bool:
        """Whether either half sees the future."""
        return _keeper(self.evict).oracle or _fetcher(self.prefetch).oracle

    @property
    def needs_lookahead(self) -> bool:
        """Whether it plays only traces that hold the column `lookahead`."""
        return _fetcher(self.prefetch).needs_lookahead

    @property
    def shares(self) -> bool:
        """Whether its halves have one name and the same options, and so share what they learn."""
        resolved = self.resolved()
        return self.evict == self.prefetch and resolved["evict"] == resolved["prefetch"]

    def resolved(self) -> dict[str, Any]:
        """Both halves and the scope with every option resolved, defaults included: equal for what plays alike."""
        return {
            part: {"name": cls.name, **_options(cls, text)}
            for part, cls, text in (
                ("evict", _keeper(self.evict), self.evict_options),
                ("prefetch", _fetcher(self.prefetch), self.prefetch_options),
                ("scope", _scope(self.scope), self.scope_options),
            )
        }

    def options(self) -> dict[str, Any]:
        """What is resolved, and the preset's name if it was typed by one."""
        return {**({"preset": self.preset} if self.preset else {}), **self.resolved()}

    def without_prefetch(self) -> "PolicySpec":
        """The same retention in the same scope with nothing fetched early: what coverage is measured against."""
        text = _joined(self.evict, self.evict_options)
        if self.evict in _prefetch:
            text += f"+{NO_PREFETCH}"
        if self.scope != SHARED:
            text += f"@{_joined(self.scope, self.scope_options)}"
        return replace(self, text=text, prefetch=NO_PREFETCH, prefetch_options="", preset="")

    def within(self, scope: str) -> "PolicySpec":
        """The same policy in `scope`, as typed behind an @, unless it, or its preset, names one. InputError."""
        name, _, options = scope.partition(":")
        _options(_scope(name), options)
        own = any(preset.name == self.preset and "@" in preset.policy for preset in PRESETS)
        return self if own or "@" in self.text or scope == SHARED else parse(f"{self.text}@{scope}")

    @property
    def seed(self) -> int | None:
        """The option of that name, of a policy that draws."""
        resolved = self.resolved()
        return next((resolved[half]["seed"] for half in ("evict", "prefetch") if "seed" in resolved[half]), None)

    def divide(self, shape: Shape, slots: int) -> tuple[int, ...]:
        """Slots of each partition of a cache of `slots` experts. InputError where the scope cannot have it so."""
        cls = _scope(self.scope)
        return cls(cls.Options(**_options(cls, self.scope_options))).divide(shape, slots)

    def build(self, shape: Shape) -> tuple[RetentionPolicy, Prefetcher]:
        """Fresh instances; halves of one name and the same options share what they have learned.

        In a scope of layers a retention policy that is no score is one instance for each, so it shares nothing.
        """
        keeper, fetcher = _make(_keeper(self.evict), shape, self.evict_options), _fetcher(self.prefetch)
        if _scope(self.scope).per_layer and not isinstance(keeper, ScorePolicy):
            return PerLayer(keeper), _make(fetcher, shape, self.prefetch_options)
        if self.shares:
            return keeper, fetcher.beside(keeper)
        return keeper, _make(fetcher, shape, self.prefetch_options)


def parse(text: str) -> PolicySpec:
    """Resolve a policy as typed: EVICT[:opts][+PREFETCH[:opts]][@SCOPE], or PRESET[:opts][@SCOPE].

    InputError for an unknown name (near ones are offered) or option.
    """
    text = text.strip()
    policy, at, scope = text.partition("@")
    name, options = user_file.divide(policy.partition("+")[0])
    preset = next((preset for preset in PRESETS if preset.name == name), None)
    if preset is None:
        return _checked(_divided(text, policy, scope if at else SHARED))
    if "+" in policy:
        raise InputError(f"{name} is a preset and stands for {preset.policy}: write that to change a half of it")
    policy, own_at, own_scope = preset.policy.partition("@")
    spec = _divided(text, policy, scope if at else own_scope if own_at else SHARED)
    return _checked(_with_options(replace(spec, preset=name), options))


def _divided(text: str, policy: str, scope: str) -> PolicySpec:
    """What stands before and behind the @, in its parts."""
    name, _, scope_options = scope.strip().partition(":")
    _scope(name)
    kept, plus, fetched = policy.partition("+")
    evict, evict_options = user_file.divide(kept)
    _keeper(evict)
    if plus:
        prefetch, prefetch_options = user_file.divide(fetched)
    else:
        prefetch, prefetch_options = (evict, evict_options) if evict in _prefetch else (NO_PREFETCH, "")
    return PolicySpec(text, evict, prefetch, evict_options, prefetch_options, name, scope_options)


def _checked(spec: PolicySpec) -> PolicySpec:
    """InputError for a name or an option that there is not."""
    spec.resolved()
    return spec


def _with_options(spec: PolicySpec, options: str) -> PolicySpec:
    """A preset with options of its own, each given to every part that declares it. InputError if none does."""
    parts = {
        "evict_options": _options(_keeper(spec.evict), ""),
        "prefetch_options": _options(_fetcher(spec.prefetch), ""),
        "scope_options": _options(_scope(spec.scope), ""),
    }
    for option in filter(None, options.split(":")):
        key = option.partition("=")[0]
        taking = [part for part, declared in parts.items() if key in declared]
        if not taking:
            known = set().union(*parts.values())
            raise unknown(f"option of {spec.preset}", key, known) if known else _no_options(spec.preset)
        spec = replace(spec, **{part: _joined(getattr(spec, part), option) for part in taking})
    return spec


def _joined(*parts: str) -> str:
    return ":".join(filter(None, parts))


def _scope(name: str) -> type[Scope]:
    if name not in SCOPES:
        raise InputError(f"{unknown('scope', name, SCOPES)} (what follows an @ is a scope: a path before it has no @)")
    return SCOPES[name]


def _keeper(name: str) -> type[RetentionPolicy]:
    """The retention policy of that name, or in that file."""
    _load()
    cls = user_file.load(name) if user_file.is_in_a_file(name) else _retention.get(name) or _prefetch.get(name)
    if cls is None:
        raise unknown("policy", name, [*_retention, *(preset.name for preset in PRESETS)])
    if not issubclass(cls, RetentionPolicy):
        raise InputError(f"{name!r} is a prefetcher: name what to keep as well, as in lru+{name}")
    return cls


def _fetcher(name: str) -> type[Prefetcher]:
    """The prefetcher of that name, or in that file."""
    _load()
    cls = user_file.load(name) if user_file.is_in_a_file(name) else _prefetch.get(name) or _retention.get(name)
    if cls is None:
        raise unknown("prefetcher", name, _prefetch)
    if not issubclass(cls, Prefetcher):
        raise InputError(f"{name!r} decides what to keep, not what to fetch: it cannot stand after a +")
    return cls


def _make(cls: type[Any], shape: Shape, text: str) -> Any:
    return cls(shape, cls.Options(**_options(cls, text)))


def _no_options(name: str) -> InputError:
    return InputError(f"{name} has no options")


def _options(cls: type[Listener] | type[Scope], text: str) -> dict[str, Any]:
    """The options of a policy or a scope, `key=value` pairs between colons over the defaults, of their types."""
    declared = cls.Options
    fields: dict[str, Any] = {}
    if dataclasses.is_dataclass(declared):
        fields = {field.name: field.default for field in dataclasses.fields(declared)}
        for name in fields:
            if fields[name] is dataclasses.MISSING:
                raise InputError(f"option {name} of {cls.name} needs a default")
    values = dict(fields)
    for part in filter(None, text.split(":")):
        key, equals, value = part.partition("=")
        if key not in fields:
            raise unknown(f"option of {cls.name}", key, fields) if fields else _no_options(cls.name)
        try:
            values[key] = _like(fields[key], value)
        except ValueError:
            equals = ""
        if not equals:
            wanted = type(fields[key]).__name__
            raise InputError(f"option {key} of {cls.name} needs a value of type {wanted}, as in {key}={fields[key]}")
    if values:
        declared(**values)
    return values


def _like(default: Any, text: str) -> Any:
    """The value that `text` writes, of the default's type. ValueError if it writes none."""
    if not isinstance(default, bool):
        return type(default)(text)
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"
