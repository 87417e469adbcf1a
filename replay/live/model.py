"""A model whose experts are behind a cache: `open_live` opens one, `LiveModel.model` is called as any other.

Decisions are those of a replay: the session's (`sim.loop.session`), asked by the loop of a live model. A forward pass
with an empty KV cache begins a request; `end_request` says that the last one has ended. When a read fails, the pass
that needed it raises the error, cache and policy start again, and the model can be called again.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
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
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from policies.core.policy import NO_INTS, Shape
from policies.core.spec import FETCHED, PolicySpec, parse
from replay.calibration.measure import CYCLE_BYTES, transfers
from replay.calibration.meter import Meter
from replay.devices.expert_file import ExpertFile
from replay.devices.lanes import knee, rates
from replay.devices.store import ExpertSource, require_host_memory
from replay.live.device import LiveDevice
from replay.live.experts import LayerExperts, SlotViews
from replay.live.layout import ExpertLayer, ShardStore
from replay.live.loading import IMPLEMENTATION, Opened, Progress, expert_store, opened
from replay.live.loop import LiveLoop
from replay.live.memory import Memory, cache_bytes, memory_of
from replay.live.parts import Parts
from replay.live.profile import starting_from, write_learned
from replay.warmup import decide
from sim.loop.log import StepRow
from sim.loop.run import Run, gpu_run
from sim.profiles.timing import FixedTiming, Link
from sim.quantities import parse_cache_size, show_bytes
from sim.sweeps.setup import Requests
from tracer.hook import ExpertsHook
from tracer.models import LoadedModel, blaming
from traces.errors import InputError
from traces.synthetic import synthetic

HOOK = "moe_expert_cache"
"""Attribute of a module of experts: what computes them."""


AT_NO_LAYER = -1
TRIED_TOKENS = 24
"""Of a prefill by which a token's share of the KV cache is told."""


@dataclass(frozen=True)
class How:
    """How a model is opened."""

    source: str  # a folder or a hub id
    name: str | None = None  # None: the folder's, or the hub id
    policy: str | PolicySpec = "eamc-blend"
    cache_size: str = "25%"
    dtype: str = "auto"  # the checkpoint's
    lanes: int | None = None  # threads that read the disk; None: as many as it takes
    store: Path | None = None  # for experts that loading converts; None: beside the model
    profile: Path | None = None  # what the policy has learned before, if the file is there


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
    ) -> None:
        """hook: of the tracer, which has probed the model; layers: in the order of execution.

        lanes: of the device; dense_ns: what a layer's dense part takes for a token, about.
        """
        self.loaded, self.model, self.hook = loaded, loaded.model, hook
        self.device, self.memory, self.lanes = device, memory, lanes
        self.rows: list[StepRow] = []
        self._hidden_size: int = loaded.model.config.get_text_config().hidden_size
        slots = torch.from_numpy(device.pool)
        views = {layer.rows: SlotViews(layer.rows, slots) for layer in layers}
        places = [
            [_places(device.store, layer, number * layer.experts + expert) for expert in range(layer.experts)]
            for number, layer in enumerate(layers)
        ]
        self._layers = [LayerExperts(layer, views[layer.rows], own) for layer, own in zip(layers, places, strict=True)]
        self._names = [layer.name for layer in layers]
        self.transfers = self._time_transfers(run)
        """What an expert takes from the disk, and what of it is latency, in ns: timed before the first request."""
        self.run = replace(run, tiers=(replace(run.gpu, experts_per_layer=self._window(dense_ns)),))
        self._experts = run.shape.experts
        self._next = AT_NO_LAYER  # of the forward pass
        self._tokens = self._context = 0  # of it
        self._top_k = hook.top_k
        self.parts = Parts()
        self._loop = LiveLoop(self.run, device)
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
        places = min(gpu.slots, max(2 * self.hook.top_k, CYCLE_BYTES // gpu.link.expert_bytes))
        return transfers(Meter(self.device), gpu.link.expert_bytes, run.shape.total, places)

    def _window(self, dense_ns: int) -> float:
        """How many experts the disk gives while a layer of a decoded token computes: for prefetch budgets."""
        timed = []
        for _ in range(3):
            began = perf_counter_ns()
            self._compute_one(0)
            timed.append(perf_counter_ns() - began)
        return (dense_ns + self.hook.top_k * median(timed)) / self.transfers[0]

    def _compute_one(self, slot: int) -> None:
        """Compute an expert for one token, as if it lay in a slot."""
        hidden, layer = torch.zeros(1, self._hidden_size, dtype=self.model.dtype), self._layers[0]
        layer.begin(hidden, torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, dtype=hidden.dtype))
        layer.expert(0, slot)
        layer.combined()

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

    def end_request(self) -> None:
        """The last forward pass of a request has ended."""
        self._end_pass(ends_request=True)

    def save(self, file: Path) -> None:
        """Write what the policy knows now, for `How.profile`."""
        decider = self._loop.decider
        write_learned((decider.retention, decider.prefetcher), self.loaded.name, file)

    def close(self) -> None:
        """End what the policy has under way."""
        self.end_request()
        self._loop.stop()
        for handle in self._handles:
            handle.remove()

    def _begins(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward pass begins."""
        names = ("input_ids", "inputs_embeds")
        given: Tensor = args[0] if args else next(kwargs[name] for name in names if kwargs.get(name) is not None)
        rows, columns = given.shape[:2]
        cache = kwargs.get("past_key_values")
        before = int(cache.get_seq_length()) if cache is not None else 0
        continues = before > 0 and self._end_pass(ends_request=False)
        if not continues:
            self._end_pass(ends_request=True)
        ids = NO_INTS if given.is_floating_point() else given.numpy().reshape(-1)
        self._loop.begin(rows * columns, rows * (before + columns), before == 0, ids)
        self._next = 0
        was, self._tokens, self._context = self._tokens, rows * columns, before + columns
        took = self.parts.lap()
        if continues:
            self.parts.head[was].add(took)

    def _end_pass(self, ends_request: bool) -> bool:
        """The forward pass that was begun last has ended, if it has come to its end and was not ended before."""
        self._next = AT_NO_LAYER
        row = self._loop.end(ends_request)
        if row:
            self.rows.append(row)
        return row is not None

    def _event(self, layer: int, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The experts of a layer: everything between its router and its sum."""
        if layer != self._next:
            raise InputError(f"{self._names[layer]} was called out of order: call the whole model, one pass at a time")
        parts = self.parts
        parts.dense[layer == 0, self._tokens, self._context].add(parts.lap())
        chosen, counts = np.unique(index.numpy(), return_counts=True)
        real = (chosen >= 0) & (chosen < self._experts)
        chosen, counts = chosen[real], counts[real]
        first = layer * self._experts
        self._loop.route(chosen + first, counts)
        output = self._computed(self._layers[layer], first, len(chosen), (hidden, index, weights))
        if not bool(output.isfinite().all()):
            raise InputError(f"the experts of {self._names[layer]} give NaN or infinity: the checkpoint is damaged")
        self._loop.combined()
        self.parts.combine[self._tokens].add(self.parts.lap())
        self._next += 1
        return output

    def _computed(self, experts: LayerExperts, first: int, count: int, event: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Compute `count` experts as they come, and return their sum."""
        loop, parts, output, left = self._loop, self.parts, None, count
        experts.begin(*event)
        while left:
            works = loop.works()
            waited = [loop.landed(expert) for expert, _, _ in works]
            took = parts.lap()
            if len(works) == count and not any(waited):
                parts.answer.add(took)
            if len(works) == count:
                output = experts.whole(*event, {expert - first: slot for expert, slot, _ in works})
                parts.expert[self._tokens * self._top_k // count or 1].add(parts.lap(), count)
                left = 0
                loop.computed([expert for expert, _, _ in works], is_last=True)
                continue
            for expert, slot, tokens in works:
                experts.expert(expert - first, slot)
                parts.expert[tokens].add(parts.lap())
                left -= 1
                loop.computed([expert], is_last=not left)
        parts.lap()
        return experts.combined() if output is None else output


def _places(store: ExpertSource, layer: ExpertLayer, expert: int) -> tuple[int, ...]:
    """Where in its slot each row of an expert lies."""
    return store.places(expert) if isinstance(store, ShardStore) else tuple(row.begin for row in layer.rows)


def _live_experts(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """The experts implementation that transformers calls."""
    output: Tensor = getattr(module, HOOK)(hidden, index, weights)
    return output


@contextmanager
def open_live(how: How, progress: Progress = lambda count: nullcontext(lambda pieces: None)) -> Iterator[LiveModel]:
    """Load a model without its experts and put a cache of them in front of the disk.

    progress: is shown while a store is written (`expert_store`). Raise InputError for whatever cannot be.
    """
    policy = starting_from(parse(how.policy), how.profile)
    require_causal(policy)
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _live_experts)
    with ExitStack() as opening:
        without = opening.enter_context(opened(how.source, how.dtype, how.name))
        layers, hook = rehearse(without)
        store: ShardStore | ExpertFile = opening.enter_context(expert_store(without, layers, how.store, progress))
        shape = Shape(len(layers), layers[0].experts)
        slots = parse_cache_size(how.cache_size, shape.total, store.expert_bytes)
        policy.divide(shape, slots)
        first = slots * store.stride, f"a cache of {slots} experts", "choose a smaller --cache-size"
        require_host_memory(*first, reserve_bytes=0)
        run = gpu_run((), shape, slots, policy, FixedTiming(1, 1, 0, 1, 1), Link(0, 1, 1, store.expert_bytes))
        _warm_up(run, hook.top_k)
        kv_per_token, dense_ns = _try_out(without.loaded.model, len(layers))
        memory = memory_of(
            without.loaded, without.dense_bytes, slots * store.stride, store.stride, hook.top_k, kv_per_token
        )
        what = f"a cache of {slots} experts beside {show_bytes(memory.stated(0) - memory.slots)} of everything else"
        require_host_memory(memory.slots + memory.workspace(0), what, "choose a smaller --cache-size", reserve_bytes=0)
        device = LiveDevice(store, slots)
        opening.callback(device.close)
        lanes = how.lanes or knee(rates(store, store.expert_bytes, slots=device.pool))
        device.read_with(lanes)
        live = LiveModel(without.loaded, hook, layers, device, run, memory, lanes, dense_ns)
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


def _warm_up(run: Run, top_k: int) -> None:
    """Have the policy compiled before memory is stated and time counts."""
    shape = run.shape
    steps = {"requests": 2, "tokens": 8, "prompt_tokens": 4}
    trace = synthetic(**steps, layers=shape.layers, experts=shape.experts, top_k=top_k, seed=0)
    tiers = (replace(run.gpu, experts_per_layer=1.0),)
    decide(replace(run, requests=Requests(trace), tiers=tiers))


def _try_out(model: Any, layers: int) -> tuple[int, int]:
    """Run a prefill and a few tokens with experts that add nothing: bytes of KV cache a token, and ns a layer."""
    ids = torch.zeros(1, TRIED_TOKENS, dtype=torch.int64)
    took = []
    with torch.inference_mode():
        cache = model(input_ids=ids, use_cache=True).past_key_values
        size = cache_bytes(cache)
        for _ in range(3):
            began = perf_counter_ns()
            model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
            took.append(perf_counter_ns() - began)
    return -(-size // TRIED_TOKENS), int(median(took)) // layers
