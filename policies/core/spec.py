"""A policy, parsed once: what it keeps, fetches early, computes where, and what shares the slots, with their options.

`parse` takes text (`policies.core.grammar`), a class or a spec. `lru` is retention alone, `lru+eamc` a pair, `eamc` (a
name that stands for both) the pair of its two halves; a preset (`policies.core.systems`) stands for all of it. A spec
keeps the text that it was made from, for results to show; two specs are equal if they decide alike.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

from policies.core import dispatch, guard, registry, user_file
from policies.core.admission import ADMISSIONS, Admission, Always, Own, Score
from policies.core.bent import RULES, Rule
from policies.core.grammar import Expression, Term, file_and_class, read, read_term, value_text
from policies.core.per_layer import PerLayer
from policies.core.placement import PLACEMENTS, Admitted, Fetch, Placement
from policies.core.policy import Int, Listener, Policy, Prefetcher, ScorePolicy, Shape
from policies.core.scope import Global, Scope
from traces.errors import InputError, unknown

HALVES = ("evict", "prefetch")
PARTS = (*HALVES, *registry.OTHERS)

SEED = "seed"
"""An option of that name is an int but no quantity: no value is better than another."""


@dataclass(frozen=True)
class Part:
    """An eviction policy, a prefetcher, a scope, a placement or an admission: its class and its options.

    name: as it is written: registered, `my_file.py:MyPolicy`, or the class's own. Another process imports the class
    again; that of a user's file it loads by the name.
    stated: the options that were given, also those given as they are by default: a run's seed changes only a seed that
    was not, and a search only options that were not.
    """

    cls: type[Any]
    options: Any = field(hash=False)
    name: str = field(compare=False)
    stated: frozenset[str] = field(default=frozenset(), compare=False)

    @classmethod
    def of(cls, policy: type[Listener | Scope | Placement | Admission], /, **options: Any) -> "Part":
        """Return a class with these options over its defaults. Raise InputError for an option that it has not."""
        return cls(policy, _options(policy, options.items()), policy.name, frozenset(options))

    @property
    def values(self) -> dict[str, Any]:
        declared = dataclasses.fields(self.options) if dataclasses.is_dataclass(self.options) else ()
        return {option.name: getattr(self.options, option.name) for option in declared}

    @property
    def term(self) -> Term:
        """The canonical text: the options that were stated or differ from the defaults."""
        default = Part.of(self.cls).values
        written = ((key, value) for key, value in self.values.items() if key in self.stated or value != default[key])
        return Term(self.name, tuple((key, value_text(value)) for key, value in written))

    @property
    def importable(self) -> bool:
        """Whether another process finds the class: one that a notebook or a function defines is here alone."""
        own = self.cls.__module__ == "__main__" or "<locals>" in self.cls.__qualname__
        return bool(file_and_class(self.name)) or not (own or self.cls.__module__.startswith(user_file.MODULE))

    def having(self, options: Mapping[str, Any]) -> "Part":
        """Return the same class with these options changed. Raise InputError for what it refuses."""
        changed = _options(self.cls, {**self.values, **options}.items())
        return replace(self, options=changed, stated=self.stated | options.keys())

    def build(self, shape: Shape, guarded: bool = True) -> Any:
        """Return a fresh instance with options of its own, guarded if it is a user's (`policies.core.guard`)."""
        return guard.built(self.cls, lambda: self.cls(shape, copy(self.options)), shape, guarded)

    def __reduce__(self) -> tuple[Any, ...]:
        if file_and_class(self.name):
            return _read_again, (Term(self.name, tuple(self.values.items())), self.stated)
        return Part, (self.cls, self.options, self.name, self.stated)


Half = str | type[Listener | Scope | Placement | Admission] | Part


@dataclass(frozen=True)
class Option:
    """One option of a policy.

    It goes by its own name, or by `evict.NAME` and `prefetch.NAME` where both halves of a pair declare it. Of a
    preset, and of halves that share what they learn, it is one option that all parts take that declare it.
    """

    name: str
    key: str  # as declared
    parts: tuple[str, ...]  # of `PARTS`, that take it
    stated: bool  # typed, not a default


@dataclass(frozen=True)
class PolicySpec:
    """Retention, prefetcher, scope, placement and admission, with which options. Cheap to send about."""

    evict: Part
    prefetch: Part
    scope: Part
    placement: Part
    admission: Part
    typed: Expression = field(compare=False)
    preset: str | None = field(default=None, compare=False)  # by whose name it was typed

    @classmethod
    def of(
        cls,
        evict: Half,
        prefetch: Half = "none",
        scope: Half = "global",
        placement: Half = "fetch",
        admission: Half = "always",
    ) -> "PolicySpec":
        """Return the policy of these parts, each a name with options, a class, or a `Part`. Raise InputError.

        A name stands for one half here: `of("eamc")` fetches nothing early.
        """
        return cls._canonical(*map(_part, (evict, prefetch, scope, placement, admission), PARTS))

    @classmethod
    def _canonical(cls, evict: Part, prefetch: Part, scope: Part, placement: Part, admission: Part) -> "PolicySpec":
        one = _alike(evict, prefetch) if registry.is_pair(evict.name) else prefetch == NO_PREFETCH
        both = replace(evict, stated=evict.stated | prefetch.stated)
        halves = (both.term,) if one else (evict.term, prefetch.term)
        others = zip((scope, placement, admission), DEFAULTS.values(), strict=True)
        typed = (None if part == default else part.term for part, default in others)
        return cls(evict, prefetch, scope, placement, admission, Expression(halves, *typed))

    @property
    def _others(self) -> tuple[Part, Part, Part]:
        return self.scope, self.placement, self.admission

    @property
    def text(self) -> str:
        """Return the text as given, and as results show it."""
        return str(self.typed)

    def __str__(self) -> str:
        """Return the canonical text, which `parse` makes an equal policy of."""
        return self._canonical(self.evict, self.prefetch, *self._others).text

    @property
    def oracle(self) -> bool:
        return bool(self.evict.cls.oracle or self.prefetch.cls.oracle)

    @property
    def prefetches(self) -> bool:
        return self.prefetch != NO_PREFETCH

    @property
    def needs_lookahead(self) -> bool:
        """Whether it runs only traces that hold the column `lookahead`."""
        return bool(self.prefetch.cls.needs_lookahead)

    @property
    def compiled(self) -> bool:
        """Whether it runs without Python: all that both halves decide is compiled."""
        return dispatch.is_compiled(self.evict.cls) and dispatch.is_compiled(self.prefetch.cls)

    @property
    def learns_from_events_alone(self) -> bool:
        """Whether what it learns is the same whatever its cache holds, so that caches of all sizes may share it."""
        cls = self.evict.cls
        counts = any(dispatch.hooks(cls.declared(self.evict.options)))
        return issubclass(cls, ScorePolicy) and (self.learns_apart or not (cls.observes and counts))

    @property
    def learns_apart(self) -> bool:
        """Whether it learns from events apart from what it does for one cache (`Compiled.learn`)."""
        declared = self.evict.cls.compiled
        return self.shares and declared is not None and declared.learn is not None

    @property
    def shares(self) -> bool:
        """Whether its halves have one name and the same options, and so share what they learn."""
        return _alike(self.evict, self.prefetch)

    @property
    def importable(self) -> bool:
        return self.evict.importable and self.prefetch.importable

    @property
    def files(self) -> dict[str, str | None]:
        """The content of each file of a user's own that it was read from, as a digest, by the half's name."""
        own = (half for half in (self.evict, self.prefetch) if file_and_class(half.name))
        return {half.name: user_file.content(half.cls) for half in own}

    @property
    def uses_host(self) -> bool:
        """Whether its placement may have the host compute misses (rule 13)."""
        return self.placement.cls is not Fetch

    @property
    def admits(self) -> Admission | None:
        """How it decides which misses are admitted (rule 21); None: always."""
        if self.admission == ADMITTED:
            return None
        cls: type[Admission] = self.admission.cls
        return cls(self.admission.options, self.placement.cls is Admitted)

    @property
    def seed(self) -> int | None:
        """The option of that name, of a policy that draws."""
        return next((half.values[SEED] for half in (self.evict, self.prefetch) if SEED in half.values), None)

    def resolved(self) -> dict[str, Any]:
        """Return both halves, the scope, the placement and the admission, if any, with every option resolved."""
        parts = ((name, getattr(self, name)) for name in (PARTS if self.admits else PARTS[:-1]))
        return {name: {"name": part.cls.name, **part.values} for name, part in parts}

    def options(self) -> dict[str, Any]:
        """Return what is resolved, and the preset's name if it was typed by one."""
        return {**({"preset": self.preset} if self.preset else {}), **self.resolved()}

    def declared(self) -> list[Option]:
        """Return all options of both halves, of a preset of all parts that it names, in the order of declaration."""
        stated = [{key for key, _ in half.options} for half in self.typed.halves]
        groups, both = [([half], typed) for half, typed in zip(HALVES, stated, strict=False)], set[str]()
        if self._as_one:  # what is typed beside a preset is no part of it
            own = [part for part in registry.OTHERS if self.preset and not getattr(self.typed, part)]
            groups = [(["prefetch", "evict", *own], set().union(*stated))]
        else:
            both = self.evict.values.keys() & self.prefetch.values.keys()
        options = []
        for parts, typed in groups:
            for key in dict.fromkeys(key for part in parts for key in getattr(self, part).values):
                takers = tuple(part for part in parts if key in getattr(self, part).values)
                options.append(Option(f"{parts[0]}.{key}" if key in both else key, key, takers, key in typed))
        return options

    @property
    def _as_one(self) -> bool:
        """Whether an option is given to all halves as given."""
        return len(self.typed.halves) == 1 or self.shares

    def with_options(self, values: Mapping[str, Any]) -> "PolicySpec":
        """Return the same policy with options of these values, as it would be typed. Raise InputError."""
        known = {option.name: option for option in self.declared()}
        halves, changed = list(self.typed.halves), dict[str, dict[str, Any]]()
        for name, value in values.items():
            if name not in known:
                raise unknown(f"option of {self.preset or self.text}", name, known)
            option = known[name]
            for part in option.parts:
                changed.setdefault(part, {})[option.key] = value
            for place in range(len(halves)) if self._as_one else map(HALVES.index, option.parts):
                halves[place] = halves[place].having(option.key, value)
        parts = {part: getattr(self, part).having(options) for part, options in changed.items()}
        return replace(self, **parts, typed=replace(self.typed, halves=tuple(halves)))

    def without_prefetch(self) -> "PolicySpec":
        """Return the same retention in the same scope with nothing fetched early: coverage is measured against it."""
        return self._canonical(self.evict, NO_PREFETCH, *self._others)

    def with_part(self, kind: str, text: str | None) -> "PolicySpec":
        """Return the same policy with this scope or admission, with options, unless it, or its preset, names one.

        text: None leaves it as it is. Raise InputError.
        """
        default = DEFAULTS[kind]
        term: Any = read_term(text or default.name)
        part: Any = _part(term, kind)
        if getattr(self.typed, kind) or getattr(self, kind) != default or part == default:
            return self
        return replace(self, **{kind: part}, typed=replace(self.typed, **{kind: term}))

    def divide(self, shape: Shape, room: int, sizes: Int | None = None) -> tuple[int, ...]:
        """Return the slots of each partition of a cache of `room` slots. Raise InputError where that cannot be.

        sizes: bytes of each expert, where layers differ; all are bytes then.
        """
        scope: Scope = self.scope.cls(self.scope.options)
        return scope.divide(shape, room, sizes)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Put the policy in front of each InputError that is raised inside, unless that names a user's file."""
        try:
            yield
        except guard.PolicyError:
            raise
        except InputError as error:
            raise InputError(f"{self.text}: {error}") from error

    def require(self, shape: Shape) -> None:
        """Raise InputError for a file that an option names and that is no good for this model, without an instance."""
        with self._named():
            keeper = self.evict.cls
            if self.admission.cls is Score and not issubclass(keeper, ScorePolicy):
                raise InputError(f"the admission score needs keep scores, and {keeper.name} names its victims")
            if self.admission.cls is Own and keeper.admit is Policy.admit:
                raise InputError(f"the admission own needs a method `admit`, and {keeper.name} has none")
            for half in (self.evict, self.prefetch):
                guard.guarded(half.cls, "require", half.cls.require)(half.options, shape)

    def build(self, shape: Shape, guarded: bool = True) -> tuple[Policy, Prefetcher]:
        """Return fresh instances; halves of one name and the same options share what they have learned.

        guarded: those of a user's own classes are (`policies.core.guard`).

        In a scope of layers an eviction policy that is no score is one instance for each, so it shares nothing.
        Raise InputError where one cannot be made, such as without the file that it reads.
        """
        with self._named():
            keeper: Policy = self.evict.build(shape, guarded)
            if self.scope.cls.per_layer and not isinstance(keeper, ScorePolicy):
                others = [self.evict.build(shape, guarded) for _ in range(1, shape.layers)]
                return PerLayer(keeper, others), self.prefetch.build(shape, guarded)
            if not self.shares:
                return keeper, self.prefetch.build(shape, guarded)
            cls = self.prefetch.cls
            return keeper, guard.built(cls, lambda: cls.beside(keeper), shape, guarded)


PolicyLike = str | type[Listener] | Part | PolicySpec
"""What `parse` makes a policy of."""

NO_PREFETCH = Part(registry.NoPrefetch, registry.NoPrefetch.Options(), registry.NoPrefetch.name)
GLOBAL = Part(Global, Global.Options(), Global.name)
FETCHED = Part(Fetch, Fetch.Options(), Fetch.name)
ADMITTED = Part(Always, Always.Options(), Always.name)
DEFAULTS = dict(zip(registry.OTHERS, (GLOBAL, FETCHED, ADMITTED), strict=True))


def parse(policy: PolicyLike) -> PolicySpec:
    """Return the policy that a text, an eviction policy's class or a spec says. InputError for an unknown name."""
    if isinstance(policy, str):
        return _read(policy)
    return policy if isinstance(policy, PolicySpec) else PolicySpec.of(policy)


def read_rule(text: str) -> Rule:
    """Return the rule that bends routing which a text says, `drop:below=0.1`. Raise InputError."""
    term = read_term(text)
    if term.name not in RULES:
        raise unknown("routing", term.name, RULES)
    return RULES[term.name](_options(RULES[term.name], term.options), text)


def make_policy(policy: PolicyLike, *, prefetch: Half | None = None, **options: Any) -> PolicySpec:
    """Return a policy with other options than its defaults, or with a prefetcher beside it.

    policy: a name such as "eamc", a class, or a policy. prefetch: a name such as "popular:n=2", or a class.
    `make_policy(Mine, prefetch="popular", alpha=0.9)` is Mine with its option alpha, beside the prefetcher.

    Raises InputError for an unknown name or option.
    """
    spec = parse(policy).with_options(options)
    return spec if prefetch is None else PolicySpec.of(spec.evict, prefetch, *spec._others)


def text_of(policy: PolicyLike) -> str:
    """Return what results call a policy; text stays as it is."""
    return policy if isinstance(policy, str) else make_policy(policy).text


def _read(text: str) -> PolicySpec:
    typed = read(text, PLACEMENTS, ADMISSIONS)
    kept, *fetched = typed.halves
    for term in filter(None, (*typed.halves, typed.scope, typed.placement, typed.admission)):
        for key, times in Counter(key for key, _ in term.options).items():
            if times > 1:
                raise InputError(f"option {key} of {term.name} is given twice: {text}")
    others: dict[str, Any] = {kind: _part(term, kind) for kind in registry.OTHERS if (term := getattr(typed, kind))}
    if preset := registry.preset(kept.name):
        if fetched:
            raise InputError(f"{kept.name} is a preset and stands for {preset.policy}: write that to change a half")
        named = replace(typed, halves=(Term(kept.name),))
        spec = replace(_read(preset.policy), **others, typed=named, preset=preset.name)
        return spec.with_options(dict(kept.options))
    evict = _part(kept, "evict")
    if not fetched:
        fetched = [kept] if registry.is_pair(kept.name) else [NO_PREFETCH.term]
    others = {**DEFAULTS, **others}
    return PolicySpec(evict, _part(fetched[0], "prefetch"), **others, typed=typed)


def _part(half: Any, kind: str) -> Part:
    """Return a part of this kind from a term, a class or a part. Raise InputError for one of the other half."""
    if isinstance(half, Part):
        registry.find(kind, half.cls)
        return half
    if isinstance(half, type):
        part = Part.of(registry.find(kind, half))
        same = [table[part.name] for table in registry.tables() if part.name in table]
        if registry.preset(part.name) or (same and part.cls not in same):
            raise InputError(f"there is another policy called {part.name}: give the class another name")
        return part
    term = read_term(half) if isinstance(half, str) else half
    if not isinstance(term, Term):
        raise InputError(f"{term!r} is not a policy: use a name such as 'lru', a class, or what make_policy returns")
    cls = registry.find(kind, term.name)
    return Part(cls, _options(cls, term.options), term.name, frozenset(key for key, _ in term.options))


def _read_again(term: Term, stated: frozenset[str]) -> Part:
    """Return a user's half in another process; without content where it is gone (`PolicySpec.files` tells)."""
    try:
        cls = user_file.load(term.name)
        return Part(cls, _options(cls, term.options), term.name, stated)
    except InputError:
        return Part(Listener, Listener.Options(), term.name)


def _alike(evict: Part, prefetch: Part) -> bool:
    return evict.name == prefetch.name and evict.values == prefetch.values


def _options(cls: type[Listener | Scope | Placement | Admission | Rule], values: Iterable[tuple[str, Any]] = ()) -> Any:
    """Return the options of a class: its defaults and over them `values`, or their text. Raise InputError."""
    return guard.guarded(cls, "Options", _chosen)(cls, values)


def _chosen(cls: type[Listener | Scope | Placement | Admission | Rule], values: Iterable[tuple[str, Any]]) -> Any:
    declared = dataclasses.fields(cls.Options) if dataclasses.is_dataclass(cls.Options) else ()
    defaults = {option.name: option.default for option in declared}
    chosen = {}
    for key, value in values:
        if key not in defaults:
            raise unknown(f"option of {cls.name}", key, defaults)
        try:
            chosen[key] = _like(defaults[key], value)
        except ValueError:
            kind = type(defaults[key]).__name__
            example = f"{key}={defaults[key]}"
            raise InputError(f"option {key} of {cls.name} needs a value of type {kind}, as in {example}") from None
    return cls.Options(**chosen)


def _like(default: Any, value: Any) -> Any:
    """Return what `value`, or its text, is as the default's type. Raise ValueError where it is no such value."""
    if value is None or (isinstance(default, bool) and str(value).lower() not in ("true", "false")):
        raise ValueError(value)
    typed = str(value).lower() == "true" if isinstance(default, bool) else type(default)(str(value))
    if isinstance(typed, int) and not -(1 << 63) <= typed < 1 << 63:  # compiled code cannot take it
        raise ValueError(value)
    return typed
