"""What a sweep is asked to do, from flags or a TOML file: lists of traces, policies, cache sizes, machines and seeds.

An option of a policy may list alternatives between bars, `eamc:capacity=100|300:matches=1|2`: each combination is a
policy of its own. Seeds are for the policies that draw; others are run once. The number of cells is known before
any is made.
"""

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from policies.core.grammar import alternatives, count_alternatives
from policies.core.spec import SEED, Policy, PolicySpec, parse
from sim import profiles
from sim.quantities import parse_bytes
from sim.results.provenance import commit
from sim.sweeps.setup import CLOSED, Setup
from traces.errors import InputError, located, unknown
from traces.files import read_toml
from traces.location import absolute
from traces.output import replacing

NAME = "sweep.toml"


@dataclass(frozen=True)
class Config:
    """A sweep's grid, and what holds for all of its cells; InputError for a value that it cannot have."""

    traces: tuple[str, ...]
    policies: tuple[str, ...]
    cache_sizes: tuple[str, ...]
    hardware: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)
    scope: str | None = None
    model_profile: str | None = None
    requests: int | None = None
    warmup_requests: int = 0
    as_decode: bool = False
    cold: bool = False
    untimed: bool = False
    chunk_bytes: int | None = None
    predictor_us: float | None = None
    host_memory: str | None = None
    expert_sizes: str | None = None
    max_batch: tuple[int, ...] = ()
    arrivals: str = CLOSED
    arrival_rate: float | None = None
    engine: str = "auto"

    def __post_init__(self) -> None:
        for name, example in _EXAMPLES.items():
            if not getattr(self, name):
                raise InputError(f"`{name}` is empty: {example}")
        profiles.check(self, _LIMITS)

    @property
    def cells(self) -> int:
        """How many there are at most, counted without making them."""
        policies = sum(map(count_alternatives, self.policies))
        setups = len(self.traces) * len(self.machines) * max(1, len(self.max_batch))
        return policies * len(self.cache_sizes) * setups * len(self.seeds)

    @property
    def machines(self) -> tuple[str, ...]:
        """Hardware that makes a difference, each once: untimed, none does."""
        return self.hardware[:1] if self.untimed else tuple(dict.fromkeys(self.hardware))

    def specs(self) -> list[PolicySpec]:
        """The policies, each once, in the order of the rows. InputError for one that there is not."""
        return specs(self.policies, self.scope, self.seeds)

    @property
    def seeds_count(self) -> bool:
        """Whether a policy draws from the seeds: one that draws, and names none of its own."""
        with_0, with_1 = (specs(self.policies, self.scope, (seed,)) for seed in (0, 1))
        return [each.text for each in with_0] != [each.text for each in with_1]

    def setups(self) -> Iterator[Setup]:
        """One for each trace, machine and number of users."""
        own = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(Setup) if hasattr(self, field.name)
        }
        batches = dict.fromkeys(self.max_batch) or (None,)
        for trace, machine, batch in itertools.product(dict.fromkeys(self.traces), self.machines, batches):
            yield Setup(**{**own, "trace": trace, "hardware": machine, "max_batch": batch})

    def resolved(self) -> "Config":
        """The same with paths that hold wherever one stands."""
        return dataclasses.replace(
            self,
            traces=tuple(map(absolute, self.traces)),
            hardware=tuple(profiles.absolute("hardware", machine) for machine in self.machines),
            model_profile=None if self.model_profile is None else profiles.absolute("models", self.model_profile),
            expert_sizes=self.expert_sizes and absolute(self.expert_sizes),
        )

    def write(self, path: Path) -> None:
        """As a file that `--config` takes, whole or not at all; what policies resolve to stands in comments."""
        import tomli_w  # not at the top: a GPU machine, which writes none, may lack it

        values = {key: value for key, value in dataclasses.asdict(self).items() if value is not None}
        text = [
            "# `moe-sim sweep --config THIS` runs the same again; paths of policies are as given in",
            f"# {Path.cwd()} at commit {commit()}. The policies, resolved:",
        ]
        text += [f"# {spec.text} = {json.dumps(spec.options(), default=str)}" for spec in self.specs()]
        with replacing(path) as file:
            file.write_text("\n".join(text) + "\n\n" + tomli_w.dumps(values), encoding="utf-8")


def specs(policies: Sequence[Policy], scope: str | None, seeds: Sequence[int] = (0,)) -> list[PolicySpec]:
    """Return all policies, each once; `scope` is of those that name none.

    Raise InputError for one that there is not, and for two that results would call the same.
    """
    named: dict[str, PolicySpec] = {}
    found = (
        seeded(parse(each) if scope is None else parse(each).within(scope), seed)
        for policy in policies
        for each in (alternatives(policy) if isinstance(policy, str) else [policy])
        for seed in seeds
    )
    for spec in found:
        same = named.setdefault(spec.text, spec)
        if (same.evict.cls, same.prefetch.cls) != (spec.evict.cls, spec.prefetch.cls):
            raise InputError(f"two different policies are called {spec.text}: give one of the classes another name")
    return list(named.values())


def seeded(policy: PolicySpec, seed: int) -> PolicySpec:
    """The same policy drawing from `seed`; itself if it draws nothing, or names a seed."""
    return policy.with_options({o.name: seed for o in policy.declared() if o.key == SEED and not o.stated})


def read(path: Path) -> dict[str, Any]:
    """The values of a TOML file, each checked as an option would be. InputError naming file, key and value."""
    values, kinds = read_toml(path), get_type_hints(Config)
    with located(str(path)):
        if isinstance(text := values.get("chunk_bytes"), str):
            values["chunk_bytes"] = parse_bytes(text, "chunk_bytes =")
        for key, value in values.items():
            if key not in kinds:
                raise unknown("key", key, kinds)
            if key in _EXAMPLES and value == []:
                raise InputError(f"{key} = []: {_EXAMPLES[key]}")
        return {key: profiles.checked(key, value, kinds[key], **_LIMITS.get(key, {})) for key, value in values.items()}


_LIMITS: dict[str, Mapping[str, Any]] = {field.name: field.metadata for field in dataclasses.fields(Setup)}
_LIMITS["seeds"] = _LIMITS["seed"]
"""What values may be: as in `Setup`, of lists each one."""

_EXAMPLES = {
    "traces": "name the folder of one",
    "policies": "use lru,eamc (moe-sim policies lists them)",
    "cache_sizes": "use 10%,25% or 64 or 8GiB",
    "hardware": "use a5000 (moe-sim hardware lists them)",
    "seeds": "use 1,2,3",
}
"""What a sweep needs at least one of, and how to write it."""
