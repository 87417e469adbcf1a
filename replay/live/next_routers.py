"""The routers of the next layers, run on what enters a layer of a model that runs now (`tracer.lookahead`)."""

from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from policies.core.events import Picked
from policies.core.policy import NO_FLOATS, NO_INTS
from tracer.hook import ExpertsHook
from tracer.lookahead import states_of
from tracer.observed import Wanted
from traces.schema import Picks

Choices = list[tuple[NDArray[np.int64], NDArray[np.float32]]]
"""By distance: experts [T, k] of a layer, -1 where nothing is routed, and their scores."""


class NextRouters:
    """Runs them, so many layers ahead; `opening` ends it."""

    def __init__(self, model: nn.Module, distance: int, opening: ExitStack) -> None:
        """Probe the model, whose experts may add nothing. Raise InputError for one whose routers cannot be run."""
        with ExpertsHook(model, Wanted(lookahead=tuple(range(1, distance + 1)))) as hook:
            hook.probe()
        assert hook.ahead
        assert hook.picks
        self.picks = Picks(hook.picks.distances, hook.top_k)
        self._sites, self._ahead = hook.sites, hook.ahead
        self._states: Tensor | None = None  # that have entered the layer at hand
        self.named: dict[tuple[int, int], NDArray[np.int64]] = {}  # by layer and distance, the latest choices [T, k]
        self._ahead.picks = hook.top_k
        for site in hook.sites:
            for handle in self._ahead.answering(site):
                opening.callback(handle.remove)
            tried = site.block or site.router
            assert tried
            opening.callback(tried.register_forward_pre_hook(self._entered, with_kwargs=True).remove)

    def _entered(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._ahead.trying:
            self._states = states_of(args, kwargs)

    @property
    def trying(self) -> bool:
        """Whether a router is run on what is not its own input."""
        return self._ahead.trying

    def choices(self, layer: int) -> Choices:
        """Return what the routers behind `layer` would choose for what has entered it."""
        found: Choices = []
        for site in self._sites[layer + 1 : layer + 1 + len(self.picks.distances)]:
            assert self._states is not None
            index, scores = self._ahead.picked(site, self._states)
            found.append((index.cpu().numpy(), scores.float().cpu().numpy()))
            self.named[layer + len(found), len(found)] = found[-1][0]
        return found


def picked(choices: Choices, first: int, experts: int) -> Picked:
    """Return choices as an event holds them. first: id of the next layer's first expert; experts: of a layer."""
    offsets, ids, counts, scores = [0], [NO_INTS], [NO_INTS], [NO_FLOATS]
    for distance, (index, of_each) in enumerate(choices):
        here = index >= 0
        tokens = np.bincount(index[here], minlength=experts)
        chosen = np.flatnonzero(tokens)
        ids.append(chosen + first + distance * experts)
        counts.append(tokens[chosen])
        scores.append(np.bincount(index[here], of_each[here], experts)[chosen].astype(np.float64))
        offsets.append(offsets[-1] + len(chosen))
    return np.array(offsets), np.concatenate(ids), np.concatenate(counts), np.concatenate(scores)
