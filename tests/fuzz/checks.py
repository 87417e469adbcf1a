"""What a reader has accepted must be usable: a trace is written, validated, read again and run; sizes and times add up.

Each check takes what a target has read, and an empty folder or one of its own. Whatever it raises is a finding: what
cannot be used, the reader should have refused in one line.
"""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np

from policies.core.policy import Shape
from policies.core.spec import parse
from policies.eamc.file import SavedEamc
from policies.prefetch.stride import Predictor
from sim.api import simulate
from sim.engines.untimed import count
from sim.profiles.hardware_profile import Hardware, hardware
from sim.profiles.model_profile import ModelProfile
from sim.profiles.roofline import Roofline, host_link
from sim.report import inputs
from sim.results.compare import SweptRun, differences
from tests.support.same import assert_same
from tests.support.tiny import PROFILE, SIZES
from tracer.prompts import Prompt
from traces.errors import InputError
from traces.reader import EXTRA
from traces.stats import summary
from traces.stream import pieces
from traces.synthetic import synthetic
from traces.trace import Trace
from traces.writer import write_trace

MOST_EXPERTS = 1_000
"""Of a model for which a policy is started."""

MOST_TOKENS = 10_000
"""Of a trace that is run."""


def imported(found: tuple[Trace, list[str]], folder: Path) -> None:
    """A dump has become a trace that can be written and used."""
    trace, notes = found
    assert all(note and "\n" not in note for note in notes), notes
    rmtree(folder / "written", ignore_errors=True)
    try:
        write_trace(trace, folder / "written")
    except InputError:  # `moe-trace import` says so as well
        return
    assert_same(trace, used(folder / "written"))


def a_trace(_: object, folder: Path) -> None:
    """It is valid and can be used."""
    used(folder / "t")


def used(folder: Path) -> Trace:
    """A trace that can be read is valid, can be summed up, and each of its requests can be run."""
    trace = Trace.read(folder, EXTRA)
    assert sum(len(piece.step) for piece in pieces(folder, EXTRA)) == len(trace.step)
    summary(trace)
    if trace.aggregate is not None or len(trace.step) > MOST_TOKENS:
        return trace
    slots = -(-trace.layers * trace.num_experts // 2)
    requests = [trace.steps(i) for i in range(len(trace.requests))]
    log = count(requests, trace.layers, trace.num_experts, slots, parse("lru"))
    lookups = sum(len(request.experts) for request in requests)
    assert log.hits.sum() + log.misses.sum() == lookups
    return trace


def runs(model: ModelProfile, hardware: Hardware) -> None:
    """Durations are positive and grow with the tokens; an expert takes time on the link."""
    timing = Roofline(hardware, model)
    for layer in {0, model.moe_layers - 1}:
        few, many = (timing.expert_ns(tokens, layer) for tokens in (1, 64))
        assert 0 < few <= many
        few, many = (timing.dense_ns(layer, tokens, 64) for tokens in (1, 64))
        assert few >= 0
        assert layer < model.encoder_moe_layers or few <= many
        assert 0 < timing.host_ns(1, layer) <= timing.host_ns(64, layer)
        assert 0 < model.bytes_of(layer) <= model.expert_bytes
        assert host_link(hardware, model).used_ns(model.bytes_of(layer)) > 0
    assert 0 < timing.head_ns(1) <= timing.head_ns(64)
    assert 0 < timing.combine_ns(1) <= timing.combine_ns(64)
    assert model.token_bytes > 0
    assert 0 <= model.kv_cache_bytes(1) <= model.kv_cache_bytes(1000)
    assert model.dense_bytes > 0


def a_model(found: ModelProfile, _: Path) -> None:
    """It runs on a machine."""
    runs(found, hardware("a5000"))


def a_machine(found: Hardware, _: Path) -> None:
    """A model runs on it."""
    runs(PROFILE, found)


def sizes(found: Any, _: Path) -> None:
    """Each layer's experts have bytes."""
    assert len(found)
    assert (np.asarray(found) > 0).all()


def cells(found: list[SweptRun], folder: Path) -> None:
    """Each pair of cells can be compared, or is refused in one line; the report reads the same tables."""
    with suppress(InputError):
        for difference in differences(found[0], found[-1], resamples=10):
            assert "nan" not in difference.sentence()
    (results,) = inputs.read([folder])
    assert len(results.rows) == len(found)
    assert results.requests is not None


def an_eamc(found: SavedEamc, folder: Path) -> None:
    """Written again it is the same, and a policy starts from it."""
    path = folder / "written.npz"
    with path.open("wb") as file:
        found.write(file)
    again = SavedEamc.read(path)
    options = replace(found.options, collection="")  # which is not kept
    assert (again.shape, again.options, again.trace) == (found.shape, options, found.trace)
    for one, other in zip(found.parts, again.parts, strict=True):
        for name, array in vars(one).items():
            np.testing.assert_array_equal(array, vars(other)[name], name)
    starts(f"eamc:collection={path}", found.shape)


def a_predictor(found: Predictor, folder: Path) -> None:
    """Written again it is the same."""
    found.save(folder / "written.npz")
    again = Predictor.load(folder / "written.npz")
    np.testing.assert_array_equal(found.weights, again.weights)
    np.testing.assert_array_equal(found.bias, again.bias)
    assert found.stride == again.stride
    starts(f"lru+stride:model={folder / 'written.npz'}", found.shape)


def starts(policy: str, shape: Shape) -> None:
    """A policy that starts from a file runs on a model of that shape."""
    if shape.total <= MOST_EXPERTS:
        made = synthetic(2, 3, shape.layers, shape.experts, top_k=1, seed=0, prompt_tokens=2)
        trace = replace(made, meta=replace(made.meta, **SIZES))
        run = simulate(trace, policy, "50%", engine="simpy")
        assert run["lookups"] == run["hits"] + run["late"] + run["misses"]


def prompts(found: list[Prompt], _: Path) -> None:
    """Each says something in each turn, and has an id of its own."""
    assert found
    for prompt in found:
        assert prompt.turns
        assert all(turn.strip() for turn in prompt.turns), prompt
        assert len(prompt.responses) in (0, len(prompt.turns))
        assert all(isinstance(text, str) for text in (prompt.id, prompt.dataset, prompt.task, *prompt.responses))
    assert len({prompt.id for prompt in found}) == len(found)
