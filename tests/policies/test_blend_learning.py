"""The weights of eamc-blend go on learning: as a logistic regression over all that was shown, with a prior, would."""

import numpy as np
import pytest

from policies.blend import BLIND, CHANCE, CONSTANT, HORIZON, TIME, WEIGHTS, learning
from policies.core import Shape

E, K = 16, 4
EVEN = float(np.log(K / (E - K)))


def weights(own):
    return own.fits[:-1, learning.WEIGHT]


def shown(own, rng, step, true, model=CHANCE):
    """One question, and its answer by the true weights; returns evidence [PLACES, E] and use [E]."""
    learning.ask(own, model, 0, step, 0, EVEN)
    evidence = own.questions[model, : CONSTANT + 1]
    evidence[:CONSTANT] = rng.normal(size=(CONSTANT, E))
    kept = evidence.copy()
    used = rng.random(E) < 1 / (1 + np.exp(-(EVEN + true @ kept)))
    learning.show(own, 0, step, 0, np.flatnonzero(used))
    return kept, used


def most_likely(rows, used, prior_mean):
    """The weights by gradient steps on the log posterior of all rows together, until nothing changes."""
    weights = prior_mean.copy()
    for _ in range(100):
        chance = 1 / (1 + np.exp(-(EVEN + rows @ weights)))
        gradient = rows.T @ (used - chance) - learning.PRIOR * (weights - prior_mean)
        curvature = (rows * (chance * (1 - chance))[:, None]).T @ rows + learning.PRIOR * np.eye(len(weights))
        weights += np.linalg.solve(curvature, gradient)
    return weights


def test_weights_come_to_what_all_answers_together_say():
    rng, own = np.random.default_rng(0), learning.nothing_learned(Shape(1, E))
    true = WEIGHTS[CHANCE] + rng.normal(size=CONSTANT + 1) / 2
    answers = [shown(own, rng, step, true) for step in range(2000)]
    learning.ask(own, CHANCE, 0, 2000, 0, EVEN)  # settles the last

    rows = np.concatenate([evidence.T for evidence, _ in answers])
    best = most_likely(rows, np.concatenate([used for _, used in answers]), WEIGHTS[CHANCE])
    assert np.abs(weights(own)[CHANCE] - best).max() < 0.03
    assert np.abs(weights(own)[CHANCE] - true).max() < np.abs(WEIGHTS[CHANCE] - true).max() / 3
    others = [model for model in range(len(WEIGHTS)) if model != CHANCE]
    assert np.array_equal(weights(own)[others], WEIGHTS[others])


def test_one_answer_moves_the_weights_by_one_step_of_newtons_method():
    rng, own = np.random.default_rng(1), learning.nothing_learned(Shape(1, E))
    evidence, used = shown(own, rng, 0, WEIGHTS[CHANCE])
    learning.ask(own, CHANCE, 0, 1, 0, EVEN)

    chance = 1 / (1 + np.exp(-(EVEN + WEIGHTS[CHANCE] @ evidence)))
    curvature = learning.PRIOR * np.eye(CONSTANT + 1) + (evidence * chance * (1 - chance)) @ evidence.T
    step = np.linalg.solve(curvature, evidence @ (used - chance))
    assert weights(own)[CHANCE] == pytest.approx(WEIGHTS[CHANCE] + step, rel=1e-12)


def test_times_come_to_what_least_squares_say_of_all_that_has_waited():
    """Those of a pass settle HORIZON steps later."""
    rng, own = np.random.default_rng(2), learning.nothing_learned(Shape(1, E))
    steps = 600
    evidence = rng.normal(size=(steps, BLIND, E)) / 4
    used = rng.random((steps, E)) < 0.15
    for step in range(steps):
        learning.pass_on(own, 0, np.flatnonzero(used[step]))
        learning.keep(own, evidence[step], 0, step)

    found, waited = [], []
    for step in range(steps - HORIZON):
        for e in range(E):
            later = np.flatnonzero(used[step + 1 : step + HORIZON + 1, e])
            wait = later[0] + 1 if len(later) else HORIZON
            if wait > 1:
                found.append([*evidence[step, :, e], 1.0])
                waited.append(np.log(wait))
    rows, waits, places = np.array(found), np.array(waited), [*range(BLIND), CONSTANT]
    prior = np.diag(learning.PRIOR[places])
    best = np.linalg.solve(rows.T @ rows + prior, rows.T @ waits + prior @ WEIGHTS[TIME, places])
    assert weights(own)[TIME, places] == pytest.approx(best, abs=1e-9)
    assert np.array_equal(weights(own)[:TIME], WEIGHTS[:TIME])


def test_a_wait_longer_than_the_horizon_counts_as_the_horizon():
    """Evidence stays longer where its place is not needed again: after a prefill, or a layer that is skipped."""
    rng = np.random.default_rng(3)
    evidence, later = rng.normal(size=(BLIND, E)), rng.normal(size=(BLIND, E))
    late, never = learning.nothing_learned(Shape(1, E)), learning.nothing_learned(Shape(1, E))
    for own, used in ((late, [3]), (never, [])):
        learning.keep(own, evidence, 0, 0)
        for _ in range(HORIZON + 20):
            learning.pass_on(own, 0, np.array([], np.int64))
        learning.pass_on(own, 0, np.array(used, np.int64))
        learning.keep(own, later, 0, 2 * HORIZON)
    assert np.array_equal(weights(late), weights(never))


@pytest.mark.parametrize("told", [(1, 0, 0), (0, 1, 0), (0, 0, 1), None])
def test_a_pass_that_was_not_asked_about_teaches_nothing(told):
    own = learning.nothing_learned(Shape(2, E))
    learning.ask(own, CHANCE, 0, 0, 0, EVEN)
    own.questions[CHANCE, :CONSTANT] = 1.0
    if told:
        layer, step, batch_slot = told
        learning.show(own, layer, step, batch_slot, np.arange(K))
    learning.ask(own, CHANCE, 0, 1, 0, EVEN)
    assert np.array_equal(weights(own), WEIGHTS)
