"""Sweeps need neither torch nor transformers nor matplotlib; what does need one says which extra installs it."""

import subprocess
import sys

import pytest

from traces.errors import EXTRAS

WITHOUT = f"""
import sys
sys.modules.update(dict.fromkeys({sorted(EXTRAS)}))
"""

COMMANDS = """
import typer
from terminal import program
from sim.commands import app as sim
from tracer.commands import app as tracer
from replay.commands import app as replay

groups = [*map(typer.main.get_command, (sim, tracer, replay))]
for group in groups:
    for name, command in group.commands.items():
        if not isinstance(command, program.Command):
            groups.append(command)
            continue
        try:
            command.described()
        except ModuleNotFoundError:
            print(name)
"""


def run(code, *arguments, cwd):
    return subprocess.run(
        [sys.executable, "-c", WITHOUT + code, *arguments], cwd=cwd, capture_output=True, text=True, check=False
    )


def run_command(package, *arguments, cwd):
    return run(f"from {package}.commands import main\nmain()", *arguments, cwd=cwd)


def test_a_sweep_and_its_replay_on_a_logical_clock_need_no_extra(tmp_path):
    asked = ("--requests", "2", "--cache-sizes", "25%", "--policies", "lru")
    done = run_command("sim", "sweep", *asked, "--out", "swept", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (
        "hit_rate.png, tpot.png not drawn: this needs matplotlib: pip install 'moe-expert-cache[plot]'" in done.stderr
    )
    assert (tmp_path / "swept" / "results.parquet").is_file()
    for arguments in (("--from", "swept"), ("compare", *asked)):
        done = run_command("replay", *arguments, "--device", "virtual", cwd=tmp_path)
        assert done.returncode == 0, done.stderr


def test_the_options_of_a_command_need_an_extra_only_where_a_model_runs(tmp_path):
    done = run(COMMANDS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["calibrate", "generate", "quality", "serve"]


@pytest.mark.parametrize(
    ("package", "arguments", "said"),
    [
        (
            "tracer",
            ("record", "--out", "x"),
            "moe-trace: error: this needs huggingface_hub: pip install 'moe-expert-cache[record]'",
        ),
        ("replay", ("--device", "cpu"), "moe-replay: error: this needs torch: pip install 'moe-expert-cache[replay]'"),
        ("sim", ("sweep", "--scheduler", "tcp://h:1"), "needs distributed: pip install 'moe-expert-cache[cluster]'"),
    ],
)
def test_what_needs_an_extra_says_which(tmp_path, package, arguments, said):
    done = run_command(package, *arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
