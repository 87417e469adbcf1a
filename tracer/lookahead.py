"""What a layer's router would choose for the hidden states that entered the MoE layer before it.

That is what speculative prefetchers see (Eliseev and Mazur 2023, arXiv 2312.17238). When a block is about to run,
its own forward is tried on the states that entered the block before it, with all its other arguments, and left as
soon as it calls its experts: the model's own code does the whole selection. Where block and attention are one
module, only the router is tried.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from traces.errors import InputError
from traces.models.sites import Site

Choice = tuple[Tensor, Tensor]
"""Index and weights, [T, k] each."""


class _AnswerError(Exception):
    """Leaves a block that is tried, with its choice."""

    def __init__(self, choice: Choice):
        self.choice = choice


class Lookahead:
    """Tries each layer on what entered the one before; a choice reported while `trying` is to be given to `answer`."""

    def __init__(self) -> None:
        self.trying = False
        self.chosen: dict[Site, Choice] = {}
        self._before: Tensor | None = None
        self._own: dict[Site, Choice] | None = None  # what layers choose for their own states, until checked

    def rehearse(self) -> None:
        """In the coming pass try each layer also on its own states, for `check`."""
        self._own = {}

    def clear(self) -> None:
        """Forget the pass: the next layer is the first of its stack."""
        self.chosen.clear()
        self._before = None

    def attach(self, site: Site) -> Iterator[Any]:
        tried = site.block or site.router
        if tried is None or not site.weighted:
            return

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states = _states(args, kwargs)
            if self._own is not None:
                self._own[site] = self._try(site, module, states, args, kwargs)
            if self._before is not None:
                self.chosen[site] = self._try(site, module, self._before, args, kwargs)
            self._before = states.detach().clone()

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
        """The choice for `states` instead of what the module is called with."""
        own = _states(args, kwargs)
        given = states.to(own.device).reshape(own.shape).clone()
        with torch.no_grad(), self._aside(own.device):
            try:
                output = module.forward(
                    *(given if value is own else value for value in args),
                    **{key: given if value is own else value for key, value in kwargs.items()},
                )
            except _AnswerError as left:
                return left.choice
        choice = site.routed_by(output) if module is site.router else None
        if choice is None:
            raise InputError(f"lookahead of {site.name} cannot be recorded: its router does not return a choice")
        return choice

    @contextmanager
    def _aside(self, device: torch.device) -> Iterator[None]:
        """Calls within are tries, and draw no random numbers from the model's."""
        self.trying = True
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                yield
        finally:
            self.trying = False


def _states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states among arguments: the first tensor of floats."""
    return next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.is_floating_point())
