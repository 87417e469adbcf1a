"""Profiles are TOML files: shipped ones in a folder of the package, a user's own in another, others by their path.

Every key carries its unit in its name. What a field may hold stands at the field, and `traces.typed` checks it.
"""

from dataclasses import dataclass
from os.path import exists  # of any name, however long
from pathlib import Path
from typing import TypeVar

from traces.errors import InputError, unknown
from traces.files import expanded, read_toml
from traces.location import absolute, is_url
from traces.typed import typed

T = TypeVar("T")


@dataclass(frozen=True)
class Shipped:
    """The shipped profiles of one kind: `what` names it in messages; own: a folder of the user's."""

    folder: Path
    what: str
    own: Path | None = None

    def names(self) -> list[str]:
        return sorted(self._files())

    def _files(self) -> dict[str, Path]:
        folders = [self.folder, *([self.own] if self.own else [])]
        return {path.stem: path for folder in folders for path in folder.glob("*.toml")}

    def find(self, text: str) -> Path:
        """Return the file of a shipped profile, or of a path. Raise InputError with near names if there is none."""
        if text in (files := self._files()):
            return files[text]
        path = expanded(text)
        if exists(path) and not path.is_dir():
            return path
        if path.suffix == ".toml":
            raise InputError(f"no {self.what} profile at {path}")
        raise unknown(f"{self.what} profile", text, self.names())

    def absolute(self, text: str, base: Path = Path()) -> str:
        """Return the absolute path of a profile in a file; the name of a shipped one, and a URL, as they are."""
        return text if text in self.names() or is_url(text) else absolute(str(expanded(text)), base)

    def read(self, cls: type[T], path: Path) -> T:
        """Return a profile as an instance of the dataclass `cls`, its field `name` being the file's stem."""
        return typed(cls, {**read_toml(path), "name": path.stem}, str(path))
