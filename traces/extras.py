"""Packages that only some commands need: which extra of this package installs each, and whether it is there."""

from importlib.util import find_spec

from traces.errors import InputError

EXTRAS = {
    "matplotlib": "plot",
    "torch": "record",
    "transformers": "record",
    "safetensors": "record",
    "optuna": "tune",
    "distributed": "cluster",
    "gguf": "gguf",
    "accelerate": "offload",
}
"""Packages, and the extra that installs each. `replay` installs the same as `record`."""


def installed(package: str) -> bool:
    """Return whether a package can be imported."""
    return find_spec(package) is not None


def missing(package: str, command: str = "") -> InputError | None:
    """Return the error for a package that is not installed, with the extra to install; None for one of no extra."""
    package = package.partition(".")[0]
    if package not in EXTRAS:
        return None
    extra = "replay" if command == "moe-replay" and EXTRAS[package] == "record" else EXTRAS[package]
    return InputError(f"this needs {package}: pip install 'moe-expert-cache[{extra}]'")
