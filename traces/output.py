"""How files and folders are written: whole or not at all, by one process at a time, and never in place of others' work.

In a folder of results, MARKER lists the files and folders in it that are ours, each with the command that wrote it;
nothing else there is replaced or removed. It may be somebody else's: only plain names count, and links are removed,
never followed. LOCK is held by the operating system while a command writes there, so it ends with the process.
"""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from traces.errors import InputError, refuse

MARKER = ".moe-expert-cache"
LOCK = ".moe-expert-cache.lock"

ELSEWHERE = "choose another folder"


@contextmanager
def replacing(path: Path, keep: bool = True, overwrite: bool = True) -> Iterator[Path]:
    """Yield a file beside `path` that takes its place once it is whole; nothing is left of it otherwise.

    Raises InputError where another process writes it, the disk is full, or the folder cannot be written to; without
    `overwrite` also where the file came since `check_file`.
    """
    part = path.absolute().with_name(f".{path.name}.part")  # Arrow takes a `~` at the beginning for a home
    with _writing(path), _locked(path.with_name(f".{path.name}.lock"), path):
        try:
            part.unlink(missing_ok=True)  # it may be a link
            yield part
            if keep and not overwrite and path.exists():
                raise InputError(f"another command wrote {path} meanwhile: name another file, or use --overwrite")
            if keep:
                part.replace(path)
        finally:
            part.unlink(missing_ok=True)


@contextmanager
def _locked(lock: Path, what: object) -> Iterator[None]:
    """Hold the file `lock`, which protects `what`. Raises InputError where another process does."""
    with _writing(what):
        unlink_link(lock)
        lock.touch()  # raises where no file can be made, as filelock does not always
        held = FileLock(lock, timeout=0)
        try:
            held.acquire()
        except Timeout:
            raise InputError(f"another command is writing {what}: wait for it, or choose another name") from None
    try:
        yield
    finally:
        with suppress(OSError):
            lock.unlink(missing_ok=True)  # while it is held: whoever has it open sees that it is gone
        held.release()


@contextmanager
def _writing(what: object) -> Iterator[None]:
    """Raise InputError, saying that `what` cannot be written, where the operating system refuses."""
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write {what}: {error.strerror or error}") from error


def unlink_link(path: Path) -> None:
    """Remove `path` if it is a link: what it leads to stays."""
    if path.is_symlink():
        path.unlink()


def remove(*files: Path) -> None:
    for file in files:
        file.unlink(missing_ok=True)


def refuse_address(path: Path) -> None:
    """Raise InputError for `s3://bucket/name`, of which a path has made `s3:/bucket/name`."""
    if re.match(r"(?i)[a-z][a-z0-9+.-]+:/", str(path)):
        raise InputError(f"{path} is an address, and only folders here are written to: name one, and upload it")


def make_folder(folder: Path) -> None:
    """Make `folder` unless it is there. Raises InputError where that cannot be, or where it is an address."""
    refuse_address(folder)
    with _writing(f"to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)


def check_file(path: Path, overwrite: bool = False, read: Path | None = None) -> None:
    """Raise InputError where a file cannot be written, is not to be replaced, is another command's, or is `read`."""
    refuse_address(path)
    if path.exists():
        of, is_read = marked(path.parent).get(path.name), read is not None and read.exists() and path.samefile(read)
        refuse(
            (not path.is_file(), f"cannot write {path}: it is a folder or a device; name a file"),
            (of, f"{path} was written by {of}: it is left alone; name another file"),
            (not overwrite, f"{path} exists: replace it with --overwrite, or name another file"),
            (is_read, f"{path} is read and cannot be written at the same time; name another file"),
        )
    with replacing(path, keep=False) as part:
        part.touch()


@contextmanager
def claimed(folder: Path, maker: str, names: Iterable[str]) -> Iterator[None]:
    """Keep `folder`, which is made, for the command `maker` to write files and folders of these names.

    Afterwards the marker lists what is there; a new, empty folder goes. Raises InputError as `claim` and `only_writer`.
    """
    with only_writer(folder):
        claim(folder, maker, names)
        try:
            yield
        finally:
            with suppress(InputError):  # it lists too much, then
                _mark(folder, {name: of for name, of in marked(folder).items() if (folder / name).exists()})


def claim(folder: Path, maker: str, names: Iterable[str]) -> None:
    """Make `folder`, and mark these names in it as of `maker`. Raises InputError for one that it did not write."""
    make_folder(folder)
    held, wanted = marked(folder), list(names)
    for name in wanted:
        if (folder / name).exists() and held.get(name) != maker:
            by = f"was written by {held[name]}" if name in held else f"was not written by {maker}"
            raise InputError(f"{folder / name} {by}: it is left alone; {ELSEWHERE}")
        unlink_link(folder / name)
    _mark(folder, {**held, **dict.fromkeys(wanted, maker)})


def marked(folder: Path) -> dict[str, str]:
    """Return the plain names in `folder` that are ours, each with the command that wrote it."""
    marker = folder / MARKER
    held: dict[str, str] = json.loads(marker.read_bytes()) if marker.is_file() else {}
    return {name: maker for name, maker in held.items() if name == Path(name).name}


def _mark(folder: Path, names: dict[str, str]) -> None:
    """Write the marker; none where nothing is ours."""
    if not names:
        remove(folder / MARKER)
    elif names != marked(folder):
        with replacing(folder / MARKER) as part:
            part.write_text(json.dumps(names, indent=1) + "\n", encoding="utf-8")


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Make `folder`, and lock it against other writers; folders that were made and stayed empty go. InputError."""
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    make_folder(folder)
    try:
        with _locked(folder / LOCK, f"to {folder}"):
            yield
    finally:
        with suppress(OSError):
            for place in made:
                place.rmdir()
