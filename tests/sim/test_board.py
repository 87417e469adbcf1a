"""`moe-sim board`: LRU and Belady are the ends, an own policy lies where a sweep has it, and a file is run again."""

from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from statistics import fmean

import pytest

from sim import sweep
from sim.analysis.board import SIZES, cards_of, read, write
from tests.support.command import moe_sim

OWN = """
from policies import ScorePolicy

class Mine(ScorePolicy):
    def observe(self, event):
        self.keep[0] *= 0.995
        self.keep[0, event.experts] += 1
"""
NAME = "mine.py:Mine"
COUNTED, TIMED = "switch-base-8", "qwen3-30b-a3b"


def test_an_own_policy_is_ranked_and_its_file_is_run_again(tmp_path: Path) -> None:
    own, file = tmp_path / "mine.py", tmp_path / "mine.toml"
    own.write_text(OWN)
    done = moe_sim("board", NAME, f"--traces={COUNTED},{TIMED}", "--workers=1", "--out", file, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = read(file)
    entries = found.policies
    for end, value in (("lru", 0), ("belady", 1)):
        entry = entries[end]
        assert (entry.score, entry.worst, entry.tpot_score, entry.tpot_worst) == (value, value, value, value)
    mine = entries[NAME]
    assert list(mine.hits) == [f"{trace} {size}" for trace in (COUNTED, TIMED) for size in SIZES]
    assert list(mine.tpot) == [f"{TIMED} {size}" for size in SIZES]
    counted = sweep(cards_of([COUNTED])[0].folder, [f"{own}:Mine"], SIZES, untimed=True).frame.gap_hits
    assert [mine.hits[f"{COUNTED} {size}"] for size in SIZES] == pytest.approx(list(counted), abs=1e-6)
    assert mine.score == pytest.approx(fmean(mine.hits.values()), abs=1e-6)
    assert mine.digest == sha256(own.read_bytes()).hexdigest()
    assert found.overhead_us[NAME] > 0
    first, *others = done.stdout.splitlines()
    assert first.startswith(f"{NAME if mine.score > 0 else 'lru'} leads: it closes ")
    assert all(len(line.rstrip()) <= 80 for line in others[:-1])

    changed = replace(mine, tpot={**mine.tpot, f"{TIMED} 25%": 0.5})
    write(replace(found, policies={**entries, NAME: changed}), file, overwrite=True)
    done = moe_sim("board", "--check", file, "--workers=1", cwd=tmp_path)
    assert done.returncode == 1
    assert f"policies {NAME} tpot {TIMED} 25% is 0.5 in the file, and {mine.tpot[f'{TIMED} 25%']} now" in done.stderr
