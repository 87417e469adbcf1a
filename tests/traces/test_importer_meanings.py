"""Columns are held against what their names mean: what contradicts is read as what it is, or is a question."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from traces.errors import InputError
from traces.importers import Options, import_dump
from traces.trace import Trace

RNG = np.random.default_rng(1)
TOKENS, LAYERS, EXPERTS, K = 12, 2, 8, 2
WEIGHTS = RNG.random((TOKENS, LAYERS, EXPERTS))
WEIGHTS /= WEIGHTS.sum(axis=2, keepdims=True)
IDS = np.argsort(-WEIGHTS, axis=2)[:, :, :K]
HITS = RNG.integers(0, 2, IDS.shape)
PHASE = np.repeat([0, 1], 6)
VOCABULARY = RNG.permutation(50_000)[:TOKENS]
COUNTS = RNG.integers(1, 90, (LAYERS, EXPERTS))


def rows(token: Any = None, **columns: Any) -> pd.DataFrame:
    """A row for each expert of a choice, with columns by token, or by token, layer and place."""
    at = np.indices(IDS.shape).reshape(3, -1)
    made = {name: values[tuple(at)] if values.ndim == 3 else values[at[0]] for name, values in columns.items()}
    token = np.arange(TOKENS) if token is None else token
    return pd.DataFrame({"token": token[at[0]], "layer": at[1], "expert": IDS.ravel(), **made})


def wide(values: Any = IDS, name: str = "expert") -> pd.DataFrame:
    """A row for each token and layer."""
    at = np.indices((TOKENS, LAYERS)).reshape(2, -1)
    columns = {f"{name}_{n}": values[..., n].ravel() for n in range(values.shape[2])}
    return pd.DataFrame({"token": at[0], "layer": at[1], **columns})


def counts(name: str, values: Any) -> pd.DataFrame:
    layer, expert = np.indices(values.shape).reshape(2, -1)
    return pd.DataFrame({"layer": layer, "expert": expert, name: values.ravel()})


@pytest.fixture(params=["csv", "jsonl", "parquet"])
def read(request: Any, tmp_path: Path) -> Any:
    def read(frame: pd.DataFrame, **options: Any) -> tuple[Trace, str]:
        file = tmp_path / f"dump.{request.param}"
        if request.param == "csv":
            frame.to_csv(file, index=False)
        elif request.param == "parquet":
            frame.to_parquet(file)
        else:
            file.write_text("\n".join(json.dumps(row) for row in frame.to_dict("records")))
        given: dict[str, Any] = {"experts": EXPERTS, "phase": "decode"} | options
        trace, notes = import_dump(file, options=Options(**given))
        return trace, " ".join(notes)

    return read


@pytest.mark.parametrize("by", ["token", "layer"])
def test_numbers_that_do_not_count_up_are_ids_and_the_order_is_the_files(read: Any, by: str) -> None:
    frame = rows(VOCABULARY)
    trace, notes = read(frame if by == "token" else frame.sort_values("layer", kind="stable"))
    assert np.array_equal(trace.experts, IDS)
    assert np.array_equal(trace.token_id, VOCABULARY)
    assert "token does not count up" in notes
    assert np.array_equal(read(frame.assign(t=np.repeat(np.arange(TOKENS), 2 * LAYERS)))[0].experts, IDS)
    assert np.array_equal(read(rows().sample(frac=1, random_state=1))[0].experts.sum(axis=2), IDS.sum(axis=2))


@pytest.mark.parametrize(
    ("name", "prompt", "decoded"),
    [("is_prefill", 1, 0), ("isPrompt", True, False), ("is_decode", 0, 1), ("generated", "no", "yes"), ("phase", 0, 1)],
)
def test_a_phase_is_an_answer_to_the_question_that_its_column_asks(
    read: Any, name: str, prompt: Any, decoded: Any
) -> None:
    values = np.array([prompt, decoded], object)[PHASE]
    frame = rows(**{name: values.astype(type(prompt))})
    assert np.array_equal(read(frame, phase=None)[0].phase, PHASE)
    if name == "phase":
        frame["phase"] = 1 - frame["phase"]
        with pytest.raises(InputError, match="--columns is_prefill=phase if 1 is a prompt"):
            read(frame, phase=None)
        assert np.array_equal(read(frame, phase=None, columns="is_prefill=phase")[0].phase, PHASE)


@pytest.mark.parametrize(
    "frame",
    [
        wide(WEIGHTS, "expert"),
        wide(np.log(WEIGHTS), "logit"),
        pd.DataFrame({**wide()[["token", "layer"]], "router_probs": list(WEIGHTS.reshape(-1, EXPERTS).tolist())}),
    ],
)
def test_weights_of_all_experts_are_a_top_k_of_the_stated_k(read: Any, frame: pd.DataFrame) -> None:
    with pytest.raises(InputError, match=r"names all 8 experts in a choice.*--top-k"):
        read(frame)
    assert np.array_equal(read(frame, top_k=K)[0].experts, IDS)


def test_shares_are_kept_in_proportion_where_they_are_said_to_be_shares(read: Any) -> None:
    shares = COUNTS / COUNTS.sum(axis=1, keepdims=True)
    with pytest.raises(InputError, match="--columns share=frequency keeps them in proportion"):
        read(counts("frequency", shares), top_k=K)
    kept = read(counts("frequency", shares), top_k=K, columns="share=frequency")[0].eams(1)[0]
    assert np.allclose(kept / kept.sum(axis=1, keepdims=True), shares, atol=1e-5)


def test_a_count_is_counted_once_and_by_its_phase(read: Any) -> None:
    frame = counts("count", COUNTS)
    with pytest.raises(InputError, match="is counted twice"):
        read(pd.concat([frame, frame]), top_k=K)
    both = pd.concat([frame.assign(phase="prefill"), frame.assign(phase="decode", count=2 * frame["count"])])
    trace, _ = read(both, top_k=K, phase=None)
    assert [trace.eams(phase)[0].tolist() for phase in (0, 1)] == [COUNTS.tolist(), (2 * COUNTS).tolist()]


def test_counts_of_all_experts_may_stand_in_a_row(read: Any) -> None:
    listed = pd.DataFrame({"layer": range(LAYERS), "counts": COUNTS.tolist()})
    numbered = pd.DataFrame({"layer": range(LAYERS), **{f"count_{e}": COUNTS[:, e] for e in range(EXPERTS)}})
    for frame in (listed, numbered):
        assert np.array_equal(read(frame, top_k=K)[0].eams(1)[0], COUNTS)


def test_ids_that_count_through_all_layers_become_those_of_each(read: Any) -> None:
    frame = pd.concat([rows().assign(token=rows()["token"] + n * TOKENS) for n in range(2)])
    frame["expert"] += EXPERTS * frame["layer"]
    with pytest.raises(InputError, match="count through all layers, up to 15: give --experts"):
        read(frame, experts=None)
    assert np.array_equal(read(frame)[0].experts, np.concatenate([IDS, IDS]))


def test_layers_of_two_stacks_are_not_one(read: Any) -> None:
    frame = rows().rename(columns={"layer": "number"})
    stacks = np.array(["encoder", "decoder"])[frame.pop("number")]
    for named in (frame.assign(layer=stacks + ".block.1.mlp"), frame.assign(layer=1, stack=stacks)):
        assert np.array_equal(read(named)[0].experts, IDS)


@pytest.mark.parametrize(("name", "values"), [("residency", 2 * HITS), ("cache_hit", HITS == 1), ("miss", 1 - HITS)])
def test_what_an_engine_said_of_its_cache_is_kept(read: Any, name: str, values: Any) -> None:
    assert np.array_equal(read(rows(**{name: values}))[0].hits, HITS)
