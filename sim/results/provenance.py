"""Which code made a result: the commit that people look up, and a digest of the sources that a cell depends on."""

import hashlib
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@cache
def commit() -> str:
    """Return the commit of this checkout (`-dirty` if files differ), else the installed version, else "unknown"."""
    if (ROOT / ".git").exists():
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            pass
    try:
        return version("moe-expert-cache")
    except PackageNotFoundError:
        return "unknown"


@cache
def sources() -> str:
    """Return a digest of this project's code that a result depends on, edited or committed."""
    digest = hashlib.sha256()
    for file in sorted(path for package in ("traces", "policies", "sim") for path in (ROOT / package).rglob("*.py")):
        digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]
