"""A model whose experts are behind a cache: `replay.live.opening` opens one, `LiveModel.model` is called as any other.

Each row of a batch is a request (rule 18), which continues with the KV cache of the pass before. When a read fails, the
pass that runs raises the error, cache and policy start again; where no pass runs, `on_note` is called. One pass runs at
a time, other threads wait for it; those that take turns are new requests to the policy each time.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial, wraps
from itertools import cycle
from pathlib import Path
from statistics import median
from threading import Event, RLock, Thread
from time import perf_counter_ns
from types import TracebackType
from typing import Any, Self
from weakref import ref

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from policies.core.policy import NO_INTS
from policies.core.spec import Part, PolicySpec
from replay.calibration.measure import steady_ns
from replay.calibration.meter import Meter
from replay.calibration.parts import cycle_slots, transfers
from replay.comparison.cell import copy_gb_per_s
from replay.devices.stage import facts
from replay.live.device import LiveDevice
from replay.live.experts import TRIALS, LayerExperts, SlotViews
from replay.live.layout import ExpertLayer, places_of
from replay.live.loop import LiveLoop
from replay.live.memory import KV_NAMES, Memory, resident_bytes
from replay.live.next_routers import NextRouters, picked
from replay.live.parts import Parts
from replay.live.recorder import Recorder
from sim.api import RunResult
from sim.experiment import RECORDED
from sim.loop.log import COLUMNS, MOVED, PREDICTOR, RunLog, StepRow
from sim.loop.run import Run
from sim.probe.limits import available_memory_bytes
from sim.profiles.policy_overhead import cost_us
from sim.results import steps
from sim.results.metrics import Cell, Row, summarise
from tracer.answers import LoadedModel, Runner
from tracer.hook import ExpertsHook
from traces.errors import InputError, refuse
from traces.output import check_file, replacing
from traces.schema import TraceMeta
from traces.steps import DECODE, PREFILL
from traces.trace import Trace

HOOK = "moe_expert_cache"  # attribute of a module of experts: what computes them


class LiveModel:
    """A cache of experts, open until it is closed; a context manager.

    `model` is transformers' own, with this as its `expert_cache`; `rows` are those of the steps that have ended.
    """

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
        profile: Path | None,
        next_routers: NextRouters | None = None,
    ) -> None:
        """hook: of the tracer, which has probed the model; layers: in the order of execution.

        lanes: of the device; dense_ns: what a layer's dense part takes for a token, about; require_unchanged: raises
        InputError where what experts are read from has changed; profile: file for what the policy learns.
        """
        self.loaded, self.model, self.hook = loaded, loaded.model, hook
        self.device, self.memory, self.lanes = device, memory, lanes
        self.rows: list[StepRow] = []
        self.draft = 0
        """Tokens that are drafted for each decode step, at most: a pass of several then decodes (rule 20)."""
        self._width, self._is_packed = layers[0].width, any(layer.packing for layer in layers)
        self._like = torch.empty(0, dtype=self.model.dtype, device=loaded.device)
        views = {layer.stored: SlotViews(layer.stored, device.slots) for layer in layers}
        places, self._layers = places_of(device.store, layers), list[LayerExperts]()
        for number, layer in enumerate(layers):
            own = range(number * layer.experts, (number + 1) * layer.experts)
            self._layers.append(LayerExperts(layer, views[layer.stored], [places(expert) for expert in own]))
        self._names = [layer.name for layer in layers]
        self.transfers = self._time_transfers(run)
        """What an expert takes over the link, and what of it is latency, in ns: timed before the first request."""
        charge = 1_000 * (cost_us(run.policy, run.shape.layers, run.shape.experts) or 0.0) / self.transfers[0]
        gpu = replace(run.gpu, experts_per_layer=self._window(dense_ns), transfers_per_event=charge)
        self.run = replace(run, tiers=(gpu,))
        self._experts = run.shape.experts
        self._require_unchanged = require_unchanged
        self._requests = self._tokens = self._context = 0  # of the forward pass
        self._kv: Callable[[], object] = ref(self)  # the KV cache that it gave back, if any
        self._top_k = hook.top_k
        self.parts = Parts()
        self.loop = LiveLoop(self.run, device, on_note)
        self._next = next_routers
        distances = len(next_routers.picks.distances) if next_routers else 0
        self._recorder = Recorder(len(layers), self._experts, self._top_k, distances)
        self._profile, self._process, self._is_closed = profile, os.getpid(), False
        self.opening = ExitStack()  # what is open as long as this is
        self._turn = RLock()
        for number, layer in enumerate(layers):
            setattr(layer.module, HOOK, partial(self._event, number))
        self._kind, forward = type(self.model), self.model.forward

        @wraps(forward)
        def one_at_a_time(*args: Any, **kwargs: Any) -> Any:
            name = self.loaded.name
            refuse((self._process != os.getpid(), f"{name} was loaded in another process: load it in this one"))
            with self._turn, torch.no_grad():
                refuse((self._is_closed, f"{name} was closed: load it again"))
                self._begins(args, kwargs)
                output = forward(*args, **kwargs)
                parts = output if isinstance(output, tuple) else output.to_tuple()
                held = (each for each in parts if hasattr(each, "get_seq_length"))
                self._kv = ref(next(held, self))
                return output

        self.model.forward = one_at_a_time
        self.model.expert_cache = self
        self.model.__class__ = entered(self._kind)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; without an error raise InputError where what was read has changed meanwhile."""
        if self._is_closed or self._process != os.getpid():  # another process has nothing of it
            return
        with self._turn:
            self._is_closed = True
            self.opening.__exit__(kind, error, trace)

    def close(self) -> None:
        """Write the profile, end what is under way, close files. Raise InputError where what was read has changed."""
        self.__exit__(None, None, None)

    def __repr__(self) -> str:
        run, what = self.run, "closed" if self._is_closed else self.device.name
        return (
            f"<Cache of {run.gpu.slots} of {run.shape.total} experts of {self.loaded.name}, {run.policy.text}; {what}>"
        )

    @property
    def counters(self) -> dict[str, int]:
        """Return `steps` since the last `clear`, and sums over them as results count them (`sim.loop.log.COLUMNS`)."""
        self._end_pass(ends_request=True)
        sums = np.array([row.numbers for row in self.rows], np.int64).reshape(-1, len(COLUMNS)).sum(0)
        counted = dict(zip(COLUMNS, sums.tolist(), strict=True))
        bytes_ = {moved: counted[count] * self.run.gpu.link.expert_bytes for moved, count in MOVED.items()}
        del counted["phase"]
        return {"steps": len(self.rows), **counted, **bytes_}

    def report(self) -> RunResult:
        """Return the steps since the last `clear` as they were measured: totals, a table of steps, one of requests."""
        trace = self.trace
        log = RunLog.of_rows(self.rows, self.run.gpu.link.expert_bytes, ())
        row, requests, _ = self.measured(trace, log)
        return RunResult(row, steps.frame(log, trace.requests["id"]), requests.to_pandas())

    def measured(self, trace: Trace, log: RunLog) -> tuple[Row, pa.Table, Cell]:
        """Return the row of a run with the columns of a replay's, the table of its requests, and what they are of.

        log: of the requests of `trace`, in its order.
        """
        run, device, draft = self.run, self.device, self.draft
        charged = list(zip(log.phase.tolist(), log.stall_ns[:, PREDICTOR].tolist(), strict=True))
        known, policy, most = facts(device.gpu, device.store), run.policy, int(np.bincount(log.by_request.step).max())
        cell = Cell(
            policy=policy.text,
            options=policy.options(),
            oracle=False,
            trace="this run",
            phase=trace.phases,
            model=self.loaded.name,
            hardware=str(known["device_name"]),
            predictor_us=steady_ns(charged, run.shape.layers) / 1_000,
            cache_experts=run.gpu.slots,
            cache_bytes=run.gpu.slots * run.gpu.link.expert_bytes,
            all_experts=run.shape.total,
            layers=run.shape.layers,
            draft=draft or None,
            acceptance=RECORDED if draft else None,
            routing=lossy.text if (lossy := run.routing) and lossy.is_lossy(trace.top_k) else None,
            max_batch=most if most > 1 else None,
            arrivals="closed" if most > 1 else None,
            seed=policy.seed,
        )
        row, requests = summarise(log, cell, trace.requests)
        past_cache = getattr(device.store, "past_cache", None)
        row |= {"device": device.name, **known, "lanes": None if device.gpu else self.lanes, "past_cache": past_cache}
        row["copy_gb_per_s"] = copy_gb_per_s(log)
        return row, requests, cell

    def free_bytes(self) -> int:
        """Return the memory that is left for requests, where nothing but program, dense part and slots is taken."""
        if self.device.gpu:
            return self.device.gpu.free_bytes()
        memory = self.memory
        untouched = memory.program + memory.dense + memory.slots - resident_bytes()  # of the slots
        return available_memory_bytes() - max(0, untouched)

    @property
    def trace(self) -> Trace:
        """Return what was routed since the last `clear`, a request for each row. Raise InputError of nothing."""
        self._end_pass(ends_request=True)
        meta = self.as_stored(Runner(self.loaded, self.hook, lambda rows: None).meta())
        return self._recorder.trace(replace(meta, lookahead=self._next.picks if self._next else None))

    def with_picks(self, trace: Trace) -> Trace:
        """Return a trace of what was run last, one request at a time, with what the next routers picked in it."""
        if not self._next:
            return trace
        own, rows = self.trace, slice(-len(trace.experts), None)
        assert own.lookahead is not None
        assert own.lookahead_scores is not None
        meta = replace(trace.meta, lookahead=self._next.picks)
        picks, scores = own.lookahead[rows], own.lookahead_scores[rows]
        return replace(trace, meta=meta, lookahead=picks, lookahead_scores=scores)

    def as_stored(self, meta: TraceMeta) -> TraceMeta:
        """Return the metadata of a trace with the bytes that packed experts have, which move, and what bent routing."""
        if rule := self.run.routing:
            meta = replace(meta, settings={**meta.settings, "routing": rule.text})
        return replace(meta, expert_bytes=self.run.gpu.link.expert_bytes) if self._is_packed else meta

    def clear(self) -> None:
        """Forget counters, steps and trace, which take some hundred bytes a token. The cache stays as it is."""
        self._end_pass(ends_request=True)
        self.rows.clear()
        self._recorder.clear()

    def time_transfers(self) -> tuple[tuple[int, int], float]:
        """Time transfers again, alone, and how many times as long beside compute. Cache and policy start again."""
        self.loop.stop()  # a prefetch may be under way
        alone = self._time_transfers(self.run)
        with self._computing():
            beside = self._time_transfers(self.run)
        return alone, max(1.0, beside[0] / alone[0])

    def _time_transfers(self, run: Run) -> tuple[int, int]:
        return transfers(Meter(self.device), run, cycle_slots(run, self.hook.top_k))

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
        if not self._is_closed:
            self._require_unchanged()

    def end(self) -> None:
        """Write what the policy has learned, and end what it has under way; the model is as it was before."""
        try:
            self._end_pass(ends_request=True)
            if self._profile:
                halves = self.loop.decider.retention, self.loop.decider.prefetcher
                with replacing(self._profile) as part, part.open("wb") as written:
                    next(half for half in halves if half.starts_from).save(written, self.loaded.name)
        finally:
            with suppress(InputError):  # what is under way never ends, as the last pass has said
                self.loop.stop()

    def detach(self) -> None:
        self.model.__class__ = self._kind
        del self.model.forward, self.model.expert_cache

    def _begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = ("input_ids", "inputs_embeds")
        inputs: Tensor = args[0] if args else next(kwargs[name] for name in names if kwargs.get(name) is not None)
        rows, columns = inputs.shape[:2]
        cache = next((kwargs[name] for name in KV_NAMES if kwargs.get(name) is not None), None)
        before = int(cache.get_seq_length()) if cache is not None else 0
        same = before > 0 and rows == self._requests and self._kv() is cache
        continues = same and self._end_pass(ends_request=False)
        if not continues:
            self._end_pass(ends_request=True)
        ids = None if inputs.is_floating_point() else inputs.cpu().numpy()
        is_own = np.broadcast_to(own_tokens(kwargs.get("attention_mask"), before, columns), (rows, columns))
        request = self._recorder.begin(ids, is_own, before, continues)
        known = NO_INTS if ids is None else ids.reshape(-1)
        is_prompt = before == 0 or (columns > 1 and not self.draft)
        phase = PREFILL if is_prompt else DECODE
        self.loop.begin(phase, rows, columns, before + columns, not continues, known, request)
        was, self._tokens, self._context, self._requests = self._tokens, rows * columns, before + columns, rows
        took = self.parts.lap()
        if continues:
            self.parts.head[was].add(took)

    def _end_pass(self, ends_request: bool) -> bool:
        """End the forward pass that was begun last, if it has come to its end and was not ended before."""
        with self._turn:
            row = self.loop.end(ends_request)
            if row:
                self.rows.append(row)
                self._recorder.keep()
            return row is not None

    def _event(self, layer: int, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Compute the experts of a layer: everything between its router and its sum."""
        if layer != self.loop.layer:
            raise InputError(f"{self._names[layer]} was called out of order: call the whole model, one pass at a time")
        parts, experts, rows = self.parts, self._experts, self._requests
        ids = index.cpu().numpy()
        ahead = self._next.choices(layer) if self._next else []  # a part of what the layer takes
        parts.dense[layer == 0, self._tokens, self._context].add(parts.lap())
        own = ids.reshape(rows, -1) + experts * np.arange(rows)[:, None]
        is_routed = (ids >= 0) & (ids < experts)
        tokens = np.bincount(own[is_routed.reshape(rows, -1)], minlength=rows * experts).reshape(rows, experts)
        self._recorder.put(np.where(is_routed, ids, -1), ahead)
        self.loop.route(tokens, picked(ahead, (layer + 1) * experts, experts))
        chosen = int(np.count_nonzero(tokens.sum(0)))
        output = self._computed(self._layers[layer], layer * experts, chosen, (hidden, index, weights))
        if not bool(output.isfinite().all()) and bool((~output.isfinite()[hidden.isfinite().all(-1)]).any()):
            raise InputError(f"the experts of {self._names[layer]} give NaN or infinity: the checkpoint is damaged")
        self.loop.combined()
        self.parts.combine[self._tokens].add(self.parts.lap())
        return output

    def _computed(self, experts: LayerExperts, first: int, count: int, event: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        loop, parts, output, left = self.loop, self.parts, None, count
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


def own_tokens(mask: Any, before: int, columns: int) -> NDArray[np.bool_]:
    """Return which tokens of a pass are no padding, bool[rows or 1, columns], by any mask that a model takes.

    before: tokens in the KV cache. In a mask [rows, 1, queries, keys], made for static caches, all that see themselves.
    With a sliding window the keys are the latest ones alone.
    """
    if isinstance(mask, dict):
        mask = mask.get("full_attention")
    if isinstance(mask, Tensor) and mask.dim() == 4:
        seen = mask[:, 0].diagonal(min(before, mask.shape[3] - columns), 1, 2)
        mask = seen if seen.dtype == torch.bool else seen == 0
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return np.ones((1, columns), np.bool_)
    own: NDArray[np.bool_] = (mask[:, -columns:] != 0).cpu().numpy()
    return own


def entered(kind: type) -> Any:
    """Return a model's class as one whose objects are context managers, and which nothing compiles."""
    own: dict[str, Any] = {
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
        "__enter__": lambda model: model,
        "__exit__": lambda model, *error: model.expert_cache.__exit__(*error),
        "_valid_auto_compile_criteria": lambda model, *_: False,  # of static caches on a GPU
    }
    return type(kind.__name__, (kind,), own)


def starting_from(policy: PolicySpec, file: Path | None) -> PolicySpec:
    """Return the policy as it starts from what `file` holds, if that is there. Raise InputError for one that cannot."""
    if not file:
        return policy
    saving = sum(bool(half.cls.starts_from) for half in (policy.evict, policy.prefetch))
    apart = saving == 2 and not (policy.shares and policy.prefetch.cls.shares_state_with(policy.evict.cls))
    refuse(
        (not saving, f"--profile: {policy.text} does not save what it learns; eamc and eamc-blend do"),
        (apart, f"--profile: both halves of {policy.text} save what they learn, and a profile is of one"),
    )
    check_file(file, overwrite=True)  # better now than when all is learned
    if not file.exists():
        return policy

    def learned(half: Part) -> Part:
        return half.having({half.cls.starts_from: str(file)}) if half.cls.starts_from else half

    evict, prefetch = learned(policy.evict), learned(policy.prefetch)
    return replace(PolicySpec.of(evict, prefetch, policy.scope, policy.placement), typed=policy.typed)
