"""The one error that a user can mend: its text is a single line that says what, where and what to do.

Commands print it and exit with status 2; anything else that escapes is a defect of ours and keeps its
traceback.
"""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class InputError(Exception):
    """Bad input: a file, an option or a combination of them that cannot be used."""

    def __init__(self, text: str):
        super().__init__(" ".join(text.splitlines()))


@contextmanager
def located(where: str) -> Iterator[None]:
    """Put `where` in front of each InputError that is raised inside."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def unknown(what: str, name: str, known: Iterable[str]) -> InputError:
    """The error for a name that is not in `known`: offers the near ones, else all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    offer = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names)}"
    return InputError(f"unknown {what} {name!r}; {offer}")
