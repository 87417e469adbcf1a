"""Names of policies: how a policy gets one, and how what a user types becomes retention plus prefetch.

`lru` is retention alone, `lru+eamc` a pair, `eamc` (a name that stands for both) the pair of its two halves;
options follow colons: `lru+popular:n=8`. A class in a user's own file goes by `my_file.py:MyPolicy` wherever a name
may stand; the first + divides the halves, so a file's path has none. Packages add policies under the entry point
group `moe_expert_cache.policies`, each naming a module whose import registers them.
"""

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any, TypeVar

from policies import user_file
from policies.contract import Listener, Prefetcher, RetentionPolicy, Shape
from traces.errors import InputError, unknown

BUILT_IN = (
    "lru",
    "lfu",
    "fifo",
    "eamc",
    "belady",
    "oracle1",
    "oracle",
    "popular",
    "lfu_perfect",
    "lfu_aged",
    "lrfu",
    "clock",
    "sieve",
    "s3fifo",
    "arc",
    "random_victim",
    "static",
    "least_stale",
    "eamc_blend",
    "all",
    "previous",
    "markov",
    "expert_map",
)
"""Modules of this package that register policies."""

NO_PREFETCH = "none"

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


@dataclass(frozen=True)
class PolicyInfo:
    """One line of `moe-sim policies`."""

    name: str
    kind: str  # "retention", "prefetch", or "pair" for a name that stands for both
    summary: str
    oracle: bool
    options: dict[str, Any]  # defaults


def available() -> list[PolicyInfo]:
    """Every registered policy: pairs first, then retention, then prefetch, by name."""
    _load()
    both = _retention.keys() & _prefetch.keys()
    kinds: list[tuple[str, Mapping[str, type[Listener]], set[str]]] = [
        ("pair", _retention, both),
        ("retention", _retention, _retention.keys() - both),
        ("prefetch", _prefetch, _prefetch.keys() - both),
    ]
    return [
        PolicyInfo(name, kind, _summary(table[name]), table[name].oracle, _options(table[name], ""))
        for kind, table, names in kinds
        for name in sorted(names)
    ]


def _summary(cls: type[Listener]) -> str:
    return (cls.__doc__ or "").strip().split("\n")[0]


@dataclass(frozen=True)
class PolicySpec:
    """A policy as typed, resolved: which retention, which prefetcher, with which options. Cheap to send about."""

    text: str
    evict: str
    prefetch: str
    evict_options: str = ""
    prefetch_options: str = ""

    @property
    def oracle(self) -> bool:
        """Whether either half sees the future."""
        return _keeper(self.evict).oracle or _fetcher(self.prefetch).oracle

    def options(self) -> dict[str, Any]:
        """Both halves with every option resolved, defaults included."""
        keeper, fetcher = _keeper(self.evict), _fetcher(self.prefetch)
        return {
            "evict": {"name": keeper.name, **_options(keeper, self.evict_options)},
            "prefetch": {"name": fetcher.name, **_options(fetcher, self.prefetch_options)},
        }

    def without_prefetch(self) -> "PolicySpec":
        """The same retention with nothing fetched early: what coverage is measured against."""
        suffix = f":{self.evict_options}" if self.evict_options else ""
        text = f"{self.evict}{suffix}"
        if self.evict in _prefetch:
            text += f"+{NO_PREFETCH}"
        return PolicySpec(text, self.evict, NO_PREFETCH, self.evict_options)

    def build(self, shape: Shape) -> tuple[RetentionPolicy, Prefetcher]:
        """Fresh instances; halves of one name and the same options share what they have learned."""
        keeper, fetcher = _make(_keeper(self.evict), shape, self.evict_options), _fetcher(self.prefetch)
        if (self.evict, self.evict_options) == (self.prefetch, self.prefetch_options):
            return keeper, fetcher.beside(keeper)
        return keeper, _make(fetcher, shape, self.prefetch_options)


def parse(text: str) -> PolicySpec:
    """Resolve a policy as typed. InputError for an unknown name (near ones are offered) or option."""
    kept, plus, fetched = text.strip().partition("+")
    evict, evict_options = user_file.divide(kept)
    _options(_keeper(evict), evict_options)
    if not plus:
        both = evict in _prefetch
        return PolicySpec(
            text.strip(), evict, evict if both else NO_PREFETCH, evict_options, evict_options if both else ""
        )
    prefetch, prefetch_options = user_file.divide(fetched)
    _options(_fetcher(prefetch), prefetch_options)
    return PolicySpec(text.strip(), evict, prefetch, evict_options, prefetch_options)


def _keeper(name: str) -> type[RetentionPolicy]:
    """The retention policy of that name, or in that file."""
    _load()
    cls = user_file.load(name) if user_file.is_in_a_file(name) else _retention.get(name) or _prefetch.get(name)
    if cls is None:
        raise unknown("policy", name, _retention)
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


def _options(cls: type[Listener], text: str) -> dict[str, Any]:
    """The options of a policy, `key=value` pairs between colons over the defaults, each of its default's type."""
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
            raise (
                unknown(f"option of {cls.name}", key, fields) if fields else InputError(f"{cls.name} has no options")
            )
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
