"""The routers of a GGUF file, to be given other states than their own: what `record --lookahead` needs of llama.cpp.

Which of the tensors that llama.cpp shows enters a router, and how its logits become probabilities, differs by
architecture. So both are found by verification when the model is probed: the states are those that the router's weights
make the shown logits of, and the probabilities those that the shown weights are, up to a factor for each token.
"""

import re
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.errors import InputError
from traces.models import gguf_files

Single = NDArray[np.float32]
Shown = Callable[[bytes, type], NDArray[Any]]
"""Returns a tensor of the pass, [rows, columns], by its name."""

NAMED = re.compile(rb"([a-z0-9_]+)-\d+")

TOLERANCE = 0.02
"""The error of bfloat16, of the greatest logit."""

TRANSFORMS: dict[str, Callable[[Single], NDArray[Any]]] = {
    "softmax": lambda logits: _exp(logits) / _exp(logits).sum(-1, keepdims=True),
    "sigmoid": lambda logits: 1 / (1 + np.exp(-logits)),
    "sqrt(softplus)": lambda logits: np.sqrt(np.logaddexp(np.float32(0), logits)),
}


def _exp(logits: Single) -> NDArray[Any]:
    return np.asarray(np.exp(logits - logits.max(-1, keepdims=True)))


class Routers:
    """Those of some blocks, read from the files of a model."""

    def __init__(self, path: Path, blocks: Sequence[int], top_k: int) -> None:
        from gguf import GGUFReader
        from gguf.quants import dequantize

        source, parts = str(path.expanduser()), dict[str, Single]()
        wanted = {f"blk.{n}.{name}" for n in blocks for name in (WEIGHT, BIAS, CORRECTION)}
        for part in gguf_files.parts(source):
            for tensor in GGUFReader(part).tensors:
                if tensor.name in wanted:
                    parts[tensor.name] = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        file = gguf_files.read(source)
        self._groups, self._used = file.key("expert_group_count", 1), file.key("expert_group_used_count", 1)
        self._blocks, self._parts, self._top_k, self._transform = blocks, parts, top_k, TRANSFORMS["softmax"]
        self.states = b""  # name of the tensors that enter routers, without the block

    def probe(self, shown: Shown, names: Set[bytes], layers: Mapping[int, Sequence[bytes]]) -> None:
        """Learn how to read routers from a pass.

        names: of its tensors that are shown once. layers: names of those of ids and weights, by block.
        Raise InputError where a router, given its own states, does not choose what it chose.
        """
        bases = sorted({found[1] for name in names if (found := NAMED.fullmatch(name))})
        self.states = min(bases, key=lambda base: self._error(base, shown, names))
        spreads = {name: self._spread(name, shown, layers) for name in TRANSFORMS}
        best = min(spreads, key=lambda name: spreads[name])
        if self._error(self.states, shown, names) > TOLERANCE or spreads[best] == np.inf:
            raise InputError("`lookahead` cannot be recorded: its routers cannot be run by themselves")
        self._transform = TRANSFORMS[best]

    def of(self, block: int) -> bytes:
        """Return the name of the tensor that enters a block's router."""
        return self.states + b"-%d" % block

    def pick(self, block: int, states: Single, count: int) -> tuple[NDArray[np.int64], Single]:
        """Return the experts [T, count] that a router picks for states [T, H], those it would choose first; scores."""
        return self._ranked(block, self._transform(self._logits(block, states)), count)

    def _logits(self, block: int, states: Single) -> Single:
        weight, bias = self._parts[f"blk.{block}.{WEIGHT}"], self._parts.get(f"blk.{block}.{BIAS}", 0)
        return np.asarray(states @ weight.T + bias, np.float32)

    def _ranked(self, block: int, scores: Single, count: int) -> tuple[NDArray[np.int64], Single]:
        chance = scores + self._parts.get(f"blk.{block}.{CORRECTION}", 0)
        if self._groups > 1:
            groups = chance.reshape(len(chance), self._groups, -1)
            best = np.sort(groups, -1)[..., -2:].sum(-1)
            left_out = np.argsort(-best, -1, kind="stable")[:, self._used :]
            np.put_along_axis(groups, left_out[..., None], -np.inf, 1)
        by_chance, level = np.argsort(-chance, -1, kind="stable"), np.zeros(scores.shape)
        for n in (count, self._top_k):
            np.put_along_axis(level, by_chance[:, :n], np.float64(n == self._top_k) + 1, -1)
        order = np.lexsort((-scores, -level), -1)[:, :count]
        return order, np.take_along_axis(scores, order, -1)

    def _error(self, base: bytes, shown: Shown, names: Set[bytes]) -> float:
        """Return how far logits of these states are from those that are shown, in the greatest of them."""
        worst = 0.0
        for block in self._blocks:
            if base + b"-%d" % block not in names:
                return np.inf
            states, logits = shown(base + b"-%d" % block, np.float32), shown(b"ffn_moe_logits-%d" % block, np.float32)
            weight = self._parts.get(f"blk.{block}.{WEIGHT}")
            if weight is None or not logits.size or states.shape != (len(logits), weight.shape[1]):
                return np.inf
            worst = max(worst, float(np.abs(states @ weight.T - logits).max() / np.abs(logits).max()))
        return worst

    def _spread(self, name: str, shown: Shown, layers: Mapping[int, Sequence[bytes]]) -> float:
        """Return how far weight / probability is from constant; inf where others are chosen than those shown."""
        worst = 0.0
        for block, (ids, weights) in layers.items():
            probabilities = TRANSFORMS[name](self._logits(block, shown(self.of(block), np.float32)))
            chosen = shown(ids, np.int32)
            picked, _ = self._ranked(block, probabilities, chosen.shape[1])
            if (np.sort(picked, -1) != np.sort(chosen, -1)).any():
                return np.inf
            ratio = shown(weights, np.float32).reshape(chosen.shape) / np.take_along_axis(probabilities, chosen, -1)
            ratio = ratio.T if chosen.shape[1] == 1 else ratio
            worst = max(worst, float((ratio.max(-1) / ratio.min(-1)).max()))
        return worst


WEIGHT, BIAS, CORRECTION = "ffn_gate_inp.weight", "ffn_gate_inp.bias", "exp_probs_b.bias"
"""Tensors of a router: its weights [E, H], what its logits have more, and what corrects the choice."""
