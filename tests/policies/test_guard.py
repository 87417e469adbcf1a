"""The guard around a user's own policy: each fault is one line with file and line, and nothing wrong is answered."""

import pickle
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from policies.core.guard import PolicyError
from policies.core.policy import Shape
from policies.core.spec import parse
from policies.core.user_file import read_with
from sim.engines import untimed
from sim.engines.simpy_engine import simulate
from sim.loop.run import gpu_run
from sim.profiles.timing import FixedTiming, Link
from tests.support.command import moe_sim
from tests.support.tiny import SIZES
from traces.synthetic import synthetic
from traces.writer import write_trace

SHAPE = Shape(2, 6)
TRACE = synthetic(3, tokens=6, layers=2, experts=6, top_k=2, seed=3)
REQUESTS = [TRACE.steps(i) for i in range(3)]

HEAD = """import sys
import numpy as np
from policies.core.policy import Prefetcher, Policy, ScorePolicy
from policies.eamc.eamc import EamcRetention
from policies.prefetch.layer_stream import All
from policies.prefetch.popular import Popular
from policies.retention.arc import ARC
from policies.retention.belady import Belady
from policies.retention.clock import Clock
from policies.retention.lru import LRU
class Mine({base}):
"""
LINES = HEAD.count("\n")


def evicted(policy: str, slots: int = 3) -> list[int]:
    """Run the policy timed and untimed; return the experts that the untimed run evicted."""
    run = gpu_run(REQUESTS, SHAPE, slots, parse(policy), FixedTiming(5, 1, 1, 1, 1), Link(1, 1, 1, 8))
    simulate(run)
    experts: list[int] = untimed.count(REQUESTS, 2, 6, slots, parse(policy)).evictions.tolist()
    return experts


def file_of(folder: Path, body: str, base: str = "Policy", name: str = "mine.py") -> str:
    """Write a policy `Mine`, its body indented by four; its first line is LINES + 1."""
    (folder / name).write_text(HEAD.format(base=base) + "".join(f"    {line}\n" for line in body.splitlines()))
    return f"{folder / name}:Mine"


@pytest.mark.parametrize("scope", ["", "@layer"])
@pytest.mark.parametrize(
    "answer", ["None", "-1", "10**9", "1.5", "'a'", "evictable", "next(e for e in range(12) if e not in evictable)"]
)
def test_a_victim_that_was_not_offered_is_one_line_with_its_place(answer, scope, tmp_path):
    mine = file_of(tmp_path, f"def victim(self, evictable):\n    return {answer}")
    with pytest.raises(PolicyError, match=rf"^{re.escape(mine[:-5])}:{LINES + 1}: .*victim") as caught:
        evicted(mine + scope)
    assert "\n" not in str(caught.value)


RAISES = {
    "in __init__": "def __init__(self, shape, options):\n    super().__init__(shape, options)\n    1 / 0",
    "in observe": "def observe(self, event):\n    if event.serial > 3:\n        1 / 0",
    "in foresee": "oracle = True\ndef foresee(self, requests):\n    for _ in requests:\n        1 / 0",
    "in end_request": "def end_request(self, batch_slot):\n    def helper():\n        1 / 0\n    helper()",
}


@pytest.mark.parametrize("where", RAISES)
@pytest.mark.parametrize("fault", ["1 / 0", "sys.exit(0)"])
def test_what_a_policy_raises_is_one_line_with_its_place(where, fault, tmp_path):
    body = RAISES[where].replace("1 / 0", fault)
    line = LINES + next(n for n, text in enumerate(body.splitlines(), 1) if fault in text)
    with pytest.raises(PolicyError, match=rf"mine.py:{line}: {'ZeroDiv' if fault == '1 / 0' else 'SystemExit: 0'}"):
        evicted(file_of(tmp_path, body, "ScorePolicy"))


@pytest.mark.parametrize("base", ["LRU", "Clock", "All", "Popular"])
def test_a_method_that_a_built_in_class_does_without_is_called(base, tmp_path):
    mine = file_of(tmp_path, "def observe(self, event):\n    1 / 0", base)
    with pytest.raises(PolicyError, match=f"mine.py:{LINES + 2}: ZeroDivisionError"):
        evicted(f"lru+{mine}" if base in ("All", "Popular") else mine)


OBSERVE = "def observe(self, event):\n    "
FORESEE = "oracle = True\ndef foresee(self, requests):\n    "
BEGIN = "def __init__(self, shape, options):\n    super().__init__(shape, options)\n    "

WRONG_NUMBERS = {
    BEGIN.replace("super().__init__(shape, options)", "pass"): "let its __init__ call super",
    BEGIN + "self.keep = self.keep[:1]": "`keep`",
    BEGIN + "self.keep = self.keep.astype(np.float32)": "`keep`",
    "def victim(self, evictable):\n    pass": "its victim is never called",
    "def propose(self, event):\n    pass": "its propose is never called",
    OBSERVE + "self.keep[0, event.experts] = np.nan": "NaN",
    OBSERVE + "self.keep = self.keep * 0.5": "it replaces its array `keep`",
    OBSERVE + "event.experts[0] = 3": "ValueError: assignment destination is read-only",
    OBSERVE + "event.own_counts.sort()": "read-only",
    FORESEE.replace("True", "False") + "pass": "declare `oracle = True`",
    FORESEE + "requests[0].experts[:] = 0": "ValueError: assignment destination is read-only",
    FORESEE + "requests[:1][0].counts[:] = 0": "ValueError: assignment destination is read-only",
}


@pytest.mark.parametrize("body", WRONG_NUMBERS)
def test_what_would_be_a_wrong_number_is_refused(body, tmp_path):
    with pytest.raises(PolicyError, match=rf"^{tmp_path / 'mine.py'}:\d+: .*{WRONG_NUMBERS[body]}"):
        evicted(file_of(tmp_path, body, "ScorePolicy"))


def test_keep_is_written_in_place_in_every_way(tmp_path):
    body = """def __init__(self, shape, options):
    super().__init__(shape, options)
    self.keep = np.ones((3, shape.total))
def observe(self, event):
    self.keep[0] *= 0.5
    self.keep *= 1
    self.keep[0, event.experts] += 1
    assert (self.keep[0, event.experts] > 1).all()
    assert (self.keep[1] == 1).all()"""
    evicted(file_of(tmp_path, body, "ScorePolicy"))
    with pytest.raises(PolicyError, match="AssertionError"):
        evicted(file_of(tmp_path, body.replace("> 1", "> 2"), "ScorePolicy"))


def test_events_are_kept_and_arrays_of_proposals_are_the_policys_own(tmp_path):
    body = """def observe(self, event):
    self.__dict__.setdefault("heard", []).append((event, event.experts.tolist()))
    assert all(event.experts.tolist() == experts for event, experts in self.heard)
    self.event = event
def propose(self, event):
    assert event is self.event
    self.ids = np.arange(12)
    return self.ids, np.zeros(12)
def end_request(self, batch_slot):
    if hasattr(self, "ids"):  # untimed nothing is proposed
        self.ids[:] = 99"""
    evicted(f"lru+{file_of(tmp_path, body, 'Prefetcher')}")


def test_a_class_that_derives_from_a_built_in_hands_its_events_on(tmp_path):
    body = "def observe(self, event):\n    super().observe(event)"
    for base in ("EamcRetention", "ARC", "Belady"):
        oracle = "oracle = True\n" if base == "Belady" else ""
        plain, mine = (file_of(tmp_path, oracle + b, base, f"{base}{n}.py") for n, b in enumerate(("pass", body)))
        assert evicted(mine) == evicted(plain) != []


def test_a_policy_that_derives_from_an_oracle_is_one(tmp_path):
    with pytest.raises(PolicyError, match="declare `oracle = True`"):
        evicted(file_of(tmp_path, "oracle = False", "Belady"))


def test_a_fault_reaches_other_processes_whole(tmp_path):
    with pytest.raises(PolicyError) as caught:
        evicted(file_of(tmp_path, "def observe(self, event):\n    1 / 0", "ScorePolicy"))
    fault = pickle.loads(pickle.dumps(caught.value))
    assert (str(fault), fault.place) == (str(caught.value), f"{tmp_path / 'mine.py'}:{LINES + 2}")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a small trace."""
    home = tmp_path_factory.mktemp("home")
    write_trace(replace(TRACE, meta=replace(TRACE.meta, model="tiny", **SIZES)), home / "tiny")
    return home


def test_a_command_reports_the_fault_in_one_line_and_fails(home):
    file_of(home, "def observe(self, event):\n    sys.exit(0)", "ScorePolicy")
    words = ("sweep", "tiny", "--policies", "mine.py:Mine", "--cache-sizes", "50%", "-q", "--predictor-us", "1")
    done = moe_sim(*words, "--workers", "2", "--out", "out", cwd=home)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"mine.py:{LINES + 2}: SystemExit: 0" in done.stderr.splitlines()[-1]


def test_only_files_that_a_policy_imports_count_for_its_digest(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "mine.py").write_text("import numpy\nimport helper\ndef later():\n    from more import lazy\n")
    (tmp_path / "helper.py").write_text("from json import dumps\nimport absent\n")
    (tmp_path / "more").mkdir()
    for name in ("more/__init__.py", "more/lazy.py", "neighbour.py"):
        (tmp_path / name).write_text("")
    names = [str(path.relative_to(tmp_path)) for path in read_with(str(tmp_path / "mine.py"))]
    assert names == ["helper.py", "mine.py", "more/__init__.py", "more/lazy.py"]
