"""Paths that users name, files packed or not, and TOML files, which are read in one place."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pyarrow as pa

from traces.errors import InputError

PACKED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
"""The first bytes of packed files, and how Arrow names the packing."""


def expanded(path: Path | str) -> Path:
    return Path(path).expanduser()


def unpacked(path: Path) -> bytes:
    """Return a file's bytes, unpacked where it is packed with gzip or zstd. Raises InputError where it is damaged."""
    raw = path.read_bytes()
    packing = next((kind for magic, kind in PACKED.items() if raw.startswith(magic)), None)
    if packing is None:
        return raw
    try:
        return bytes(pa.CompressedInputStream(pa.BufferReader(raw), packing).read())
    except OSError as error:
        raise InputError(f"{path} is damaged: {error}") from None


def unpacked_name(path: Path) -> Path:
    """Return the name of what is in a packed file: `a.csv` of `a.csv.gz`."""
    return Path(re.sub(r"\.(gz|zst|zstd)$", "", path.name, flags=re.IGNORECASE))


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file. Raises InputError, beginning with the path, where it has none."""
    try:
        return tomllib.loads(path.read_text("utf-8-sig"))  # editors may begin a file with its mark
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # of TOML or of UTF-8
        raise InputError(f"{path}: cannot be read as TOML: {error}") from error
