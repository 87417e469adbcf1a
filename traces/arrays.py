"""Arrays in files, .npy and .npz: no pickle is run, and whatever is wrong with them is an InputError."""

import io
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

import numpy as np
from numpy.typing import NDArray

from traces.errors import InputError
from traces.facts import parse_json

LARGE = 2**27
"""Bytes of a file beyond which an array stays there and is mapped into memory."""


def read_npy(file: Path | io.BytesIO, where: str = "") -> NDArray[Any]:
    """Return the array of a .npy. Raise InputError, beginning with `where`, else the path."""
    with _reading(f"{where or file} is no .npy"):
        if isinstance(file, Path) and file.stat().st_size > LARGE:
            return np.lib.format.open_memmap(file, mode="r")
        with open(file, "rb") if isinstance(file, Path) else file as opened:
            return np.asarray(np.lib.format.read_array(opened, allow_pickle=False))


def forget(array: Any) -> None:
    """Give back what was read of an array that is mapped into memory; it is read again where it is needed again."""
    if isinstance(array, np.memmap) and hasattr(mmap, "MADV_DONTNEED"):
        array._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]


def read_npz(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of a .npz by their names, large ones unpacked to a file. InputError begins with the path."""
    with (
        _reading(f"{path} is no .npz"),
        ZipFile(path) as archive,
        TemporaryDirectory(ignore_cleanup_errors=True) as folder,  # what is mapped stays readable without its name
    ):
        held = {}
        for member in archive.infolist():
            if member.filename.endswith(".npy"):
                large = member.file_size > LARGE
                file = Path(archive.extract(member, folder)) if large else io.BytesIO(archive.read(member))
                held[member.filename.removesuffix(".npy")] = read_npy(file)
        return held


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
