"""Run as a module: the check on a machine that has what a GPU machine has and nothing more, on a GPU that is not there.

Argument: the file of the record. Prints the modes of the cells that were run.
"""

import gc
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

MISSING = {"tomli_w", "matplotlib", "distributed", "dask", "hypothesis", "libcachesim", "aiohttp"}


class Without:
    """A finder that does not find what is not installed there."""

    def __init__(self, finder: Any) -> None:
        self._finder = finder

    def find_spec(self, name: str, *other: Any) -> ModuleSpec | None:
        return None if name.partition(".")[0] in MISSING else self._finder.find_spec(name, *other)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)


sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]

from benchmarks.checks.runner import Check  # noqa: E402
from replay.comparison.record import ERROR, Record  # noqa: E402
from tests.support.fake_gpu import FakeGpu  # noqa: E402
from tests.support.small_check import MODELS, PLAN, shrink  # noqa: E402

shrink()
gc.freeze()  # no collection goes through what is imported
record = Record.open(Path(sys.argv[1]), resume=False)
Check(PLAN, record, print, MODELS, gpu=FakeGpu(1), host_bytes=4 << 20).run()
assert not any(ERROR in cell for cell in record), list(record)
print("run:", *sorted({cell["mode"] for cell in record}))
