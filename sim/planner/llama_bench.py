"""Seconds of decoded tokens in llama.cpp, as its llama-bench measures them."""

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from traces.errors import InputError

NAME = "llama-bench"

TOKENS, REPEATS = 8, 5
"""That are decoded at a time, and how often."""


@dataclass(frozen=True)
class Bench:
    """A program that is called as llama-bench."""

    command: tuple[str, ...]

    @staticmethod
    def find() -> "Bench":
        """Return the one on PATH. Raise InputError where there is none."""
        if path := shutil.which(NAME):
            return Bench((path,))
        raise InputError(f"no {NAME} here: put that of your llama.cpp on PATH")

    def seconds(
        self, files: Sequence[Path], depths: Sequence[int] = (0,), flags: Sequence[str] = ()
    ) -> dict[tuple[Path, int], float]:
        """Return the seconds of a token decoded behind so many others, by file and depth. Raise InputError."""
        models = [part for file in files for part in ("-m", str(file))]
        shape = ["-p", "0", "-n", str(TOKENS), "-r", str(REPEATS), "-d", ",".join(map(str, depths)), "-o", "json"]
        done = subprocess.run([*self.command, *models, *shape, *flags], capture_output=True, text=True, check=False)
        if done.returncode:
            last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
            raise InputError(f"{NAME} ended with status {done.returncode}: {'; '.join(last)}")
        measured = {}
        for row in json.loads(done.stdout):
            took = median(row["samples_ns"]) / row["n_gen"] / 1e9
            measured[Path(row["model_filename"]), row["n_depth"]] = took
        return measured
