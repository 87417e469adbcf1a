"""Drafts that are looked up while a model generates: the same tokens as one by one, and what was drafted is stated."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replay.commands import main
from replay.device_choice import DeviceChoice
from replay.live.opening import open_live
from sim import simulate
from tests.support.command import run
from tests.support.live_models import saved, whole_model
from tracer import demo
from tracer.answers import LoadedModel, Runner
from tracer.hook import ExpertsHook
from tracer.observed import Answer, Answers
from traces import Trace
from traces.drafts import Drafts

TEXT = "Once upon a time there was a little dog. The little dog"
REPEATING = [5, 6, 7, 8, 9, 10] * 3 + [5, 6]
LONG = 60


def routed(answer: Answer) -> Any:
    return np.sort(np.concatenate([part.ids[rows] for part, rows in answer.routed]))


def answered(whole: Any, tokens: list[int], draft: int) -> tuple[Answer, list[tuple[int, int]]]:
    """What the tracer records of an unmodified model."""
    with ExpertsHook(whole) as hook:
        hook.probe()
        runner = Runner(LoadedModel("whole", whole, None), hook, lambda given: None, draft=draft)
        return runner.generate([tokens], LONG, Answers())[0], runner.drafts


@pytest.mark.parametrize(("policy", "draft"), [("lru", 4), ("eamc-blend", 16)])
def test_the_shipped_model_says_and_routes_the_same_as_when_it_decodes_one_by_one(
    policy: str, draft: int, tmp_path: Path
) -> None:
    asked = ("--prompt", TEXT, "--max-new-tokens", LONG, "--print-token-ids", "--lanes", 1)
    done = run(main, "generate", *asked, "--policy", policy, "--draft", draft, "--record", tmp_path / "t")
    assert done.returncode == 0, done.stderr
    trace = Trace.read(tmp_path / "t", ["token_id", "drafted"])
    assert trace.token_id is not None
    ids = trace.token_id[: trace.prompts[0]].tolist()
    whole = whole_model(demo.MODEL)
    alone = whole.generate(torch.tensor([ids]), max_new_tokens=LONG, do_sample=False)[0, len(ids) :].tolist()
    assert done.stdout.splitlines()[-1] == " ".join(map(str, alone))
    assert trace.token_id.tolist() == [*ids, *alone[:-1]]
    one_by_one, _ = answered(whole, ids, 0)
    np.testing.assert_array_equal(np.sort(trace.experts), routed(one_by_one))
    steps = trace.in_steps(drafts=Drafts(draft, None)).steps(0)
    assert steps.drafted is not None
    assert steps.rejected is not None
    drafted, accepted = steps.drafted.sum(), (steps.drafted - steps.rejected).sum()
    assert 0 < accepted < drafted
    assert steps.drafted.max() == draft
    assert len(steps.tokens) == 1 + LONG - 1 - accepted
    assert (
        f"Drafted {drafted} tokens in {(steps.drafted > 0).sum()} of {len(steps.tokens) - 1} decode steps"
        in done.stderr
    )
    assert f"accepted {accepted} (" in done.stderr
    simulated = simulate(tmp_path / "t", policy, "25%", draft=draft)
    assert simulated.row["tokens"] == len(ids) + LONG - 1
    assert len(simulated.steps) == len(steps.tokens)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_each_pass_is_what_the_whole_model_makes_of_it(architecture: str, dtype: str, tmp_path: Path) -> None:
    """The same tokens a pass, drafted, accepted and routed; and in float32 the tokens of decoding one by one."""
    folder = saved(tmp_path, architecture, dtype)
    whole = whole_model(folder)
    wanted, drafts = answered(whole, REPEATING, 3)
    with (
        open_live(str(folder), DeviceChoice("disk", lanes=1), policy="lru", cache_size="30%") as live,
        live.hook as hook,
    ):
        live.draft = 3
        runner = Runner(live.loaded, hook, lambda given: None, draft=3)
        (found,) = runner.generate([REPEATING], LONG, Answers())
        live.end_request()
        rows = [row.numbers[:2] for row in live.rows]
    assert runner.drafts == drafts
    assert sum(count for count, _ in drafts) > 0
    assert rows == [[0, len(REPEATING)], *([1, 1 + count] for count, _ in drafts)]
    assert found.output == wanted.output
    np.testing.assert_array_equal(routed(found), routed(wanted))
    assert found.drafted == wanted.drafted
    if dtype == "float32":
        assert found.output == answered(whole, REPEATING, 0)[0].output


def test_what_is_drawn_is_recorded_as_it_was_fed(tmp_path: Path) -> None:
    """With drafts, too, each token is drawn from what the model gives behind those before it."""
    whole = whole_model(saved(tmp_path, "qwen3_moe"))
    torch.manual_seed(1)
    with ExpertsHook(whole) as hook:
        hook.probe()
        runner = Runner(LoadedModel("whole", whole, None), hook, lambda given: None, draft=4)
        (found,) = runner.generate([REPEATING], LONG, Answers(temperature=0.01))
        fed = [*REPEATING, *found.output[:-1]]
        assert len(routed(found)) == len(fed)
        hook.clear()
        with torch.no_grad():
            whole(input_ids=torch.tensor([fed]))
        np.testing.assert_array_equal(np.sort(hook.passes[0].ids), routed(found))
