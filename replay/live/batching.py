"""Continuous batching: requests join and leave between steps, and meet at every layer of experts (rule 18).

Each request runs transformers' own `generate` in a greenlet, with a KV cache and random numbers of its own. At a layer
of experts it waits until all of the step are there. What any of them chose is then looked up and moved once, and each
request's tokens are computed alone. So an answer is the one that a request gets alone, to the bit, whatever the
model and however tokens are drawn; what requests share is the cache and what moves into it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor

from replay.live.calls import Call, Routed
from replay.live.model import LiveModel
from replay.live.recorder import Batch
from traces.errors import InputError


@dataclass
class Member:
    """A request of the batch, and the call with which it waits for the next step in which it takes part."""

    slot: int
    task: Any  # greenlet
    random: "RandomState"
    recorded: Batch | None
    request: int
    call: Call | None = None
    steps: int = 0


class ContinuousBatch:
    """At most so many requests that run at a time. `add` one, `step` while there are any."""

    def __init__(self, live: LiveModel, most: int, is_recorded: bool = False) -> None:
        """is_recorded: whether what is routed is kept in the model's `trace`, without end."""
        self._live, self._most, self._is_recorded = live, most, is_recorded
        self._members: dict[int, Member] = {}  # by batch slot
        self._hub = getcurrent()
        self.columns = 0
        """Tokens that the request which runs, or ran last, took in with its latest pass."""

    def __len__(self) -> int:
        return len(self._members)

    @property
    def is_full(self) -> bool:
        return len(self) == self._most

    def add(self, generate: Callable[[], None]) -> None:
        """Let a request begin, up to its prefill, which is the next step.

        generate: calls the model, and raises nothing.
        """
        slot = next(slot for slot in range(self._most) if slot not in self._members)
        recorded, request = self._live.new_batch() if self._is_recorded else (None, 0)
        member = Member(slot, greenlet(generate), RandomState(self._live.loaded.device), recorded, request)
        self._members[slot] = member
        self._continue(member)

    def step(self) -> None:
        """Run the next step: the prefill of one that has been added, alone, or a pass of every request.

        Where it fails, it fails for all that take part.
        """
        live, members = self._live, [self._members[slot] for slot in sorted(self._members)]
        due = [member for member in members if not member.steps][:1] or members
        try:
            live.begin_step([self._called(member) for member in due])
            outputs: list[Any] = [None] * len(due)
            for layer in range(live.run.shape.layers):
                arrived = [self._switch(member, output) for member, output in zip(due, outputs, strict=True)]
                outputs = live.compute(layer, [_at(layer, each) for each in arrived])
            for member, output in zip(due, outputs, strict=True):
                member.steps += 1
                self.columns = member.call.columns if member.call else 0
                self._continue(member, output)
        except Exception as error:
            for member in due:
                if not member.task.dead:
                    self._switch(member, error=error)
        live.end_step([member.slot for member in due if member.task.dead])

    def begin(self, call: Call) -> None:
        """Called by a request, before a pass: wait for its step."""
        self._hub.switch(call)

    def event(self, layer: int, routed: Routed) -> Tensor:
        """Called by a request at a layer of experts: wait for the others, and return what its experts give."""
        output: Tensor = self._hub.switch((layer, routed))
        return output

    def _called(self, member: Member) -> Call:
        call = member.call
        assert call
        call.slot, call.is_new = member.slot, not member.steps
        call.recorded, call.request = member.recorded, member.request
        return call

    def _continue(self, member: Member, output: Tensor | None = None) -> None:
        """Let a request run to its next pass, or to its end; between two passes it draws tokens."""
        member.random.restore()
        call = self._switch(member, output)
        member.random.keep()
        member.call = call if isinstance(call, Call) else None

    def _switch(self, member: Member, output: Tensor | None = None, error: Exception | None = None) -> Any:
        """Let a request run until it waits again; return with what it waits."""
        self._live.meeting = self
        try:
            return member.task.throw(error) if error else member.task.switch(*() if output is None else (output,))
        finally:
            self._live.meeting = None
            if member.task.dead:
                del self._members[member.slot]


def _at(layer: int, arrived: Any) -> Routed:
    """Return what a request has brought to that layer."""
    at, routed = arrived if isinstance(arrived, tuple) else (None, ())
    if at != layer:
        raise InputError("another request of the same step has failed, or does not run the layers in their order")
    return cast(Routed, routed)


class RandomState:
    """The random numbers of one request; none before it has drawn its first."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device if device.type == "cuda" else None
        self._states: tuple[Tensor, ...] = ()

    def keep(self) -> None:
        states = [torch.get_rng_state()]
        self._states = (*states, torch.cuda.get_rng_state(self._gpu)) if self._gpu else tuple(states)

    def restore(self) -> None:
        if self._states:
            torch.set_rng_state(self._states[0])
        if self._gpu and self._states:
            torch.cuda.set_rng_state(self._states[1], self._gpu)
