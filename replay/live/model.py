"""A model whose experts are behind a cache: `replay.live.opening` opens one, `LiveModel.model` is called as any other.

Decisions are those of a replay: the session's (`sim.loop.session`), asked by the loop of a live model. Each row of a
batch is a request (rule 18). A forward pass begins new ones unless it continues the KV cache of the pass before it;
`end_request` says that the last one has ended. Passes of several calls may be one step (`meeting`). When a read fails,
early ones too, the pass that runs then raises the error, cache and policy start again, and the model can be called
again. Where no pass runs then, `on_note` is called. What a policy has learned is kept in a file for the next time (a
warm start).

Threads: one pass runs at a time, others wait for it, and every pass gives what it gives alone. Passes of two threads
that take turns are new requests to the policy each time. `close` waits for the pass that runs. Models share nothing,
so each may have a thread of its own. A process that was forked, or is sent the model, has to load its own.
"""

import os
from collections.abc import Callable, Collection, Iterator, Sequence
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

from policies.core.policy import NO_INTS, Listener
from policies.core.spec import Part as Half
from policies.core.spec import PolicySpec
from replay.calibration.meter import Meter
from replay.calibration.parts import cycle_slots, transfers
from replay.live.calls import Call, Meeting, Routed
from replay.live.device import LiveDevice
from replay.live.experts import TRIALS, LayerExperts, SlotViews
from replay.live.layout import ExpertLayer, places_of
from replay.live.loop import LiveLoop
from replay.live.memory import Memory
from replay.live.parts import Parts
from replay.live.recorder import Batch, Recorder
from replay.live.rows import measured
from sim.api import RunResult
from sim.loop.log import COLUMNS, MOVED, RunLog, StepRow
from sim.loop.run import Run
from sim.results import steps
from sim.results.metrics import Cell, Row
from tracer.answers import LoadedModel, Runner
from tracer.hook import ExpertsHook
from traces.errors import InputError, refuse
from traces.output import check_file, replacing
from traces.schema import TraceMeta
from traces.steps import DECODE, PREFILL
from traces.trace import Trace

HOOK = "moe_expert_cache"
"""Attribute of a module of experts: what computes them."""


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
        places = places_of(device.store, layers)
        self._stored = list[tuple[ExpertLayer, SlotViews, list[tuple[int, ...]]]]()
        for number, layer in enumerate(layers):
            own = range(number * layer.experts, (number + 1) * layer.experts)
            self._stored.append((layer, views[layer.stored], [places(expert) for expert in own]))
        self._layers = [self._layer_experts()]  # for each call of a step
        self._names = [layer.name for layer in layers]
        self.transfers = self._time_transfers(run)
        """What an expert takes over the link, and what of it is latency, in ns: timed before the first request."""
        self.run = replace(run, tiers=(replace(run.gpu, experts_per_layer=self._window(dense_ns)),))
        self._experts = run.shape.experts
        self.require_unchanged = require_unchanged
        self._calls: Sequence[Call] = ()  # of the step that was begun last
        self._tokens = self._context = 0  # of that
        self._kv: Callable[[], object] = ref(self)  # the KV cache that a pass gave back, if any
        self._top_k = hook.top_k
        self.parts = Parts()
        self._loop = LiveLoop(self.run, device, on_note)
        self._recorder = Recorder(len(layers), self._experts, self._top_k)
        self.meeting: Meeting | None = None
        self._profile, self._process, self._is_closed = profile, os.getpid(), False
        self._opening = ExitStack()  # what is open as long as this is
        self._turn = RLock()
        for number, layer in enumerate(layers):
            setattr(layer.module, HOOK, partial(self._event, number))
        self._kind, forward = type(self.model), self.model.forward

        @wraps(forward)
        def one_at_a_time(*args: Any, **kwargs: Any) -> Any:
            with self._passing(args, kwargs):
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
            self._opening.__exit__(kind, error, trace)

    def close(self) -> None:
        """Write the profile, end what is under way and give slots and files back.

        Raise InputError where what was read has changed since it was opened.
        """
        self.__exit__(None, None, None)

    def __reduce__(self) -> Any:
        raise InputError(
            f"{self.loaded.name} has a cache of experts, which cannot be copied or sent: load it again there"
        )

    def __repr__(self) -> str:
        run, what = self.run, "closed" if self._is_closed else self.device.name
        return (
            f"<Cache of {run.gpu.slots} of {run.shape.total} experts of {self.loaded.name}, {run.policy.text}; {what}>"
        )

    @property
    def counters(self) -> dict[str, int]:
        """Return sums over all steps since the last `clear`, as results count them (`sim.loop.log.COLUMNS`).

        Also `steps`.
        """
        self._end_request()
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
        """Return the row of a log of the requests of `trace`, in its order, their table, and what it is a row of."""
        return measured(self.loaded.name, self.run, self.device, self.lanes, self.draft, trace, log)

    @property
    def trace(self) -> Trace:
        """Return what was routed since the last `clear`, each row of a batch as a request (`Recorder`).

        Raise InputError where nothing was.
        """
        self._end_request()
        return self._recorder.trace(self.as_stored(Runner(self.loaded, self.hook, lambda rows: None).meta()))

    def as_stored(self, meta: TraceMeta) -> TraceMeta:
        """Return the metadata of a trace with the bytes that packed experts have, which are those that move."""
        return replace(meta, expert_bytes=self.run.gpu.link.expert_bytes) if self._is_packed else meta

    def clear(self) -> None:
        """Forget counters, steps and trace, which take some hundred bytes a token. The cache stays as it is."""
        self._end_request()
        self.rows.clear()
        self._recorder.clear()

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
        return transfers(Meter(self.device), run, cycle_slots(run, self.hook.top_k))

    def _window(self, dense_ns: int) -> float:
        """Return how many experts the link brings while a layer of a decoded token computes: for prefetch budgets."""
        timed = []
        for _ in range(2 * TRIALS):
            began = perf_counter_ns()
            self._compute_one(0)
            timed.append(perf_counter_ns() - began)
        timed = timed[TRIALS:]
        self._layers[0][0].forget()
        return (dense_ns + self.hook.top_k * median(timed)) / self.transfers[0]

    def _compute_one(self, slot: int) -> None:
        """Compute an expert for one token, as if it lay in a slot."""
        hidden, layer = self._like.new_zeros(1, self._width), self._layers[0][0]
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
            self._layers[0][0].forget()

    def end_request(self) -> None:
        """End a request after its last forward pass. Raise InputError if a file of its experts was written to."""
        self._end_request()
        if not self._is_closed:
            self.require_unchanged()

    def _end_request(self) -> None:
        with self._turn:
            self._end_pass(ends_request=True)

    def end(self) -> None:
        """Write what the policy has learned, and end what it has under way; the model is as it was before."""
        try:
            self._end_pass(ends_request=True)
            if self._profile:
                decider = self._loop.decider
                write_learned((decider.retention, decider.prefetcher), self.loaded.name, self._profile)
        finally:
            with suppress(InputError):  # what is under way never ends, as the last pass has said
                self._loop.stop()

    def until_closed(self, opening: ExitStack) -> None:
        """Keep open what `opening` holds, until this is closed."""
        self._opening = opening.pop_all()

    def detach(self) -> None:
        """Give the model its own class and forward pass back."""
        self.model.__class__ = self._kind
        del self.model.forward, self.model.expert_cache

    @contextmanager
    def _passing(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Let one forward pass run. Raise InputError where none can."""
        name = self.loaded.name
        refuse((self._process != os.getpid(), f"{name} was loaded in another process: load it in this one"))
        with self._turn, torch.no_grad():
            refuse((self._is_closed, f"{name} was closed: load it again"))
            call = Call.of(args, kwargs)
            if self.meeting:
                self.meeting.begin(call)
            else:
                self._begin(call)
            yield

    def _begin(self, call: Call) -> None:
        """A pass of one call begins: it continues the one before it, or its rows are new requests."""
        latest = self._calls[0] if self._calls else call
        same = call.before > 0 and call.rows == latest.rows and self._kv() is call.kv()
        if same and self._end_pass(ends_request=False):
            call.is_new, call.recorded, call.request = False, latest.recorded, latest.request
        else:
            self._end_pass(ends_request=True)
            call.recorded, call.request = self.new_batch()
        self.begin_step([call])

    def make_room(self, requests: int) -> None:
        """Let so many requests be in a step; the cache starts empty. Otherwise the first such step does so."""
        self._loop.restart(requests)

    def new_batch(self) -> tuple[Batch, int]:
        """Return where a new batch is recorded, and the number of its first request."""
        return self._recorder.batch(), self._recorder.requests

    def begin_step(self, calls: Sequence[Call]) -> None:
        """A step begins, of calls by their batch slots; none was begun, or it has ended."""
        phases = set[int]()
        for call in calls:
            is_prompt = call.before == 0 or (call.columns > 1 and not self.draft)
            phases.add(PREFILL if is_prompt else DECODE)
            if call.recorded:
                call.recorded.begin(call.ids, call.is_own, call.before)
        known = [call.ids.reshape(-1) for call in calls if call.ids is not None]
        parts = [part for call in calls for part in call.parts]
        self._loop.begin(max(phases), parts, np.concatenate(known) if len(known) == len(calls) else NO_INTS)
        was, is_later = self._tokens, not all(call.is_new for call in calls)
        self._calls = calls
        self._tokens, self._context = (sum(part[place] for part in parts) for place in (2, 3))
        took = self.parts.lap()
        if is_later:
            self.parts.head[was].add(took)

    def _end_pass(self, ends_request: bool) -> bool:
        """End the pass that was begun last, if it has come to its end and was not ended before."""
        rows = self._calls[0].rows if self._calls else 0
        return self.end_step(range(rows) if ends_request else ()) is not None

    def end_step(self, ends: Collection[int]) -> StepRow | None:
        """End the step that was begun last; return its row, None where it was left before its end, or ended before.

        ends: batch slots of the requests that have ended with it.
        """
        row = self._loop.end(ends)
        if row:
            self.rows.append(row)
            for call in self._calls:
                if call.recorded:
                    call.recorded.keep()
        return row

    def _event(self, layer: int, *routed: Tensor) -> Tensor:
        """Compute the experts of a layer: everything between its router and its sum."""
        hidden, index, weights = routed
        if self.meeting:
            return self.meeting.event(layer, (hidden, index, weights))
        return self.compute(layer, [(hidden, index, weights)])[0]

    def compute(self, layer: int, events: Sequence[Routed]) -> list[Tensor]:
        """Compute the experts of a layer for each call of the step; all of them are looked up and moved once."""
        if layer != self._loop.layer:
            raise InputError(f"{self._names[layer]} was called out of order: call the whole model, one pass at a time")
        parts, experts, tokens = self.parts, self._experts, []
        indices = [index.cpu().numpy() for _, index, _ in events]
        parts.dense[layer == 0, self._tokens, self._context].add(parts.lap())
        for call, ids in zip(self._calls, indices, strict=True):
            own = ids.reshape(call.rows, -1) + experts * np.arange(call.rows)[:, None]
            is_routed = (ids >= 0) & (ids < experts)
            counts = np.bincount(own[is_routed.reshape(call.rows, -1)], minlength=call.rows * experts)
            tokens.append(counts.reshape(call.rows, experts))
            if call.recorded:
                call.recorded.put(np.where(is_routed, ids, -1))
        self._loop.route(np.concatenate(tokens))
        outputs = self._computed(layer, [each.sum(0) for each in tokens], events)
        for output, (hidden, _, _) in zip(outputs, events, strict=True):
            if not bool(output.isfinite().all()) and bool((~output.isfinite()[hidden.isfinite().all(-1)]).any()):
                name = self._names[layer]
                raise InputError(f"the experts of {name} give NaN or infinity: the checkpoint is damaged")
        self._loop.combined()
        self.parts.combine[self._tokens].add(self.parts.lap())
        return outputs

    def _layer_experts(self) -> list[LayerExperts]:
        return [LayerExperts(*each) for each in self._stored]

    def _computed(self, layer: int, chosen: Sequence[NDArray[Any]], events: Sequence[Routed]) -> list[Tensor]:
        """Compute experts as they come; return the sum of each call's. chosen: [E] tokens by expert, of each call."""
        loop, parts, first = self._loop, self.parts, layer * self._experts
        while len(self._layers) < len(events):
            self._layers.append(self._layer_experts())
        each = [(self._layers[n][layer], own.nonzero()[0].tolist()) for n, own in enumerate(chosen)]
        count = left = len({expert for _, own in each for expert in own})
        for (experts, _), event in zip(each, events, strict=True):
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
                slots = {expert - first: slot for expert, slot, _ in works}
                outputs = [
                    experts.whole(*event, {expert: slots[expert] for expert in own})
                    for (experts, own), event in zip(each, events, strict=True)
                ]
                self.device.finish()
                parts.expert[self._tokens * self._top_k // count or 1].add(parts.lap(), count)
                loop.computed([expert for expert, _, _ in works], is_last=True)
                parts.lap()
                return outputs
            for expert, slot, tokens in works:
                for experts, own in each:
                    if expert - first in own:
                        experts.expert(expert - first, slot)
                self.device.finish()
                parts.expert[tokens].add(parts.lap())
                left -= 1
                loop.computed([expert], is_last=not left)
        parts.lap()
        return [experts.combined() for experts, _ in each]


def entered(kind: type) -> Any:
    """Return a model's class as one whose objects are context managers, and which nothing compiles."""
    own: dict[str, Any] = {
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
        "__enter__": lambda model: model,
        "__exit__": lambda model, *error: model.expert_cache.__exit__(*error),
        "__reduce_ex__": lambda model, _: model.expert_cache.__reduce__(),
        "_valid_auto_compile_criteria": lambda model, *_: False,  # of static caches on a GPU
    }
    return type(kind.__name__, (kind,), own)


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


def _from(half: Half, file: Path) -> Half:
    return half.having({half.cls.starts_from: str(file)}) if half.cls.starts_from else half


def write_learned(halves: tuple[Listener, Listener], model: str, file: Path) -> None:
    """Write what the policy has learned from runs of `model`."""
    for half in halves:
        if half.starts_from:
            with replacing(file) as part, part.open("wb") as written:
                half.save(written, model)
            return
