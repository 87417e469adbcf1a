"""Ranges for NVIDIA's profilers: steps, layers, and what is submitted, as the host submits it.

`nsys profile moe-replay --device cuda --nvtx ...` shows them above the streams.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from sim.loop.device import Completion, Device, Kind, Work

Push = Callable[[str], object]
Pop = Callable[[], object]


def marked(device: Device, push: Push = torch.cuda.nvtx.range_push, pop: Pop = torch.cuda.nvtx.range_pop) -> Device:
    """Return the same device, which opens and closes ranges by `push` and `pop`."""
    return cast(Device, _Marked(device, push, pop))


class _Marked:
    """A layer's range is open from its dense part to the next one's, a step's to the head's end."""

    def __init__(self, device: Device, push: Push, pop: Pop) -> None:
        self._device = device
        self._push, self._pop = push, pop
        self._open = 0
        self._step = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)  # all that opens and closes nothing

    def copy(self, expert: int, slot: int, first: int, last: int) -> None:
        self._push(f"copy {expert} into {slot}")
        self._device.copy(expert, slot, first, last)
        self._pop()

    def dense(self, layer: int, tokens: int, context: int, requests: int = 1) -> None:
        """End the range of the layer before; the first layer begins a step."""
        self._end(1)
        if not self._open:
            self._begin(f"step {self._step}: {tokens} tokens, context {context}")
        self._begin(f"layer {layer}")
        self._device.dense(layer, tokens, context)

    def experts(self, works: Sequence[Work]) -> None:
        self._push(f"experts {' '.join(str(expert) for expert, _, _ in works)}")
        self._device.experts(works)
        self._pop()

    def head(self, tokens: int, requests: int = 1) -> None:
        self._end(1)
        self._begin("head")
        self._device.head(tokens)

    def next_completion(self) -> Completion:
        """Return what has ended; with the head a step's range ends."""
        return self._ended(self._device.next_completion())

    def poll(self) -> Completion | None:
        completion = self._device.poll()
        return completion and self._ended(completion)

    def _ended(self, completion: Completion) -> Completion:
        if completion.kind is Kind.HEAD:
            self._end(0)
            self._step += 1
        return completion

    def _begin(self, name: str) -> None:
        self._push(name)
        self._open += 1

    def _end(self, left: int) -> None:
        """End all open ranges but so many."""
        for _ in range(left, self._open):
            self._pop()
        self._open = min(self._open, left)
