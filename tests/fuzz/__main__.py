"""Run fuzzers, one after another: `python -m tests.fuzz [TARGET ...] --seconds 60`; status 1 where one found something.

Put an input that found something, `crash-TARGET-KIND`, into `tests/fuzz/corpus/TARGET/` with its fix: `make test`
reads it from then on.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

from tests.fuzz.harness import CORPUS


def main() -> None:
    """Each in a process of its own, since a finding may end it."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", help="default: all")
    parser.add_argument("--seconds", type=int, default=60, help="for each")
    asked = parser.parse_args()
    failed = []
    for name in asked.targets or sorted(folder.name for folder in CORPUS.iterdir()):
        command = [sys.executable, "-m", "tests.fuzz.one", name, str(asked.seconds)]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
        told = done.stderr
        runs = re.findall(r"^#(\d+)", told, re.MULTILINE)
        left = sorted(Path().glob(f"crash-{name}-*"))
        print(f"{name}: {runs[-1] if runs else 'some'} inputs in {asked.seconds} s, {len(left)} findings", flush=True)
        if left or done.returncode:
            failed.append(name)
            print("\n".join(line for line in told.splitlines() if not line.startswith(("#", "INFO"))), flush=True)
    if failed:
        sys.exit(f"findings: {', '.join(failed)}")


if __name__ == "__main__":
    main()
