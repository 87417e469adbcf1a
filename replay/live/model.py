"""A model whose experts are behind a cache: `replay.live.opening` opens one, `LiveModel.model` is called as any other.

Decisions are those of a replay: the session's (`sim.loop.session`), asked by the loop of a live model. A forward pass
with an empty KV cache begins a request; `end_request` says that the last one has ended. When a read fails, early ones
too, the pass that runs then raises the error, cache and policy start again, and the model can be called again. Where
no pass runs then, `on_note` is called. What a policy has learned is kept in a file for the next time (a warm start).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median
from threading import Event, Thread
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
from torch import Tensor

from policies.core.policy import NO_INTS, Listener
from policies.core.spec import Part, PolicySpec
from replay.calibration.meter import Meter
from replay.calibration.parts import cycle_slots, transfers
from replay.live.device import LiveDevice
from replay.live.experts import TRIALS, LayerExperts, SlotViews
from replay.live.layout import ExpertLayer, places_of
from replay.live.loop import LiveLoop
from replay.live.memory import KV_NAMES, Memory
from replay.live.parts import Parts
from sim.loop.log import StepRow
from sim.loop.run import Run
from tracer.hook import ExpertsHook
from tracer.models import LoadedModel
from traces.errors import InputError, refuse
from traces.output import check_file, replacing

HOOK = "moe_expert_cache"
"""Attribute of a module of experts: what computes them."""


class LiveModel:
    """Open. `model` is transformers' own; `rows` are those of the steps that have ended."""

    def __init__(
        self,
        loaded: LoadedModel,
        hook: ExpertsHook,
        layers: Sequence[ExpertLayer],
        device: LiveDevice,
        run: Run,
        memory: Memory,
        lanes: int,
        dense_ns: int,
        on_note: Callable[[str], None],
        require_unchanged: Callable[[], None],
    ) -> None:
        """hook: of the tracer, which has probed the model; layers: in the order of execution.

        lanes: of the device; dense_ns: what a layer's dense part takes for a token, about; require_unchanged: raises
        InputError where what experts are read from has changed.
        """
        self.loaded, self.model, self.hook = loaded, loaded.model, hook
        self.device, self.memory, self.lanes = device, memory, lanes
        self.rows: list[StepRow] = []
        self._width = layers[0].width
        self._like = torch.empty(0, dtype=self.model.dtype, device=loaded.device)
        views = {layer.rows: SlotViews(layer.rows, device.slots) for layer in layers}
        places, self._layers = places_of(device.store, layers), list[LayerExperts]()
        for number, layer in enumerate(layers):
            own = range(number * layer.experts, (number + 1) * layer.experts)
            self._layers.append(LayerExperts(layer, views[layer.rows], [places(expert) for expert in own]))
        self._names = [layer.name for layer in layers]
        self.transfers = self._time_transfers(run)
        """What an expert takes over the link, and what of it is latency, in ns: timed before the first request."""
        self.run = replace(run, tiers=(replace(run.gpu, experts_per_layer=self._window(dense_ns)),))
        self._experts = run.shape.experts
        self._require_unchanged = require_unchanged
        self._tokens = self._context = 0  # of the forward pass
        self._top_k = hook.top_k
        self.parts = Parts()
        self._loop = LiveLoop(self.run, device, on_note)
        self._handles = [self.model.register_forward_pre_hook(self._begins, with_kwargs=True)]
        for number, layer in enumerate(layers):
            setattr(layer.module, HOOK, partial(self._event, number))

    def time_transfers(self) -> tuple[tuple[int, int], float]:
        """Time transfers once more, alone, and beside compute: how many times as long they take.

        What slots hold is lost, and cache and policy start again.
        """
        self._loop.stop()  # a prefetch may be under way
        alone = self._time_transfers(self.run)
        with self._computing():
            beside = self._time_transfers(self.run)
        return alone, max(1.0, beside[0] / alone[0])

    def _time_transfers(self, run: Run) -> tuple[int, int]:
        gpu = run.gpu
        return transfers(Meter(self.device), gpu.link.expert_bytes, run.shape.total, cycle_slots(run, self.hook.top_k))

    def _window(self, dense_ns: int) -> float:
        """Return how many experts the link brings while a layer of a decoded token computes: for prefetch budgets."""
        timed = []
        for _ in range(2 * TRIALS):
            began = perf_counter_ns()
            self._compute_one(0)
            timed.append(perf_counter_ns() - began)
        timed = timed[TRIALS:]
        self._layers[0].forget()
        return (dense_ns + self.hook.top_k * median(timed)) / self.transfers[0]

    def _compute_one(self, slot: int) -> None:
        """Compute an expert for one token, as if it lay in a slot."""
        hidden, layer = self._like.new_zeros(1, self._width), self._layers[0]
        layer.begin(hidden, self._like.new_zeros(1, 1, dtype=torch.int64), self._like.new_ones(1, 1))
        layer.expert(0, slot)
        layer.combined()
        self.device.finish()

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Compute experts meanwhile, on a thread of its own, from one slot after another as a run does."""
        ended = Event()

        def compute() -> None:
            torch.set_num_threads(torch.get_num_threads())  # OpenMP keeps a number for each thread
            with torch.inference_mode():
                for slot in cycle(range(self.run.gpu.slots)):
                    if ended.is_set():
                        return
                    self._compute_one(slot)

        thread = Thread(target=compute, name="compute", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self._layers[0].forget()

    def end_request(self) -> None:
        """End a request after its last forward pass. Raise InputError if a file of its experts was written to."""
        self._end_pass(ends_request=True)
        self._require_unchanged()

    def save(self, file: Path) -> None:
        """Write what the policy has learned, for the `profile` of `open_live`."""
        decider = self._loop.decider
        write_learned((decider.retention, decider.prefetcher), self.loaded.name, file)

    def close(self) -> None:
        """End what the policy has under way."""
        try:
            self._end_pass(ends_request=True)
        finally:
            with suppress(InputError):  # what is under way never ends, as the last pass has said
                self._loop.stop()
            for handle in self._handles:
                handle.remove()

    def _begins(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = ("input_ids", "inputs_embeds")
        inputs: Tensor = args[0] if args else next(kwargs[name] for name in names if kwargs.get(name) is not None)
        rows, columns = inputs.shape[:2]
        cache = next((kwargs[name] for name in KV_NAMES if kwargs.get(name) is not None), None)
        before = int(cache.get_seq_length()) if cache is not None else 0
        continues = before > 0 and self._end_pass(ends_request=False)
        if not continues:
            self._end_pass(ends_request=True)
        ids = NO_INTS if inputs.is_floating_point() else inputs.cpu().numpy().reshape(-1)
        self._loop.begin(rows * columns, rows * (before + columns), before == 0, ids)
        was, self._tokens, self._context = self._tokens, rows * columns, before + columns
        took = self.parts.lap()
        if continues:
            self.parts.head[was].add(took)

    def _end_pass(self, ends_request: bool) -> bool:
        """End the forward pass that was begun last, if it has come to its end and was not ended before."""
        row = self._loop.end(ends_request)
        if row:
            self.rows.append(row)
        return row is not None

    def _event(self, layer: int, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Compute the experts of a layer: everything between its router and its sum."""
        if layer != self._loop.layer:
            raise InputError(f"{self._names[layer]} was called out of order: call the whole model, one pass at a time")
        parts, ids = self.parts, index.cpu().numpy()
        parts.dense[layer == 0, self._tokens, self._context].add(parts.lap())
        chosen, counts = np.unique(ids[(ids >= 0) & (ids < self._experts)], return_counts=True)
        first = layer * self._experts
        self._loop.route(chosen + first, counts)
        output = self._computed(self._layers[layer], first, len(chosen), (hidden, index, weights))
        if not bool(output.isfinite().all()):
            raise InputError(f"the experts of {self._names[layer]} give NaN or infinity: the checkpoint is damaged")
        self._loop.combined()
        self.parts.combine[self._tokens].add(self.parts.lap())
        return output

    def _computed(self, experts: LayerExperts, first: int, count: int, event: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Compute `count` experts as they come, and return their sum."""
        loop, parts, output, left = self._loop, self.parts, None, count
        experts.begin(*event)
        if not count:
            loop.computed((), is_last=True)
        while left:
            works = loop.works()
            waited = [self.device.await_landing(expert) for expert, _, _ in works]
            took = parts.lap()
            if len(works) == count and not any(waited):
                parts.answer.add(took)
            if len(works) == count:
                output = experts.whole(*event, {expert - first: slot for expert, slot, _ in works})
                self.device.finish()
                parts.expert[self._tokens * self._top_k // count or 1].add(parts.lap(), count)
                left = 0
                loop.computed([expert for expert, _, _ in works], is_last=True)
                continue
            for expert, slot, tokens in works:
                experts.expert(expert - first, slot)
                self.device.finish()
                parts.expert[tokens].add(parts.lap())
                left -= 1
                loop.computed([expert], is_last=not left)
        parts.lap()
        return experts.combined() if output is None else output


def starting_from(policy: PolicySpec, file: Path | None) -> PolicySpec:
    """Return the policy as it starts from what `file` holds, if that is there. Raise InputError for one that cannot."""
    saving = sum(bool(half.cls.starts_from) for half in (policy.evict, policy.prefetch))
    if not file:
        return policy
    apart = saving == 2 and not (policy.shares and policy.prefetch.cls.shares_state_with(policy.evict.cls))
    refuse(
        (not saving, f"--profile: {policy.text} does not save what it learns; eamc and eamc-blend do"),
        (apart, f"--profile: both halves of {policy.text} save what they learn, and a profile is of one"),
    )
    check_file(file, overwrite=True)  # better now than when all is learned
    if not file.exists():
        return policy
    evict, prefetch = _from(policy.evict, file), _from(policy.prefetch, file)
    return replace(PolicySpec.of(evict, prefetch, policy.scope, policy.placement), typed=policy.typed)


def _from(half: Part, file: Path) -> Part:
    return half.having({half.cls.starts_from: str(file)}) if half.cls.starts_from else half


def write_learned(halves: tuple[Listener, Listener], model: str, file: Path) -> None:
    """Write what the policy has learned from runs of `model`."""
    for half in halves:
        if half.starts_from:
            with replacing(file) as part, part.open("wb") as written:
                half.save(written, model)
            return
