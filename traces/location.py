"""Where a trace lies: a folder of this machine, or one at a URL of PROTOCOLS, which fsspec reads.

What has "://" in it is a URL. A file system of the network raises what it likes: here it becomes one line.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from traces.errors import InputError

PROTOCOLS = ("file", "memory", "http", "https", "s3", "gs", "az", "abfs", "hf")
"""Of URLs that are opened, and no chains of them: some that fsspec knows run code that a file names (docs/trust.md)."""

TAIL = 65_536
"""Bytes read of the end of a file at first; its footer is seldom longer."""


@dataclass(frozen=True)
class Location:
    """A folder; the files in it go by their names relative to it."""

    path: str  # as it was typed, for messages
    filesystem: AbstractFileSystem
    root: str  # the folder, as the file system calls it

    @staticmethod
    def of(path: Path | str) -> "Location":
        """Return that of a path or a URL. Raises InputError for another protocol, and one that lacks its package."""
        text = str(path)
        if not is_url(text):
            return Location(text, LocalFileSystem(), os.path.abspath(text))
        if text.partition("://")[0].lower() not in PROTOCOLS or "::" in text:
            raise InputError(f"{text} is not opened: use a folder or a URL of {', '.join(PROTOCOLS)}")
        try:
            filesystem, root = url_to_fs(text)
        except Exception as error:
            raise InputError(f"{text} cannot be opened: {error}") from error
        filesystem.invalidate_cache()  # of listings that were made before in this process
        return Location(text.rstrip("/"), filesystem, root.rstrip("/"))

    @property
    def remote(self) -> bool:
        return not isinstance(self.filesystem, LocalFileSystem)

    @property
    def name(self) -> str:
        """Of the folder itself, where links lead."""
        return os.path.basename(self.root if self.remote else os.path.realpath(self.root))

    def within(self, file: str) -> str:
        return f"{self.path}/{file}" if file else self.path

    def names(self, folder: str = "") -> list[str] | None:
        """Return what lies in it, or in a folder of it, sorted; None: there is no such folder. Raises InputError."""
        place = self._place(folder)
        with self.reading(self.within(folder), "cannot be listed"):
            try:
                entries = [entry.rstrip("/") for entry in self.filesystem.ls(place, detail=False)]
            except FileNotFoundError:
                return None
        if entries == [place]:
            raise InputError(f"{self.within(folder)} is a file; a trace is a folder")
        return sorted(entry.rsplit("/", 1)[-1] for entry in entries)

    def tail(self, file: str) -> tuple[bytes, int]:
        """Return the last bytes of a Parquet file, its footer included, and its size. Raises InputError."""
        with (
            self.reading(self.within(file), "cannot be read"),
            self.filesystem.open(self._place(file), "rb") as opened,
        ):
            size = opened.seek(0, os.SEEK_END)
            opened.seek(max(0, size - TAIL))
            tail = opened.read()
            footer = int.from_bytes(tail[-8:-4], "little") + 8
            if footer > len(tail):
                opened.seek(max(0, size - footer))
                tail = opened.read()
            return tail, size

    def parquet(self, file: str, texts: Sequence[str] = ()) -> pq.ParquetFile:
        """Open a Parquet file, its row groups each fetched in one go; texts: columns read as dictionaries."""
        opened = self.filesystem.open(self._place(file), "rb", cache_type="none") if self.remote else self._place(file)
        return pq.ParquetFile(
            opened, pre_buffer=self.remote, read_dictionary=list(texts), page_checksum_verification=True
        )

    @contextmanager
    def reading(self, where: str, what: str) -> Iterator[None]:
        """Raise an InputError, `where` and `what` and the reason, for whatever reading raises inside."""
        try:
            yield
        except InputError:
            raise
        except Exception as error:
            if not self.remote and not isinstance(error, pa.ArrowException | OSError | ValueError):
                raise
            reason = str(error) or type(error).__name__
            if "range requests" in reason:  # fsspec's advice is for its own callers
                reason = "its server does not answer byte ranges: copy the trace here, or serve it otherwise"
            raise InputError(f"{where} {what}: {reason}") from error

    def _place(self, file: str) -> str:
        return f"{self.root}/{file}" if file else self.root


def is_url(path: str) -> bool:
    return "://" in path


def absolute(path: str, base: Path = Path()) -> str:
    """Return the same place wherever one stands: a URL as it is, a path from the root. base: of relative paths."""
    return path if is_url(path) else os.path.realpath(base / path)


def name_of(path: str) -> str:
    """Return the name of a trace's folder or URL: its last part."""
    return absolute(path).rstrip("/").rsplit("/", 1)[-1]


def demo_trace() -> Path:
    """Return the folder of the trace that ships with the project: the shipped model over the shipped prompts."""
    return Path(__file__).parent / "demo"
