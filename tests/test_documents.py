"""Every command and code block of README.md and docs runs, or says why not.

A block runs in a folder of its own with those before it on the page, where one that begins with `# NAME.py` is that
file. A page marks a block that does not run with the line `<!-- not run by tests: REASON -->` before it, and one that
runs only where the published routing is with `<!-- run by slow tests: REASON -->`. The package pages have tests of
their own, but for blocks with that line.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import replay.commands
import sim.commands
import tracer.commands
from tests.support.command import run
from traces import Trace, demo_trace
from traces.models.architectures import architectures
from traces.writer import write_trace

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared" / "traces"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SLOW = "run by slow tests"
BLOCK = re.compile(
    rf"(?:^<!-- (?P<mark>not run by tests|{SLOW}): [^\n]+ -->\n)?^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)
MAINS = {"moe-sim": sim.commands.main, "moe-trace": tracer.commands.main, "moe-replay": replay.commands.main}
DATA = {"text", "toml", "json", "yaml"}
"""Kinds of blocks that hold no commands."""


class Block(NamedTuple):
    mark: str | None
    kind: str
    text: str


def blocks(page: Path) -> list[Block]:
    return [Block(*found.group("mark", "kind", "text")) for found in BLOCK.finditer(page.read_text(encoding="utf-8"))]


def commands(text: str) -> list[list[str]]:
    """The commands of a block, without comments, lines that end with a backslash joined."""
    lines = text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def runnable(page: Path) -> list[Block]:
    """The blocks that run: Python, and those of which every line is a command of ours."""
    found = []
    for block in blocks(page):
        if block.mark or block.kind in DATA or is_picture(block):
            continue
        if block.kind == "python" or all(words[0] in MAINS for words in commands(block.text)):
            found.append(block)
    return found


def provide(page: Path, folder: Path) -> None:
    """Put into the folder what a page takes for granted: a trace of one's own, and a model's configuration."""
    if page.name not in ("README.md", "tutorial.md"):
        write_trace(Trace.read(demo_trace()).head(3), folder / "my-trace")
    (folder / "config.json").write_text(json.dumps(CONFIG))


CONFIG = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151_936,
    "torch_dtype": "bfloat16",
}


def is_picture(block: Block) -> bool:
    return not block.kind and any(sign in block.text for sign in "─▶│")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_runs_or_says_why_not(page):
    runs = runnable(page)
    for block in blocks(page):
        assert block in runs or block.mark or block.kind in DATA or is_picture(block), block.text


@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)], ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    provide(page, tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in runnable(page):
        if block.kind == "python":
            if file := re.match(r"# (\w+\.py)\n", block.text):
                (tmp_path / file[1]).write_text(block.text)
            exec(block.text, names)
            continue
        for words in commands(block.text):
            done = run(MAINS[words[0]], *words[1:], cwd=tmp_path)
            assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}{done.stderr}"


def test_the_readme_counts_the_architectures_of_the_transformers_that_it_names():
    said = re.search(r"\((\d+) of the (\d+) MoE architectures of transformers ([\d.]+)\)", PAGES[0].read_text("utf-8"))
    assert said
    recorded, known, named = said.groups()
    if not version("transformers").startswith(f"{named}."):
        pytest.skip(f"the figures are of transformers {named}")
    found = architectures()
    assert (sum(each.recorded for each in found), len(found)) == (int(recorded), int(known))


def test_the_site_takes_pages_and_their_pictures():
    lines = (ROOT / "docs" / "mkdocs.yml").read_text("utf-8").split("exclude_docs: |\n")[1].split("\nnav:")[0].split()
    assert lines[0] == "*"
    assert {"!*.md", "!*.png"} <= set(lines)


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason=f"real traces are not at {SHARED}")
def test_the_blocks_over_the_published_routing_run(tmp_path):
    """In one folder, page after page; `pytest -s` shows the figures, to compare with those of the pages."""
    for file in SHARED.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "board").symlink_to(ROOT / "traces" / "board")
    pages = [*PAGES, *(ROOT / package / "README.md" for package in ("policies", "tracer"))]
    marked = [block for page in pages for block in blocks(page) if block.mark == SLOW]
    for words in [words for block in marked for words in commands(block.text)]:
        print(shlex.join(words), flush=True)
        module = ["-m", MAINS[words[0]].__module__.partition(".")[0]] if words[0] in MAINS else []
        command = [sys.executable, *module, *words[1:]]
        done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True)
        assert done.returncode == 0, shlex.join(words)
