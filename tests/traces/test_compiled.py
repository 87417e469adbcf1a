"""What numba keeps on disk: code of several processes, which one process loads together."""

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
