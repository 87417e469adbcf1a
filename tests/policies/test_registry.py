import re
from pathlib import Path

import pytest

from policies.core import registry
from policies.core.catalog import available
from policies.core.policy import Policy, ScorePolicy, Shape
from policies.core.spec import parse
from policies.core.systems import presets
from policies.eamc.eamc import EamcPrefetcher, EamcRetention
from policies.retention.belady import Belady
from traces import InputError


def test_a_pair_name_stands_for_both_of_its_halves():
    spec = parse("eamc")
    assert (spec.evict.name, spec.prefetch.name) == ("eamc", "eamc")
    assert spec.options()["evict"] == spec.options()["prefetch"]
    assert spec.options()["evict"].items() >= {"name": "eamc", "capacity": 120, "eps": 1e-8}.items()
    keeper, prefetcher = spec.build(Shape(2, 4))
    assert isinstance(keeper, EamcRetention)
    assert isinstance(prefetcher, EamcPrefetcher)
    assert prefetcher.predictor is keeper.predictor


@pytest.mark.parametrize(("typed", "alone"), [("lru", "lru"), ("eamc:capacity=3", "eamc:capacity=3+none")])
def test_coverage_is_measured_against_the_same_retention_alone(typed, alone):
    spec = parse(typed).without_prefetch()
    assert spec.text == alone
    assert parse(spec.text) == spec


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("lrru", "did you mean lru"),
        ("popular", "lru+popular"),
        ("lru+fifo", "cannot stand after"),
        ("eamc:capacty=3", "did you mean capacity"),
        ("lru:k=2", "unknown option of lru 'k'; there are none"),
    ],
)
def test_a_wrong_name_or_option_is_one_line_that_helps(typed, says):
    with pytest.raises(InputError, match=says.replace("+", r"\+")) as caught:
        parse(typed)
    assert "\n" not in str(caught.value)


def test_every_policy_is_listed_with_its_summary_and_oracles_are_marked():
    listed = {info.name: info for info in available()}
    assert {"lru", "lfu", "fifo", "eamc", "belady", "none", "popular", "oracle1"} <= listed.keys()
    assert all(info.summary.endswith(".") for info in listed.values()), "a sentence each"
    oracles = {"belady", "foresight", "oracle1", "oracle", "fewest-reads", "lookahead", "pre-gated"}
    assert {name for name, info in listed.items() if info.oracle} == oracles
    assert listed["eamc"].kind == "pair"
    assert parse("belady").oracle
    assert parse("lru+oracle1").oracle
    assert not parse("eamc").oracle


@pytest.mark.parametrize(("kind", "name"), [("retention", "lru"), ("prefetcher", "lru"), ("retention", "fiddler")])
def test_a_file_cannot_give_its_policy_the_name_of_another(kind, name, tmp_path):
    base = {"retention": "ScorePolicy", "prefetcher": "Prefetcher"}[kind]
    imports = f"from policies.core.policy import {base}\nfrom policies.core.registry import {kind}\n"
    before = parse("lru")
    (tmp_path / "mine.py").write_text(f"{imports}@{kind}({name!r})\nclass Mine({base}):\n    pass\n")
    with pytest.raises(InputError, match=f"mine.py:3: cannot be imported: .*'{name}' names a policy of .*mine.py and "):
        parse(f"{tmp_path / 'mine.py'}:Mine")
    assert parse("lru") == before


@pytest.mark.parametrize("cls", [type("Derived", (Belady,), {}), type("Says", (ScorePolicy,), {"oracle": True})])
def test_a_registered_class_that_sees_the_future_is_an_oracle(cls, monkeypatch):
    monkeypatch.setattr(registry, "_retention", dict(registry.tables()[0]))
    registry.retention("sees-all")(cls)
    assert parse("sees-all").oracle


README = (Path(__file__).parents[2] / "policies/README.md").read_text(encoding="utf-8")


def test_the_readme_lists_every_policy_of_each_kind_and_every_preset() -> None:
    listed = {
        kind: {name.partition(":")[0] for name in re.findall(r"`([^` ]+)`", names)}
        for kind, names in re.findall(r"^\| (pairs|eviction|prefetch) \| (.*) \|$", README, re.MULTILINE)
    }
    names = {cls.name: issubclass(cls, Policy) for cls in registry.built_in()}
    pairs = {name for name in names if registry.is_pair(name)}
    assert listed["pairs"] == pairs
    assert listed["eviction"] == {name for name, keeps in names.items() if keeps} - pairs
    assert listed["prefetch"] == {name for name, keeps in names.items() if not keeps} - pairs
    section = README.partition("## Presets\n")[2].partition("\n## ")[0]
    assert {preset.name for preset in presets()} <= set(re.findall(r"`([^` ]+)`", section))
