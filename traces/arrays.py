"""Arrays in files, .npy and .npz: no pickle is run, and whatever is wrong with them is an InputError."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.errors import InputError
from traces.facts import parse_json


def read_npy(file: Path | io.BytesIO, where: str = "") -> NDArray[Any]:
    """Return the array of a .npy. Raise InputError, beginning with `where`, else the path."""
    with _reading(f"{where or file} is no .npy"), open(file, "rb") if isinstance(file, Path) else file as opened:
        return np.asarray(np.lib.format.read_array(opened, allow_pickle=False))


def read_npz(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of a .npz by their names. Raise InputError, beginning with the path."""
    with _reading(f"{path} is no .npz"), np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files if isinstance(archive[name], np.ndarray)}


def read_described(
    path: Path | str, form: str, what: str, advice: str
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Return `about`, the JSON in a .npz of ours, and its other arrays. InputError unless it is of format `form`."""
    try:
        held = read_npz(Path(path))
        about = parse_json(str(held.pop("about")), "what it says of itself")
        if about.get("format") != form:
            raise InputError(f"it is not of this version ({form})")
    except (InputError, OSError, KeyError, AttributeError) as error:
        raise InputError(f"{path} holds no {what}, or half of one ({error}): {advice}") from error
    return about, held


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Raise an InputError for whatever numpy and zipfile raise for damaged bytes."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise InputError(f"{what}, or damaged: {error or type(error).__name__}") from error
