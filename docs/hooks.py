"""Hooks of the documentation's build: the page of all commands, from the commands themselves; links to source files.

Pages of the packages stand where they are in the repository. A link to a file that is not a page becomes its name.
"""

import re
from pathlib import Path
from typing import Any

import typer
from mkdocs.structure.files import File
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\[([^\]]+)\]\((?!https?://)([^)#\s]+)(#[^)]*)?\)")


def on_config(config: Any) -> Any:
    """Build into `site/`, which `exclude_docs` keeps from being read as pages."""
    config.site_dir = str(ROOT / "site")
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are generated."""
    files.append(File.generated(config, "docs/cli.md", content=commands()))
    files.append(File.generated(config, "docs/reference.md", content=reference()))
    return files


def on_page_markdown(markdown: str, page: Any, files: Any, **_: Any) -> str:
    """Turn links to files that are neither pages nor pictures into their texts.

    Raise FileNotFoundError if a file does not exist, or a picture is not part of the site.
    """
    folder = (ROOT / page.file.src_uri).parent

    def linked(found: re.Match[str]) -> str:
        target = (folder / found[2]).resolve()
        if target.suffix == ".md":
            return found[0]
        picture = files.get_file_from_path(str(target.relative_to(ROOT))) if target.suffix == ".png" else None
        if picture and picture.inclusion.is_included():
            return found[0]
        if picture or not target.exists():
            raise FileNotFoundError(f"{page.file.src_uri}: {found[2]}")
        return found[1]

    return LINK.sub(linked, markdown)


def commands() -> str:
    """Return the help of every command, as it is printed at 80 columns."""
    from replay.commands import app as replay
    from sim.commands import app as sim
    from tracer.commands import app as tracer

    parts = ["# Commands", "Printed by the commands themselves."]
    for name, app in (("moe-trace", tracer), ("moe-sim", sim), ("moe-replay", replay)):
        parts.append(f"## {name}")
        for command in typer.main.get_command(app).commands:  # type: ignore[attr-defined]
            shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"}).output
            parts.append(f"### {name} {command}\n\n```text\n{shown.strip()}\n```")
    return "\n\n".join(parts)


def reference() -> str:
    """Return the page of docstrings: the public names of each package."""
    from importlib import import_module
    from inspect import ismodule

    parts = ["# Docstrings", "The public names; semantic versioning is promised for these."]
    for package in ("traces", "policies", "sim", "replay"):
        module = import_module(package)
        for name in module.__all__:
            public = getattr(module, name)
            if ismodule(public):
                parts.append(f"::: {public.__name__}")
            elif callable(public):  # numbers have no docstrings of their own
                parts.append(f"::: {public.__module__}.{public.__name__}")
    return "\n\n".join(parts)
