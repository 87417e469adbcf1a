"""Which engine runs a run: the compiled one where it serves the policy, else SimPy. What comes out is the same."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from sim.experiment import COMPILED, ENGINES, SIMPY
from sim.loop.log import Ended, RunLog, whole
from sim.loop.run import Run
from traces.errors import InputError, unknown


def check(engine: str) -> None:
    """Raise InputError for a name that no engine has."""
    if engine not in ENGINES:
        raise unknown("engine", engine, ENGINES)


def play(engine: str, run: Run, ended: Ended) -> None:
    """Run a run on `engine`; `ended` gets the log of each request.

    InputError where it cannot run the policy, or where a time is beyond what a clock of 64 bits counts.
    """
    with counting(run):
        if engine != SIMPY:
            from sim.engines import compiled_engine

            try:
                return compiled_engine.play(run, ended)
            except compiled_engine.NotServedError:
                if engine == COMPILED:
                    raise
        from sim.engines import simpy_engine

        return simpy_engine.play(run, ended)


@contextmanager
def counting(run: Run) -> Iterator[None]:
    """Raise InputError where a time of the run is beyond what a clock of 64 bits counts."""
    try:
        yield
    except OverflowError as error:
        raise InputError(
            f"{run.policy.text}: its times are beyond what a clock of 64 bits counts in ns: "
            "check the times, sizes and rates in the profiles"
        ) from error


def simulate(engine: str, run: Run) -> RunLog:
    return whole(partial(play, engine), run)
