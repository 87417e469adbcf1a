"""Run the commands of commands.txt and write what each printed and wrote: `python -m tests.golden` renews the folder.

What depends on the version (commit, keys of cells) is replaced by its name, and fractions are rounded to twelve digits,
as the last ones depend on the machine. A table of results stands here as rows, a
larger file as the SHA-256 of its content.
"""

import contextlib
import gzip
import hashlib
import importlib
import io
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from itertools import islice
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow.parquet as pq

from sim.results.provenance import commit
from traces import demo_trace

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
PROGRAMS = {"moe-trace": "tracer", "moe-sim": "sim", "moe-replay": "replay"}
HELD_WHOLE = 12_000
"""Characters of a file that stands here as text; of a larger one its digest does."""

UNSTABLE = {"commit", "cell", "key", "made_at", "date"}
"""Columns and keys whose values belong to a version or a moment."""


def main(out: Path) -> None:
    """Write a file for each command, and one for the options of all commands."""
    demo = demo_trace()
    with gzip.open(Path(__file__).parents[1] / "sim" / "cases.jsonl.gz", "rt", encoding="utf-8") as stored:
        cases = list(islice(stored, 20))
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        folder = Path(scratch).resolve()
        shutil.copy(FOLDER / "rows.toml", "rows.toml")
        Path("cases.jsonl").write_text("".join(cases), encoding="utf-8")
        seen: dict[Path, str] = {}
        lines = (FOLDER / "commands.txt").read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(line for line in lines if line and not line.startswith("#")):
            if line == "gone":
                continue
            status, printed, errors = run(shlex.split(line.replace("DEMO", str(demo))))
            files = written(folder, seen)
            parts = [f"$ {line}", f"status {status}", "--- stdout", printed, "--- stderr", errors, *files]
            names = {str(demo): "DEMO", str(folder): "HERE", str(ROOT): "ROOT"}
            text = normal("\n".join(part.rstrip() for part in parts), names)
            words = "-".join(re.findall(r"[a-z0-9]+", line.lower())[1:5])
            (out / f"{number:02}-{words}.txt").write_text(text + "\n", encoding="utf-8")
        helps = [options(program, ()) for program in PROGRAMS]
        (out / "options.txt").write_text("\n".join(helps) + "\n", encoding="utf-8")


def run(words: list[str]) -> tuple[object, str, str]:
    """Run a command in this process, with one worker on any machine; return its status and what it printed."""
    out, err = io.StringIO(), io.StringIO()
    environment = {"COLUMNS": "150", "TERM": "dumb", "NO_COLOR": "1"}
    command = importlib.import_module(f"{PROGRAMS[words[0]]}.__main__").main
    with (
        patch.object(sys, "argv", words),
        patch.dict(os.environ, environment),
        patch.object(os, "cpu_count", return_value=1),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            command()
            status: object = 0
        except SystemExit as end:
            status = end.code or 0
    return status, out.getvalue(), err.getvalue()


def options(program: str, words: tuple[str, ...]) -> str:
    """Return the help of a program, of each of its commands and of theirs, without frames."""
    _, text, _ = run([program, *words, "--help"])
    rows = [line.strip(" │╭╰─╮╯").strip() for line in text.splitlines()]
    rows = [re.sub(r"\s+", " ", row) for row in rows if row]
    found = [f"## {' '.join([program, *words])}", *rows, ""]
    names = re.findall(r"^│ ([a-z][a-z0-9-]*)\s", text.partition("─ Commands ")[2], re.MULTILINE)
    found += [options(program, (*words, name)) for name in names]
    return "\n".join(found)


def written(folder: Path, seen: dict[Path, str]) -> list[str]:
    """Return the files that have changed since the last call, with their content."""
    found = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if seen.get(path) != digest:
            seen[path] = digest
            found.append(f"--- file {path.relative_to(folder)}\n{content(path)}")
    return found


def content(path: Path) -> str:
    """Return what a file holds as text, of a large one the digest of that; of pictures and unfinished runs nothing."""
    if path.suffix in (".png", ".lock", ".log") or "cells" in path.parts:
        return "(not compared)"
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as held:
            arrays = {name: held[name] for name in held.files}
        facts = {name: (array.dtype.str, array.shape, _size(array)) for name, array in arrays.items()}
        return "\n".join(f"{name} {fact}" for name, fact in facts.items())
    if path.suffix == ".parquet":
        table = pq.read_table(path)
        rows = [{name: value for name, value in row.items() if name not in UNSTABLE} for row in table.to_pylist()]
        types = {field.name: str(field.type) for field in table.schema}
        text = "\n".join(json.dumps(row, default=str) for row in [types, *rows])
    else:
        data = path.read_bytes()
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return f"sha256 {hashlib.sha256(data).hexdigest()}"
        text = re.sub(r"base64,[A-Za-z0-9+/=]+", "base64,PICTURE", text)
    return text if len(text) <= HELD_WHOLE else f"sha256 {hashlib.sha256(stable(text).encode()).hexdigest()}"


def _size(array: np.ndarray) -> str:
    return f"{np.abs(array.astype(float)).sum():.6g}" if array.dtype.kind in "iuf" else ""


def stable(text: str) -> str:
    """Return the text without commit, keys of cells, and the note that the engine is compiled for the first time."""
    text = re.sub(r"\d+\.\d{12,}(e-?\d+)?", lambda number: f"{float(number[0]):.12g}", text)
    text = text.replace(commit(), "COMMIT").replace(commit()[:12], "COMMIT")
    text = re.sub(r"\n?compiling the engine, .*", "", text)
    return re.sub(r"\b[0-9a-f]{16}\b|(?<=-)[0-9a-f]{8}(?=\.csv)", "CELL", text)


def normal(text: str, names: dict[str, str]) -> str:
    """Return the text with what belongs to a version or a folder replaced by its name."""
    for value, name in names.items():
        text = text.replace(value, name)
    text = re.sub(r'("(?:commit|made_at|date)": )"[^"]*"', r"\1null", text)
    return stable(text)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER / "outputs"
    target.mkdir(parents=True, exist_ok=True)
    for old in target.glob("*.txt"):
        old.unlink()
    main(target.resolve())
