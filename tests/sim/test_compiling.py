"""The compiled engine is compiled once, where it is first called, and kept where there is a folder for it."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sim.engines import compiled_engine, compiling
from tests.support.tiny import SIZES
from traces.synthetic import synthetic
from traces.writer import write_trace

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "from sim.commands import main; main()"]
REQUESTS = 20


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    made = synthetic(REQUESTS, tokens=6, layers=3, experts=16, top_k=2, seed=3)
    write_trace(replace(made, meta=replace(made.meta, model="tiny", **SIZES)), home / "tiny")
    return home


@pytest.mark.parametrize(("on_disk", "lines"), [(True, 0), (False, 1)])
def test_a_user_is_told_once_where_the_engine_is_still_to_be_compiled(
    monkeypatch: pytest.MonkeyPatch, on_disk: bool, lines: int
) -> None:
    monkeypatch.setattr(compiled_engine, "on_disk", lambda tiered: on_disk)
    assert len(compiling.notes([False, True])) == lines


@pytest.fixture
def nowhere(tmp_path: Path) -> dict[str, Any]:
    """How a process runs that can keep nothing: not beside the sources, of which it has a copy, nor at home."""
    (tmp_path / "file").touch()
    for package in ("policies", "sim", "traces"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__", "recorded"))
        for folder in (tmp_path / package, *(tmp_path / package).rglob("*/")):
            (folder / "__pycache__").touch()
    no_home = str(tmp_path / "file" / "home")
    kept = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    env = {**kept, "HOME": no_home, "XDG_CACHE_HOME": no_home, "PYTHONPATH": str(tmp_path)}
    return {"cwd": tmp_path, "env": {**env, "MPLCONFIGDIR": str(tmp_path)}, "capture_output": True, "text": True}


def test_where_no_folder_can_keep_the_engine_one_of_the_process_does(nowhere: dict[str, Any]) -> None:
    code = (
        "import os\nfrom policies.core import residency_compiled\nfrom policies.core import compiled\n"
        "residency_compiled.clear_queue(residency_compiled.new(4, [2], False))\n"
        "print(compiled.KEPT_FOR_NOW, os.environ['NUMBA_CACHE_DIR'], len(os.listdir(os.environ['NUMBA_CACHE_DIR'])))"
    )
    done = subprocess.run([sys.executable, "-c", code], **nowhere)
    assert done.returncode == 0, done.stderr
    kept, folder, files = done.stdout.split()
    assert kept == "True"
    assert int(files) > 0
    assert not Path(folder).exists()


@pytest.mark.slow
def test_a_sweep_that_can_keep_nothing_plays_all_the_same_and_says_so(home: Path, nowhere: dict[str, Any]) -> None:
    options = ("--policies", "lru", "--cache-sizes", "50%", "--out", "o")
    done = subprocess.run([*COMMAND, "sweep", str(home / "tiny"), *options], **nowhere)
    assert done.returncode == 0, done.stderr
    assert "no folder can keep it" in done.stderr
