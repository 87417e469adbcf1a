"""Arrays in files, .npy and .npz: no pickle is run, and whatever is wrong with them is an InputError."""

import io
import math
from collections.abc import Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any
from zipfile import ZipFile

import numpy as np
from numpy.typing import NDArray

from traces.errors import InputError
from traces.facts import parse_json


def read_npy(file: Path | io.BytesIO, where: str = "") -> NDArray[Any]:
    """Return the array of a .npy. Raise InputError, beginning with `where`, else the path."""
    with _reading(f"{where or file} is no .npy"), open(file, "rb") if isinstance(file, Path) else file as opened:
        return np.asarray(np.lib.format.read_array(opened, allow_pickle=False))


def read_npz(path: Path, left: Container[str] = ()) -> dict[str, NDArray[Any]]:
    """Return the arrays of a .npz by their names, but those `left`. Raise InputError, beginning with the path."""
    with _reading(f"{path} is no .npz"), np.load(path, allow_pickle=False) as archive:
        held = {name: archive[name] for name in archive.files if name not in left}
        return {name: array for name, array in held.items() if isinstance(array, np.ndarray)}


@dataclass(frozen=True)
class Stored:
    """An array in a .npy, or in one of a .npz, that is read from its first row on."""

    path: Path
    member: str  # of a .npz; "": of none
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @staticmethod
    def of(path: Path, names: Container[str]) -> "dict[str, Stored]":
        """Return those of these names, as far as they can be read in parts; "" is the array of a .npy."""
        with _reading(f"{path} is no {path.suffix}"):
            members = (
                [""] if path.suffix == ".npy" else [name.removesuffix(".npy") for name in ZipFile(path).namelist()]
            )
        found = {}
        for name in members:
            if name in names:
                with _opened(path, name) as file:
                    shape, by_columns, dtype = _header(file)
                if not by_columns and not dtype.hasobject:
                    found[name] = Stored(path, name, dtype, shape)
        return found

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]


def parts(array: NDArray[Any] | Stored, cuts: Sequence[int]) -> Iterator[NDArray[Any]]:
    """Yield the rows from each of `cuts`, of which the first is 0, to the next."""
    if isinstance(array, np.ndarray):
        yield from (array[first:last] for first, last in pairwise(cuts))
        return
    shape = array.shape[1:]
    with _opened(array.path, array.member) as file:
        _header(file)
        for first, last in pairwise(cuts):
            held = file.read((last - first) * math.prod(shape) * array.dtype.itemsize)
            yield np.frombuffer(held, array.dtype).reshape(last - first, *shape)


@contextmanager
def _opened(path: Path, member: str) -> Iterator[IO[bytes]]:
    with _reading(f"{path} is no {path.suffix}"), ExitStack() as files:
        archive = files.enter_context(ZipFile(path) if member else nullcontext())
        yield files.enter_context(archive.open(f"{member}.npy") if archive else path.open("rb"))


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return the shape, whether columns come one behind the other, and the type."""
    readers = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}
    return readers[np.lib.format.read_magic(file)[0]](file)


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
