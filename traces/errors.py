"""The one error that a user can fix: its text is a single line that says what is wrong, where, and what to do.

Commands print it and exit with status 2; anything else that escapes is a defect of ours and keeps its traceback.
A text names a parameter of the library in backquotes, `cache_size`; commands show it as the flag --cache-size.
"""

import difflib
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager


class InputError(ValueError):
    """Invalid input: a file, a parameter or a combination of them that cannot be used."""

    def __init__(self, text: str):
        super().__init__(" ".join(text.splitlines()))


def refuse(*cases: tuple[object, str]) -> None:
    """Raise InputError with the text of the first case that applies."""
    for applies, text in cases:
        if applies:
            raise InputError(text)


@contextmanager
def located(where: str) -> Iterator[None]:
    """Put `where` in front of each InputError that is raised inside."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def unknown(what: str, name: str, known: Iterable[str], where: object = "") -> InputError:
    """Return the error for a name that is not in `known`, in `where`: it offers the near ones, else all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    offer = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names)}"
    return InputError(f"{where}{': ' if where else ''}unknown {what} {name!r}; {offer if names else 'there are none'}")


def with_flags(text: str, parameters: Collection[str]) -> str:
    """Return the text with each of these parameters that it names in backquotes as a flag of a command."""

    def flag(found: re.Match[str]) -> str:
        return f"--{found[1].replace('_', '-')}" if found[1] in parameters else found[0]

    return re.sub(r"`(\w+)`", flag, text)


EXTRAS = {
    "matplotlib": "plot",
    "torch": "record",
    "huggingface_hub": "record",
    "transformers": "record",
    "safetensors": "record",
    "distributed": "cluster",
    "gguf": "gguf",
    "xllamacpp": "llama",
    "accelerate": "offload",
    "fastapi": "serve",
    "uvicorn": "serve",
    "openai": "serve",
    "prometheus_client": "serve",
}
"""Optional packages, and the extra that installs each. `replay` installs the same as `record`."""


def missing_extra(package: str, command: str = "") -> InputError | None:
    """Return the error for a package that is not installed, with the extra to install; None for one of no extra."""
    package = package.partition(".")[0]
    if package not in EXTRAS:
        return None
    extra = "replay" if command == "moe-replay" and EXTRAS[package] == "record" else EXTRAS[package]
    return InputError(f"this needs {package}: pip install 'moe-expert-cache[{extra}]'")
