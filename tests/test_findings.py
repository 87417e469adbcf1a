"""FINDINGS.md says what its tables hold, and the tables are what the traces give."""

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from benchmarks.findings import studies, text

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "findings" / "results"
SHARED = ROOT.parent / "shared" / "traces"


@pytest.fixture(scope="module")
def held() -> dict[str, pd.DataFrame]:
    return text.tables(RESULTS)


def test_every_number_is_what_the_tables_give(held):
    assert text.text(held) == (ROOT / text.NAME).read_text("utf-8")


def test_a_changed_result_changes_the_text(held):
    policies = held["policies"].copy()
    policies.loc[policies["policy"] == "lru", "hits"] -= 1_000
    assert text.text({**held, "policies": policies}) != text.text(held)


def test_the_figures_that_it_names_are_there():
    named = set(re.findall(r"\]\((\S+\.png)\)", (ROOT / text.NAME).read_text("utf-8")))
    assert len(named) == 5
    assert all((ROOT / name).is_file() for name in named)


def test_the_tables_hold_no_routing(held):
    assert set(held) == {
        "policies",
        "capacities",
        "users",
        "curves",
        "activation",
        "similarity",
        "models",
        "speculation",
        "bent",
        "quality",
        "hybrid",
    }
    for table in held.values():
        assert all(table[name].map(type).isin([str, int, float, bool]).all() for name in table.columns)
    assert not any(name in table.columns for table in held.values() for name in ("expert", "experts", "layer"))


@pytest.mark.parametrize("name", [studies.GPT_OSS, studies.DEEPSEEK])
def test_traces_are_read_with_the_ids_of_their_tokens(name, tmp_path):
    file, ids = tmp_path / f"{studies.FILES[name]}.npz", np.arange(7, dtype=np.int32)
    np.savez(file, experts=np.arange(42).reshape(7, 3, 2) % 5, offsets=[0, 4, 7])
    np.savez(file.with_name(f"{file.stem}-tokens.npz"), token_ids=ids)
    file.with_suffix(".json").write_text(json.dumps({"phase": "prefill", "experts": 5, "requests": [{}, {}]}))
    trace, _ = studies.read(tmp_path, name)
    assert np.array_equal(np.concatenate([trace.steps(i).token_ids for i in range(2)]), ids)


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason=f"real traces are not at {SHARED}")
def test_the_studies_give_the_tables_again(held):
    for name, half in studies.HALVES.items():
        trace, facts = studies.read(SHARED, name)
        told = {
            "curves": studies.curves(trace, list(half)[: studies.MOST]),
            "activation": studies.activation(trace, facts),
            "similarity": studies.similarity(trace),
        }
        for study, found in told.items():
            committed = held[study][held[study]["trace"] == name].drop(columns="trace").reset_index(drop=True)
            pd.testing.assert_frame_equal(found.reset_index(drop=True), committed, check_dtype=False)
