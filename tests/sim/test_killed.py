"""A sweep killed before each of its file operations in turn, and resumed: the files of one that was not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, shutil, signal, sys
from pathlib import Path
import matplotlib
matplotlib.use("Agg")
from sim.commands import main  # before the forks
from sim.engines import untimed
from sim.sweeps import verdict
from sim.results import plot
from sim.sweeps import notes

OPERATIONS = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"}
OUT = Path("out").resolve()

def swept(folder, *more, kill_before=None):
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    done = 0
    def watch(event, arguments):
        nonlocal done
        writes = event == "open" and str(arguments[0]).startswith(str(OUT)) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if event in OPERATIONS or writes:
            done += 1
            if done == kill_before:
                os.kill(os.getpid(), signal.SIGKILL)
    if kill_before:
        sys.addaudithook(watch)
    sys.argv = ["moe-sim", "sweep", "one", "cells", "--untimed", "--policies", "lru,lfu", "--cache-sizes", "4"]
    sys.argv += ["--workers", "1", "-q", "--out", str(folder), *more]
    try:
        main()
    except SystemExit as end:
        os._exit(end.code or 0)

def content(folder):
    files = (file for file in sorted(Path(folder).rglob("*")) if file.suffix in (".parquet", ".toml"))
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}

assert swept("whole") == 0
whole, kills = content("whole"), 0
while True:
    shutil.rmtree(OUT, ignore_errors=True)
    ended = swept(OUT, kill_before=kills + 1)
    if ended == 0:
        break
    kills += 1
    assert ended == signal.SIGKILL, (kills, ended)
    assert swept(OUT, "--resume") == 0, kills
    assert content(OUT) == whole, kills
print(kills, len(whole))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_sweep_killed_before_any_file_operation_resumes_to_the_same_files(tmp_path):
    from traces.synthetic import synthetic
    from traces.writer import write_trace

    for seed, name in enumerate(("one", "cells")):
        write_trace(synthetic(3, tokens=6, layers=2, experts=6, top_k=2, seed=seed), tmp_path / name)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kills, files = map(int, done.stdout.split())
    assert kills > 50
    assert files == 8  # a table of all, sweep.toml, and of each trace rows, requests and winner
