"""What numba keeps on disk: code of several processes, which one process loads together."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SORTED = """
import numpy as np
from traces.compiled import loop

def ascending(ids):
    return np.sort(ids)

made = loop(ascending)
assert made(np.arange(40)[::-1].copy()).tolist() == list(range(40))
print(made.inspect_llvm(made.signatures[0]))
"""


def names(folder: Path) -> set[str]:
    """Compile a sort in a process of its own; return the names of numba's functions in it."""
    folder.mkdir()
    program = folder / "sorted.py"
    program.write_text(SORTED)
    run = subprocess.run([sys.executable, program], env={"PYTHONPATH": str(ROOT)}, text=True, capture_output=True)
    assert run.returncode == 0, run.stderr
    return set(re.findall(r"quicksort\w*v\d+\w*", run.stdout))


def test_two_processes_give_no_two_functions_one_name(tmp_path):
    first, second = names(tmp_path / "first"), names(tmp_path / "second")
    assert first
    assert second
    assert not first & second


ADDED = """
from traces.compiled import loop

def added(x):
    return x + 1

print(loop(added)(1))
"""


def test_a_damaged_file_of_compiled_code_is_replaced(tmp_path: Path) -> None:
    program = tmp_path / "added.py"
    program.write_text(ADDED)

    def run() -> dict[Path, bytes]:
        env = {"PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
        ended = subprocess.run([sys.executable, program], env=env, text=True, capture_output=True)
        assert (ended.returncode, ended.stdout) == (0, "2\n"), ended.stderr
        return {file: file.read_bytes() for file in tmp_path.rglob("*.nb?")}

    run()
    for ending in (".nbi", ".nbc"):
        (file,) = tmp_path.rglob(f"*{ending}")
        for left in (0, 10, 100):
            os.truncate(file, left)
            kept = run()
            assert len(kept[file]) > 100, (ending, left)
        assert run() == kept, "they are read, not compiled again"


def test_code_is_compiled_where_the_disk_cannot_keep_it(tmp_path: Path) -> None:
    program = tmp_path / "added.py"
    program.write_text("import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n" + ADDED)
    env = {"PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    ended = subprocess.run([sys.executable, "-B", program], env=env, text=True, capture_output=True)
    assert (ended.returncode, ended.stdout) == (0, "2\n"), ended.stderr
    assert not [*tmp_path.rglob("*.nbc")]
