"""A user's policy hears the same events in every mode: counted, compiled, SimPy, replayed, and live."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from policies import Event, Policy, ScorePolicy, make_policy
from policies.core.spec import parse
from replay import replay
from replay.device_choice import DeviceChoice
from replay.live.opening import open_live
from sim import simulate
from sim.engines import simpy_engine
from sim.experiment import Experiment
from sim.loaded import TimedRun
from tests.support.live_models import logits, prompt, saved
from tests.support.tiny import SIZES
from traces import Trace
from traces.synthetic import synthetic

PAGE = (Path(__file__).parents[2] / "policies" / "YOUR_OWN.md").read_text(encoding="utf-8")
EXAMPLES: dict[str, Any] = {"__name__": __name__}
for code in re.findall(r"Save this as `\w+\.py`:\n\n```python\n(.*?)```", PAGE, re.DOTALL):
    exec(code, EXAMPLES)

HEARD = list[Any]()


def recording(cls: type[Any]) -> type[Any]:
    """Return the class, which writes down in HEARD what it hears and then does as before."""

    class Recording(cls):
        def begin_request(self, request: int, batch_slot: int) -> None:
            HEARD.append((request, batch_slot))
            super().begin_request(request, batch_slot)

        def observe(self, event: Event) -> None:
            HEARD.append([part.tolist() if hasattr(part, "tolist") else part for part in event])
            super().observe(event)

        def end_request(self, batch_slot: int) -> None:
            HEARD.append(batch_slot)
            super().end_request(batch_slot)

    return Recording


class Oldest(Policy):
    """Names its victims."""

    def victim(self, evictable: Any) -> int:
        return int(evictable[0])


POLICIES = {
    "a score policy": recording(EXAMPLES["Fading"]),
    "one that names victims": recording(Oldest),
    "one that only hears": recording(ScorePolicy),
    "a prefetcher": make_policy("lru", prefetch=recording(EXAMPLES["Again"])),
}

MADE = synthetic(3, tokens=8, layers=3, experts=8, top_k=2, seed=5, prompt_tokens=4)
TRACE = replace(MADE, meta=replace(MADE.meta, model="tiny", **SIZES))


def in_simpy(trace: Trace, policy: Any, **options: Any) -> int:
    loaded = TimedRun.of(Experiment(trace.name, **options), trace)
    spec = parse(policy)
    return int(simpy_engine.simulate(loaded.run(spec, loaded.slots_for(spec, "50%"))).hits.sum())


MODES: dict[str, Callable[[Any], int]] = {
    "counted": lambda policy: simulate(TRACE, policy, "50%", untimed=True)["hits"],
    "compiled": lambda policy: simulate(TRACE, policy, "50%", predictor_us=3)["hits"],
    "simpy": lambda policy: in_simpy(TRACE, policy, predictor_us=3),
    "replayed": lambda policy: replay(TRACE, policy, "50%", device="virtual", predictor_us=3)["hits"],
}


def heard(run: Callable[[], int]) -> tuple[list[Any], int]:
    HEARD.clear()
    hits = run()
    return list(HEARD), hits


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_hears_the_same_events_in_every_mode_and_hits_alike_where_time_does_not_enter(name: str) -> None:
    policy = make_policy(POLICIES[name])  # type: ignore[arg-type]
    modes = {mode: run for mode, run in MODES.items() if mode != "counted" or not policy.prefetches}
    found = {mode: heard(lambda run=run: run(policy)) for mode, run in modes.items()}  # type: ignore[misc]
    events, hits = found["simpy"]
    once = [each for each in events if isinstance(each, list)]
    assert [event[0] for event in once] == list(range(1, 1 + 3 * sum(len(TRACE.steps(i).phase) for i in range(3))))
    for mode, (others, those) in found.items():
        assert others in (events, events * 2), f"{mode}: a replay predicts as well"
        assert those == hits > 0, mode


def test_a_live_model_has_its_policy_hear_the_same_fields(tmp_path: Path) -> None:
    (tmp_path / "spy.py").write_text(
        "from policies import ScorePolicy\nclass Spy(ScorePolicy):\n    heard = []\n    def observe(self, event):\n"
        "        self.heard.append([each.tolist() if hasattr(each, 'tolist') else each for each in event])\n"
    )
    spy = make_policy(f"{tmp_path / 'spy.py'}:Spy")
    folder = saved(tmp_path / "model", "olmoe")
    with open_live(str(folder), DeviceChoice("disk", lanes=1), policy=spy.text, cache_size="50%") as live:
        logits(live.model, prompt(5))
        live.end_request()
        events = list(spy.evict.cls.heard)
    live_ones = events[max(at for at, event in enumerate(events) if event[0] == 1) :]  # what came before warmed up
    layers = 1 + max(event[2] for event in live_ones)
    place = Event._fields.index("token_ids")
    for number, event in enumerate(live_ones):
        (serial, phase, layer, experts, counts, slots, steps), token_ids = event[:7], event[place]
        step = number // layers
        assert (serial, phase, layer, slots, steps) == (number + 1, int(step > 0), number % layers, [0], [step])
        assert experts == sorted(set(experts))
        assert sum(counts) == 2 * len(token_ids) == (2 if step else 10)
    assert live_ones[0][place] == prompt(5).flatten().tolist()
