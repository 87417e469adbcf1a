"""Presets: names of documented systems that stand for policies as given."""

from dataclasses import replace

import pytest

from policies.core.policy import Shape
from policies.core.spec import parse
from policies.core.systems import presets, systems
from sim.engines.simpy_engine import simulate
from sim.loop.requests import Requests
from sim.loop.run import gpu_run
from sim.profiles.timing import FixedTiming, Link
from tests.support.ahead import with_lookahead
from traces.synthetic import synthetic
from traces.writer import write_trace

L, E = 3, 8
TRACE = synthetic(3, tokens=8, layers=L, experts=E, top_k=2, seed=5, prompt_tokens=4)
TRACE = with_lookahead(TRACE, TRACE.experts)
TIMING = FixedTiming(dense=100, expert=20, expert_per_token=1, combine=2, head=300)
LINK = Link(latency_ns=10, ns_per_byte_num=1, ns_per_byte_den=4, expert_bytes=400)

NEEDS = {"brainstorm": "profile={trace}", "fiddler": "profile={trace}"}
"""Options without which a preset cannot run; {trace}: the folder of TRACE."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home") / "trace"
    write_trace(TRACE, folder)
    return folder


@pytest.mark.parametrize("preset", presets(), ids=lambda preset: preset.name)
def test_every_preset_plays_as_what_it_stands_for(preset, folder):
    options = NEEDS.get(preset.name, "").format(trace=folder)
    spec = parse(f"{preset.name}:{options}" if options else preset.name)
    assert spec.text.startswith(preset.name)
    assert spec.options()["preset"] == preset.name
    if not options:
        assert spec.resolved() == parse(preset.policy).options()
    log = simulate(gpu_run(list(Requests(TRACE)), Shape(L, E), 9, spec, TIMING, LINK, experts_per_layer=1.5))
    lookups = sum(len(request.experts) for request in Requests(TRACE))
    assert log.hits.sum() + log.late.sum() + log.misses.sum() == lookups
    assert log.misses.sum() > 0


def made_up(monkeypatch, policy: str) -> None:
    monkeypatch.setitem(systems(), "made-up", replace(systems()["specmd"], name="made-up", policy=policy))


@pytest.mark.parametrize(
    ("policy", "typed", "stands_for"),
    [
        ("lrfu+popular", "made-up:n=2", "lrfu+popular:n=2"),
        ("lrfu+popular:n=3", "made-up:decay=0.5:n=2", "lrfu:decay=0.5+popular:n=2"),
        ("lru+popular@layer", "made-up:profile=some/trace", "lru+popular@layer:profile=some/trace"),
        ("static+popular@layer", "made-up:profile=t", "static:profile=t+popular@layer:profile=t"),
        ("lru+popular@layer", "made-up@global", "lru+popular"),
        ("lru+popular", "made-up:n=2@layer:profile=t", "lru+popular:n=2@layer:profile=t"),
        ("static", "made-up:profile=t@layer", "static:profile=t@layer"),
        ("static", "made-up:profile=t@layer:profile=u", "static:profile=t@layer:profile=u"),
        ("lru+popular", "made-up:n=2/layers:n=12", "lru+popular:n=2/layers:n=12"),
        ("eamc", "made-up:capacity=7", "eamc:capacity=7"),
    ],
)
def test_an_option_goes_to_every_part_that_declares_it(monkeypatch, policy, typed, stands_for):
    made_up(monkeypatch, policy)
    found = parse(typed)
    assert found.resolved() == parse(stands_for).resolved()
    assert found.text == typed


def test_a_preset_in_a_scope_of_its_own_keeps_it(monkeypatch):
    made_up(monkeypatch, "lru@layer")
    assert parse("made-up").with_part("scope", "global").text == "made-up"
    assert parse("made-up").with_part("scope", "layer:profile=t").text == "made-up"
    assert parse("pre-gated").with_part("scope", "layer").text == "pre-gated@layer"
    assert parse("pre-gated").with_part("scope", "layer").options()["preset"] == "pre-gated"
    assert parse("made-up").without_prefetch().text == "lru@layer"
    assert parse("pre-gated").without_prefetch() == parse("fifo")
