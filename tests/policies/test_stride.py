"""The stride predictor: what it proposes against the definition, what training learns, and files that are not one."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.core import Shape, parse
from policies.prefetch import Predictor, Tokens, Training, recall, recall_of_previous, train
from policies.prefetch.stride_training import probabilities
from tests.support import command
from tests.support.routings import proposals
from tests.support.tiny import SIZES
from traces import DECODE, InputError, write_trace
from traces.synthetic import synthetic


def made_up(L, E, stride, back, seed):
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((L, back + 1, E, E)).astype(np.float32)
    return Predictor(stride, weights, rng.standard_normal((L, E)).astype(np.float32))


def saved(predictor, folder):
    path = folder / "stride.npz"
    predictor.save(path)
    return path


def proposed(trace, path, n):
    """After each event: [(id, priority)], by request, step and layer."""
    requests, shape = [trace.steps(i) for i in range(len(trace.requests))], Shape(trace.layers, trace.num_experts)
    found = proposals(requests, shape, f"lru+stride:model={path}:n={n}")
    return {at: list(each.items()) for at, each in found.items()}


def slowly(trace, predictor, n):
    """The definition, over the request's decoded events in one list."""
    L, E, stride = trace.layers, trace.num_experts, predictor.stride
    back = predictor.weights.shape[1] - 1
    found: dict[tuple[int, int, int], list[tuple[int, float]]] = {}
    for r in range(len(trace.requests)):
        rows = range(int(trace.offsets[r]), int(trace.offsets[r + 1]))
        decoded = [row for row in rows if trace.phase[row] == DECODE]
        before = int(len(decoded) < len(rows))
        events = [set(trace.experts[row, layer].tolist()) - {trace.sentinel} for row in decoded for layer in range(L)]
        if before:
            found |= {(r, 0, layer): [] for layer in range(L)}
        latest = {}
        for at in range(len(events)):
            coming, to = at + stride, (at + stride) % L
            scores = predictor.bias[to].astype(float)
            for j, source in enumerate([*(at - j for j in range(back)), coming - L]):
                for expert in events[source] if source >= 0 else ():
                    scores = scores + predictor.weights[to, j, expert]
            likely = sorted(range(E), key=lambda e: (-scores[e], e))[:n]
            latest[to] = [(to * E + e, 1 / (1 + math.exp(-scores[e]))) for e in likely]
            ahead = [(at + distance) % L for distance in range(1, stride + 1)]
            found[r, before + at // L, at % L] = [one for layer in ahead for one in latest.get(layer, [])]
    return found


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 5), st.integers(2, 6), st.data())
def test_the_likeliest_of_the_layer_ahead_and_again_those_of_the_layers_before_it(L, E, data):
    stride = data.draw(st.integers(1, L - 1))
    back = data.draw(st.integers(1, L - stride))
    n, seed, prompt = data.draw(st.integers(0, E + 1)), data.draw(st.integers(0, 99)), data.draw(st.integers(0, 2))
    trace = synthetic(requests=2, tokens=4, layers=L, experts=E, top_k=2, seed=seed, prompt_tokens=prompt)
    holes = np.random.default_rng(seed).random(trace.experts.shape) < 0.2
    trace = replace(trace, experts=np.where(holes, trace.sentinel, trace.experts).astype(trace.experts.dtype))
    predictor = made_up(L, E, stride, back, seed)
    with TemporaryDirectory() as folder:
        found, expected = proposed(trace, saved(predictor, Path(folder)), n), slowly(trace, predictor, n)
    assert found.keys() == expected.keys()
    for at in found:
        assert [i for i, _ in found[at]] == [i for i, _ in expected[at]], at
        assert [p for _, p in found[at]] == pytest.approx([p for _, p in expected[at]], rel=1e-4)


def follows(seed, noise=0.0, tokens=300, L=4, E=6):
    """A trace where in each layer expert e is followed by e + 1 in the next, but for a share `noise` of the time."""
    made = synthetic(requests=6, tokens=tokens, layers=L, experts=E, top_k=1, seed=seed)
    rng = np.random.default_rng(seed)
    experts = np.empty((6 * tokens, L, 1), made.experts.dtype)
    before = rng.integers(0, E, 6 * tokens)
    for layer in range(L):
        experts[:, layer, 0] = before
        other = rng.random(6 * tokens) < noise
        before = np.where(other, rng.integers(0, E, 6 * tokens), (before + 1) % E)
    return replace(made, experts=experts)


@pytest.mark.parametrize("stride", [1, 2])
def test_training_learns_a_rule_and_finds_it_in_unseen_requests(stride):
    seen, unseen = Tokens.of(follows(seed=1)), Tokens.of(follows(seed=2))
    predictor = train(seen, Training(stride=stride, back=2, epochs=20))
    k_of_layers = [layer for layer in range(4) if layer >= stride]  # the first layers follow nothing: they are random
    for layer in k_of_layers:
        p = probabilities(predictor, unseen, layer, np.arange(len(unseen)))
        assert (p.argmax(axis=1) == unseen.chosen[layer::4, 0]).all()
    assert recall(predictor, unseen) == pytest.approx(1 - stride / 4 * 5 / 6, abs=0.02)
    assert recall_of_previous(unseen) == pytest.approx(1 / 6, abs=0.03)


def test_training_twice_gives_the_same_and_another_seed_another_predictor():
    tokens = Tokens.of(follows(seed=1, noise=0.3))
    one, two, other = (train(tokens, Training(epochs=1, seed=seed)) for seed in (0, 0, 1))
    assert (one.weights == two.weights).all()
    assert (one.bias == two.bias).all()
    assert (one.weights != other.weights).any()


def test_what_is_proposed_is_what_training_would_say(tmp_path):
    trace = synthetic(requests=2, tokens=8, layers=4, experts=6, top_k=2, seed=3, prompt_tokens=2)
    tokens = Tokens.of(trace)
    predictor = train(tokens, Training(stride=2, back=2))
    found = proposed(trace, saved(predictor, tmp_path), n=6)
    for r in range(2):
        for token in range(1, 8):
            for layer in range(4):
                step, source = (token + 1, layer - 2) if layer >= 2 else (token, layer + 2)
                p = probabilities(predictor, tokens, layer, np.array([r * 8 + token]))[0]
                said = {i - layer * 6: share for i, share in found[r, step, source] if i // 6 == layer}
                assert said == pytest.approx(dict(enumerate(p.tolist())), rel=1e-4)


def test_a_file_keeps_the_predictor(tmp_path):
    predictor = made_up(3, 5, stride=1, back=2, seed=0)
    path = saved(predictor, tmp_path)
    read = Predictor.load(path)
    assert (read.stride, read.shape) == (1, Shape(3, 5))
    assert (read.weights == predictor.weights).all()
    with pytest.raises(InputError, match=r"no stride predictor at .*: moe-sim train-stride"):
        Predictor.load(tmp_path / "nowhere.npz")


def test_a_predictor_is_needed_and_has_to_fit(tmp_path):
    path = saved(made_up(3, 5, stride=1, back=2, seed=0), tmp_path)
    with pytest.raises(InputError, match="stride: it needs a trained predictor"):
        parse("lru+stride").build(Shape(3, 5))
    with pytest.raises(InputError, match="is for 3 layers of 5 experts, not 3 of 6"):
        parse(f"lru+stride:model={path}").build(Shape(3, 6))


# The command


@pytest.fixture
def moe_sim(tmp_path):
    return partial(command.moe_sim, cwd=tmp_path)


def test_the_command_trains_tests_and_writes_what_a_sweep_takes(moe_sim, tmp_path):
    trace = follows(seed=1)
    write_trace(replace(trace, meta=replace(trace.meta, **SIZES)), tmp_path / "t")
    code, out, err = moe_sim("train-stride", "t", "--out", "s.npz", "--epochs", 20, "--held-out", 0.2, "--back", 2)
    assert code == 0, err
    assert "of the choices of the last 1 requests" in out
    assert "wrote s.npz: --policies lru+stride:model=s.npz" in out
    expected = train(Tokens.of(trace.head(5)), Training(back=2, epochs=20))
    assert (Predictor.load(tmp_path / "s.npz").weights == expected.weights).all()
    sweep = ("--policies", "lru+stride:model=s.npz:n=1,lru", "--cache-sizes", 12, "--workers", 1, "--json")
    code, out, err = moe_sim("sweep", "t", *sweep)
    assert code == 0, err
