"""Policies as objects: what is written is read back, and classes stand wherever names do."""

import math
import pickle
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.core import registry
from policies.core.grammar import Expression, Term, pieces, read, split_size
from policies.core.policy import Prefetcher, ScorePolicy, Shape
from policies.core.scope import SCOPES
from policies.core.spec import Part, PolicySpec, make_policy, parse, text_of
from sim.sweeps.config import seeded
from traces import InputError


@dataclass(frozen=True)
class MyOptions:
    alpha: float = 0.5
    seed: int = 0


class MyPolicy(ScorePolicy):
    """LRU, more or less."""

    Options = MyOptions
    options: MyOptions

    def observe(self, event):
        self.keep[0, event.experts] = event.serial * self.options.alpha


class MyPrefetch(Prefetcher):
    """Fetches expert 0 of every layer."""

    def propose(self, event):
        return np.array([event.layer * self.shape.experts]), np.ones(1)


KEEPERS, FETCHERS = registry.tables()
NUMBERS = {
    bool: st.booleans(),
    int: st.integers(-5, 10**6),
    float: st.floats(-2, 1e18) | st.sampled_from([math.inf, -math.inf, 1e-8]),
    str: st.text("abc/._-= xyz", max_size=9).map(str.strip) | st.sampled_from(["rows", "flat", "ratio", "request"]),
}


@st.composite
def parts(draw, cls) -> Part:
    """A class with any options that it accepts, and its defaults for those that it refuses."""
    made = Part.of(cls)
    for key, value in made.values.items():
        if draw(st.booleans()):
            try:
                made = made.having({key: draw(NUMBERS[type(value)])})
            except InputError:
                continue
    return made


@st.composite
def specs(draw) -> PolicySpec:
    keeper, fetcher = (draw(parts(draw(st.sampled_from(list(table.values()))))) for table in (KEEPERS, FETCHERS))
    if draw(st.booleans()) and keeper.name in FETCHERS:  # both halves of a pair, alike
        fetcher = Part.of(FETCHERS[keeper.name], **keeper.values)
    return PolicySpec.of(keeper, fetcher, draw(parts(draw(st.sampled_from(list(SCOPES.values()))))))


@given(specs())
def test_what_is_written_is_read_back_as_an_equal_policy(spec):
    again = parse(str(spec))
    assert again == spec
    assert hash(again) == hash(spec)
    assert again.text == str(again) == str(spec) == spec.text
    assert again.resolved() == spec.resolved()
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert parse(spec) is spec


names = st.text("ab-/", min_size=1, max_size=4)
options = st.lists(st.tuples(st.text("ab", min_size=1), st.none() | st.text("x1=|./"))).map(tuple)
terms = st.builds(Term, names | names.map("{}.py:Mine".format), options)


halves = st.lists(terms, min_size=1, max_size=2).map(tuple)


@given(st.builds(Expression, halves, st.none() | st.builds(Term, names, options)))
def test_what_is_written_is_read_back_as_the_same_expression(expression):
    assert read(str(expression)) == expression
    assert "".join(pieces(str(expression))) == str(expression)


@given(specs(), st.sampled_from(["", "25%", "8GiB", "64"]))
def test_a_cell_is_a_policy_and_a_size(spec, size):
    assert split_size(f"{spec}@{size}" if size else str(spec), SCOPES) == (str(spec), size)


def test_equal_policies_decide_alike_whatever_was_typed():
    assert parse("eamc:capacity=120") == parse("eamc") == parse("eamc+eamc") != parse("eamc:capacity=121")
    assert parse("lru+none@global") == parse("lru") != parse("lru@layer")
    assert parse("pre-gated") == parse("fifo+oracle:horizon=1")
    assert str(parse("pre-gated:horizon=2@layer")) == "fifo+oracle:horizon=2@layer"
    assert parse("eamc:capacity=120").text == "eamc:capacity=120"
    assert str(parse("eamc+eamc:capacity=120")) == "eamc:capacity=120"
    assert str(PolicySpec.of("eamc")) == "eamc+none"


@pytest.mark.parametrize(
    "spec",
    [
        make_policy("random:seed=0", prefetch="popular"),
        make_policy(MyPolicy, seed=0, prefetch="popular"),
        PolicySpec.of(Part.of(MyPolicy, seed=0), MyPrefetch),
        parse("random:seed=0+popular").without_prefetch(),
        pickle.loads(pickle.dumps(parse(str(parse("random:seed=0"))))),
    ],
    ids=str,
)
def test_an_option_that_is_given_as_it_is_by_default_is_stated(spec):
    assert "seed=0" in spec.text
    assert [option.name for option in spec.declared() if option.stated] == ["seed"]
    assert seeded(spec, 7).seed == 0


def test_a_class_is_a_policy_wherever_a_name_is():
    spec = make_policy(MyPolicy, alpha=0.9)
    assert (spec.text, text_of(MyPolicy)) == ("MyPolicy:alpha=0.9", "MyPolicy")
    assert spec.options()["evict"] == {"name": "MyPolicy", "alpha": 0.9, "seed": 0}
    assert spec == parse(Part.of(MyPolicy, alpha=0.9)) == pickle.loads(pickle.dumps(spec))
    keeper, _ = spec.build(Shape(2, 4))
    assert isinstance(keeper, MyPolicy)
    assert (type(keeper), keeper.options.alpha) == (MyPolicy, 0.9)
    pair = PolicySpec.of(Part.of(MyPolicy, seed=3), MyPrefetch, "layer")
    assert (pair.text, pair.seed) == ("MyPolicy:seed=3+MyPrefetch@layer", 3)
    assert pair.without_prefetch() == PolicySpec.of(Part.of(MyPolicy, seed=3), scope="layer")
    assert pair.with_options({"alpha": 0.25}).text == "MyPolicy:seed=3:alpha=0.25+MyPrefetch@layer"
    assert PolicySpec.of("lru", MyPrefetch).text == "lru+MyPrefetch"
    assert parse(KEEPERS["lru"]) == parse("lru")
    assert make_policy("eamc", capacity=7).text == "eamc:capacity=7"


def test_a_class_that_only_this_process_knows_says_so():
    class Local(MyPolicy):
        pass

    assert parse(MyPolicy).importable
    assert not parse(Local).importable
    assert not PolicySpec.of("lru", type("Notebook", (MyPrefetch,), {"__module__": "__main__"})).importable


@pytest.mark.parametrize(
    "policy",
    ["lru", "eamc", "eamc-blend", "belady+oracle", "eamc+eamc:depth=1", "lru@layer"],
)
def test_a_class_alone_says_that_a_policy_is_compiled(policy):
    assert parse(policy).compiled


@pytest.mark.parametrize("policy", ["clock", "random@layer", "sieve+markov"])
def test_a_class_alone_says_that_it_is_not(policy):
    assert not parse(policy).compiled


@pytest.mark.parametrize("policy", ["static:profile=missing", "eamc:collection=missing"])
def test_a_file_that_an_option_names_is_required_without_an_instance(policy):
    spec = parse(policy if policy.startswith(("static", "eamc")) else f"lru+{policy}")
    with pytest.raises(InputError, match="missing"):
        spec.require(Shape(2, 4))
