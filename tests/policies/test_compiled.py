"""What is compiled into its callers is what says so, whichever function calls it first; what is kept is ours."""

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies.core.compiled import allocating, compiled, inlined
from policies.core.policy import Int

ROOT = Path(__file__).parents[2]

NUMBA = """
import sys
import numba
modules = [module for name, module in sys.modules.items() if name.split(".")[0] == "numba"]
def attributes():
    kinds = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    return {(each, name): value for each in [*modules, *kinds] for name, value in vars(each).items()}
before = attributes()
import traces
after = attributes()
import policies.core, sim.engines.compiled_engine, sim
later = attributes()
print([key for key, value in before.items() if not (after.get(key) is later.get(key) is value)])
"""


def test_numba_is_the_same_for_everybody_else() -> None:
    done = subprocess.run([sys.executable, "-c", NUMBA], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_parts_of_a_function_have_no_name_that_another_could_take_them_by() -> None:
    @allocating
    def ascending(ids: Int) -> Int:
        return np.sort(ids)

    function: Any = ascending
    assert function(np.arange(40)[::-1].copy()).tolist() == list(range(40))
    (code,) = function.inspect_llvm().values()
    named = [line for line in code.splitlines() if re.match("define (?!internal)", line)]
    assert named
    assert all("ascending" in line for line in named)


def test_a_function_that_an_inlined_one_calls_is_not_inlined_for_that() -> None:
    @compiled
    def called(x: int) -> int:
        return x * x

    @inlined
    def calls(x: int) -> int:
        return called(x) + 1

    @compiled
    def whole(x: int) -> int:
        return calls(x)

    assert whole(3) == 10
    assert not _in_its_callers(called)
    assert _in_its_callers(calls)


def _in_its_callers(function: Any) -> bool:
    """Whether LLVM must make a function a piece of each that calls it."""
    (made,) = function.part.overloads.values()
    name = made.fndesc.llvm_func_name
    return any("alwaysinline" in str(each) for each in made.library.get_function(name).attributes)


def test_a_users_function_is_compiled_with_what_it_names_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba would keep it under the date of its own file."""
    file = tmp_path / "own.py"
    head = "import os\nfrom policies.core.compiled import compiled\nN = int(os.environ['N'])\n"
    file.write_text(f"{head}@compiled\ndef number(x: int) -> int:\n    return x + N\n")
    for n in (1, 2):
        monkeypatch.setenv("N", str(n))
        assert runpy.run_path(str(file), run_name="own")["number"](10) == 10 + n
    assert [path.name for path in tmp_path.iterdir()] == ["own.py"]


def test_what_is_kept_is_of_the_files_that_give_it_constants(tmp_path: Path) -> None:
    """Whatever they hold is part of its name."""
    shutil.copytree(ROOT / "policies", tmp_path / "policies", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "traces", tmp_path / "traces", ignore=shutil.ignore_patterns("__pycache__", "demo"))
    code = "from policies.core.residency_compiled import clear_queue; print(clear_queue.py_func.__qualname__)"
    names = []
    for changed in ("", "policies/core/residency_compiled.py", "policies/blend/evidence.py", "traces/steps.py"):
        if changed:
            (tmp_path / changed).write_text((tmp_path / changed).read_text() + "# changed\n")
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env={"PYTHONPATH": "."},
            capture_output=True,
            text=True,
            check=True,
        )
        names.append(done.stdout)
    assert len(set(names)) == 4


def test_traces_does_not_know_numba() -> None:
    code = "import sys, traces.check, traces.stats, traces.export, traces.defects; print('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
