"""Sweeps need neither torch nor transformers nor matplotlib; what does need one says which extra installs it."""

import subprocess
import sys

import pytest

ABSENT = (
    "torch",
    "transformers",
    "safetensors",
    "matplotlib",
    "accelerate",
    "optuna",
    "distributed",
    "gguf",
    "xllamacpp",
)

WITHOUT = f"""
import sys
sys.modules.update(dict.fromkeys({ABSENT!r}))
from {{}}.commands import main
main()
"""


def run(package, *arguments, cwd):
    code = WITHOUT.format(package)
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=cwd, capture_output=True, text=True, check=False
    )


@pytest.mark.slow  # compiles the engine in a process of its own
def test_a_sweep_and_its_replay_on_a_logical_clock_need_no_extra(tmp_path):
    asked = ("--requests", "2", "--cache-sizes", "25%", "--policies", "lru", "--out", "swept")
    done = run("sim", "sweep", *asked, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (
        "hit_rate.png, tpot.png not drawn: this needs matplotlib: pip install 'moe-expert-cache[plot]'" in done.stderr
    )
    assert (tmp_path / "swept" / "results.parquet").is_file()
    done = run("replay", "--from", "swept", "--device", "virtual", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("package", "arguments", "said"),
    [
        (
            "tracer",
            ("record", "--out", "x"),
            "moe-trace: error: this needs torch: pip install 'moe-expert-cache[record]'",
        ),
        ("replay", ("--device", "cpu"), "moe-replay: error: this needs torch: pip install 'moe-expert-cache[replay]'"),
        ("sim", ("tune", "--policy", "eamc"), "this needs optuna: pip install 'moe-expert-cache[tune]'"),
        ("sim", ("sweep", "--scheduler", "tcp://h:1"), "needs distributed: pip install 'moe-expert-cache[cluster]'"),
    ],
)
def test_what_needs_an_extra_says_which(tmp_path, package, arguments, said):
    done = run(package, *arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
