"""Who runs the cells of a sweep: threads, processes, or a Dask cluster. Neither number nor order changes a result.

What the compiled engine runs leaves Python's lock alone: threads over one copy of the trace. What runs in Python has a
process, but a policy of a notebook or script and a trace in memory stay in the thread.
"""

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures import ThreadPoolExecutor as Threads
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import islice
from typing import Any, Generic, TypeVar

from policies.core import user_file
from policies.core.spec import PolicySpec
from sim.experiment import Experiment
from sim.loaded import Loaded, load
from sim.results.provenance import sources
from traces.errors import InputError, located
from traces.location import absolute
from traces.reader import changed

Advance = Callable[[int], None]

T = TypeVar("T")

Played = Generator[tuple[int, T], None, None]
"""(place of a task, its result), as they finish; who closes it, as Ctrl-C does, stops what is running."""

ANSWER_S = 10


@dataclass(frozen=True)
class Task(Generic[T]):
    """`play(loaded, *arguments, advance)`, of a module's function, found by its name elsewhere."""

    loaded: Loaded
    play: Callable[..., T]
    arguments: tuple[Any, ...]
    compiled: bool  # leaves Python's lock alone
    cells: int = 1  # that it runs

    @property
    def elsewhere(self) -> tuple[Any, ...]:
        """What another process needs of it: names and profiles, not the trace."""
        here = replace(self.loaded.experiment, trace=absolute(self.loaded.experiment.trace))
        files = {name: content for each in self._policies for name, content in each.files.items()}
        return here, self.loaded.fingerprint, self.loaded.machine, files, self.play, self.arguments

    @property
    def stays(self) -> str | None:
        """Return what keeps it in this process and what to do about that; None: it can run in any."""
        if self.loaded.in_memory:
            return f"the trace {self.loaded.trace.name} is in memory: write it to a folder that all workers can read"
        own = next((policy.text for policy in self._policies if not policy.importable), None)
        return own and f"{own} is defined in a notebook or script: save its class in a file, and name it FILE.py:CLASS"

    @property
    def _policies(self) -> list[PolicySpec]:
        return [each for each in self.arguments if isinstance(each, PolicySpec)]

    @property
    def requests(self) -> int:
        return self.cells * len(self.loaded.trace.requests)


class Local:
    """`workers` cells at a time on this machine; `advance` gets the number of requests run, from any thread."""

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def results(self, tasks: Sequence[Task[T]], advance: Advance) -> Played[T]:
        if min(self.workers, len(tasks)) <= 1:
            for place, task in enumerate(tasks):
                yield place, task.play(task.loaded, *task.arguments, advance)
            return
        stopped, lock = threading.Event(), threading.Lock()

        def advance_one(requests: int) -> None:
            if stopped.is_set():
                raise _Stopped
            with lock:
                advance(requests)

        def work(task: Task[T]) -> T:
            if task.compiled or task.stays or not processes:
                return task.play(task.loaded, *task.arguments, advance_one)
            found: T = processes.submit(_elsewhere, *task.elsewhere).result()
            advance_one(task.requests)
            return found

        with ExitStack() as stack:
            threads = stack.enter_context(Threads(self.workers, initializer=_leave_ctrl_c))
            stack.callback(threads.shutdown, wait=False, cancel_futures=True)
            processes = None
            if not all(task.compiled or task.stays for task in tasks):
                processes = stack.enter_context(_processes(min(self.workers, len(tasks))))
            stack.callback(stopped.set)
            yield from _as_completed(lambda task: threads.submit(work, task), tasks, 2 * self.workers)


LOGGERS = ("distributed", "distributed.client", "tornado.application", "asyncio", "concurrent.futures")
"""What logs a traceback, some of them only now and then, when a scheduler goes."""


class Cluster:
    """The workers of a Dask scheduler; they need the same version of this package, and the traces' paths or URLs."""

    def __init__(self, address: str) -> None:
        import distributed

        self.address, self._lost = address, distributed.KilledWorker
        for name in LOGGERS:  # what is wrong is told once, below
            logging.getLogger(name).setLevel(logging.CRITICAL)
        try:
            self._client = distributed.Client(address, timeout=ANSWER_S, set_as_default=False)
            versions = self._client.run(sources, on_error="return")  # the error of what cannot import this package
        except (OSError, ValueError) as error:
            raise InputError(f"no Dask scheduler answers at {address}, as in tcp://HOST:8786: {error}") from error
        others = {worker: answer for worker, answer in versions.items() if answer != sources()}
        if others or not versions:
            found = f"another one, or none, on {next(iter(others.items()))}" if others else "it has none"
            raise InputError(f"the workers of {address} need the version of this package that runs here: {found}")

    def results(self, tasks: Sequence[Task[T]], advance: Advance) -> Played[T]:
        """Run tasks; `advance` is told when a cell has ended. InputError where the cluster is lost."""
        if stays := [task.stays for task in tasks if task.stays]:
            raise InputError(f"no worker of {self.address} can run this: {stays[0]}")
        submit = partial(self._client.get_executor(pure=False).submit, _elsewhere)
        at_a_time = 4 * max(1, sum(self._client.nthreads().values()))
        try:
            for place, result in _as_completed(lambda task: submit(*task.elsewhere), tasks, at_a_time):
                advance(tasks[place].requests)
                yield place, result
        except Exception as error:
            if self._client.status == "running" and not isinstance(error, self._lost):
                raise
            raise InputError(f"the cluster at {self.address} lost a cell, possibly out of memory: {error}") from error
        finally:
            self._client.close(timeout=2)


Workers = Local | Cluster


class _Stopped(Exception):  # noqa: N818
    """Ends a cell whose result is not needed any more."""


def _as_completed(
    submit: Callable[[Task[T]], Future[T]], tasks: Sequence[Task[T]], at_a_time: int
) -> Iterator[tuple[int, T]]:
    """Yield what ends, failures last; so many tasks wait or run, in their order."""
    running: dict[Future[T], int] = {}
    following = iter(enumerate(tasks))
    while True:
        running |= {submit(task): place for place, task in islice(following, at_a_time - len(running))}
        if not running:
            return
        done = wait(running, timeout=0.1, return_when=FIRST_COMPLETED).done
        for future in sorted(done, key=lambda each: (each.cancelled() or bool(each.exception()), running[each])):
            yield running.pop(future), future.result()


@lru_cache(maxsize=2)
def _loaded(experiment: Experiment, fingerprint: str) -> Loaded:
    """Return it with its trace open, which stays so for the next cell. Raise InputError for another trace's content."""
    loaded = load(experiment)
    if loaded.fingerprint != fingerprint:
        raise changed(experiment.trace)
    return loaded


def _elsewhere(
    experiment: Experiment,
    fingerprint: str,
    machine: Mapping[str, Any],
    files: Mapping[str, str | None],
    play: Callable[..., T],
    arguments: tuple[Any, ...],
) -> T:
    """A cell in another process, of the trace and the policies that the one which asks for it has read."""
    for policy in (each for each in arguments if isinstance(each, PolicySpec)):
        for name, content in policy.files.items():
            if content is None:
                with located(f"{name} is not run by another process"):
                    user_file.load(name)  # raises why it could not be read
            if content != files[name]:
                raise InputError(f"{name} was changed, or what it imports, since the run began: run it again")
    loaded = _loaded(experiment, fingerprint)
    here = loaded if loaded.machine == machine else replace(loaded, **machine)
    return play(here, *arguments, lambda requests: None)


@contextmanager
def _processes(workers: int) -> Iterator[ProcessPoolExecutor]:
    strangers = set(multiprocessing.active_children())
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin) as pool:
        try:
            yield pool
        except BrokenProcessPool as error:
            raise InputError(
                "a worker process has ended, possibly out of memory: try fewer `workers`; a script that asks for "
                'several needs `if __name__ == "__main__":`'
            ) from error
        finally:
            for process in set(multiprocessing.active_children()) - strangers:
                process.terminate()
            pool.shutdown(cancel_futures=True)  # waits: Python 3.13.0 locks up where a pool is dropped as it breaks


def _leave_ctrl_c() -> None:
    """Leave Ctrl-C to the main thread: what a thread starts, a process while it imports too, inherits that."""
    if hasattr(signal, "pthread_sigmask"):  # not on Windows
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def _begin() -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A process whose parent was killed would wait for work for ever."""
    if parent := multiprocessing.parent_process():
        parent.join()
    os._exit(1)
