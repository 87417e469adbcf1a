"""The walk-through of policies/YOUR_OWN.md, run as it stands, and what a file that is no policy gets to hear."""

import json
import os
import pickle
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies import check_policy
from policies.core.policy import Shape
from policies.core.spec import parse
from sim.loop.requests import Requests
from tests.support.ahead import with_lookahead
from tests.support.command import moe_sim
from tests.support.tiny import SIZES
from traces import InputError
from traces.synthetic import synthetic
from traces.writer import write_trace

WALK_THROUGH = (Path(__file__).parents[2] / "policies" / "YOUR_OWN.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"Save this as `(\w+\.py)`:\n\n```python\n(.*?)```", WALK_THROUGH, re.DOTALL))
COMMANDS = [shlex.split(line) for line in re.findall(r"```\n((?:moe-sim|python) .*?)\n```", WALK_THROUGH)]

TRACE = synthetic(3, tokens=6, layers=3, experts=16, top_k=2, seed=3)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with the files of the walk-through and a trace at the place that it names."""
    home = tmp_path_factory.mktemp("home")
    for name, code in FILES.items():
        (home / name).write_text(code, encoding="utf-8")
    write_trace(replace(TRACE, meta=replace(TRACE.meta, model="tiny", **SIZES)), home / "demo" / "trace")
    return home


def run(command, home):
    if command[0] == "moe-sim":
        return moe_sim(*command[1:], cwd=home)
    root = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, *command[1:]],
        cwd=home,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=300,
    )


def rows(home, *arguments):
    done = run(["moe-sim", "sweep", "demo/trace", *arguments, "--json"], home)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def misses_of_fading(slots, alpha):
    """The walk-through's policy, untimed, in a few lines of its own; no event is larger than the cache."""
    misses, cache, uses = 0, set[int](), [0.0] * (TRACE.layers * TRACE.num_experts)
    for request in Requests(TRACE):
        for step in range(len(request.tokens)):
            uses = [score * alpha for score in uses]
            for number in range(step * TRACE.layers, (step + 1) * TRACE.layers):
                chosen = request.experts[slice(*request.offsets[number : number + 2])].tolist()
                missed = [expert for expert in chosen if expert not in cache]
                misses += len(missed)
                for expert in chosen:
                    uses[expert] += 1
                for expert in missed:
                    if len(cache) == slots:
                        cache.remove(min(cache - set(chosen), key=lambda e: (uses[e], e)))
                    cache.add(expert)
    return misses


def test_the_walk_through_holds_what_its_sentences_say():
    assert set(FILES) == {"fading.py", "again.py", "router.py"}
    assert all(len(code.splitlines()) <= 30 for code in FILES.values()), "a policy is 30 lines"
    assert [command[0] for command in COMMANDS] == ["moe-sim", "moe-sim", "python"]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[-1])
def test_every_command_of_the_walk_through_runs(home, command):
    extra = ["--workers", "1", "--out", "out", "--overwrite", "--json"] if command[0] == "moe-sim" else []
    done = run([*command, *extra], home)
    assert done.returncode == 0, done.stdout + done.stderr
    if extra:
        asked = command[command.index("--policies") + 1].split(",")
        sizes = command[command.index("--cache-sizes") + 1].split(",")
        assert [row["policy"] for row in json.loads(done.stdout)] == asked * len(sizes)
    else:
        assert done.stdout.count("conforms") == 2


def test_policies_that_read_scores_of_routers_conform_and_run(home, monkeypatch):
    monkeypatch.chdir(home)
    for policy in ("router.py:Recent", "lru+router.py:Sure"):
        check_policy(policy).require()
    trace = replace(TRACE, weights=np.full(TRACE.experts.shape, 0.25, np.float16))
    trace = with_lookahead(replace(trace, meta=replace(trace.meta, model="tiny", **SIZES)), TRACE.experts)
    (of_weights,) = {step.weights.sum() for step in map(trace.steps, range(3)) if step.weights is not None}
    assert of_weights == 6 * 3 * 2 * 0.25
    write_trace(trace, home / "scored")
    command = (
        "moe-sim sweep scored --policies router.py:Recent+router.py:Sure --cache-sizes 25% --out scores --workers 1"
    )
    assert run(shlex.split(command), home).returncode == 0


def test_classes_stand_wherever_names_do(home, monkeypatch):
    """The page's block for notebooks, after those that define the classes."""
    monkeypatch.chdir(home)
    (block,) = re.findall(r"a name may:\n\n```python\n(.*?)```", WALK_THROUGH, re.DOTALL)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("\n".join([*FILES.values(), block]), names)
    frame = names["result"].frame
    assert frame["policy"].tolist() == ["lru", *CLASSES]
    stated = (
        f"{CLASSES[policy]}={us}"
        for policy, us in zip(frame["policy"], frame["predictor_us"], strict=True)
        if policy != "lru"
    )
    asked = ["--policies", ",".join(["lru", *CLASSES.values()]), "--cache-sizes", "25%", "--out", "named"]
    asked += ["--predictor-us", ",".join(stated)]
    for row, by_name in zip(frame.to_dict("records"), rows(home, *asked), strict=True):
        figures = {name: value for name, value in by_name.items() if isinstance(value, int | float)}
        assert len(figures) > 20
        assert {name: row[name] for name in figures} == figures


CLASSES = {
    "Fading": "fading.py:Fading",
    "Fading:alpha=0.9": "fading.py:Fading:alpha=0.9",
    "Fading:alpha=0.9+Again": "fading.py:Fading:alpha=0.9+again.py:Again",
}
"""What results call a class, and the same by its file."""


def test_a_users_policy_is_counted_exactly(home):
    policies = "fading.py:Fading,fading.py:Fading:alpha=0.9"
    found = rows(home, "--policies", policies, "--cache-sizes", "8,20", "--untimed", "--workers", "1", "--out", "exact")
    assert [row["misses"] for row in found] == [misses_of_fading(n, a) for n in (8, 20) for a in (0.5, 0.9)]
    assert [row["misses"] for row in found] != [found[0]["misses"]] * 4, "size and option matter"


def test_workers_find_the_file_as_well(home):
    asked = ["--policies", "lru,fading.py:Fading:alpha=0.9+again.py:Again", "--cache-sizes", "25%,50%"]
    asked += ["--predictor-us", "2"]
    alone, together = (rows(home, *asked, "--workers", n, "--out", f"by{n}") for n in ("1", "2"))
    assert [row["tpot_mean_ms"] for row in alone] == [row["tpot_mean_ms"] for row in together]
    assert alone[1]["bytes_prefetch"] > 0


def test_the_overhead_of_a_users_policy_is_measured_charged_to_it_alone_and_kept(home):
    asked = ("--policies", "lru,fading.py:Fading,belady", "--cache-sizes", "25%", "--out", "measured")
    first = rows(home, *asked)
    lru, own, belady = (row["predictor_us"] for row in first)
    assert lru == belady == 0 < own
    assert first[1]["stall_predictor_ms"] == pytest.approx(own * 3 * 6 * TRACE.layers / 1_000)
    assert rows(home, *asked, "--resume") == first
    assert f'predictor_us = "fading.py:Fading={own:g}"' in (home / "measured" / "sweep.toml").read_text()
    again = rows(home, "--config", "measured/sweep.toml", "--trust-folder", "--out", "again")
    assert [row["tpot_mean_ms"] for row in again] == [row["tpot_mean_ms"] for row in first]
    run = moe_sim("run", "demo/trace", "--policy", "belady", "--predictor-us", "500", cwd=home)
    assert "charged to all policies, so to belady too, which would cost nothing" in run.stderr


def test_a_class_in_a_file_is_a_policy_like_any_other(home, monkeypatch):
    monkeypatch.chdir(home)
    spec = parse("fading.py:Fading:alpha=0.9+again.py:Again")
    halves = {"evict": {"name": "Fading", "alpha": 0.9}, "prefetch": {"name": "Again"}}
    assert spec.options() == {**halves, "scope": {"name": "global"}, "placement": {"name": "fetch"}}
    keeper, prefetcher = pickle.loads(pickle.dumps(spec)).build(Shape(2, 4))
    assert (keeper.name, keeper.alpha, prefetcher.name) == ("Fading", 0.9, "Again")
    assert spec.without_prefetch() == parse("fading.py:Fading:alpha=0.9")
    assert not spec.oracle
    assert type(parse(f"{home / 'fading.py'}:Fading").build(Shape(1, 1))[0]) is type(keeper), "imported once"


def test_an_edit_of_the_same_second_and_length_is_run(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "mine.py"
    for n in (1, 2):
        file.write_text(f"from policies.core.policy import ScorePolicy\nclass Mine(ScorePolicy):\n    number = {n}\n")
        os.utime(file, ns=(0, 10**18 + n))
        assert parse(f"{file}:Mine").evict.cls.number == n
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


BROKEN = """
from dataclasses import dataclass
from policies.core.policy import ScorePolicy
class Keeps(ScorePolicy):
    pass
class Neither:
    pass
class Switch(ScorePolicy):
    @dataclass(frozen=True)
    class Options:
        on: bool = False
"""


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("absent.py:Keeps", "absent.py: no such file"),
        ("mine.py:Kepes", "unknown class of mine.py 'Kepes'; did you mean Keeps"),
        ("mine.py:Neither", "neither a Policy nor a Prefetcher"),
        ("mine.py:Switch:on=maybe", "option on of Switch needs a value of type bool, as in on=False"),
        ("syntax.py:Keeps", "syntax.py:2: cannot be imported: SyntaxError"),
        ("raises.py:Keeps", "raises.py:3: cannot be imported: KeyError: 'nothing here'"),
    ],
)
def test_a_file_that_is_no_policy_is_one_line_that_helps(tmp_path, monkeypatch, typed, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(BROKEN)
    (tmp_path / "syntax.py").write_text("a = 1\nclass Keeps(\n")
    (tmp_path / "raises.py").write_text("def find():\n    pass\nfound = {}['nothing here']\n")
    with pytest.raises(InputError, match=re.escape(says)) as caught:
        parse(typed)
    assert "\n" not in str(caught.value)
