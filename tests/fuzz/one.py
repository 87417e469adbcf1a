"""Run one fuzzer: `python -m tests.fuzz.one TARGET SECONDS`; `tests.fuzz` starts it.

Half of the time is for edits (`tests.fuzz.edits`) in any order, the rest for mutations. It goes on after a finding. The
first input of each kind is left in the working directory, `crash-TARGET-KIND`. Inputs that reached new code are kept in
`.fuzz/TARGET` there, and the next run begins with them.
"""

import hashlib
import random
import re
import sys
import tempfile
import time
import traceback
import warnings
from itertools import chain, islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

PACKAGES = ("traces", "policies", "tracer", "sim", "replay")

COMPILES = re.compile(r"compiled import|njit|compiled\.")
"""In modules that numba compiles, which it cannot once they count their coverage."""


PARTS = 16
"""Into which all edits of a target are divided."""


def instrument() -> Any:
    """Have the modules that are imported from now on count their coverage; None where atheris is not installed."""
    try:
        import atheris
    except ImportError:
        return None
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    compiling = [file.relative_to(ROOT) for file in files if COMPILES.search(file.read_text("utf-8"))]
    left_out = [".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in compiling]
    with atheris.instrument_imports(include=[*PACKAGES, "tomllib"], exclude=left_out):
        import tests.fuzz.targets  # noqa: F401
    return atheris


def kind_of(error: BaseException) -> str:
    """Which finding it is: what was raised, and where in our own code."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(ROOT)]
    told = f"{type(error).__name__} {own[-1].filename} {own[-1].lineno}"
    return hashlib.sha256(told.encode()).hexdigest()[:8]


def main() -> None:
    """Run it."""
    name, seconds = sys.argv[1], float(sys.argv[2])
    atheris = instrument()
    from tests.fuzz import harness
    from tests.fuzz.edits import edited
    from tests.fuzz.targets import TARGETS

    warnings.simplefilter("ignore")
    target, folder, found = TARGETS[name], Path(tempfile.mkdtemp()), set[str]()

    def attack(content: bytes) -> None:
        try:
            with harness.bounded():
                target.attack(content, folder)
        except (Exception, harness.TooSlow) as error:
            if (kind := kind_of(error)) not in found:
                found.add(kind)
                Path(f"crash-{name}-{kind}").write_bytes(content)
                print(f"\ncrash-{name}-{kind}:", file=sys.stderr)
                traceback.print_exception(error, limit=-6)

    for seed in target.seeds().values():
        attack(seed)
    begun, tried = time.monotonic(), 0
    for part in random.sample(range(PARTS), PARTS):
        edits = chain.from_iterable(map(edited, target.seeds().values()))
        for change in islice(edits, part, None, PARTS):
            if time.monotonic() < begun + seconds / 2:
                attack(change)
                tried += 1
    print(f"{name}: {tried} edits", flush=True)
    ends = begun + seconds
    if atheris:
        options = {
            "max_total_time": max(1, round(ends - time.monotonic())),
            "max_len": harness.LARGEST_INPUT,
            "timeout": 120,  # seconds, for what hangs outside of Python
            "rss_limit_mb": 4096,
            "dict": Path(__file__).with_name("tokens.dict"),
            "artifact_prefix": f"crash-{name}-",
        }
        flags = [f"-{option}={value}" for option, value in options.items()]
        reached = Path(".fuzz") / name
        reached.mkdir(parents=True, exist_ok=True)
        atheris.Setup([sys.argv[0], *flags, str(reached), str(target.corpus)], attack)
        atheris.Fuzz()
        return
    from hypothesis import given, settings

    fuzz = settings(max_examples=200, database=None)(given(harness.mutated(list(target.seeds().values())))(attack))
    while time.monotonic() < ends:
        fuzz()


if __name__ == "__main__":
    main()
