"""A sweep is an experiment with axes: lists of traces, policies, cache sizes, machines, seeds and numbers of users.

Seeds are for the policies that draw; others are run once.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from policies.core.grammar import alternatives, split_list
from policies.core.spec import SEED, PolicyLike, PolicySpec, parse
from sim.defaults import CACHE_SIZES, HARDWARE, POLICIES
from sim.experiment import OPTIONS, Experiment, Natural, Positive, Text, from_file, resolve
from sim.results.files import write_toml
from sim.results.provenance import commit
from traces import demo_trace
from traces.errors import InputError, unknown
from traces.files import read_toml
from traces.typed import typed

NAME = "sweep.toml"

Texts = Annotated[tuple[Text, ...], Meta(min_length=1)]


@dataclass(frozen=True)
class Sweep:
    """A sweep's axes, and what holds for all of its cells: `shared`, but for what the axes say."""

    shared: Experiment
    traces: Texts
    policies: Texts
    cache_sizes: Texts
    hardware: Texts
    seeds: Annotated[tuple[Natural, ...], Meta(min_length=1)] = (0,)
    scope: Text | None = None
    admission: Text | None = None
    max_batch: tuple[Positive, ...] = ()

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str = "") -> "Sweep":
        """Return the sweep of options as users write them. Raise InputError, beginning with `where`, for bad ones."""
        for name in values:
            if name not in KEYS:
                raise unknown("key", name, KEYS, where)
        axes = DEFAULTS | {name: value for name, value in values.items() if name in AXES}
        others = {name: value for name, value in values.items() if name not in AXES}
        one = {"trace": str(demo_trace()), "max_batch": 1 if axes.get("max_batch") else None}
        shared = Experiment.of({**others, **one}, where)
        return typed(cls, {**axes, "shared": shared}, where)

    @property
    def machines(self) -> tuple[str, ...]:
        """Hardware that makes a difference, each once: untimed, none does."""
        return self.hardware[:1] if self.shared.untimed else tuple(dict.fromkeys(self.hardware))

    @cached_property
    def specs(self) -> list[PolicySpec]:
        """The policies, each once, in the order of the rows. Raise InputError for one that there is not."""
        return specs(self.policies, self.scope, self.seeds, self.admission)

    def experiments(self) -> Iterator[Experiment]:
        batches: Sequence[int | None] = tuple(dict.fromkeys(self.max_batch)) or (None,)
        for trace, machine, batch in itertools.product(dict.fromkeys(self.traces), self.machines, batches):
            yield replace(self.shared, trace=trace, hardware=machine, max_batch=batch)

    def write(self, path: Path) -> None:
        """Write a file that `--config` takes: paths hold wherever one stands, what policies resolve to is a comment."""
        stated = {name: getattr(self, name) for name in AXES} | {"hardware": self.machines}
        shared = self.shared.resolved()
        values = {name: stated.get(name, shared.get(name)) for name in KEYS}
        for name in ("traces", "hardware"):
            values[name] = [resolve(SAME.get(name, name), value) for value in stated[name]]
        text = [
            "# `moe-sim sweep --config THIS` runs the same again; paths of policies are as given in",
            f"# {Path.cwd()} at commit {commit()}. The policies, resolved:",
        ]
        text += [f"# {spec.text} = {json.dumps(spec.options(), default=str)}" for spec in self.specs]
        shown = {name: value for name, value in values.items() if value is not None}
        write_toml("\n".join(text) + "\n\n", shown, path)


DEFAULTS = {
    "traces": (str(demo_trace()),),
    "policies": split_list(POLICIES),
    "cache_sizes": split_list(CACHE_SIZES),
    "hardware": split_list(HARDWARE),
}

AXES = tuple(field.name for field in fields(Sweep) if field.name != "shared")

SAME = {"traces": "trace"}
"""Axes whose values are of an option of another name."""

KEYS = tuple(
    dict.fromkeys(
        [name for name in AXES if name != "max_batch"] + [name for name in OPTIONS if name not in ("trace", "seed")]
    )
)
"""All options of a sweep, in the order of its file."""


def read(file: Path, stated: Iterable[str], trust: bool) -> dict[str, Any]:
    """Return the options that a file states, but for those that a user has stated; see `from_file`. InputError."""
    values = {name: value for name, value in read_toml(file).items() if name not in stated}
    return {name: from_file(file, SAME.get(name, name), value, trust) for name, value in values.items()}


def specs(
    policies: Sequence[PolicyLike], scope: str | None, seeds: Sequence[int] = (0,), admission: str | None = None
) -> list[PolicySpec]:
    """Return all policies, each once; `scope` and `admission` are of those that name none.

    Raise InputError for one that there is not, and for two that results would call the same.
    """
    named: dict[str, PolicySpec] = {}
    for policy in policies:
        for each in alternatives(policy) if isinstance(policy, str) else [policy]:
            spec = parse(each).with_part("scope", scope).with_part("admission", admission)
            for drawn in (seeded(spec, seed) for seed in seeds):
                same = named.setdefault(drawn.text, drawn)
                if (same.evict.cls, same.prefetch.cls) != (drawn.evict.cls, drawn.prefetch.cls):
                    raise InputError(
                        f"two different policies are called {drawn.text}: give one of the classes another name"
                    )
    return list(named.values())


def seeded(policy: PolicyLike, seed: int) -> PolicySpec:
    """Return the policy drawing from `seed`; as it is if it draws nothing, or names a seed."""
    spec = parse(policy)
    return spec.with_options({o.name: seed for o in spec.declared() if o.key == SEED and not o.stated})
