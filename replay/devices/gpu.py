"""What the CUDA device asks of CUDA, and nothing else: streams, events, graphs, registered host memory.

Everything that touches the driver goes through here, so that a test can put streams in its place that run their work
later and in any order which events allow, and can count what was asked. Host memory is registered where it is, at its
true size: torch's pinned allocator rounds up to powers of two.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from sim.quantities import show_bytes
from traces.errors import InputError

if TYPE_CHECKING:
    from replay.devices.store import HostMemory

Task = Callable[[], object]


class Event(Protocol):
    """A mark in a stream, ended as long as it was not recorded."""

    def query(self) -> bool:
        """Return whether all work before its latest record has ended."""


class Stream:
    """Work in the order of submission; without `back_to` it is torch's current one, which computing need not switch."""

    def __init__(self, stream: torch.cuda.Stream, back_to: torch.cuda.Stream | None = None) -> None:
        self._stream = stream
        self._back_to = back_to

    def run(self, task: Task) -> None:
        if self._back_to is None:
            task()
            return
        torch.cuda.set_stream(self._stream)
        try:
            task()
        finally:
            torch.cuda.set_stream(self._back_to)

    def record(self, event: Any) -> None:
        event.record(self._stream)

    def wait(self, event: Any) -> None:
        """Let what is submitted from now on begin, on the device, after the event's latest record."""
        self._stream.wait_event(event)

    def synchronize(self) -> None:
        self._stream.synchronize()


class Gpu:
    """The current GPU of torch, as the device sees it. Tests put another in its place."""

    is_stuck: bool = False
    """Something never ended: nothing may wait for this GPU any more, nor take back memory that it may still read."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.name = torch.cuda.get_device_name(self.device)
        # torch deals its streams from a ring of 32: whoever asks again and again gets one that is in use.
        self._compute, self._copy, self._side = (torch.cuda.Stream() for _ in range(3))  # type: ignore[no-untyped-call]

    def compute_stream(self) -> Stream:
        """Return the stream on which all is computed, made torch's current one; tasks on other streams only copy."""
        torch.cuda.set_stream(self._compute)
        return Stream(self._compute)

    def copy_stream(self) -> Stream:
        """Return the stream for copies of experts; after each task the current stream is the compute stream again."""
        return Stream(self._copy, back_to=self._compute)

    def current_stream(self) -> Stream:
        return Stream(torch.cuda.current_stream(self.device))

    def event(self) -> Event:
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def capture(self, tasks: list[Task]) -> list[Task]:
        """Return each task as one launch: run twice to warm up, then captured as a CUDA graph, on a side stream.

        Graphs of a call share temporary memory. Those without an owner go first, and the stream's workspaces with them.
        """
        gc.collect()
        memory = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize()
        replays: list[Task] = []
        with torch.cuda.stream(self._side):
            for task in tasks:
                task()
                task()
            torch.cuda.synchronize()
            for task in tasks:
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(pool=memory, capture_error_mode="thread_local")
                try:
                    task()
                except BaseException:
                    with suppress(RuntimeError):  # that the capture is not whole
                        graph.capture_end()
                    raise
                graph.capture_end()
                replays.append(graph.replay)
        torch.cuda.synchronize()
        return replays

    def register(self, memory: NDArray[Any]) -> int:
        """Pin host memory where it is, at its true size; return 0, or the driver's error."""
        return int(_runtime().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))

    def unregister(self, memory: NDArray[Any]) -> None:
        _runtime().cudaHostUnregister(memory.ctypes.data)

    def free_bytes(self) -> int:
        """Return the memory that may still be taken: what the driver says, and what torch holds unused."""
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return torch.cuda.mem_get_info()[0] + unused

    def total_bytes(self) -> int:
        return int(torch.cuda.mem_get_info()[1])

    def peak_bytes(self) -> int:
        """Return the most of its memory that torch ever had in use."""
        return int(torch.cuda.max_memory_allocated())

    def release(self) -> None:
        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


@contextmanager
def pinned(memory: "HostMemory", gpu: Gpu, is_required: bool = False) -> Iterator[bool]:
    """Register all slabs, and give them back however this ends, unless the GPU is stuck; yields whether they are.

    Where the driver refuses one: InputError if it is required, else none is registered and copies are slower.
    """

    def give_back(slab: NDArray[np.uint8]) -> None:
        if not gpu.is_stuck:
            gpu.unregister(slab)

    with ExitStack() as registered:
        for number, slab in enumerate(memory.slabs):
            if refused := gpu.register(slab):
                if is_required:
                    raise InputError(
                        f"the driver refused to pin host memory (CUDA error {refused}) after {number} of "
                        f"{len(memory.slabs)} slabs, {show_bytes(memory.nbytes)} in all: raise the limit of locked "
                        "memory, or share buffers with --host-dedup"
                    )
                registered.close()
                break
            registered.callback(give_back, slab)
        yield not refused
