"""Where a trace lies: a folder of this machine, or one at any URL that fsspec reads (s3://, gs://, http://, memory://).

What has "://" in it is a URL. A file system of the network raises what it likes: here it becomes one line.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from traces.errors import InputError
from traces.files import plain

TAIL = 65_536
"""Bytes read of the end of a file at first; its footer is seldom longer."""


@dataclass(frozen=True)
class Location:
    """A folder; the files in it go by their names relative to it."""

    path: str  # as it was given, for messages
    filesystem: AbstractFileSystem
    root: str  # the folder, as the file system calls it

    @staticmethod
    def of(path: Path | str) -> "Location":
        """Of a path or a URL. Raises InputError for a protocol that is unknown, or lacks its package."""
        text = str(path)
        if "\0" in text:
            raise InputError(f"{text!r} cannot be opened: no path holds a NUL")
        if "://" not in text:
            return Location(text, LocalFileSystem(), os.path.abspath(text))
        try:
            filesystem, root = url_to_fs(text)
        except Exception as error:
            raise InputError(f"{text} cannot be opened: {_reason(error)}") from error
        filesystem.invalidate_cache()  # of listings that were made before in this process
        return Location(text.rstrip("/"), filesystem, root.rstrip("/"))

    @property
    def remote(self) -> bool:
        """Whether it is a URL's."""
        return not isinstance(self.filesystem, LocalFileSystem)

    @property
    def name(self) -> str:
        """Of the folder itself, where links lead."""
        return os.path.basename(self.root if self.remote else os.path.realpath(self.root))

    def within(self, file: str) -> str:
        """A file of the folder, for messages."""
        return f"{self.path}/{file}" if file else self.path

    def names(self, folder: str = "") -> list[str] | None:
        """What lies in a folder of it, or in itself, sorted; None: there is no such folder. Raises InputError."""
        place = self._place(folder)
        with self.telling(self.within(folder), "cannot be listed"):
            try:
                found = [entry.rstrip("/") for entry in self.filesystem.ls(place, detail=False)]
            except FileNotFoundError:
                return None
        if found == [place]:
            raise InputError(f"{self.within(folder)} is a file; a trace is a folder")
        return sorted(entry.rsplit("/", 1)[-1] for entry in found)

    def tail(self, file: str) -> tuple[bytes, int]:
        """The last bytes of a Parquet file, its footer included, and its size. Raises InputError."""
        where = self.within(file)
        if not self.remote:
            plain(Path(where))
        with self.telling(where, "cannot be read"), self.filesystem.open(self._place(file), "rb") as opened:
            size = opened.seek(0, os.SEEK_END)
            tail = _last(opened, size, TAIL)
            footer = int.from_bytes(tail[-8:-4], "little") + 8
            return (tail if footer <= len(tail) else _last(opened, size, footer)), size

    def parquet(self, file: str, texts: Sequence[str] = ()) -> pq.ParquetFile:
        """A Parquet file, opened; over a network, what is asked for of a row group is fetched in one go.

        texts: columns that are read as dictionaries.
        """
        if self.remote:
            opened = self.filesystem.open(self._place(file), "rb", cache_type="none")
            return pq.ParquetFile(opened, pre_buffer=True, read_dictionary=list(texts), page_checksum_verification=True)
        return pq.ParquetFile(self._place(file), read_dictionary=list(texts), page_checksum_verification=True)

    @contextmanager
    def telling(self, where: str, what: str) -> Iterator[None]:
        """Raise an InputError, `where` and `what` and the reason, for whatever reading raises inside."""
        try:
            yield
        except (InputError, UnicodeEncodeError):  # a name that the locale cannot write is no fault of the file
            raise
        except (pa.ArrowException, OSError, UnicodeError, MemoryError) as error:
            raise InputError(f"{where} {what}: {_reason(error)}") from error
        except Exception as error:
            if not self.remote:
                raise
            raise InputError(f"{where} cannot be read: {_reason(error)}") from error

    def _place(self, file: str) -> str:
        return f"{self.root}/{file}" if file else self.root


def absolute(path: str) -> str:
    """The same place wherever one stands: a URL as it is, a path from the root."""
    return path if "://" in path else os.path.realpath(path)  # of links in a circle too


def name_of(path: str) -> str:
    """Of a trace's folder or URL: its last part."""
    return absolute(path).rstrip("/").rsplit("/", 1)[-1]


def _last(opened: IO[bytes], size: int, count: int) -> bytes:
    opened.seek(max(0, size - count))
    return opened.read()


def _reason(error: Exception) -> str:
    said = str(error) or type(error).__name__
    if "range requests" in said:  # fsspec's advice is for its own callers
        return "its server does not answer byte ranges: copy the trace here, or serve it otherwise"
    return said
