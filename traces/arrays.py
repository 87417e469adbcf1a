"""Arrays in files of other people, .npy and .npz: no pickle is run, and whatever is wrong with them is an InputError.

numpy and zipfile raise a dozen kinds of errors for damaged bytes, and believe what a file says of its own size. Here no
archive unpacks to much more than it is, and texts are texts: numpy makes ones of numbers that are no characters, which
Python's own functions then trip over.
"""

import io
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from traces.errors import InputError
from traces.facts import parse_json
from traces.files import plain

ENDING = ".npy"

MOST_UNPACKED = 1 << 30
"""Bytes that an archive may unpack to, or more where that is less than MOST_TIMES its size."""

MOST_TIMES = 100
"""Ids of experts pack to some third of their size; what packs to so little is made to fill a memory."""

LAST_CHARACTER = 0x10FFFF


def read_npy(content: bytes | Path) -> NDArray[Any]:
    """Return the array of a .npy, given as its bytes or its path. Raise InputError without the path."""
    if isinstance(content, bytes):
        with _telling(".npy"):
            return _array(io.BytesIO(content))
    with _telling(".npy"), plain(content).open("rb") as file:
        return _array(file)


def read_npz(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of a .npz by their names. Raise InputError without the path."""
    with _telling(".npz"), plain(path).open("rb") as file, zipfile.ZipFile(file) as archive:
        held = [member for member in archive.infolist() if member.filename.endswith(ENDING)]
        unpacked = sum(member.file_size for member in held)
        if unpacked > max(MOST_UNPACKED, MOST_TIMES * path.stat().st_size):
            raise InputError(f"it says that it unpacks to {unpacked} bytes, far more than it has")
        found: dict[str, NDArray[Any]] = {}
        for member in held:
            name = member.filename.removesuffix(ENDING)
            if name in found:
                raise InputError(f"the array {name!r} is there twice")
            with archive.open(member) as opened:
                found[name] = _array(opened)
        return found


def read_described(
    path: Path | str, form: str, what: str, advice: str
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Return what a .npz of ours says of itself, a JSON text in `about`, and its other arrays.

    Raise InputError, one line with what it should be and what to do, for a file that is missing, damaged, or not of
    the format `form`.
    """
    try:
        held = read_npz(Path(path))
        about = parse_json(text(held.pop("about")), "what it says of itself")
        if not isinstance(about, dict) or about.get("format") != form:
            raise InputError(f"it is not of this version ({form})")
    except OSError as error:
        raise InputError(f"cannot read the {what} {path}: {error.strerror or error}; {advice}") from error
    except (InputError, KeyError) as error:
        raise InputError(f"{path} holds no {what}, or half of one ({error}): {advice}") from error
    return about, held


def text(array: NDArray[Any]) -> str:
    """Return what an array of one text holds. Raise InputError."""
    if array.ndim or array.dtype.kind != "U":
        raise InputError(f"{array.dtype} {array.shape} is there in place of a text")
    native = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False))
    if array.dtype.itemsize and native.reshape(1).view(np.uint32).max() > LAST_CHARACTER:
        raise InputError("a text holds what is no character")
    return str(array[()])


def _array(file: IO[bytes]) -> NDArray[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of files that Python 2 wrote
        return np.asarray(np.lib.format.read_array(file, allow_pickle=False))


@contextmanager
def _telling(kind: str) -> Iterator[None]:
    try:
        yield
    except (InputError, FileNotFoundError):
        raise
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}") from error
    except Exception as error:
        raise InputError(f"is no {kind}, or damaged: {error or type(error).__name__}") from error
