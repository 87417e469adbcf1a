"""What is compiled into its callers is what says so, whichever function calls it first; what is kept is ours."""

import runpy
from pathlib import Path
from typing import Any

import pytest

from policies.core import compiled as compiling
from policies.core import inlined
from policies.core.compiled import compiled
from sim.engines import compiled_streams


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


def test_what_is_kept_has_the_dates_of_files_that_give_it_constants() -> None:
    kept = {name for name, *_ in compiling.STAMP}
    assert {"residency_compiled.py", "evidence.py", "placement.py", "steps.py"} < kept
    engine: Any = compiled_streams.run_steps
    *_, own = engine._cache._cache_file._source_stamp
    assert {"compiled_streams.py", "log.py"} < {name for name, *_ in own}
