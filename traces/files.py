"""Paths that users name, and TOML files, which are read in one place."""

import tomllib
from pathlib import Path
from typing import Any

from traces.errors import InputError


def expanded(path: Path | str) -> Path:
    return Path(path).expanduser()


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file. Raises InputError, beginning with the path, where it has none."""
    try:
        return tomllib.loads(path.read_text("utf-8-sig"))  # editors may begin a file with its mark
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # of TOML or of UTF-8
        raise InputError(f"{path}: cannot be read as TOML: {error}") from error
