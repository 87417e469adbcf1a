"""Settings of all tests: Hypothesis judges results, never wall time; under CI it draws the same examples every time.

Torch computes on one thread, here and in processes that tests start: xdist's workers share the cores already, and on
tiny models threads that wait for each other take several times as long.

Processes that tests start find the project compiled to bytecode, whatever the environment says of that. They can be
interrupted, also where the tests run behind a shell's `&`, which ignores Ctrl-C.

Without torch, the tests that need it are left out: whole folders here, single ones by `importorskip`.
"""

import gc
import os
import signal
import sys
from importlib.util import find_spec
from multiprocessing import get_context

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["XDG_CONFIG_HOME"] = os.devnull  # what a probe has kept of this machine is not there
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

collect_ignore = [] if find_spec("torch") else ["checks", "replay", "tracer", "traces/test_models.py"]

settings.register_profile("project", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("project"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "project")


@pytest.fixture(autouse=True, scope="module")
def _imported_modules_are_no_garbage() -> None:
    """Have no collection go through what is imported: before each measured run it took longer than the run."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile the engines here and the policies in a process beside it, before xdist's workers would all do."""
    if session.config.getoption("numprocesses", None):
        from tests.support.compiled import engines, policies

        beside = get_context("spawn").Process(target=policies)
        beside.start()
        engines()
        beside.join()
