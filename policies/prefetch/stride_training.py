"""Train the predictors of `policies.prefetch.stride` on the decoded tokens of a trace, with numpy alone.

Each layer's is a logistic regression of its own, over what the events before chose: minimise the binary cross-entropy
by Adam (Kingma and Ba 2015, arXiv 1412.6980) in mini-batches, with a rate that falls to zero. The bias starts at the
log-odds of how often each expert is chosen, so that what is learned is what the past adds to it. The same trace, seed
and numpy give the same predictor.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.core.policy import Int, Single
from policies.prefetch.stride import Predictor
from traces.errors import InputError, refuse
from traces.steps import DECODE
from traces.trace import Trace

BATCH = 128  # tokens
RATE = 0.005
MEAN_DECAY, SQUARE_DECAY, EPSILON = 0.9, 0.999, 1e-8  # Adam's


@dataclass(frozen=True)
class Training:
    """stride: layers ahead; back: latest layers that a prediction reads, beside the coming layer's last choice."""

    stride: int = 1
    back: int = 8
    epochs: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"--stride": (self.stride, 1), "--back": (self.back, 1), "--epochs": (self.epochs, 1)}
        refuse(*((value < low, f"{option} {value}: must be at least {low}") for option, (value, low) in least.items()))


@dataclass(frozen=True)
class Tokens:
    """The decoded tokens of a trace, laid end to end."""

    chosen: NDArray[np.int32]  # [T * L, k] ids within the layer, E where nothing was routed
    start: Int  # [T] the first token of the same request
    layers: int
    experts: int

    @staticmethod
    def of(trace: Trace) -> "Tokens":
        decoded = trace.phase == DECODE
        L, E = trace.layers, trace.num_experts
        chosen = trace.experts[decoded].astype(np.int32)
        chosen[chosen == trace.sentinel] = E
        before = np.concatenate([[0], np.cumsum(decoded)])[trace.offsets]  # decoded tokens before each request
        return Tokens(chosen.reshape(-1, trace.top_k), np.repeat(before[:-1], np.diff(before)), L, E)

    def __len__(self) -> int:
        return len(self.start)

    def choices(self, tokens: Int, layer: int) -> Single:
        """What `tokens` [B] chose in `layer`: [B, E], 1 or 0."""
        return self._hot(tokens * self.layers + layer, tokens)

    def inputs(self, tokens: Int, layer: int, stride: int, back: int) -> Single:
        """What is known `stride` events before `tokens` [B] reach `layer`: [B, (back + 1) * E], 1 or 0."""
        coming = tokens * self.layers + layer
        sources = [coming - stride - j for j in range(back)] + [coming - self.layers]
        return np.concatenate([self._hot(events, tokens) for events in sources], axis=1)

    def _hot(self, events: Int, tokens: Int) -> Single:
        """[B, E] of events by number; nothing of one before the request's first."""
        known = events >= self.start[tokens] * self.layers
        ids = np.where(known[:, None], self.chosen[np.maximum(events, 0)], self.experts)
        hot = np.zeros((len(events), self.experts + 1), np.float32)
        np.put_along_axis(hot, ids, 1, axis=1)
        return hot[:, :-1]


def train(tokens: Tokens, training: Training, advance: Callable[[], None] = lambda: None) -> Predictor:
    """Learn; `advance` is called after each layer. InputError where there is nothing to learn from, or ahead."""
    if not len(tokens):
        raise InputError("the trace holds no decoded tokens to learn from: --as-decode takes those of its prompts")
    L, E = tokens.layers, tokens.experts
    stride, back = training.stride, min(training.back, L - training.stride)
    if back < 1:
        raise InputError(f"--stride {stride}: a model of {L} MoE layers has no layer so far ahead within a token")
    weights, bias = np.zeros((L, back + 1, E, E), np.float32), np.zeros((L, E), np.float32)
    for layer in range(L):
        _regress(tokens, layer, stride, back, training, weights[layer].reshape(-1, E), bias[layer])
        advance()
    return Predictor(stride, weights, bias)


def _regress(
    tokens: Tokens, layer: int, stride: int, back: int, training: Training, weights: Single, bias: Single
) -> None:
    """Fit weights [(back + 1) * E, E] and bias [E] of one layer, in place."""
    rng = np.random.default_rng([training.seed, layer])
    T = len(tokens)
    often = np.bincount(tokens.chosen[layer :: tokens.layers].ravel(), minlength=tokens.experts + 1)[:-1]
    share = (often + 1) / (T + 2)
    bias[:] = np.log(share / (1 - share))
    adam = Adam(weights), Adam(bias)
    steps = training.epochs * -(-T // BATCH)
    done = 0
    for _ in range(training.epochs):
        order = rng.permutation(T)
        for first in range(0, T, BATCH):
            some = order[first : first + BATCH]
            x, y = tokens.inputs(some, layer, stride, back), tokens.choices(some, layer)
            error = (_sigmoid(x @ weights + bias) - y) / len(some)
            rate = RATE * (1 - done / steps)
            done += 1
            for each, gradient in zip(adam, (x.T @ error, error.sum(axis=0)), strict=True):
                each.step(gradient, rate, done)


class Adam:
    """Running means of the gradient and of its square, for parameters that are changed in place."""

    def __init__(self, parameters: Single) -> None:
        self._parameters = parameters
        self._mean, self._square = np.zeros_like(parameters), np.zeros_like(parameters)

    def step(self, gradient: Single, rate: float, number: int) -> None:
        self._mean += (1 - MEAN_DECAY) * (gradient - self._mean)
        self._square += (1 - SQUARE_DECAY) * (gradient * gradient - self._square)
        root = np.sqrt(self._square / (1 - SQUARE_DECAY**number)) + EPSILON
        self._parameters -= rate / (1 - MEAN_DECAY**number) * self._mean / root


def _sigmoid(scores: Single) -> Single:
    return (1 / (1 + np.exp(-scores))).astype(np.float32)


def probabilities(predictor: Predictor, tokens: Tokens, layer: int, some: Int) -> Single:
    """What the predictor says, `stride` events before, of what `some` tokens [B] choose in `layer`: [B, E]."""
    back = predictor.weights.shape[1] - 1
    x = tokens.inputs(some, layer, predictor.stride, back)
    return _sigmoid(x @ predictor.weights[layer].reshape(-1, tokens.experts) + predictor.bias[layer])


def recall(predictor: Predictor, tokens: Tokens) -> float:
    """Return the share of the tokens' choices that are among the k likeliest of their layer."""
    k = tokens.chosen.shape[1]

    def likeliest(layer: int, some: Int) -> Single:
        p = probabilities(predictor, tokens, layer, some)
        hot = np.zeros_like(p)
        np.put_along_axis(hot, np.argpartition(-p, k - 1, axis=1)[:, :k], 1, axis=1)
        return hot

    return _recall(tokens, likeliest)


def recall_of_previous(tokens: Tokens) -> float:
    """Return the same of the token before, which is what a predictor has to better."""
    return _recall(tokens, lambda layer, some: tokens.inputs(some, layer, tokens.layers, 1)[:, : tokens.experts])


def _recall(tokens: Tokens, guess: Callable[[int, Int], Single]) -> float:
    """Return the share of all choices that `guess`, 1 or 0 by (layer, tokens), has."""
    found = made = 0.0
    for layer in range(tokens.layers):
        for first in range(0, len(tokens), BATCH):
            some = np.arange(first, min(first + BATCH, len(tokens)))
            y = tokens.choices(some, layer)
            found += float((y * guess(layer, some)).sum())
            made += float(y.sum())
    return found / made if made else 0.0
