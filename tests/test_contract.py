"""docs/contract.md and what cites it: each rule that is cited exists, each rule has its owner and its tests.

Links, paths, modules and commands that pages name exist, too.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import typer

import replay.commands
import sim.commands
import tracer.commands

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
CONTRACT = (ROOT / "docs" / "contract.md").read_text(encoding="utf-8")
FOLDERS = ("benchmarks", "docs", "notebooks", "policies", "replay", "sim", "terminal", "tests", "tracer", "traces")
SUFFIXES = {".py", ".md", ".toml", ".ipynb"}

CITATION = re.compile(r"\brules?\s+(\d+(?:(?:,(?:\s+and)?|\s+and|\s+or|\s+to)\s+\d+)*)\b", re.IGNORECASE)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
RULE = re.compile(r"^## Rule (\d+): (.+)\n+(Status: not implemented yet)?", re.MULTILINE)
ROW = re.compile(r"^\| \[(\d+): (.+?)\]\(#(.+?)\) \| (.+?) \| (.+?) \|$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
PATH = re.compile(r"`([\w.-]+/[\w./-]*)`")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
FOLDER = re.compile(r"[\w.-]+(?:/[\w.-]+)+")
MODULE = re.compile(r"`([\w./-]+\.py)(?::[\w.]+)?`")
COMMAND = re.compile(r"`(moe-\w+) ([a-z][\w-]*)")
PROGRAMS = {"moe-trace": tracer.commands.app, "moe-sim": sim.commands.app, "moe-replay": replay.commands.app}
FOREIGN = {"kt_ep_wrapper.py", "my_file.py"}
"""Modules of other programs, and a user's own."""


class Rule(NamedTuple):
    name: str
    implemented: bool


class Row(NamedTuple):
    name: str
    anchor: str
    owners: list[str]
    tests: list[str]


def rules_of(contract: str) -> dict[int, Rule]:
    return {int(number): Rule(name, not status) for number, name, status in RULE.findall(contract)}


def table_of(contract: str) -> dict[int, Row]:
    return {
        int(number): Row(name, anchor, *(re.findall("`(.+?)`", cell) for cell in cells))
        for number, name, anchor, *cells in ROW.findall(contract)
    }


def cited(text: str) -> set[int]:
    """The rules that `text` cites, as in "rules 1, 2 and 4 to 10", also over the end of a line and in test names."""
    numbers: set[int] = set()
    for citation in CITATION.findall(re.sub(r"\n\s*#* ?|_", " ", text)):
        for first, last in re.findall(r"(\d+)(?:\s+to\s+(\d+))?", citation):
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def anchors(page: str) -> set[str]:
    """As GitHub makes them from headings."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADING.findall(page)}


def complaints(contract: str, root: Path) -> Iterator[str]:
    """What is wrong with the table of rules."""
    rules, table = rules_of(contract), table_of(contract)
    if list(rules) != list(range(1, len(rules) + 1)) or {n: rule.name for n, rule in rules.items()} != {
        n: row.name for n, row in table.items()
    }:
        yield "the rules are not numbered from 1, or the table does not have each with its name"
    for number, row in table.items():
        if row.anchor not in anchors(contract):
            yield f"rule {number}: no heading #{row.anchor}"
        if not rules[number].implemented:
            if row.owners or row.tests:
                yield f"rule {number} is not implemented yet and has an owner or a test"
            continue
        if not row.owners or not row.tests:
            yield f"rule {number} has no owner or no test"
        for owner in row.owners + row.tests:
            path, _, name = owner.partition(":")
            text = (root / path).read_text(encoding="utf-8") if (root / path).is_file() else None
            if text is None or (name and not re.search(rf"^ *(def |class |){name}\b", text, re.MULTILINE)):
                yield f"rule {number}: there is no {owner}"
            elif number not in cited(text):
                yield f"rule {number}: {path} does not cite it"


def broken_links(page: Path) -> Iterator[str]:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        if not there.exists() or (anchor and anchor not in anchors(there.read_text(encoding="utf-8"))):
            yield target


def pages() -> list[Path]:
    """Everything of this project that people write."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    return [*found, *ROOT.glob("*.md")]


def test_every_rule_has_an_owner_and_a_test_that_cite_it() -> None:
    assert list(complaints(CONTRACT, ROOT)) == []
    assert len(rules_of(CONTRACT)) == 22
    assert all(rule.implemented for rule in rules_of(CONTRACT).values())


def test_every_rule_that_is_cited_exists() -> None:
    citing = {page: cited(page.read_text(encoding="utf-8")) for page in pages()}
    unknown = {str(page): numbers - rules_of(CONTRACT).keys() for page, numbers in citing.items()}
    assert {page: numbers for page, numbers in unknown.items() if numbers} == {}
    assert sum(bool(numbers) for numbers in citing.values()) > 30


def test_every_link_leads_somewhere() -> None:
    broken = {str(page): list(broken_links(page)) for page in pages() if page.suffix == ".md"}
    assert {page: links for page, links in broken.items() if links} == {}


def missing_names(page: Path) -> Iterator[str]:
    """Modules and commands in backquotes that do not exist. A module's folder is the page's, or a path of its line."""
    text = page.read_text(encoding="utf-8")
    made = " ".join(FENCED.findall(text))  # a page's own examples
    for line in FENCED.sub("", text).splitlines():
        paths = [start / path for path in FOLDER.findall(line) for start in (ROOT, page.parent)]
        folders = [ROOT, page.parent, *paths, *(path.parent for path in paths)]
        for name in MODULE.findall(line):
            known = Path(name).name in FOREIGN or Path(name).name in made
            if not known and not any((folder / name).is_file() for folder in folders):
                yield name
        for program, name in COMMAND.findall(line):
            if name not in typer.main.get_command(PROGRAMS[program]).commands:  # type: ignore[attr-defined]
                yield f"{program} {name}"


def test_every_module_and_command_that_pages_name_exists() -> None:
    written = [page for page in pages() if page.suffix == ".md" and page.name != "CHANGELOG.md"]
    missing = {str(page): list(missing_names(page)) for page in written}
    assert {page: names for page, names in missing.items() if names} == {}


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_every_path_that_the_docs_name_exists(page: Path) -> None:
    named = set(PATH.findall(page.read_text(encoding="utf-8")))
    assert [path for path in named if not (ROOT / path).exists()] == []
