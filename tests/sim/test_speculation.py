"""When speculation pays (`moe-sim speculate`): closed forms, and the runs that it stands for."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from policies.core.spec import parse
from sim import simulate
from sim.analysis.speculation import LONGEST, ROWS, RUN, Speculation, Tally, lengths_of, recorded, sentences, speculate
from sim.experiment import Experiment
from sim.loaded import TimedRun
from sim.sweeps.grid import grid_of
from tests.support.command import moe_sim
from tests.support.runs import recorded_with
from traces import DECODE, InputError, Trace, demo_trace
from traces.drafts import Drafts
from traces.writer import write_trace


def constant(step_ns: int, length: int = 1, requests: int = 5) -> Speculation:
    """Steps that take 100 ns without drafts and `step_ns` with, and keep what they do where no request ends."""
    n = np.full(requests, 1_000_000)

    def tally(ns: int, kept: float) -> Tally:
        return Tally(ns * n, np.round(kept * n).astype(np.int64), n, n)

    drafted = [tally(step_ns, sum(share**k for k in range(length + 1))) for share in RUN]
    return Speculation("lru", "25%", 10, length, np.ones(3), tally(100, 1), tuple(drafted))


@pytest.mark.parametrize(
    ("step_ns", "length", "expected"),
    [(100, 1, 0.0), (150, 1, 0.5), (180, 1, 0.8), (200, 1, 1.0), (201, 1, None), (175, 2, 0.5), (299, 2, 0.997)],
)
def test_break_even_is_where_the_tokens_of_a_step_make_up_for_its_time(
    step_ns: int, length: int, expected: float | None
) -> None:
    """1 + p + ... + p^L = step time with over step time without."""
    found = constant(step_ns, length)
    assert found.break_even == (None if expected is None else pytest.approx(expected, abs=0.0011))
    assert found.speedup(1.0) == pytest.approx((1 + length) * 100 / step_ns)
    low, high = found.interval()
    assert low == high == (found.break_even if expected is not None else float("inf")), "requests are alike"


def test_the_interval_widens_with_what_requests_differ_in() -> None:
    found = constant(150)
    plain = Tally(found.plain.ns * np.array([60, 80, 100, 120, 140]) // 100, *list(vars(found.plain).values())[1:])
    low, high = Speculation(*[*list(vars(found).values())[:5], plain, found.drafted]).interval()
    # of five requests the mean time has a standard error of 12.6%: 150 / 125 - 1 and 150 / 75 - 1
    assert low == pytest.approx(0.2, abs=0.06)
    assert high == pytest.approx(1.0, abs=0.06)


def test_the_first_sentence_says_whether_it_pays_and_from_which_acceptance_on() -> None:
    assert list(sentences([constant(150), constant(290, 2)])) == [
        "Speculation pays here (lru, 25%) from an acceptance of 0.50 (95%: 0.50 to 0.50) on, with 1 drafted token a "
        "step"
    ]
    assert list(sentences([constant(250)])) == [
        "Speculation does not pay here (lru, 25%): even if every drafted token is accepted, it reaches 0.80 times the "
        "speed without"
    ]


def test_what_lies_between_the_runs_is_what_a_run_there_takes() -> None:
    loaded = TimedRun.of(Experiment.of({"trace": str(demo_trace()), "requests": 8}))
    found = speculate(loaded, grid_of(loaded, [parse("lru")], ["20%"]), [1, 3])
    plain = simulate(demo_trace(), "lru", "20%", requests=8).row["tpot_mean_ms"]
    for each in found:
        assert each.union.shape == (loaded.trace.layers,)
        for likely in (0.0, 0.25, 0.8, 1.0):
            run = simulate(demo_trace(), "lru", "20%", requests=8, draft=each.length, acceptance=likely)
            speedup = plain / run.row["tpot_mean_ms"]
            assert each.speedup(likely) == pytest.approx(speedup, rel=0.03), (each.length, likely)


def test_the_command_prints_the_answer_first_and_writes_a_row_for_each_length(tmp_path: Path) -> None:
    options = ["speculate", str(demo_trace()), "--requests", "2", "--policies", "lru", "--cache-sizes", "20%"]
    printed = moe_sim(*options, "--out", "out", cwd=tmp_path)
    assert printed.returncode == 0, printed.stderr
    assert printed.stdout.splitlines()[0].startswith("Speculation ")
    table = pq.read_table(tmp_path / "out" / "speculation.parquet")
    assert table.schema.names == ROWS.names
    assert table["draft"].to_pylist() == list(range(1, LONGEST + 1))
    unions = table["union"].to_pylist()
    assert unions == sorted(unions)
    assert (tmp_path / "out" / "speculation.png").exists()
    answer = json.loads(moe_sim(*options, "--longest", "1", "--json", "--out", "other", cwd=tmp_path).stdout)
    assert [row["break_even"] for row in answer["rows"]] == table["break_even"].to_pylist()[:1]


def test_what_is_given_as_a_draft_that_takes_time_has_to_be_right_more_often() -> None:
    grown = []
    for us in (0.0, 100.0):
        loaded = TimedRun.of(Experiment.of({"trace": str(demo_trace()), "requests": 4, "draft_us": us}))
        (found,) = speculate(loaded, grid_of(loaded, [parse("lru")], ["50%"]), [1])
        grown.append(found.break_even)
    assert grown[0] is not None
    assert grown[0] < (grown[1] or 2)


def test_of_a_trace_recorded_with_drafts_speeds_at_its_own_acceptance_are_printed(tmp_path: Path) -> None:
    """Of steps that accept 1, 0 and 2 of 2 tokens: 3 of 5 that were compared."""
    trace = recorded_with(Drafts(2, (1, 0, 2)), Trace.read(demo_trace()).head(1).of_phase(DECODE).without_last(1))
    assert len(trace.experts) % 6 == 0
    write_trace(trace, tmp_path / "t")
    loaded = TimedRun.of(Experiment.of({"trace": str(tmp_path / "t")}))
    assert recorded(loaded) == pytest.approx(3 / 5)
    assert recorded(TimedRun.of(Experiment.of({"trace": str(demo_trace())}))) is None
    options = ["speculate", str(tmp_path / "t"), "--policies", "lru", "--cache-sizes", "20%", "--longest", "1"]
    assert "t/s 0.6" in moe_sim(*options, cwd=tmp_path).stdout


def test_no_answer_is_shorter_than_the_longest_step() -> None:
    loaded = TimedRun.of(Experiment.of({"trace": str(demo_trace()), "requests": 2}))
    decoded = int((np.diff(loaded.whole.offsets) - loaded.whole.prompts).max())
    assert lengths_of(loaded, 1_000) == list(range(1, decoded))
    found = speculate(loaded, grid_of(loaded, [parse("lru")], ["50%"]), [decoded - 1])
    assert found[0].union.min() >= loaded.trace.top_k


def test_a_trace_that_decodes_nothing_is_refused() -> None:
    loaded = TimedRun.of(Experiment.of({"trace": str(demo_trace()), "requests": 1}))
    prompts = TimedRun(loaded.experiment, loaded.whole.of_phase(0), loaded.profile, loaded.hardware)
    with pytest.raises(InputError, match="decodes no token"):
        speculate(prompts, grid_of(loaded, [parse("lru")], ["50%"]), [1])
