"""Of docs/board.md: a policy that foresees all tokens hits as often as Belady, and one that foresees none as LRU."""

import pytest

from benchmarks.board import Foresight
from policies import make_policy
from sim import sweep
from traces.synthetic import synthetic
from traces.writer import write_trace


@pytest.mark.parametrize(("tokens", "bound"), [(200, "belady"), (0, "lru")])
def test_foresight_reaches_from_lru_to_belady(tokens, bound, tmp_path):
    write_trace(synthetic(2, 40, 3, 8, 2, seed=0), tmp_path / "trace")
    mine = make_policy(Foresight, tokens=tokens)
    found = sweep(tmp_path / "trace", ["lru", "belady", mine], ["9", "12"], untimed=True, model_profile=None).frame
    hits = {name: rows.hits.tolist() for name, rows in found.groupby("policy")}
    assert hits["lru"] != hits["belady"]
    assert hits[mine.text] == hits[bound]
