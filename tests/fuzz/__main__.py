"""Run the fuzzers one after the other: `python -m tests.fuzz [TARGET ...] --seconds 60`; status 1 after a finding.

Put an input that found something, `crash-TARGET`, into `tests/fuzz/corpus/TARGET/` with its fix: `make test` reads it
from then on.
"""

import argparse
import multiprocessing
import sys
import tempfile
import time
import traceback
from pathlib import Path

from hypothesis import given, settings

from tests.fuzz.targets import TARGETS, TooSlowError, mutated


def fuzz(name: str, seconds: float) -> None:
    """Give a reader mutations of its corpus until the time is over; leave an input that found something."""
    target, folder, tried = TARGETS[name], Path(tempfile.mkdtemp()), 0
    ends = time.monotonic() + seconds

    def attack(content: bytes) -> None:
        nonlocal tried
        tried += 1
        Path(f"crash-{name}").write_bytes(content)  # there as well where the process ends
        target.attack(content, folder)

    try:
        while time.monotonic() < ends:
            settings(max_examples=200, database=None, deadline=None)(given(mutated(target.seeds()))(attack))()
    except (Exception, TooSlowError):
        traceback.print_exc()
        sys.exit(f"{name}: a finding after {tried} inputs, kept as crash-{name}")
    Path(f"crash-{name}").unlink(missing_ok=True)
    print(f"{name}: {tried} inputs in {seconds:g} s, none a finding", flush=True)


def main() -> None:
    """Run each fuzzer in a process of its own, since a finding may end it."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", default=list(TARGETS), help="default: all")
    parser.add_argument("--seconds", type=float, default=60, help="for each")
    options = parser.parse_args()
    failed = []
    for name in options.targets:
        process = multiprocessing.get_context("spawn").Process(target=fuzz, args=(name, options.seconds))
        process.start()
        process.join()
        failed += [name] if process.exitcode else []
    sys.exit(f"findings: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
