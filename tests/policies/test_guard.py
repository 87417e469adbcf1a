"""The guard around a user's own policy: each fault is one line with file and line, wherever the policy is run."""

import itertools
import json
import pickle
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

from policies import checker
from policies.core.guard import PolicyError, own_classes
from policies.core.policy import Shape
from policies.core.spec import parse
from policies.core.user_file import read_with
from sim.engines import untimed
from sim.engines.simpy_engine import simulate
from sim.loop.run import gpu_run
from sim.profiles.timing import FixedTiming, Link
from tests.support.command import moe_sim, run
from tests.support.tiny import SIZES
from traces.commands import program
from traces.errors import InputError
from traces.synthetic import synthetic

SHAPE = Shape(2, 6)
TRACE = synthetic(3, tokens=6, layers=2, experts=6, top_k=2, seed=3)
REQUESTS = [TRACE.steps(i) for i in range(3)]

HEAD = """import sys
import time
import numpy as np
from policies.core.policy import Options, Prefetcher, RetentionPolicy, ScorePolicy
from policies.core.registry import NoPrefetch
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


def played(policy: str, slots: int = 3) -> list[int]:
    """Run the policy timed and untimed; return the experts that the untimed run evicted."""
    run = gpu_run(REQUESTS, SHAPE, slots, parse(policy), FixedTiming(5, 1, 1, 1, 1), Link(1, 1, 1, 8))
    simulate(run)
    evicted: list[int] = untimed.count(REQUESTS, 2, 6, slots, policy).evictions.tolist()
    return evicted


def file_of(folder: Path, body: str, base: str = "RetentionPolicy", name: str = "mine.py") -> str:
    """Write a policy `Mine`, its body indented by four; its first line is LINES + 1."""
    (folder / name).write_text(HEAD.format(base=base) + "".join(f"    {line}\n" for line in body.splitlines()))
    return f"{folder / name}:Mine"


VICTIMS = {
    "None": "None",
    "-1": "-1",
    "10**9": "1000000000",
    "1.5": "1.5",
    "float(evictable[0])": r"[\d.]+",
    "'a'": "'a'",
    "float('nan')": "nan",
    "True": "True",
    "evictable": r"array\(.*",
    "next(e for e in range(12) if e not in evictable)": r"\d+",
}


@pytest.mark.parametrize("scope", ["", "@layer"])
@pytest.mark.parametrize("answer", VICTIMS)
def test_a_victim_that_was_not_offered_is_one_line_with_its_place(answer, scope, tmp_path):
    mine = file_of(tmp_path, f"def victim(self, evictable):\n    return {answer}")
    told = rf"^{re.escape(mine[:-5])}:{LINES + 1}: it named victim {VICTIMS[answer]}, which was not offered"
    with pytest.raises(PolicyError, match=told) as caught:
        played(mine + scope)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("observes = np.array([1, 2])", r"its `observes` is of type ndarray, not bool"),
        ("name = property(lambda self: 1 / 0)", r"ZeroDivisionError: division by zero"),
        ("name = 5", r"its `name` is of type int, not str"),
    ],
)
def test_what_a_policy_says_of_itself_has_its_type(body, told, tmp_path):
    with pytest.raises(PolicyError, match=told):
        played(file_of(tmp_path, body + "\ndef victim(self, evictable):\n    return int(evictable[0])"))


def test_an_error_of_a_hostile_class_is_still_one_line(tmp_path):
    body = """class Meta(type):
    __name__ = property(lambda cls: 1 / 0)
class Text(str):
    __str__ = __format__ = __bool__ = lambda self, *_: 1 / 0
class Odd(Exception, metaclass=Meta):
    def __str__(self): return Mine.Text("odd")
def victim(self, evictable): raise Mine.Odd"""
    with pytest.raises(PolicyError, match=f"mine.py:{LINES + 7}: Odd: odd$"):
        played(file_of(tmp_path, body))


def test_an_error_whose_message_ends_the_process_is_still_one_line(tmp_path):
    body = """class Odd(Exception):
    def __str__(self): raise SystemExit(0)
def victim(self, evictable): raise Mine.Odd"""
    with pytest.raises(PolicyError, match=r"Odd: \(its message cannot be read"):
        played(file_of(tmp_path, body))


def test_a_module_that_answers_for_any_name_is_asked_only_for_what_it_holds(tmp_path):
    (tmp_path / "any.py").write_text("def __getattr__(name): 1 / 0\n")
    with pytest.raises(InputError, match="has no class Mine"):
        parse(f"{tmp_path / 'any.py'}:Mine")


def test_a_victim_inherited_from_a_built_in_policy_is_checked_as_well(tmp_path):
    mine = file_of(tmp_path, "def on_evict(self, expert):\n    raise SystemExit", base="Clock")
    with pytest.raises(PolicyError, match=f"mine.py:{LINES + 2}: SystemExit$"):
        played(mine)


def test_the_victim_of_a_policy_derived_from_arc_is_its_own_and_on_need_comes_first(tmp_path):
    body = "def on_need(self, expert):\n    self.it = expert\ndef victim(self, evictable):\n    {}[self.it, 'x']"
    with pytest.raises(PolicyError, match=rf"mine.py:{LINES + 4}: KeyError: \(\d+, 'x'\)$"):
        played(file_of(tmp_path, body, base="ARC"))


RAISES = {
    "in __init__": "def __init__(self, shape, options):\n    super().__init__(shape, options)\n    1 / 0",
    "in observe": "def observe(self, event):\n    if event.serial > 3:\n        1 / 0",
    "in begin_request": "def begin_request(self, request, seat):\n    if request == 1:\n        1 / 0",
    "in foresee": "oracle = True\ndef foresee(self, requests, per_access):\n    for _ in requests:\n        1 / 0",
    "in end_request": "def end_request(self, seat):\n    def helper():\n        1 / 0\n    helper()",
}


@pytest.mark.parametrize("where", RAISES)
@pytest.mark.parametrize("fault", ["1 / 0", "sys.exit(0)", "raise MemoryError", "[][3]"])
def test_what_a_policy_raises_is_one_line_with_its_place(where, fault, tmp_path):
    body = RAISES[where].replace("1 / 0", fault)
    line = LINES + next(n for n, text in enumerate(body.splitlines(), 1) if fault in text)
    name = {"1 / 0": "ZeroDivisionError: division by zero", "sys.exit(0)": "SystemExit: 0"}
    name |= {"raise MemoryError": "MemoryError", "[][3]": "IndexError: list index out of range"}
    with pytest.raises(PolicyError, match=rf"mine.py:{line}: {re.escape(name[fault])}$"):
        played(file_of(tmp_path, body, "ScorePolicy"))


BEGIN = "def __init__(self, shape, options):\n    super().__init__(shape, options)\n    "
OPTIONS = "from dataclasses import dataclass\n@dataclass\nclass Options:\n    "
OBSERVE = "def observe(self, event):\n    "
RULE = "from policies.core import scores\nrule = scores."
FORESEE = "oracle = True\ndef foresee(self, requests, per_access):\n    "
SAVE = "def save(self, file, source):\n    file.write('text')"
COPY = ".what a policy is given is read-only: copy an array"

UNFIT = {
    BEGIN.replace("super().__init__(shape, options)", "pass"): "has no shape and no options and no keep: let its __in",
    "def __init__(self):\n    pass": "TypeError: .*__init__",
    BEGIN + "self.keep = None": "its `keep` is not the writable",
    BEGIN + "self.keep = self.keep[:2]": "its `keep` has the shape",
    BEGIN + "self.keep.flags.writeable = False": "its `keep` is not the writable",
    "rule = 99": "its `rule` is 99",
    **{RULE + rule: r"not \(5, 12\) as its `rule` needs it" for rule in ("LFU_AGED", "LRFU", "VISITS")},
    RULE + "LFU_AGED\n" + BEGIN + "self.keep = np.zeros((5, 12))": "its counts halve every 0.0 events",
    "Options = 5": "TypeError: 'int' object is not callable",
    OPTIONS + "a: object = None": "option a has no default that",
    OPTIONS + "a: int = 1\n    def __post_init__(self):\n        1 / 0": "ZeroDivisionError",
    OPTIONS + "a: str = '1,2'\n    def __post_init__(self):\n        self.a = [1, 2]": "its Options turn a into list",
    OPTIONS + "a: int = 1\n    def __post_init__(self):\n        self.a = 2**70": "its Options turn a into int",
    OPTIONS + "seed: str = 'x'": "option seed is not an int",
    OPTIONS + "seed: bool = True": "option seed is not an int",
    "def observe(self):\n    pass": "TypeError: .*observe",
    **{
        f"def {method}(self, *given):\n    pass": f"a ScorePolicy is served compiled and its {method} is never called"
        for method in ("on_hit", "on_insert", "on_evict", "on_need", "victim")
    },
    OBSERVE + "self.keep[0, event.experts] = np.nan": "not all numbers: some are NaN",
    OBSERVE + "self.keep = self.keep * 0.5": "it replaces its array `keep`",
    OBSERVE + "self.keep = np.zeros_like(self.keep)": "it replaces its array `keep`",
    OBSERVE + "try:\n        self.keep = 3\n    except Exception:\n        pass": "it replaces its array `keep`",
    OBSERVE + "event.experts[0] = 3": f"ValueError: assignment destination is read-only {COPY}",
    OBSERVE + "event.own_counts.sort()": f"ValueError: sort array is read-only {COPY}",
    OBSERVE + "event.offsets[:] += 1": f"ValueError: output array is read-only {COPY}",
    OBSERVE + "event.experts.flags.writeable = True": "ValueError: cannot set WRITEABLE flag to True",
    OBSERVE + "self.keep.resize((3, 1), refcheck=False)": "ValueError: cannot resize this array",
    BEGIN + "self.keep = np.ones((3, 12))\n" + OBSERVE + "self.keep.resize((3, 1), refcheck=False)": "cannot resize",
    OBSERVE + "self.keep[0, 0] = np.nan\ndef end_request(self, seat):\n    self.keep[:] = 0": "some are NaN",
    OBSERVE + "yield": "its `observe` is a generator or a coroutine",
    "async " + OBSERVE + "pass": "its `observe` is a generator or a coroutine",
    BEGIN + "self.observe = self.learn\ndef learn(self, event):\n    sys.exit(0)": "its `observe` is not a method",
    OBSERVE + "self.observe = self.learn\ndef learn(self, event):\n    sys.exit(0)": "it replaces its method `observe`",
    OBSERVE + "del self.observe": "it replaces its method `observe`",
    "observe = property(lambda self: sys.exit(0))": "its `observe` is not a method",
    "def __getattribute__(self, name):\n    return super().__getattribute__(name)": "it defines `__getattribute__`",
    OBSERVE + "sys.stdout = None": "closes or replaces standard output",
    OBSERVE + "from traces.errors import InputError\n    raise InputError('no')": "no$",
    "class Odd(Exception):\n    __traceback__ = None\n" + OBSERVE + "raise Mine.Odd": "Odd$",
    FORESEE.replace("True", "False") + "pass": "its `foresee` sees the whole run ahead: declare `oracle = True`",
    "def propose(self, event):\n    pass": "its propose is never called, only that of a Prefetcher",
    "listed = True": "it declares `listed`",
    BEGIN + "self.oracle = True": "its `oracle` differs from its class's",
    BEGIN + "self.needs_lookahead = True": "its `needs_lookahead` differs from its class's",
    OBSERVE + "self.rule = 1": "it changes its `rule` during the run",
    OBSERVE + "self.observes = False": "it changes its `observes` during the run",
    OBSERVE + "self.keep[:] = event.serial": "it writes into the third row of `keep`",
    RULE + "LFU_AGED\n" + BEGIN + "self.keep = np.ones((5, 12))\n" + OBSERVE + "self.keep[3, 0] = 0": "or behind it",
    "starts_from = 'file'": "starts from a file, by `starts_from = 'file'`, and has no `save`",
    OPTIONS + "file: int = 1\nstarts_from = 'file'\n" + SAVE: "which is no option that holds a text",
    FORESEE + "requests[0].experts[:] = 0": "ValueError: assignment destination is read-only",
    FORESEE + "requests[:1][0].counts[:] = 0": "ValueError: assignment destination is read-only",
}


@pytest.mark.parametrize("body", UNFIT)
def test_a_policy_that_engines_could_not_use_is_told_so(body, tmp_path):
    with pytest.raises(PolicyError, match=rf"^{tmp_path / 'mine.py'}:\d+: .*{UNFIT[body]}"):
        played(file_of(tmp_path, body, "ScorePolicy"))


def test_keep_is_written_in_place_in_every_way(tmp_path):
    body = """def __init__(self, shape, options):
    super().__init__(shape, options)
    self.keep = np.ones((3, shape.total))
def observe(self, event):
    self.keep[0] *= 0.5
    self.keep *= 1
    self.keep[0, event.experts] += 1
    self.keep = self.keep
    assert (self.keep[0, event.experts] > 1).all()
    assert (self.keep[1] == 1).all()"""
    played(file_of(tmp_path, body, "ScorePolicy"))
    with pytest.raises(PolicyError, match="AssertionError"):
        played(file_of(tmp_path, body.replace("> 1", "> 2"), "ScorePolicy"))


def test_events_are_kept_and_arrays_of_proposals_are_the_policys_own(tmp_path):
    body = """def observe(self, event):
    self.__dict__.setdefault("heard", []).append((event, event.experts.tolist()))
    assert all(event.experts.tolist() == experts for event, experts in self.heard)
    self.event = event
def propose(self, event):
    assert event is self.event
    self.ids = np.arange(12)
    return self.ids, np.zeros(12)
def end_request(self, seat):
    if hasattr(self, "ids"):  # untimed nothing is proposed
        self.ids[:] = 99"""
    played(f"lru+{file_of(tmp_path, body, 'Prefetcher')}")


def test_built_in_policies_have_no_guard():
    keeper, prefetcher = parse("eamc").build(SHAPE)
    assert not {"observe", "propose", "end_request"} & {*vars(keeper), *vars(prefetcher)}
    assert own_classes(type(keeper)) == []
    assert not hasattr(type(keeper), "keep")


def test_a_fault_reaches_other_processes_whole():
    fault = PolicyError("mine.py:3: ZeroDivisionError", "it raises ZeroDivisionError", ", at mine.py:3")
    found = pickle.loads(pickle.dumps(fault))
    assert (str(found), found.broken, found.details) == (str(fault), fault.broken, fault.details)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a small trace."""
    from dataclasses import replace

    from traces.writer import write_trace

    home = tmp_path_factory.mktemp("home")
    write_trace(replace(TRACE, meta=replace(TRACE.meta, model="tiny", **SIZES)), home / "tiny")
    return home


FAULTS = {
    "exits": ("def observe(self, event):\n    sys.exit(0)", f"mine.py:{LINES + 2}: SystemExit: 0"),
    "replaces": (
        "def observe(self, event):\n    self.keep = self.keep * 1",
        f"mine.py:{LINES + 2}: it replaces its arr",
    ),
    "cannot begin": ("def __init__(self, shape, options):\n    1 / 0", f"mine.py:{LINES + 2}: ZeroDivisionError"),
}


COMMANDS = ("sweep tiny --workers 1", "run tiny", "tune tiny --search a=1..3 --trials 2 --workers 1")


@pytest.mark.parametrize(
    ("command", "fault"), [*itertools.product(COMMANDS, FAULTS), ("sweep tiny --workers 2", "exits")]
)
def test_every_command_tells_the_fault_in_one_line_and_fails(command, fault, home):
    body, said = FAULTS[fault]
    own = "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Options:\n    a: int = 1\n"
    name = f"{fault.replace(' ', '_')}.py"
    file_of(home, body + "\n" + own, "ScorePolicy", name)
    words = command.split()
    policies = ["--policies", f"{name}:Mine,{name}:Mine:a=2"] if words[0] == "sweep" else ["--policy", f"{name}:Mine"]
    out = [] if words[0] == "run" else ["--out", f"out-{fault}-{'-'.join(words)}"]
    size = ["--cache-sizes" if words[0] == "sweep" else "--cache-size", "50%"]
    done = moe_sim(*words, *policies, *out, *size, "-q", "--predictor-us", "1", cwd=home)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    *before, line = done.stderr.splitlines()
    assert all(each.startswith("warning: ") for each in before), done.stderr
    assert said.replace("mine.py", name) in line


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def observe(self, event):\n    import os\n    os.chdir('/')", "changes the working directory"),
        ("import os\nos.chdir('/')", "changes the working directory"),
        ("def end_request(self, seat):\n    sys.stdout.close()", "closes or replaces standard output"),
        ("def end_request(self, seat):\n    import os\n    os.close(1)", "closes or replaces standard output"),
        ("def end_request(self, seat):\n    import io\n    sys.stdout = io.StringIO()", "closes or replaces standard"),
        ("sys.stdout = None", "closes or replaces standard output"),
    ],
    ids=["folder in a run", "folder at import", "closed", "descriptor closed", "replaced", "replaced at import"],
)
def test_a_policy_leaves_the_process_as_it_was(body, said, home, tmp_path):
    file_of(home, body, "ScorePolicy", "rude.py")
    workers = 2 if "os.close" in body else 1  # this process needs its own
    words = ("sweep", "tiny", "--policies", "rude.py:Mine", "--cache-sizes", "50%", "-q", "--out", tmp_path / "out")
    done = moe_sim(*words, "--workers", workers, cwd=home)
    assert done.returncode == 2
    assert ("rude.py:" if "def " not in body else f"rude.py:{LINES + 1}: ") in done.stderr
    assert said in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


FAILS = "def {}(self, event):\n    1 / 0"
KERNEL = "from policies.core.policy import Kernel\nkernel = Kernel(lambda shape, options: []"


@pytest.mark.parametrize(
    ("base", "body"),
    [
        *((base, FAILS.format("observe")) for base in ("LRU", "Clock", "All", "NoPrefetch")),
        ("NoPrefetch", FAILS.format("propose")),
        ("ScorePolicy", f"{KERNEL})\n{FAILS.format('observe')}"),
        ("ScorePolicy", f"{KERNEL}, begin_request=lambda state, seat: 1 / 0)"),
    ],
)
def test_a_hook_that_the_base_class_does_without_is_called(base, body, tmp_path):
    mine = file_of(tmp_path, body, base)
    with pytest.raises(PolicyError, match="ZeroDivisionError"):
        played(f"lru+{mine}" if base in ("All", "NoPrefetch") else mine)


def test_a_hook_of_a_class_that_is_mixed_in_is_called(tmp_path):
    mine = file_of(tmp_path, FAILS.format("observe"), "object")
    with open(mine.removesuffix(":Mine"), "a") as file:
        file.write("class Mixed(Mine, LRU):\n    pass\n")
    with pytest.raises(PolicyError, match="ZeroDivisionError"):
        played(mine.replace(":Mine", ":Mixed"))


def test_what_a_policy_writes_into_its_options_lasts_for_a_run(tmp_path):
    body = f"{OPTIONS}a: int = 0\ndef begin_request(self, *_):\n    self.options.a += 1"
    policy = parse(file_of(tmp_path, body, "ScorePolicy"))
    policy.build(SHAPE)[0].begin_request(0, 0)
    assert policy.evict.values == {"a": 0}


def test_an_interruption_of_a_thread_is_the_policys_own(tmp_path):
    body = "def begin_request(self, *_):\n    raise KeyboardInterrupt"
    keeper, _ = parse(file_of(tmp_path, body, "ScorePolicy")).build(SHAPE)
    with ThreadPoolExecutor(1) as pool, pytest.raises(PolicyError, match="KeyboardInterrupt"):
        pool.submit(keeper.begin_request, 0, 0).result()
    with pytest.raises(KeyboardInterrupt):
        keeper.begin_request(0, 0)


def test_a_policy_that_cannot_save_what_it_learned_is_told_so(tmp_path):
    mine = file_of(tmp_path, f"{OPTIONS}file: str = ''\nstarts_from = 'file'\n{SAVE}", "ScorePolicy")
    keeper, _ = parse(mine).build(SHAPE)
    with pytest.raises(PolicyError, match=f"mine.py:{LINES + 7}: TypeError: a bytes-like object is required"):
        keeper.save(BytesIO(), "a trace")


NO_REQUESTS = (
    "**dict.fromkeys(('seats', 'steps', 'own_experts', 'own_counts'), event.seats[:0]), offsets=event.offsets[:1]"
)
CHANGES = ["counts=event.counts * 1.0", "experts=event.experts[::-1].copy()", "layer=2", "token_ids=np.arange(2)"]


@pytest.mark.parametrize("change", [*CHANGES, NO_REQUESTS])
def test_an_event_that_compiled_functions_cannot_take_is_refused(change, tmp_path):
    mine = file_of(tmp_path, f"def observe(self, event):\n    super().observe(event._replace({change}))", "Popular")
    with pytest.raises(PolicyError, match=f"mine.py:{LINES + 2}: it hands on an event "):
        played(f"lru+{mine}")


def test_an_event_may_be_made_anew(tmp_path):
    body = "def observe(self, event):\n    super().observe(event._replace(experts=event.experts.copy()))"
    plain, mine = (file_of(tmp_path, b, "EamcRetention", f"{n}.py") for n, b in enumerate(("pass", body)))
    assert played(mine) == played(plain) != []


def test_a_policy_that_derives_from_an_oracle_is_one(tmp_path):
    with pytest.raises(PolicyError, match="its `foresee` sees the whole run ahead: declare `oracle = True`"):
        played(file_of(tmp_path, "oracle = False", "Belady"))


def test_a_policy_with_a_rule_cannot_decide_within_another(tmp_path):
    body = """def __init__(self, shape, options):
    super().__init__(shape, options)
    self.lru = LRU(shape, options)
def on_insert(self, *given):
    self.lru.on_insert(*given)
def victim(self, evictable):
    return self.lru.victim(evictable)"""
    with pytest.raises(PolicyError, match="lru has a rule, which only a cache of its own applies: derive from it"):
        played(file_of(tmp_path, body))


@pytest.mark.parametrize("when", [BEGIN, OBSERVE])
def test_an_attribute_may_be_called_kernel(when, tmp_path):
    plain = played(file_of(tmp_path, when + "self.other = np.ones(3)", "ScorePolicy", "plain.py"))
    assert played(file_of(tmp_path, when + "self.kernel = np.ones(3)", "ScorePolicy")) == plain != []


def test_what_a_policy_prints_is_not_among_the_results(home):
    file_of(home, "print('class')\ndef begin_request(self, *_): print('run', flush=True)", "ScorePolicy", "prints.py")
    done = moe_sim("run", "tiny", "--policy", "prints.py:Mine", "--cache-size", "50%", "-q", "--json", cwd=home)
    assert json.loads(done.stdout)["policy"] == "prints.py:Mine"
    assert done.stderr.splitlines().count("run") == len(REQUESTS)


def test_the_kit_ends_a_policy_that_never_ends_an_event(tmp_path, monkeypatch):
    monkeypatch.setattr(checker, "LIMIT_S", 0.3)
    body = "def observe(self, event):\n    while event.serial > 2:\n        time.sleep(0.01)"
    (failure,) = checker.check_policy(file_of(tmp_path, body, "ScorePolicy")).failures[:1]
    assert failure.startswith("it takes more than 0.3 s for an event")


def test_only_files_that_a_policy_imports_count_for_its_digest(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "mine.py").write_text("import numpy\nimport helper\ndef later():\n    from more import lazy\n")
    (tmp_path / "helper.py").write_text("from json import dumps\nimport absent\n")
    (tmp_path / "more").mkdir()
    for name in ("more/__init__.py", "more/lazy.py", "neighbour.py"):
        (tmp_path / name).write_text("")
    (tmp_path / "x.py").mkdir()  # a folder
    (tmp_path / ".#mine.py").symlink_to("somebody@somewhere.1234")  # Emacs' lock
    names = [str(path.relative_to(tmp_path)) for path in read_with(str(tmp_path / "mine.py"))]
    assert names == ["helper.py", "mine.py", "more/__init__.py", "more/lazy.py"]


@pytest.mark.parametrize("name", ["a" * 300 + ".py", "a\0b.py", "absent.py"])
def test_a_file_that_cannot_be_there_is_no_such_file(name):
    with pytest.raises(InputError, match=r"\.py: no such file$"):
        parse(f"{name}:Mine")


def test_unreadable_neighbours_of_a_policy_are_no_matter(home):
    folder = home / "own"
    folder.mkdir()
    file_of(folder, "pass", "ScorePolicy")
    (folder / ".#mine.py").symlink_to("somebody@somewhere.1234")
    (folder / "x.py").mkdir()
    asked = ("sweep", "tiny", "--policies", "own/mine.py:Mine", "--cache-sizes", "50%", "--untimed", "-q")
    done = moe_sim(*asked, "--workers", "1", "--out", "neighbours", cwd=home)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_victim_counts_by_what_was_offered_whatever_the_policy_writes(tmp_path):
    body = "def victim(self, evictable):\n    evictable.flags.writeable = True\n    evictable[0] = 99\n    return 99"
    with pytest.raises(PolicyError, match="cannot set WRITEABLE flag"):
        played(file_of(tmp_path, body))


def test_numpy_answers_as_before_after_a_policy_that_has_it_raise(tmp_path):
    with np.errstate(divide="ignore"):
        played(file_of(tmp_path, "def observe(self, event):\n    np.seterr(all='raise')", "ScorePolicy"))
        assert np.isinf(np.float64(1) / np.float64(0))


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["lru"], 0, "lru conforms"),
        (["exits.py:Mine"], 1, "does not conform"),
        (["nothing"], 2, "error: unknown policy"),
        (["stops.py:Mine"], 130, "interrupted"),
        ([], 2, "missing argument"),
    ],
)
def test_the_kit_is_a_command_like_others(words, status, said, tmp_path):
    file_of(tmp_path, "def observe(self, event):\n    sys.exit(0)", "ScorePolicy", "exits.py")
    file_of(tmp_path, "def observe(self, event):\n    raise KeyboardInterrupt", "ScorePolicy", "stops.py")
    done = run(lambda: program.main(checker.app, "python -m policies.checker"), *words, cwd=tmp_path)
    assert done.returncode == status
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_a_victim_may_be_any_whole_number_that_was_offered(tmp_path):
    answers = "evictable[0]", "np.int32(evictable[0])", "int(evictable[-1])"
    first, same, last = (
        played(file_of(tmp_path, f"def victim(self, evictable):\n    return {answer}", name=f"mine{number}.py"))
        for number, answer in enumerate(answers)
    )
    assert first == same != last
