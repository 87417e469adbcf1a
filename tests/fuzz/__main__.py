"""Run fuzzers, one a core: `python -m tests.fuzz [TARGET ...] --seconds 60`; status 1 where one found something.

Put an input that found something, `crash-TARGET-KIND`, into `tests/fuzz/corpus/TARGET/` with its fix: `make test`
reads it from then on.
"""

import argparse
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.fuzz.harness import CORPUS


def main() -> None:
    """Each in a process of its own, since a finding may end it."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", help="default: all")
    parser.add_argument("--seconds", type=int, default=60, help="for each")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at a time; default: one a core")
    asked = parser.parse_args()
    names = asked.targets or sorted(folder.name for folder in CORPUS.iterdir())
    with ThreadPoolExecutor(max(1, asked.jobs)) as pool:
        are_clean = pool.map(partial(fuzz, asked.seconds), names)
        failed = [name for name, is_clean in zip(names, are_clean, strict=True) if not is_clean]
    if failed:
        sys.exit(f"findings: {', '.join(failed)}")


def fuzz(seconds: int, name: str) -> bool:
    """Run one fuzzer, print what came of it, and return whether it found nothing."""
    command = [sys.executable, "-m", "tests.fuzz.one", name, str(seconds)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    runs = re.findall(r"^#(\d+)", done.stderr, re.MULTILINE)
    own = re.compile(rf"crash-{name}-((crash|oom|timeout)-)?[0-9a-f]+")
    left = [path for path in Path().glob("crash-*") if own.fullmatch(path.name)]
    lines = [f"{name}: {runs[-1] if runs else 'some'} inputs in {seconds} s, {len(left)} findings"]
    is_clean = not left and not done.returncode
    if not is_clean:
        lines += [line for line in done.stderr.splitlines() if not line.startswith(("#", "INFO"))]
    print("\n".join(lines), flush=True)
    return is_clean


if __name__ == "__main__":
    main()
