"""A model whose experts are behind a cache: `open_live` opens one, `LiveModel.model` is called as any other.

Two threads: whoever calls the model runs its forward passes, and a driver decides (`sim.loop.driver`, as in a replay).
A forward pass with an empty KV cache begins a request; `end_request` says that the last one has ended. When a read
fails, the pass that needed it raises the error, cache and policy start anew, and the model can be called again.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from policies.core.policy import NO_INTS, Shape
from policies.core.spec import FETCHED, PolicySpec, parse
from replay.devices.expert_file import ExpertFile
from replay.devices.store import require_host_memory
from replay.live.device import LiveDevice
from replay.live.experts import LayerExperts, SlotViews
from replay.live.layout import ExpertLayer, ShardStore
from replay.live.loading import IMPLEMENTATION, Opened, expert_store, opened
from replay.live.steps import LiveSteps
from sim.loop.device import Completion, Kind
from sim.loop.driver import Driver
from sim.loop.log import StepRow
from sim.loop.run import Run, gpu_run
from sim.loop.schedule import LiveStep, Step
from sim.profiles.timing import FixedTiming, Link
from sim.quantities import parse_cache_size
from tracer.hook import ExpertsHook
from tracer.models import LoadedModel, blaming
from traces.errors import InputError

HOOK = "moe_expert_cache"
"""Attribute of a module of experts: what computes them."""


@dataclass(frozen=True)
class How:
    """How a model is opened."""

    source: str  # a folder or a hub id
    name: str | None = None  # None: the folder's, or the hub id
    policy: str = "eamc-blend"
    cache_size: str = "25%"
    dtype: str = "auto"  # the checkpoint's
    lanes: int | None = None  # threads that read the disk; None: as many as it takes
    store: Path | None = None  # for experts that loading converts; None: beside the model


class LiveModel:
    """Open. `model` is transformers' own; `rows` are those of the steps that have ended."""

    def __init__(
        self, loaded: LoadedModel, hook: ExpertsHook, layers: Sequence[ExpertLayer], device: LiveDevice, run: Run
    ) -> None:
        """hook: of the tracer, which has probed the model; layers: in the order of execution."""
        self.loaded, self.model, self.hook = loaded, loaded.model, hook
        self.run, self.device = run, device
        self.rows: list[StepRow] = []
        self._steps = LiveSteps(len(layers))
        slots = torch.from_numpy(device.pool)
        views = {layer.rows: SlotViews(layer.rows, slots) for layer in layers}
        self._layers = [LayerExperts(layer, views[layer.rows]) for layer in layers]
        self._names = [layer.name for layer in layers]
        self._experts = run.shape.experts
        self._step: Step | None = None  # the one that was begun last
        self._routing = LiveStep(0, 0, 0)
        self._next = 0  # layer of it
        self._dead: InputError | None = None  # why the model cannot be called any more
        self._driver = threading.Thread(target=self._drive, name="driver", daemon=True)
        self._handles = [self.model.register_forward_pre_hook(self._begins, with_kwargs=True)]
        for number, layer in enumerate(layers):
            setattr(layer.module, HOOK, partial(self._event, number))
        self._driver.start()

    def end_request(self) -> None:
        """The last forward pass of a request has ended; returns when the driver has heard of it."""
        self._close_step(ends=True)
        self._steps.waiting.wait()

    def close(self) -> None:
        """End the driver; copies under way end first."""
        if self._step:
            self._close_step(ends=True)
        self._steps.waiting.wait()
        self._steps.close()
        self._driver.join()
        for handle in self._handles:
            handle.remove()

    # The thread that calls the model

    def _begins(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward pass begins."""
        names = ("input_ids", "inputs_embeds")
        given: Tensor = args[0] if args else next(kwargs[name] for name in names if kwargs.get(name) is not None)
        rows, columns = given.shape[:2]
        cache = kwargs.get("past_key_values")
        before = int(cache.get_seq_length()) if cache is not None else 0
        self._close_step(ends=before == 0)
        self._steps.waiting.wait()
        if self._dead:
            raise self._dead
        self.device.recover()
        ids = NO_INTS if given.is_floating_point() else given.numpy().reshape(-1)
        self._step, self._routing = self._steps.begin(rows * columns, rows * (before + columns), before == 0, ids)
        self._next = 0
        self._expect(Kind.ROUTER)

    def _close_step(self, ends: bool) -> None:
        """The step that was begun last has ended, or was left in the middle."""
        step, self._step = self._step, None
        if step is None or self._steps.waiting.is_set():
            return
        if self._next < len(self._layers):
            self.device.abort()
            return
        if ends:
            step.ends, step.idle = step.places, True
        self._expect(Kind.HEAD)
        self.device.ended(Completion(Kind.HEAD))

    def _event(self, layer: int, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The experts of a layer: everything between its router and its sum."""
        if self._step is None or layer != self._next:
            raise InputError(f"{self._names[layer]} was called out of order: call the whole model, one pass at a time")
        if layer:
            self._expect(Kind.ROUTER)
        chosen, counts = np.unique(index.numpy(), return_counts=True)
        real = (chosen >= 0) & (chosen < self._experts)
        chosen, counts = chosen[real], counts[real]
        first = layer * self._experts
        self._routing.put(layer, chosen + first, counts)
        self.device.ended(Completion(Kind.ROUTER))
        output = self._computed(self._layers[layer], first, len(chosen), (hidden, index, weights))
        if not bool(output.isfinite().all()):
            raise InputError(f"the experts of {self._names[layer]} give NaN or infinity: the checkpoint is damaged")
        self.device.ended(Completion(Kind.COMBINE))
        self._next += 1
        return output

    def _computed(self, experts: LayerExperts, first: int, count: int, event: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Compute `count` experts as they come, and return their sum."""
        device, output = self.device, None
        experts.begin(*event)
        while (order := device.order()) is not Kind.COMBINE:
            assert not isinstance(order, Kind | Exception), order
            for expert, _, _ in order:
                device.landed(expert)
            if len(order) == count:
                output = experts.whole(*event, {expert - first: slot for expert, slot, _ in order})
            for expert, slot, _ in order:
                if len(order) < count:
                    experts.expert(expert - first, slot)
                device.ended(Completion(Kind.EXPERT, expert))
        return experts.combined() if output is None else output

    def _expect(self, kind: Kind) -> None:
        order = self.device.order()
        assert order is kind, (order, kind)

    # The driver's thread

    def _drive(self) -> None:
        while True:
            try:
                driver = Driver(self.run, self.device, schedule=self._steps)
                for row in driver.steps():
                    self.rows.append(row)
                return
            except Exception as error:
                try:
                    self.device.fail(error)
                except InputError as stuck:
                    self._dead = stuck
                    self._steps.waiting.set()
                    return
                self._steps.forget()


def _live_experts(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """The experts implementation that transformers calls."""
    output: Tensor = getattr(module, HOOK)(hidden, index, weights)
    return output


@contextmanager
def open_live(how: How, told: Callable[[int], Callable[[], None]] = lambda count: lambda: None) -> Iterator[LiveModel]:
    """Load a model without its experts and put a cache of them in front of the disk.

    told: progress of writing a store, see `expert_store`. Raise InputError for whatever cannot be.
    """
    policy = parse(how.policy)
    require_causal(policy)
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _live_experts)
    with ExitStack() as opening:
        opening.enter_context(torch.no_grad())
        without = opening.enter_context(opened(how.source, how.dtype, how.name))
        layers, hook = rehearse(without)
        store: ShardStore | ExpertFile = opening.enter_context(expert_store(without, layers, how.store, told))
        shape = Shape(len(layers), layers[0].experts)
        slots = parse_cache_size(how.cache_size, shape.total, store.expert_bytes)
        policy.divide(shape, slots)
        require_host_memory(slots * store.stride, f"a cache of {slots} experts", "choose a smaller --cache-size")
        device = LiveDevice(store, slots, how.lanes or 1)
        opening.callback(device.close)
        link = Link(0, 1, 1, store.expert_bytes)
        run = gpu_run((), shape, slots, policy, FixedTiming(1, 1, 0, 1, 1), link, experts_per_layer=1.0)
        live = LiveModel(without.loaded, hook, layers, device, run)
        opening.callback(live.close)
        yield live


def require_causal(policy: PolicySpec) -> None:
    """InputError for a policy that a model which runs now cannot serve."""
    if policy.oracle:
        raise InputError(f"{policy.text} knows the future, which a live model does not: choose another policy")
    if policy.needs_lookahead:
        raise InputError(f"{policy.text} asks the next layer's router ahead, which a live model does not do so far")
    if policy.placement != FETCHED:
        raise InputError(f"{policy.text}: a live model fetches every miss: leave the placement out")


def rehearse(model: Opened) -> tuple[list[ExpertLayer], ExpertsHook]:
    """Run a few tokens with experts that add nothing: find which layers run, in which order. Raise InputError."""
    by_module = {layer.module: layer for layer in model.layers}
    for layer in model.layers:
        setattr(layer.module, HOOK, lambda hidden, index, weights: torch.zeros_like(hidden))
    transformer = model.loaded.model
    with blaming(f"{model.loaded.name} cannot be run"):
        transformer.set_experts_implementation(IMPLEMENTATION)
        with ExpertsHook(transformer) as hook:
            hook.probe()
    for name, module in zip(hook.names, hook.modules, strict=True):
        if module not in by_module:
            raise InputError(
                f"{name} ({type(module).__name__}) does not have the experts interface of transformers 5: "
                f"{model.loaded.name} cannot generate from a cache of experts"
            )
    return [by_module[module] for module in hook.modules], hook
