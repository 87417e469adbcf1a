"""Every built-in passes the kit, and for each rule there is a policy that breaks it and is caught."""

import pytest

from policies.checker import check_policy
from policies.core.catalog import available
from policies.core.spec import PolicySpec, parse
from policies.random_routing import scripts

NEEDS_A_TRACE = {"static"}  # or what was trained on one, of one model's shape: their own tests hold them

TYPED = [f"lru+{info.name}" if info.kind == "prefetch" else info.name for info in available() if info.kind != "preset"]
BUILT_IN = [typed for typed in TYPED if not NEEDS_A_TRACE & {part["name"] for part in parse(typed).resolved().values()}]


@pytest.mark.parametrize("policy", BUILT_IN)
def test_every_policy_conforms(policy):
    """Rules 3, 4 and 16, among all that `policies.checker` checks."""
    report = check_policy(policy)
    report.require()
    assert report.passed
    assert report.events > 1000
    assert report.us_per_event >= 0
    assert "conforms" in str(report)


HEAD = """
import itertools
import random
import numpy as np
from policies.core.policy import Prefetcher, Policy, ScorePolicy
"""

BAD_KEEPERS = {
    "do not decide alike": """
class Bad(Policy):
    def victim(self, evictable):
        return int(random.choice(evictable))
""",
    "two runs over the same events do not decide alike: at event": """
class Bad(ScorePolicy):
    serial = itertools.count()
    def observe(self, event):
        self.keep[0, event.experts] = next(self.serial) % 7
""",
    "changes a decision before it": """
class Bad(ScorePolicy):
    oracle = True
    def foresee(self, requests):
        self.requests = requests
    def begin_request(self, request, batch_slot):
        self.coming = self.requests[request].experts
    def observe(self, event):
        self.coming = self.coming[len(event.experts):]
        self.keep[0, self.coming] = event.serial
""",
    "other routing later on changes": """
class Bad(ScorePolicy):
    oracle = True
    def foresee(self, requests):
        for request in requests:
            np.add.at(self.keep[0], request.experts, 1)
""",
    "named victim 10000, which was not offered": """
class Bad(Policy):
    def victim(self, evictable):
        return 10000
""",
    "its keep scores are not all finite": """
class Bad(ScorePolicy):
    def observe(self, event):
        self.keep[1, event.experts] = np.inf if event.steps[0] == 3 else 0
""",
    "it replaces its array `keep`": """
class Bad(ScorePolicy):
    def observe(self, event):
        self.keep = self.keep * 0.5
""",
    "ValueError: output array is read-only (what a policy is passed is read-only: ": """
class Bad(ScorePolicy):
    def observe(self, event):
        event.counts[:] += 1
""",
    "its on_insert is never called": """
class Bad(ScorePolicy):
    def on_insert(self, expert, serial, start):
        self.keep[0, expert] = start
""",
    ": ZeroDivisionError: integer division or modulo by zero": """
class Bad(ScorePolicy):
    def observe(self, event):
        self.keep[0, event.experts] = 1 // len(event.experts)
""",
    ": KeyError": """
class Bad(Policy):
    def begin_request(self, request, batch_slot):
        self.inserted = {}
    def on_insert(self, expert, serial, start):
        self.inserted[expert] = start
    def victim(self, evictable):
        return min(evictable.tolist(), key=self.inserted.__getitem__)
""",
}

BAD_PREFETCHERS = {
    "it proposes ids that no expert has": "(np.array([self.shape.total]), np.ones(1))",
    "it proposes an expert twice": "(np.array([0, 0]), np.ones(2))",
    "it proposes priorities that are not all finite": "(np.array([0]), np.array([np.nan]))",
    "different shapes: (1,), (2,)": "(np.array([0]), np.ones(2))",
    "something else than int64 ids and float64 priorities: ": "([0], [1.0])",
    "int64 ids and float64 priorities: int64, int64": "(np.array([0]), np.array([1]))",
    "two runs over the same events": "(np.array([random.randrange(self.shape.total)]), np.ones(1))",
}

BAD = {says: (code, "{}") for says, code in BAD_KEEPERS.items()} | {
    says + " (prefetch)": (f"class Bad(Prefetcher):\n    def propose(self, event):\n        return {code}\n", "lru+{}")
    for says, code in BAD_PREFETCHERS.items()
}
BAD["other routing later on changes (prefetch)"] = (
    """
class Bad(Prefetcher):
    oracle = True
    def foresee(self, requests):
        self.requests = requests
    def begin_request(self, request, batch_slot):
        self.coming = self.requests[request].experts
    def propose(self, event):
        self.coming = self.coming[len(event.experts):]
        return self.coming[:1], np.ones(len(self.coming[:1]))
""",
    "lru+{}",
)


@pytest.mark.parametrize("says", BAD)
def test_a_policy_that_breaks_a_rule_is_caught(tmp_path, says, monkeypatch):
    monkeypatch.setattr(PolicySpec, "oracle", False)  # some are given the routing of the whole run
    code, typed = BAD[says]
    (tmp_path / "bad.py").write_text(HEAD + code)
    report = check_policy(typed.format(f"{tmp_path / 'bad.py'}:Bad"))
    assert not report.passed
    assert any(says.removesuffix(" (prefetch)") in failure for failure in report.failures), report
    assert all("\n" not in failure for failure in report.failures)
    with pytest.raises(AssertionError, match="does not conform"):
        report.require()


def test_a_policy_as_bad_as_allowed_conforms(tmp_path):
    (tmp_path / "odd.py").write_text(
        HEAD
        + """
class Odd(Policy):
    def __init__(self, shape, options):
        super().__init__(shape, options)
        self.random = random.Random(3)
        self.heard = []
    def observe(self, event):
        self.heard.append((event, event.experts.tolist()))
        assert all(known.experts.tolist() == experts for known, experts in self.heard)
    def victim(self, evictable):
        return self.random.choice(evictable)
class Everything(Prefetcher):
    def propose(self, event):
        return np.arange(self.shape.total), np.zeros(self.shape.total)
"""
    )
    check_policy(f"{tmp_path / 'odd.py'}:Odd+{tmp_path / 'odd.py'}:Everything").require()


def test_seeds_draw_other_routing():
    drawn = [[[r.experts.tolist() for r in script.play] for script in scripts(seed)] for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1]
    assert all(a != b for a, b in zip(drawn[0], drawn[2], strict=True))


def test_the_scripts_hold_what_is_rare():
    drawn = list(scripts(0))
    requests = [request for script in drawn for request in script.requests()]
    assert {1, 2, 3} <= {script.slots for script in drawn}
    assert any(len(request.phase) == 0 for request in requests), "a request without any step"
    assert any(request.phase.tolist() == [0] for request in requests), "a request without decode"
    assert any((request.counts > 1).any() for request in requests)
    assert any((request.offsets[1:] == request.offsets[:-1]).any() for request in requests), "an empty event"
    assert {script.cold for script in drawn} == {True, False}
