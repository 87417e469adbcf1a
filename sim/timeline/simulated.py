"""The SimPy engine put onto a timeline: what the compute stream and the link do, and why the one waits for the other.

The run is `sim.engines.simpy_engine`'s and stays as it is: what is shown is heard from the calls that the model makes
anyway. A part of the compute stream goes from the end of the one before to the call that its end causes.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress

from sim.engines.hits import HitQueue

from policies.core import residency_compiled as core
from policies.core.events import RequestEvents
from policies.core.policy import Int, Shape
from policies.core.residency import Residency
from sim.engines.simpy_engine import DEMAND, HostLink, Model, Nanoseconds, Wait
from sim.loop.log import STALLS, Ended, RunLog
from sim.loop.run import Run
from sim.profiles.timing import Link
from sim.timeline.file import Args, ComputeTrack, Process, Timeline
from sim.timeline.residency_tracks import ResidencyTracks, after, expert_args, expert_name
from sim.timeline.window import WHOLE, Window
from traces.steps import DECODE


class WindowOver(Exception):  # noqa: N818  # no error: it ends a run that has been shown
    """The request in which the window ends has ended."""


def play(
    run: Run, ended: Ended, timeline: Timeline, names: Sequence[str], window: Window = WHOLE, slots: bool = True
) -> None:
    """Play a run on the SimPy engine and put it onto `timeline`; `ended` is told of each request when it ends.

    names: of the trace's requests. slots: whether the slots of the cache have tracks of their own.
    """
    ObservedModel(run, timeline, names, window, slots).play(ended)


class ObservedModel(Model):
    """A run that is shown."""

    def __init__(self, run: Run, timeline: Timeline, names: Sequence[str], window: Window, slots: bool) -> None:
        super().__init__(run)
        self._timeline = timeline
        self._names = names
        self._window = window
        self._requests = self._tokens = 0  # that have ended; tokens: decode steps
        self._layer = -1  # at hand in the step
        self._counts: dict[int, int] = {}  # tokens of each expert of its event
        self._late: set[int] = set()  # of these
        self._process = timeline.process("simulated: compute and link")
        self._compute = ComputeTrack(timeline, self._process)
        self._residency = ResidencyTracks(timeline, self.machine, self.shape, lambda: self.env.now, "simulated", slots)
        self.link = self._link = ObservedLink(
            *(self.env, self.machine, run.link, self.hits, self.shape, timeline, self._process, self._compute.stalled)
        )
        after(self.machine, "route", self._routed)
        after(self.hits, "begin", lambda hits_ns, n, *_: self._begun(n))
        after(self.machine, "computed", lambda _, expert: self._computed(expert))

    def play(self, ended: Ended) -> None:
        """Play everything, or up to the end of the request in which the window ends."""

        def told(log: RunLog) -> None:
            self._requests += 1
            ended(log)
            if self._is_over():
                self._close()
                if self._window.stops:
                    raise WindowOver

        with suppress(WindowOver):
            super().play(told)
        self._close()

    # The window

    def _position(self) -> int:
        return self._tokens if self._window.of == "decode steps" else self._requests

    def _is_over(self) -> bool:
        return self._window.last is not None and self._position() >= self._window.last

    def _close(self) -> None:
        if self._timeline.is_open:
            self._link.show_unfinished()
            self._residency.show_unfinished()
            self._timeline.close()

    # The compute stream

    def _step(self, events: RequestEvents, step: int) -> Wait:
        """One forward pass, shown as a whole when it has ended."""
        request, began, before = events.request, self.env.now, self.machine.counters()
        if self._position() >= self._window.first and not self._is_over() and not self._timeline.is_open:
            self._timeline.open(began)
        self._request, self._layer, tokens = request, -1, int(request.tokens[step])
        self._combine_ns = self.timing.combine_ns(tokens)
        self._compute.begin(began)
        yield from super()._step(events, step)
        self._combine()
        self._compute.until(self.env.now, "head", {})
        hits, late, misses = (now - then for now, then in zip(self.machine.counters()[:3], before[:3], strict=True))
        lookups = {"hits": hits, "late": late, "misses": misses}
        decodes = request.phase[step] == DECODE
        args = {
            "request": self._names[request.request],
            "phase": "decode" if decodes else "prefill",
            "step_of_request": step,
            "tokens": tokens,
            "context": int(request.context[step]),
            **lookups,
        }
        self._compute.end(f"decode {self._tokens}" if decodes else "prefill", args)
        self._timeline.counter(self._process, "lookups", began, lookups)
        self._tokens += int(decodes)
        if self._is_over():
            self._close()

    def _routed(self, n_hits: int, experts: Int, first: int, last: int) -> None:
        """The dense part of a layer has ended, and before it the combine of the layer before."""
        self._combine()
        self._layer += 1
        self._compute.layer(self._layer)
        self._compute.until(self.env.now, "dense", {})
        if self.timing.predictor_ns:
            self._compute.stalled("predictor", self.env.now, self.env.now + self.timing.predictor_ns, {})
        chosen = experts[first:last].tolist()
        self._counts = dict(zip(chosen, self._request.counts[first:last].tolist(), strict=True))
        self._late = {expert for expert in chosen if self.machine.m[core.STATE, expert] == core.LOADING}

    def _begun(self, n_hits: int) -> None:
        """The hits of the event start; their ends are known."""
        for expert, end in zip(self.machine.hits(n_hits), self.hits.ends, strict=True):
            self._expert("hit", expert, end)

    def _computed(self, expert: int) -> None:
        self._expert("late" if expert in self._late else "miss", expert, self.env.now)

    def _expert(self, outcome: str, expert: int, end: int) -> None:
        args = {**expert_args(expert, self.shape), "tokens": self._counts[expert], "lookup": outcome}
        self._compute.until(end, f"{outcome} {expert_name(expert, self.shape)}", args)

    def _combine(self) -> None:
        """Of the layer at hand, if there was one: it starts when the last expert has ended."""
        if self._layer >= 0 and self._combine_ns:
            self._compute.until(self._compute.ended + self._combine_ns, "combine", {})


Stalled = Callable[[str, int, int, Args], None]


class ObservedLink(HostLink):
    """The host link, each of whose chunks is a slice; a paused prefetch has a track of its own."""

    def __init__(
        self,
        env: Nanoseconds,
        machine: Residency,
        spec: Link,
        hits: HitQueue,
        shape: Shape,
        timeline: Timeline,
        process: Process,
        stalled: Stalled,
    ) -> None:
        super().__init__(env, machine, spec, hits)
        self._shape = shape
        self._timeline = timeline
        self._track = timeline.track(process, "link")
        self._pauses = timeline.track(process, "paused prefetch")
        self._stalled = stalled
        self._victim = core.NO_EXPERT  # of the transfer whose first chunk is on the link
        self._pause: tuple[int, int] | None = None  # the paused expert, and since when

    def cut(self) -> None:
        """`--cold`: discard what is under way."""
        self.show_unfinished()
        self._pause = None
        super().cut()

    def show_unfinished(self) -> None:
        """Show what is under way, up to now."""
        if self._end:
            self._show_chunk(unfinished=True)
        self._show_pause()

    def _start(self, expert: int, victim: int, prefetch: bool) -> None:
        if prefetch:
            self._show_pause()
            self._pause = None
        elif self._paused and not self._pause:
            self._pause = self._expert, self.env.now
        self._victim = victim
        super()._start(expert, victim, prefetch)

    def _account(self) -> None:
        self._show_chunk()
        before = list(self.stall_ns)
        super()._account()
        for cause, then, now in zip(STALLS, before, self.stall_ns, strict=True):
            if now > then:
                on_link = {"on_link": expert_name(self._expert, self._shape), "expert": self._expert}
                self._stalled(cause, self.env.now - (now - then), self.env.now, on_link)

    def _show_chunk(self, unfinished: bool | None = None) -> None:
        expert, whole = self._expert, self.spec.expert_bytes
        if self._cause == DEMAND:
            kind, sent, moved = "demand", whole, whole
        else:
            kind = "late" if self.machine.awaited(expert) else "prefetch"
            sent, moved = (self._moved - 1) % self._chunk + 1, self._moved
        args = {
            **expert_args(expert, self._shape),
            "transfer": kind,
            "bytes": sent,
            "bytes_so_far": moved,
            "bytes_of_expert": whole,
            "victim": expert_name(self._victim, self._shape) if self._victim >= 0 else None,
            "priority": None if kind == "demand" else float(self.machine.keep[core.PRIORITY, expert]),
            "unfinished": unfinished,
        }
        self._timeline.slice(self._track, f"{kind} {expert_name(expert, self._shape)}", self._began, self.env.now, args)
        self._victim = core.NO_EXPERT

    def _show_pause(self) -> None:
        if self._pause:
            expert, since = self._pause
            name = f"paused {expert_name(expert, self._shape)}"
            self._timeline.slice(self._pauses, name, since, self.env.now, expert_args(expert, self._shape))
