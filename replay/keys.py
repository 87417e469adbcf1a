"""Keys of measurements: digests of all that decides them, this project's code included."""

import hashlib
import json
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from sim.results.provenance import sources


def key_of(**decides: Any) -> str:
    """Return the key of a cell that all this decides: texts, numbers, lists and tables; and this project's code."""
    return digest_of({**decides, "code": code_digest()})


def digest_of(value: Any) -> str:
    text = json.dumps(plain_values(value), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def code_digest() -> str:
    """Return a digest of `sim.results.provenance.sources`, and of this package."""
    digest = hashlib.sha256(sources().encode())
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(f"{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def plain_values(value: Any) -> Any:
    """Return values as JSON has them: no infinity (null), and none of NumPy's numbers."""
    if isinstance(value, Mapping):
        return {str(key): plain_values(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(each) for each in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
