"""Nothing that others wrote is run: no pickle, no remote code unasked; and what ships is what was made.

docs/reliability.md says what is trusted, and when what we depend on was last audited.
"""

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("terminal", "traces", "policies", "tracer", "sim", "replay", "benchmarks")
SOURCES = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]

PICKLING = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve"}

NEEDED = {
    "torch.load": ("weights_only", True),
    "np.load": ("allow_pickle", False),
    "numpy.load": ("allow_pickle", False),
    "read_array": ("allow_pickle", False),
}
"""Calls that run pickles by default, or once did: the argument that says no."""

FORBIDDEN = (
    "read_pickle",
    "to_pickle",
    "set_allowed_objects",
    "add_safe_globals",
    "yaml.load",
    "marshal.load",
    "marshal.loads",
    "os.system",
)

SUMS = ROOT / "tracer" / "demo" / "SHA256SUMS"
SHIPPED = ("tracer/demo/model", "tracer/demo/prompts.jsonl", "traces/demo")


def faults(text: str) -> Iterator[str]:
    """What in a source would run bytes of other people."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name.split(".")[0] for alias in node.names}
            if isinstance(node, ast.ImportFrom):
                names = {(node.module or "").split(".")[0]}
            yield from (f"line {node.lineno}: import {name}" for name in names & PICKLING)
        elif isinstance(node, ast.Call):
            called, given = ast.unparse(node.func), {each.arg: ast.unparse(each.value) for each in node.keywords}
            for name, (argument, value) in NEEDED.items():
                if (called == name or called.endswith(f".{name}")) and given.get(argument) != str(value):
                    yield f"line {node.lineno}: {called} without {argument}={value}"
            if called.endswith(FORBIDDEN):
                yield f"line {node.lineno}: {called}"
            for argument in ("trust_remote_code", "shell"):
                if given.get(argument) == "True":
                    yield f"line {node.lineno}: {argument}=True"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_source_unpickles_or_runs_what_others_wrote(package: str) -> None:
    sources = [file for file in SOURCES if file.is_relative_to(ROOT / package)]
    assert sources
    assert not [f"{file.name}, {fault}" for file in sources for fault in faults(file.read_text("utf-8"))]


def test_what_the_demo_ships_has_the_sums_that_stand_beside_it() -> None:
    stated = {line[66:]: line[:64] for line in SUMS.read_text("utf-8").splitlines()}
    places = [ROOT / place for place in SHIPPED]
    files = [file for place in places for file in (sorted(place.rglob("*")) if place.is_dir() else [place])]
    found = {
        file.relative_to(ROOT).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
        if file.is_file() and file.suffix != ".pyc"
    }
    assert found == stated, "made anew? then: sha256sum FILES > tracer/demo/SHA256SUMS"
