"""`moe-sim tune` on policies whose best option is known, and what a search that is cut off comes to."""

import re
from dataclasses import replace

import pandas as pd
import pytest

from policies.core import Shape, parse
from sim.experiment import Experiment
from sim.loaded import load
from sim.sweeps.grid import run_cells
from sim.tuning import NAME, Halves, Journal, Search, save, space_of
from sim.tuning.tune import tune
from tests.support.tiny import SIZES
from traces import InputError, write_trace
from traces.synthetic import synthetic

pytest.importorskip("optuna")
LAYERS, EXPERTS, USED, TOP_K, SLOTS = 3, 16, 12, 2, 12
SHAPE = Shape(LAYERS, EXPERTS)

MINE = '''
"""Policies whose best option is known."""

from dataclasses import dataclass

import numpy as np

from policies.core.policy import Prefetcher, ScorePolicy
from traces.errors import InputError


@dataclass(frozen=True)
class WastefulOptions:
    number: int = 1
    at_most: int = 16

    def __post_init__(self):
        if self.number > self.at_most:
            raise InputError(f"wasteful: {self.number} is more than {self.at_most}")


class Wasteful(Prefetcher):
    """Fetches experts that are never used; 9 is the best number, since then it fetches none."""

    Options = WastefulOptions

    def propose(self, event):
        unused = np.arange(12, 16) + event.layer * self.shape.experts
        wrong = unused[: abs(self.options.number - 9)]
        return wrong, np.ones(len(wrong))


@dataclass(frozen=True)
class LuckyOptions:
    lucky: bool = False


class Lucky(ScorePolicy):
    """LRU from request 2 on, its contrary before; lucky the other way round."""

    Options = LuckyOptions

    def begin_request(self, request, batch_slot):
        self.request = request

    def observe(self, event):
        sign = 1 if (self.request < 2) == self.options.lucky else -1
        self.keep[0, event.experts] = sign * event.serial
'''


def written(folder, requests, tokens):
    """A trace that uses the first experts of each layer only."""
    made = synthetic(requests, tokens, LAYERS, USED, TOP_K, seed=3)
    write_trace(replace(made, meta=replace(made.meta, model="tiny", experts=EXPERTS, **SIZES)), folder)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    written(home / "tiny", requests=4, tokens=8)
    (home / "mine.py").write_text(MINE)
    return home


def search_of(home, policy, space, trials=10, seed=0, workers=1, **setup):
    spec = parse(policy)
    halves = Halves.of(Experiment(str(home / "tiny"), **setup))
    return Search(halves, spec, SLOTS, space_of(spec, SHAPE, space), trials, seed, workers)


def found_by(search, folder):
    """What a search finds that keeps its journal in `folder`."""
    folder.mkdir(exist_ok=True)
    return tune(search, Journal(folder), lambda played: None)


def metrics(setup, policy):
    [(row, _)] = run_cells(load(setup), parse(policy), [SLOTS], lambda played: None)
    return row["tpot_mean_ms"]


def test_the_known_best_is_found_and_judged_on_the_other_requests(home, tmp_path):
    """No early fetch at all is lru alone, which a cell of it says on either half."""
    mine = f"lru+{home / 'mine.py'}:Wasteful"
    found = found_by(search_of(home, mine, "number=0..16", trials=25), tmp_path / "a")
    assert found.best.policy == f"{mine}:number=9"
    first, both = (
        Experiment(str(home / "tiny"), requests=2),
        Experiment(str(home / "tiny"), requests=4, warmup_requests=2),
    )
    for judged, policy in ((found.typed, mine), (found.best, "lru")):
        assert (judged.first, judged.second) == (metrics(first, policy), metrics(both, policy))
    assert found.best.first < found.typed.first
    assert found.best.second < found.typed.second
    assert found.gains[1] == pytest.approx(1 - found.best.second / found.typed.second)
    assert not found.overfit
    values = {trial.options["number"]: trial.value for trial in found.trials}
    assert min(values, key=values.__getitem__) == 9
    assert len(values) > 5, "it did not have to try them all"


def test_what_fits_the_first_half_alone_is_told_from_what_helps(home, tmp_path):
    found = found_by(search_of(home, f"{home / 'mine.py'}:Lucky", "lucky=true|false", trials=4), tmp_path / "a")
    assert found.best.policy.endswith(":lucky=true")
    assert found.best.first < found.typed.first
    assert found.best.second > found.typed.second
    assert found.overfit
    assert found.gains[0] > 0 > found.gains[1]


def test_what_the_policy_refuses_is_pruned_and_told(home, tmp_path):
    mine = f"lru+{home / 'mine.py'}:Wasteful"
    search = search_of(home, mine, "number=1..16:at_most=4|16", trials=16)
    found = found_by(search, tmp_path / "a")
    refused = [trial for trial in found.trials if trial.value is None]
    assert 0 < len(refused) < 16
    for trial in found.trials:
        wanted = f"wasteful: {trial.options['number']} is more than {trial.options['at_most']}"
        assert trial.refusal == (wanted if trial.options["number"] > trial.options["at_most"] else "")
    frame = pd.read_parquet(save(found, search, tmp_path))
    assert frame["state"].tolist() == ["pruned" if trial.value is None else "complete" for trial in found.trials]
    assert frame["value"].isna().sum() == len(refused)
    assert frame["number"].tolist() == [trial.options["number"] for trial in found.trials]
    with pytest.raises(InputError, match=r"refuses all 3 trials, the last so: wasteful: 1[0-6] is more than 9"):
        found_by(search_of(home, f"{mine}:at_most=9", "number=10..16", trials=3), tmp_path / "b")
    assert not (tmp_path / "b" / NAME).exists()


def test_seed_and_number_of_workers_make_the_search(home, tmp_path):
    space = "capacity=10..1000:matches=1..5:cosine=flat|rows:threshold=0.0..0.9"
    one, again, other, alone = (
        found_by(search_of(home, "eamc", space, 16, seed, workers), tmp_path / name).trials
        for name, seed, workers in (("a", 1, 2), ("b", 1, 2), ("c", 2, 2), ("d", 1, 1))
    )
    assert one == again
    assert one != other
    assert one != alone
    assert len({trial.policy for trial in one}) > 8


@pytest.mark.parametrize("cut", [1, 2, 3, 12])
def test_a_search_that_goes_on_anywhere_has_the_same_end(home, tmp_path, cut):
    """Also from within a batch, from a line that was half written, and with more trials than were asked for first."""
    search = search_of(home, "eamc", "capacity=10..1000:threshold=0.0..0.9", 14, 5, 3)
    whole = found_by(search, tmp_path / "whole")
    lines = (tmp_path / "whole" / NAME).read_bytes().splitlines(keepends=True)
    head = len(lines) - 14
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / NAME).write_bytes(b"".join(lines[: head + cut]) + lines[head + cut][:20])
    journal = Journal(tmp_path / "cut")
    assert len(journal.trials) == cut
    played = list[int]()
    assert tune(search, journal, played.append) == whole
    assert sum(played) <= search.requests(cut)
    assert len(Journal(tmp_path / "cut").trials) == 14
    assert found_by(replace(search, trials=17), tmp_path / "cut") == found_by(
        replace(search, trials=17), tmp_path / "new"
    )


def test_the_same_options_are_played_once(home, tmp_path, monkeypatch):
    played = []

    def counted(loaded, policy, slots, advance):
        played.append((loaded.experiment, policy.text))
        return run_cells(loaded, policy, slots, advance)

    monkeypatch.setattr("sim.sweeps.grid.run_cells", counted)
    found = found_by(search_of(home, "eamc", "cosine=flat|rows", 12, workers=3), tmp_path / "a")
    assert len(played) == len(set(played)) <= 5
    assert {trial.policy for trial in found.trials} == {"eamc:cosine=flat", "eamc:cosine=rows"}


def described(space):
    """Each option's choices, or low, high and whether the scale is logarithmic."""
    ranges = {each.option.name: each.distribution for each in space}
    return {
        name: one.choices if hasattr(one, "choices") else (one.low, one.high, one.log) for name, one in ranges.items()
    }


def test_a_typed_space_is_read_by_the_options_types():
    space = space_of(
        parse("eamc"), SHAPE, "capacity=10..1000:matches=1..5:threshold=-1..0.5:split=true|FALSE:eps=0|1e-8"
    )
    assert described(space) == {
        "capacity": (10, 1000, True),
        "matches": (1, 5, False),
        "threshold": (-1.0, 0.5, False),
        "split": (True, False),
        "eps": (0.0, 1e-8),
    }
    assert isinstance(space[0].distribution.low, int)
    again = space_of(parse("eamc"), SHAPE, ":".join(each.text for each in space))
    assert again == space
    both = space_of(parse("expert-map+previous"), SHAPE, "evict.depth=1..3:prefetch.budget=0.5|inf")
    assert described(both) == {"evict.depth": (1, 3, False), "prefetch.budget": (0.5, float("inf"))}


def test_an_unasked_space_is_what_the_policy_declares_and_accepts():
    eamc = described(space_of(parse("eamc:keep=ratio"), SHAPE, None))
    assert eamc["capacity"] == (15, 960, True)
    assert eamc["matches"] == (1, 8, False)
    assert eamc["split"] == (False, True)
    assert eamc["cosine"] == ("flat", "rows")
    assert {"keep", "threshold", "depth", "collection"}.isdisjoint(eamc), "stated, zero, all, a file"
    assert described(space_of(parse("multi-criteria"), SHAPE, None))["recency"] == (0.05, 0.8, True)
    assert described(space_of(parse("clock"), SHAPE, None)) == {"bits": (1, 8, False)}
    assert described(space_of(parse("s3fifo"), SHAPE, None))["small"] == (0.0125, 0.8, True)
    markov = described(space_of(parse("random+markov"), SHAPE, None))
    assert set(markov) == {"n"}, "no seed, no depth of 0, no infinite budget, no threshold of -inf"


@pytest.mark.parametrize(
    ("policy", "search", "complaint"),
    [
        ("lru", None, "lru has no options to search"),
        ("random", None, "no option of random has a scale to search on"),
        ("eamc", "capacty=1..5", "unknown option of eamc 'capacty'; did you mean capacity"),
        ("eamc", "capacity", "write capacity=LOW..HIGH or capacity=A|B|C"),
    ],
)
def test_a_space_that_the_policy_does_not_have_is_refused(policy, search, complaint):
    with pytest.raises(InputError, match=re.escape(complaint)):
        space_of(parse(policy), SHAPE, search)
