"""New compiled built-ins take a file, a line and a name in a list each: policies/YOUR_OWN.md, followed in a copy."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WALK_THROUGH = (ROOT / "policies" / "YOUR_OWN.md").read_text(encoding="utf-8")
SECTION = WALK_THROUGH.partition("## For others")[2]
FILES = re.findall(r"This is `(policies/.*?\.py)`", SECTION)
LINES = re.findall(r'`("[\w.]+")` as its line in `BUILT_IN`', SECTION)
CODES = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
PLAIN = re.findall(r"Save this as `fading\.py`:\n\n```python\n(.*?)```", WALK_THROUGH, re.DOTALL)[0]

PLAYS = """
import numpy as np
from policies.checker import check_policy
from policies.core.policy import Shape
from policies.core.catalog import available
from policies.core.spec import parse
from sim.engines import compiled_engine, simpy_engine
from sim.loop.run import gpu_run
from sim.profiles.policy_overhead import cost_us
from sim.profiles.timing import FixedTiming, Link
from traces.synthetic import synthetic

found = next(info for info in available() if info.name == "again")
assert (found.kind, found.summary) == ("prefetch", "Fetch what the next layer used last time.")
trace = synthetic(requests=2, tokens=12, layers=3, experts=6, top_k=2, seed=4, prompt_tokens=3)
requests = [trace.steps(i) for i in range(2)]
assert parse("eamc+again").compiled
for policy in ("lru+again", "eamc+again:threshold=0.5", "belady+again:depth=1", "lru+again.py:Again"):
    assert parse(policy).compiled
    run = gpu_run(requests, Shape(3, 6), 5, parse(policy), FixedTiming(5, 2, 1, 1, 3), Link(1, 1, 2, 4))
    ours, theirs = compiled_engine.simulate(run), simpy_engine.simulate(run)
    assert ours.prefetch_used.any()
    for column in ("step_ns", "hits", "late", "misses", "prefetch_used", "prefetch_wasted", "evictions"):
        np.testing.assert_array_equal(getattr(ours, column), getattr(theirs, column))
times = FixedTiming(5, 2, 1, 1, 3), Link(1, 1, 2, 4)
for options in ("", ":alpha=0.9"):
    ours = compiled_engine.simulate(gpu_run(requests, Shape(3, 6), 5, parse(f"fading{options}+again"), *times))
    theirs = simpy_engine.simulate(gpu_run(requests, Shape(3, 6), 5, parse(f"fading.py:Fading{options}+again"), *times))
    assert ours.evictions.tolist() == theirs.evictions.tolist() != []
    assert ours.step_ns.tolist() == theirs.step_ns.tolist()
check_policy("lru+again").require()
assert cost_us(parse("lru+again"), 3, 6) is None
"""

ENUMERATE_BUILT_INS = (
    "tests/sim/test_kernel.py::test_every_score_policy_and_prefetcher_of_today_is_compiled",
    "tests/policies/test_limits.py::test_every_prefetcher_takes_every_limit",
    "tests/policies/test_registry.py",
)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The project with the file, the line and the name in README.md of the walk-through."""
    copy = tmp_path_factory.mktemp("copy")
    for package in ("benchmarks", "policies", "sim", "tests", "traces"):
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    assert len(FILES) == len(LINES) == len(CODES) == 2
    for file, code in zip(FILES, CODES, strict=True):
        (copy / file).write_text(code, encoding="utf-8")
    (copy / "fading.py").write_text(PLAIN, encoding="utf-8")
    (copy / "again.py").write_text("from policies.prefetch.again import Again as Base\nclass Again(Base): pass\n")
    registry = copy / "policies" / "core" / "registry.py"
    text = registry.read_text(encoding="utf-8")
    more = "".join(f"    {line},\n" for line in LINES)
    registry.write_text(re.sub(r"(BUILT_IN = \(.*?\n)\)", rf"\1{more})", text, count=1, flags=re.DOTALL))
    readme = copy / "policies" / "README.md"
    names = readme.read_text("utf-8").replace("| eviction | ", "| eviction | `fading` ")
    readme.write_text(names.replace("| prefetch | ", "| prefetch | `again` "), "utf-8")
    return copy


def python(copy, *arguments):
    env = {**os.environ, "PYTHONPATH": str(copy)}
    return subprocess.run([sys.executable, *arguments], cwd=copy, env=env, capture_output=True, text=True, timeout=600)


def test_it_is_listed_checked_and_played_alike_by_both_engines(copy):
    done = python(copy, "-c", PLAYS)
    assert done.returncode == 0, done.stderr


def test_the_tests_that_enumerate_built_ins_ask_for_nothing_more(copy):
    done = python(copy, "-m", "pytest", "-p", "no:cacheprovider", *ENUMERATE_BUILT_INS)
    assert done.returncode == 0, done.stdout
