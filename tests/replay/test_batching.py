"""Requests of a continuous batch get what each gets alone, and decide what rule 18 decides."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from replay.device_choice import DeviceChoice
from replay.live import LiveModel, Shard, open_live
from replay.live.batching import ContinuousBatch
from sim import simulate
from sim.loop.log import COLUMNS
from tests.support.live_models import prompt, saved, whole_model
from traces import InputError

SAMPLING: tuple[dict[str, Any], ...] = (
    {"do_sample": False, "max_new_tokens": 9},
    {"do_sample": True, "temperature": 1.5, "max_new_tokens": 6},
    {"do_sample": True, "top_k": 5, "max_new_tokens": 12},
    {"do_sample": False, "repetition_penalty": 1.7, "max_new_tokens": 1},
    {"do_sample": True, "top_p": 0.9, "max_new_tokens": 7},
)


def generated(model: Any, number: int) -> list[int]:
    torch.manual_seed(number)
    tokens: list[int] = model.generate(prompt(4 + 3 * number, seed=number), pad_token_id=0, **SAMPLING[number])[
        0
    ].tolist()
    return tokens


def asked(live: LiveModel, found: dict[int, list[int]], number: int) -> None:
    found[number] = generated(live.model, number)


@pytest.fixture(params=["qwen3_moe", "gpt_oss", "deepseek_v3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return saved(tmp_path / "model", request.param, "bfloat16")


def opened(folder: Path, policy: str = "lru", cache_size: str = "7") -> Any:
    return open_live(str(folder), DeviceChoice("disk", lanes=1), policy=policy, cache_size=cache_size)


def run(live: LiveModel, requests: list[Callable[[], None]], most: int) -> ContinuousBatch:
    """Run requests as users do who wait until there is room."""
    batch, waiting = ContinuousBatch(live, most, is_recorded=True), list(requests)
    with torch.inference_mode():
        while waiting or len(batch):
            if waiting and not batch.is_full:
                batch.add(waiting.pop(0))
            if len(batch):
                batch.step()
    return batch


@pytest.mark.parametrize("most", [1, 2, 5])
def test_each_request_gets_what_the_whole_model_gives_it_alone_in_the_steps_of_rule_18(folder: Path, most: int) -> None:
    expected = [generated(whole_model(folder), number) for number in range(len(SAMPLING))]
    found: dict[int, list[int]] = {}

    with opened(folder) as live:
        live.make_room(most)

        run(live, [partial(asked, live, found, number) for number in range(len(SAMPLING))], most)
        trace, rows = live.trace, [dict(zip(COLUMNS, row.numbers, strict=True)) for row in live.rows]
    assert [found[number] for number in range(len(SAMPLING))] == expected
    simulated = simulate(trace, "lru", 7, max_batch=most)
    counted = [(row["tokens"], row["hits"] + row["late"], row["misses"]) for row in rows]
    steps = simulated.steps
    assert counted == list(zip(steps["tokens"], steps["hits"] + steps["late"], steps["misses"], strict=True))


def test_policies_that_prefetch_change_no_answer(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "qwen3_moe")
    expected = [generated(whole_model(folder), number) for number in range(len(SAMPLING))]
    found: dict[int, list[int]] = {}
    for policy in ("eamc-blend", "lru+eamc"):
        with opened(folder, policy, "5") as live:  # which has room for one request, and starts again with the second
            ask = partial(asked, live, found)
            run(live, [partial(ask, number) for number in range(len(SAMPLING))], 3)
        assert [found[number] for number in range(len(SAMPLING))] == expected, policy


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many reads are left before the disk fails."""
    left, read = [10**9], Shard.read

    def maybe(self: Shard, offset: int, target: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise InputError("the disk cannot be read")
        read(self, offset, target)

    monkeypatch.setattr(Shard, "read", maybe)
    return left


def test_a_step_that_fails_fails_for_those_of_it_and_the_next_request_works(tmp_path: Path, reads: list[int]) -> None:
    folder = saved(tmp_path / "model", "qwen3_moe")
    expected, errors = generated(whole_model(folder), 0), list[str]()
    with opened(folder, cache_size="4") as live:
        live.make_room(2)
        found = list[list[int]]()

        def ask(number: int) -> None:
            try:
                found.append(generated(live.model, number))
            except InputError as error:
                errors.append(str(error))

        batch = ContinuousBatch(live, 2)
        with torch.inference_mode():
            for number in (1, 2):
                batch.add(partial(ask, number))
                batch.step()
            reads[0] = 0
            while len(batch):
                batch.step()
            assert errors == ["the disk cannot be read"] * 2
            reads[0] = 10**9
            batch.add(partial(ask, 0))
            while len(batch):
                batch.step()
    assert found == [expected]


def test_a_request_that_fails_alone_ends_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path / "model", "qwen3_moe")
    expected, errors, found = generated(whole_model(folder), 0), list[str](), list[list[int]]()
    with opened(folder) as live:
        live.make_room(2)
        norm, calls = live.model.model.layers[1].input_layernorm, [0]
        forward = norm.forward

        def failing(hidden: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            if calls[0] == 6:
                raise MemoryError("no memory")
            result: torch.Tensor = forward(hidden)
            return result

        def ask(number: int) -> None:
            try:
                found.append(generated(live.model, number))
            except (InputError, MemoryError) as error:
                errors.append(str(error))

        monkeypatch.setattr(norm, "forward", failing)
        batch = ContinuousBatch(live, 2)
        with torch.inference_mode():
            for number in (1, 2):
                batch.add(partial(ask, number))
            while len(batch):
                batch.step()
            assert sorted(errors)[1] == "no memory"
            assert "another request of the same step" in sorted(errors)[0]
            batch.add(partial(ask, 0))
            while len(batch):
                batch.step()
    assert found == [expected]
