"""The weights of eamc-blend go on learning, as a logistic regression over all that is recorded, with a prior, would."""

import numpy as np
import pytest

from policies.blend import learning, neighbours
from policies.blend.evidence import CONSTANT, HERE, KINDS
from policies.blend.learning import APART, BIAS, BIAS_PRIOR, CURVATURE, ENDS, PASS, PRIOR, SAMPLED, THIN, WEIGHTS
from policies.core.policy import Shape

E, K = 16, 4
EVEN = float(np.log(K / (E - K)))


def asked(own, rng, true):
    """One question of PASS, and its answer by the true weights; returns evidence [KINDS, E] and use [E]."""
    evidence = rng.normal(size=(KINDS, E)).astype(np.float32)
    evidence[CONSTANT] = 1
    used = rng.random(E) < 1 / (1 + np.exp(-(EVEN + true @ evidence)))
    learning.ask(own, 0, 8, evidence)
    learning.answer(own, np.flatnonzero(used), EVEN)
    return evidence, used


def most_likely(rows, used, prior_mean):
    """The weights by Newton's steps on the log posterior of all rows together, until nothing changes."""
    weights = prior_mean.copy()
    for _ in range(100):
        chance = 1 / (1 + np.exp(-(EVEN + rows @ weights)))
        gradient = rows.T @ (used - chance) - PRIOR * (weights - prior_mean)
        curvature = (rows * (chance * (1 - chance))[:, None]).T @ rows + np.diag(PRIOR)
        weights += np.linalg.solve(curvature, gradient)
    return weights


def test_weights_come_to_what_all_answers_together_say():
    rng, own = np.random.default_rng(0), learning.nothing_learned(Shape(1, E))
    own.biases[1] = 1e30
    true = WEIGHTS[PASS] + rng.normal(size=KINDS) / 2
    answers = []
    for step in range(2000):
        answers.append(asked(own, rng, true))
        learning.begin_step(own, step, 0, 0)

    rows = np.concatenate([evidence.T for evidence, _ in answers]).astype(float)
    best = most_likely(rows, np.concatenate([used for _, used in answers]), WEIGHTS[PASS])
    assert np.abs(own.weights[PASS] - best).max() < 0.05
    assert np.abs(own.weights[PASS] - true).max() < np.abs(WEIGHTS[PASS] - true).max() / 3
    assert np.array_equal(own.weights[:PASS], WEIGHTS[:PASS].astype(np.float32))


def test_one_answer_moves_the_weights_by_one_step_of_newtons_method_and_the_bias_by_one_of_its_own():
    rng, own = np.random.default_rng(1), learning.nothing_learned(Shape(1, E))
    evidence, used = asked(own, rng, WEIGHTS[PASS])
    for step in range(APART):
        learning.begin_step(own, step, 0, 0)

    chance = 1 / (1 + (1 - (EVEN + WEIGHTS[PASS] @ evidence) / 256) ** 256)  # as the policy reckons
    sampled = np.arange(E) % SAMPLED == 0
    spread = SAMPLED * sampled * chance * (1 - chance)
    curvature = np.diag(PRIOR) + (evidence * spread) @ evidence.T
    newton = np.linalg.solve(curvature, evidence @ (used - chance))
    assert own.weights[PASS] == pytest.approx(WEIGHTS[PASS] + newton, rel=1e-3, abs=1e-5)
    bias = (used - chance).sum() / (BIAS_PRIOR + (chance * (1 - chance)).sum())
    assert own.biases[BIAS, PASS, 0] == pytest.approx(bias, rel=1e-3)


def test_each_span_learns_of_what_it_used_that_no_earlier_span_did():
    """Of a layer in THIN, once a span is over: the gradients are those of the definition, from the start."""
    rng, own, passes = (
        np.random.default_rng(2),
        learning.nothing_learned(Shape(1, E)),
        neighbours.no_passes(Shape(1, E)),
    )
    own.biases[1] = 1e30
    steps = 150
    used = [rng.choice(E, K, replace=False) for _ in range(steps + 1)]
    evidence = rng.normal(size=(steps + 1, KINDS, E)).astype(np.float32)
    for step in range(1, steps + 1):
        neighbours.begin_pass(passes, 0)
        place = passes.request[0, neighbours.LATEST]
        own.leaders[:, step % learning.HORIZON] = place, passes.serial[place]
        neighbours.route(passes, 0, 0, used[step])
        learning.learn(own, passes, 0, step, evidence[step], EVEN)
    for span in range(PASS):
        first, last, gradient = ENDS[span], ENDS[span + 1], np.zeros(KINDS)
        for step in range(THIN, steps + 1 - last, THIN):
            before, then = (np.isin(np.arange(E), used[step + 1 :][a:b]) for a, b in ((0, first), (first, last)))
            x = evidence[step].astype(float)
            x[HERE] = 0
            chance = 1 / (1 + np.exp(-(EVEN + WEIGHTS[span, CONSTANT] + WEIGHTS[span, :CONSTANT] @ x[:CONSTANT])))
            x[CONSTANT] = 1
            gradient += x @ ((then - chance) * ~before)
        assert own.fits[span, learning.GRADIENT] == pytest.approx(gradient, rel=1e-2, abs=0.05)


def test_passes_that_are_no_longer_known_teach_nothing():
    own, passes = learning.nothing_learned(Shape(1, E)), neighbours.no_passes(Shape(1, E))
    own.recorded[:] = np.arange(learning.HORIZON)[:, None]
    own.leaders[1] = 7  # the numbers of passes whose places others have taken
    learning.learn(own, passes, 0, THIN + 1, np.ones((KINDS, E), np.float32), EVEN)
    assert not own.fits[:, learning.GRADIENT].any()
    assert (own.fits[:-1, CURVATURE:] == np.diag(PRIOR)).all()
