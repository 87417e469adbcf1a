"""What a layer's router would choose for the hidden states that entered a MoE layer before it.

Speculative prefetchers see that (Eliseev and Mazur 2023, arXiv 2312.17238). Before a block runs, its forward is tried
on the states that entered the blocks before it, and left as soon as it calls its experts; where block and attention are
one module, only the router is tried. Picks beyond its top-k are what the model's own selection gives when asked for
more, else those of the highest scores: probabilities as `tracer.gates` reads them, or weights.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from tracer.gates import Gate
from traces.errors import InputError
from traces.models.sites import Site

Choice = tuple[Tensor, Tensor]
"""Index and weights, [T, k] each."""


class _AnswerError(Exception):
    """Leaves a block that is tried, with its choice."""

    def __init__(self, choice: Choice):
        self.choice = choice


class Lookahead:
    """Tries each layer on what entered those before; a choice reported while `trying` is to be given to `answer`."""

    def __init__(self, distances: tuple[int, ...]) -> None:
        self.trying = False
        self.picks = 0  # experts that are picked; 0: as many as are chosen
        self.gates: dict[Site, Gate] = {}
        self.output: Any = None  # of the router that is tried
        self.chosen: dict[tuple[Site, int], Choice] = {}  # by layer and distance: picks and their scores
        self._distances = distances
        self._entered = deque[Tensor](maxlen=max(distances))  # what entered the latest layers of the stack
        self._own: dict[Site, Choice] | None = None  # what layers choose for their own states, until checked

    def rehearse(self) -> None:
        """In the coming pass try each layer also on its own states, for `check`."""
        self._own, self.picks = {}, 0
        self.gates.clear()

    def clear(self) -> None:
        """Forget the pass: the next layer is the first of its stack."""
        self.chosen.clear()
        self._entered.clear()

    def attach(self, site: Site) -> Iterator[Any]:
        tried = site.block or site.router
        if tried is None:
            return

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states = states_of(args, kwargs)
            if self._own is not None:
                self._own[site] = self._try(site, module, states, args, kwargs)
            for distance in self._distances:
                if distance <= len(self._entered):
                    self.chosen[site, distance] = self._try(site, module, self._entered[-distance], args, kwargs)
            self._entered.append(states.detach().clone())

        yield tried.register_forward_pre_hook(before, with_kwargs=True)

    def answer(self, index: Tensor, weights: Tensor) -> None:
        raise _AnswerError((index, weights))

    def check(self, choices: Iterable[tuple[Site, Tensor]]) -> None:
        """Raise InputError unless each layer, tried on its own states, gave the index [T, k] that it then used."""
        own = self._own or {}
        for site, index in choices:
            if site not in own or not torch.equal(own[site][0], index):
                raise InputError(f"lookahead of {site.name} cannot be recorded: its router cannot be run by itself")
        self._own = None

    def _try(
        self, site: Site, module: nn.Module, states: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Choice:
        """The choice for `states` instead of what the module is called with; behind it the further picks."""
        own = states_of(args, kwargs)
        given = states.to(own.device).reshape(own.shape)

        def run() -> Choice:
            states = given.clone()
            try:
                self.output = module.forward(
                    *(states if value is own else value for value in args),
                    **{key: states if value is own else value for key, value in kwargs.items()},
                )
            except _AnswerError as left:
                return left.choice
            if (choice := site.routed_by(self.output) if module is site.router else None) is None:
                raise InputError(f"lookahead of {site.name} cannot be recorded: its router does not return a choice")
            return choice

        with torch.no_grad(), self._aside(own.device):
            chosen = run()
            if not self.picks:
                return chosen
            if self.picks <= chosen[0].shape[1]:
                return self._ranked(site, chosen, chosen)
            with self._picking(site):
                return self._ranked(site, chosen, run())

    def answering(self, site: Site) -> Iterator[Any]:
        """Hook a layer so that it can be tried by `picked`."""

        def scored(_: nn.Module, args: Any, output: Any) -> None:
            if self.trying:
                self.output = output

        def report(index: Tensor, weights: Tensor) -> None:
            if self.trying:
                self.answer(index, weights)

        if site.router is not None:
            yield site.router.register_forward_hook(scored)
        yield from site.attach(report)

    def picked(self, site: Site, states: Tensor) -> Choice:
        """Return the picks of a layer for states alone, and their scores."""
        module = site.block or site.router
        assert module
        return self._try(site, module, states, (states,), {})

    def _ranked(self, site: Site, chosen: Choice, wide: Choice) -> Choice:
        """Return the picks, the chosen ones first, then those of `wide`, then others, each by their scores."""
        tokens, E = len(chosen[0]), site.experts
        level = torch.zeros(tokens, E + 1, device=chosen[0].device)  # the last: nothing is routed
        scores = torch.zeros_like(level)
        if gate := self.gates.get(site):
            scores[:, :E] = gate.probabilities(gate.scores(self.output, tokens))
            level[:, :E] = 1
        for rank, (index, weights) in enumerate((wide, chosen), start=2):
            places = torch.where((index >= 0) & (index < E), index, E).long()
            level.scatter_(-1, places, float(rank))
            if not gate:
                scores.scatter_(-1, places, weights.to(scores.dtype))
        level, scores = level[:, :E], scores[:, :E]
        order = scores.argsort(dim=-1, descending=True, stable=True)
        order = order.gather(-1, level.gather(-1, order).argsort(dim=-1, descending=True, stable=True))[:, : self.picks]
        known = level.gather(-1, order) > 0
        return order.masked_fill(~known, -1), scores.gather(-1, order).masked_fill(~known, 0)

    @contextmanager
    def _picking(self, site: Site) -> Iterator[None]:
        """Have the model's own selection choose `picks` experts, where an attribute says how many it chooses."""
        modules: set[Any] = {site.owner, site.router} if self.picks < site.experts else set()
        with ExitStack() as patched:
            for module in modules - {None}:
                if isinstance(vars(module).get("top_k"), int):
                    patched.enter_context(patch.object(module, "top_k", self.picks))
            yield

    @contextmanager
    def _aside(self, device: torch.device) -> Iterator[None]:
        """Calls within are tries, and draw no random numbers from the model's."""
        self.trying = True
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                yield
        finally:
            self.trying = False


def states_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states among arguments: the first tensor of floats."""
    return next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.is_floating_point())
