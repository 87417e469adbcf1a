"""A learned predictor in the manner of ProMoE (arXiv 2410.22134, section 4): the experts of the layer `stride` ahead.

For each layer a model trained offline (`policies.prefetch.stride_training`, `moe-sim train-stride`) says how likely
each of its
experts is, `stride` events before: after the event of layer l for layer l + stride, around the cycle into the coming
token. ProMoE's predictors read hidden states; a trace has none, so these read what was chosen: in the latest `back`
layers, and in the layer to come when it last ran. Each is one logistic regression: the probability of expert e is
sigmoid(bias[e] + the sum of weights[j, a, e] over the experts a that input j chose), what is not known adding nothing.

The `n` likeliest of a layer are proposed at their probability as priority, ties to the lower id. Every proposal
replaces the queue (rule 4), so the latest prediction for each layer in between is proposed again with it. A prefill is
many tokens and no token's choice: it is not remembered, nor is another request.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from policies.core.compiled import compiled
from policies.core.limits import Limits
from policies.core.policy import Compiled, Event, Float, Int, Prefetcher, Shape, Single, bounded
from policies.core.ranking import add, best
from policies.core.registry import prefetcher
from policies.prefetch import previous
from policies.prefetch.previous import Latest, no_choices
from policies.prefetch.previous import observe as remember
from traces import arrays
from traces.errors import InputError
from traces.steps import DECODE

KIND = "moe-expert-cache stride predictor 1"


@dataclass(frozen=True)
class Predictor:
    """A trained model of L layers of E experts."""

    stride: int  # layers ahead, 1 to L - 1
    weights: Single  # [L, back + 1, E, E] by layer to come, input, expert chosen there, expert to come
    bias: Single  # [L, E]

    @property
    def shape(self) -> Shape:
        return Shape(*self.bias.shape)

    def save(self, path: Path) -> None:
        with path.open("wb") as file:
            np.savez(file, kind=KIND, stride=self.stride, weights=self.weights, bias=self.bias)

    @staticmethod
    def load(path: Path) -> "Predictor":
        """Read what `save` wrote. Raise InputError for any other file."""
        held = arrays.read_npz(path) if path.is_file() else {}
        if str(held.get("kind")) != KIND:
            raise InputError(f"no stride predictor at {path}: moe-sim train-stride TRACE --out {path}")
        return Predictor(int(held["stride"]), held["weights"], held["bias"])


@dataclass(frozen=True)
class StrideOptions(Limits, policy="stride"):
    """model: a file of `moe-sim train-stride`; n: experts proposed for each layer."""

    model: str = ""
    n: int = bounded(6, least=0)


class Foresight(NamedTuple):
    """The trained model, and of each request what it has chosen and the latest prediction for each layer."""

    weights: Single  # [L, back + 1, E, E]
    bias: Single  # [L, E]
    latest: Latest  # its `depth` is the stride
    likely: Int  # [batch_slots, L, n] ids, the likeliest first
    probable: Float  # [batch_slots, L, n] their probabilities
    predicted: Int  # [batch_slots, L] how many of them
    scores: Single  # [E] of the layer that is being predicted


def predictor_for(options: StrideOptions, shape: Shape) -> Predictor:
    """Return the predictor that the options name. Raise InputError without one, or for one of another model."""
    if not options.model:
        raise InputError(
            "it needs a trained predictor: its option model, as in stride:model=FILE.npz (moe-sim train-stride)"
        )
    model = Predictor.load(Path(options.model))
    if model.shape != shape:
        raise InputError(
            f"the predictor {options.model} is for {model.shape.layers} layers of {model.shape.experts} experts, "
            f"not {shape.layers} of {shape.experts}"
        )
    return model


def begin(shape: Shape, options: StrideOptions) -> Foresight:
    """Return the state of a run; without a file its model knows nothing."""
    L, E, batch_slots, n = shape.layers, shape.experts, shape.batch_slots, min(options.n, shape.experts)
    model = Predictor(1, np.zeros((L, 2, E, E), np.float32), np.zeros((L, E), np.float32))
    if options.model:
        model = predictor_for(options, shape)
    return Foresight(
        weights=np.ascontiguousarray(model.weights),
        bias=np.ascontiguousarray(model.bias),
        latest=no_choices(shape, model.stride),
        likely=np.empty((batch_slots, L, n), np.int64),
        probable=np.empty((batch_slots, L, n)),
        predicted=np.zeros((batch_slots, L), np.int64),
        scores=np.empty(E, np.float32),
    )


def begin_request(known: Foresight, batch_slot: int) -> None:
    previous.begin_request(known.latest, batch_slot)
    known.predicted[batch_slot] = 0


@compiled
def observe(known: Foresight, event: Event) -> None:
    remember(known.latest, event)


@compiled
def propose(known: Foresight, event: Event, ids: Int, priorities: Float) -> int:
    """Predict the layer `stride` ahead; fill ids and priorities with the latest predictions up to there; how many."""
    if event.phase != DECODE or known.likely.shape[2] == 0:
        return 0
    stride, L = known.latest.depth, known.predicted.shape[1]
    for batch_slot in event.batch_slots:
        _predict(known, batch_slot, event.layer, (event.layer + stride) % L)
    n = 0
    for distance in range(1, stride + 1):
        ahead, first = (event.layer + distance) % L, n
        for batch_slot in event.batch_slots:
            for i in range(known.predicted[batch_slot, ahead]):
                n = add(
                    ids, priorities, first, n, known.likely[batch_slot, ahead, i], known.probable[batch_slot, ahead, i]
                )
    return n


@compiled
def _predict(known: Foresight, batch_slot: int, layer: int, target: int) -> None:
    """Predict layer `target` for the request in `batch_slot`, after the event of `layer`."""
    chosen, sizes = known.latest.chosen[batch_slot], known.latest.sizes[batch_slot]
    _score(known.weights, known.bias, layer, target, chosen, sizes, known.scores)
    likely, probable = known.likely[batch_slot, target], known.probable[batch_slot, target]
    found = best(known.scores, target * len(known.scores), -np.inf, likely, probable)
    for i in range(found):
        probable[i] = 1.0 / (1.0 + np.exp(-probable[i]))
    known.predicted[batch_slot, target] = found


@compiled
def _score(weights: Single, bias: Single, layer: int, target: int, chosen: Int, sizes: Int, scores: Single) -> None:
    """scores[e]: log-odds that the coming event of layer `target` chooses e, after the event of `layer`."""
    for e in range(len(scores)):
        scores[e] = bias[target, e]
    back = weights.shape[1] - 1
    for j in range(back + 1):
        source = target if j == back else (layer - j) % len(sizes)
        for i in range(sizes[source]):
            row = weights[target, j, chosen[source, i] - source * len(scores)]
            for e in range(len(scores)):
                scores[e] += row[e]


@prefetcher("stride")
class Stride(Prefetcher):
    """What a predictor trained offline says of the next layers (needs model=FILE)."""

    Options = StrideOptions
    compiled = Compiled(begin, observe, propose, begin_request)

    @classmethod
    def require(cls, options: StrideOptions, shape: Shape) -> None:
        predictor_for(options, shape)

    def __init__(self, shape: Shape, options: StrideOptions) -> None:
        if not options.model:
            self.require(options, shape)
        super().__init__(shape, options)
