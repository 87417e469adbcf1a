"""While the engine compiles in another process, SimPy runs, and what comes out is the same."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sim.engines import compiled_engine, compiling, simpy_engine
from sim.sweeps.setup import Loaded, Setup
from sim.sweeps.workers import Local, Task
from tests.support.command import moe_sim
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


def a_second(versions: list[bool]) -> None:
    time.sleep(1)


def for_long(versions: list[bool]) -> None:
    time.sleep(60)


def in_vain(versions: list[bool]) -> None:
    sys.exit(1)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[list[bool]], None]], None]]:
    """Have the engine seem uncompiled, and something else compile it."""

    def compile_with(other: Callable[[list[bool]], None]) -> None:
        monkeypatch.setattr(compiled_engine, "on_disk", lambda tiered: False)
        monkeypatch.setattr(compiled_engine, "prepare", other)

    yield compile_with
    if compiling._process:
        compiling._process.terminate()
        compiling._process.join()
    compiling._process = None


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The policies that SimPy runs."""
    seen: list[str] = []
    real = simpy_engine.play

    def play(run: Any, ended: Any) -> None:
        seen.append(run.policy.text)
        real(run, ended)

    monkeypatch.setattr(simpy_engine, "play", play)
    return seen


@pytest.mark.parametrize("workers", ["1", "3"])
@pytest.mark.parametrize("other", [a_second, for_long])
def test_a_sweep_has_the_same_results_whatever_played_its_cells(
    home: Path,
    tmp_path: Path,
    compiler: Any,
    played: list[str],
    monkeypatch: pytest.MonkeyPatch,
    other: Any,
    workers: str,
) -> None:
    monkeypatch.setattr(compiling, "finish", lambda quiet: None)
    asked = ("sweep", home / "tiny", "--policies", "lru,lfu,eamc", "--cache-sizes", "25%,50%", "--json")
    plain = moe_sim(*asked, "--out", "plain", cwd=tmp_path)
    assert not played
    compiler(other)
    ended = moe_sim(*asked, "--out", "meanwhile", "--workers", workers, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == json.loads(plain.stdout)
    assert "compiling the engine, once" in ended.stderr
    assert played[0] == "lru"
    if other is for_long:
        assert len(played) == 8, "of three policies and of Belady, the bound"


def test_a_run_is_played_meanwhile_as_well_and_quiet_says_nothing(
    home: Path, tmp_path: Path, compiler: Any, played: list[str]
) -> None:
    asked = ("run", home / "tiny", "--policy", "lfu", "--json", "--quiet")
    plain = moe_sim(*asked, cwd=tmp_path)
    compiler(a_second)
    ended = moe_sim(*asked, cwd=tmp_path)
    assert ended == plain
    assert played == ["lfu"]


PLAYED = "MOE_TEST_PLAYED"
"""The file, in the environment of processes that are started, which says that a request was run."""


def until_a_request_is_played(versions: list[bool]) -> None:
    while not Path(os.environ[PLAYED]).exists():
        time.sleep(0.1)


def endless_on_simpy(loaded: Loaded, name: str, advance: Callable[[int], None]) -> str:
    if loaded.setup.engine == "simpy":
        while True:
            advance(1)
            Path(os.environ[PLAYED]).touch()
            time.sleep(0.1)
    for _ in range(REQUESTS):
        advance(1)
    return f"{name} on {loaded.setup.engine}"


@pytest.mark.parametrize("engine", ["auto", "compiled"])
def test_a_cell_cut_off_is_played_again_and_its_requests_are_told_once(
    home: Path, tmp_path: Path, compiler: Any, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.setenv(PLAYED, str(tmp_path / "played"))
    loaded = Setup(str(home / "tiny"), engine=engine).load()
    tasks = [Task(loaded, endless_on_simpy, (name,), compiled=True) for name in ("a", "b")]
    compiler(until_a_request_is_played if engine == "auto" else a_second)
    compiling.start_if_needed([False], quiet=True)
    assert compiling.words().startswith("compiling: ")
    told: list[int] = []
    assert dict(Local(2).results(tasks, told.append)) == {0: f"a on {engine}", 1: f"b on {engine}"}
    assert sum(told) == 2 * REQUESTS
    assert (min(told) < 0) == (engine == "auto")
    assert not compiling.words()


def test_where_the_process_fails_the_sweep_compiles_by_itself(home: Path, tmp_path: Path, compiler: Any) -> None:
    compiler(in_vain)
    ended = moe_sim("sweep", home / "tiny", "--policies", "lru", "--cache-sizes", "50%", "--out", "o", cwd=tmp_path)
    assert ended.returncode == 0
    assert "the process that compiled the engine has failed" in ended.stderr


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
        "import os\nimport traces.check\nfrom policies.core import residency_compiled\nfrom traces import compiled\n"
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
    asked = [
        *COMMAND,
        "sweep",
        str(home / "tiny"),
        "--policies",
        "lru",
        "--cache-sizes",
        "50%",
        "--out",
        "o",
        "--quiet",
    ]
    done = subprocess.run(asked, **nowhere)
    assert done.returncode == 0, done.stderr
    assert "warning: no folder can keep the compiled engine" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_the_first_cell_of_a_first_sweep_does_not_wait_for_the_compiler(home: Path, tmp_path: Path) -> None:
    asked = ["sweep", str(home / "tiny"), "--policies", "lru,lfu", "--cache-sizes", "25%,50%", "--out", "o", "--quiet"]
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "kept")}
    engines = "kept/*/compiled_streams.run_steps-*.nbi"
    with subprocess.Popen([*COMMAND, *asked], cwd=tmp_path, env=env) as sweeping:
        while not any((tmp_path / "o").glob("cells/results/*.parquet")) and sweeping.poll() is None:
            time.sleep(0.05)
        assert not any(tmp_path.glob(engines))
    assert sweeping.returncode == 0
    assert any(tmp_path.glob(engines)), "the next sweep finds the engine compiled"
