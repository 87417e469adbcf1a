"""Words that docs/glossary.md retires stand in nothing that a user reads: help, messages, documents, docstrings."""

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

ROOT = Path(__file__).parents[1]
PACKAGES = ("terminal", "traces", "policies", "tracer", "sim", "replay")
MODULES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
PAGES = sorted(
    {*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(p for k in PACKAGES for p in (ROOT / k).rglob("*.md"))}
)
GLOSSARY = ROOT / "docs" / "glossary.md"

RETIRED = {
    "play, played, playing": r"\bplay(s|ed|ing)?\b",
    "gbps": r"\bgbps\b",
    "nobody": r"\bnobody\b",
    "anew": r"\banew\b",
    "mend": r"\bmend(s|ed|ing)?\b",
    "ails": r"\bails\b",
    "in vain": r"\bin vain\b",
    "demand of a token": r"\btoken's demand\b|\bdemand of a token\b",
    "own work": r"\bown work\b",
    "lest": r"\blest\b",
    "made up": r"\bmade up\b",
    "as typed": r"\bas typed\b",
    "go on, goes on": r"\b(go|goes|going|went) on\b(?! (a|an|the|top|one|both)\b)",
    "is none": r"\bis none\b(?! of)(?<!there is none)(?<!where there is none)",
    "no number of": r"\bno number of\b",
    "to be had": r"\b(to be|can be|cannot be) had\b",
    "slip of the pen": r"\bslip of the pen\b|\bis a slip\b",
    "tells one, told of": r"\btells one\b|\btold of\b",
    "come to a stand": r"\bcome to a stand\b",
}
"""Retired words, as the glossary lists them, and the pattern of each."""

MESSAGES = {"InputError", "PolicyError", "BrokenRuleError", "RuleError", "FieldError", "CannotRunError"}
MESSAGES |= {"unknown", "note", "warn", "fail", "disagrees", "Option", "Argument", "add_column", "set_ylabel"}
"""Calls whose texts users read."""


def found(text: str) -> list[str]:
    """The retired words in a text; what stands in backquotes is code."""
    prose = " ".join(re.sub(r"`[^`]*`", "", text).split())
    return [match[0] for pattern in RETIRED.values() for match in re.finditer(pattern, prose, re.IGNORECASE)]


def texts(node: ast.AST) -> Iterator[str]:
    """The strings within a call."""
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value


def test_the_glossary_lists_what_is_refused():
    listed = GLOSSARY.read_text(encoding="utf-8").split("## Retired words")[1]
    retired = [line.removeprefix("- ").split(": ")[0] for line in listed.splitlines() if line.startswith("- ")]
    assert retired == [*RETIRED]


def test_every_pattern_finds_its_words():
    for words, pattern in RETIRED.items():
        assert all(re.search(pattern, f"it {word} x") for word in words.split(", ") if word != "demand of a token"), (
            words
        )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_documents_have_no_retired_word(page):
    text = page.read_text(encoding="utf-8")
    if page == GLOSSARY:
        text = text.split("## Retired words")[0]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    assert not found(prose)


@pytest.mark.parametrize("package", PACKAGES)
def test_texts_have_no_retired_word(package):
    """Docstrings, messages, labels of plots and tables: strings of several words, and any that such a call gets."""
    wrong = []
    for path in (path for path in MODULES if path.relative_to(ROOT).parts[0] == package):
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            read: list[str] = []
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                read = list(texts(node)) if name in MESSAGES else []
            elif isinstance(node, ast.Constant) and " " in str(node.value):
                read = [str(node.value)]
            wrong += [f"{path.relative_to(ROOT)}: {word}: {text[:60]!r}" for text in read for word in found(text)]
    assert not wrong


@pytest.mark.parametrize("package", ["sim", "tracer", "replay"])
def test_help_has_no_retired_word_and_fits_80_columns(package):
    app = import_module(f"{package}.commands").app
    command = typer.main.get_command(app)
    names = [[], *([name] for name in command.commands)]  # type: ignore[attr-defined]
    for name in names:
        shown = CliRunner().invoke(app, [*name, "--help"], env={"COLUMNS": "80"}).output
        assert not found(shown), name
        assert max(map(len, shown.splitlines())) <= 80, name
