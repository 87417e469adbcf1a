"""The guard of all that is written: what is not ours is left alone, and two never write to one folder at once.

In a folder of results, MARKER lists the files and folders in it that are ours, each with the command that wrote it;
nothing else there is replaced or removed. A trace needs no marker, since its files say what they are, and only what
makes traces writes to one. A single file is replaced only where the user says so. Nothing is written through a symbolic
link, or to a device. LOCK is held while a command writes to a folder: by the operating system, so that it ends with the
process. A file gets its name when it is whole.
"""

import json
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from traces.errors import InputError
from traces.files import KINDS
from traces.schema import GROWING, KEY, REQUESTS, ROUTING

MARKER = ".moe-expert-cache"
LOCK = ".moe-expert-cache.lock"

ELSEWHERE = "choose another folder"


@contextmanager
def replacing(path: Path, keep: bool = True, overwrite: bool = True) -> Iterator[Path]:
    """Yield a file beside `path` that takes its place once it is whole; nothing is left of it otherwise.

    Raise InputError where another process writes it, the disk is full, or the folder cannot be written to. Without
    `overwrite` also where another process wrote the file since `check_file` found none.
    """
    if not path.name:
        raise InputError("a file to write needs a name")
    part = path.absolute().with_name(f".{path.name}.part")  # Arrow takes a `~` at the beginning for a home
    with _writing(path), _locked(path.with_name(f".{path.name}.lock"), path):
        part.unlink(missing_ok=True)  # left by a process that was killed, or a link to somewhere else
        try:
            yield part
            if keep:
                if not overwrite and os.path.lexists(path):
                    raise InputError(f"another command wrote {path} meanwhile: name another file, or use --overwrite")
                part.replace(path)
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)


@contextmanager
def _locked(lock: Path, what: object) -> Iterator[None]:
    """Hold the file `lock`, which protects `what`. Raise InputError where another process does, or none can be made."""
    with _writing(what):
        mode = _mode(lock)
        if mode is not None and not stat.S_ISREG(mode):
            raise InputError(f"{lock} is {_kind(mode)}: remove it, or choose another name")
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


def remove(*files: Path) -> None:
    """Remove files, those that are there. InputError where that cannot be."""
    for file in files:
        with _writing(file):
            file.unlink(missing_ok=True)


def make_folder(folder: Path) -> None:
    """Make `folder` unless it is there. InputError where that cannot be."""
    with _writing(f"to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)


def check_trace_folder(folder: Path) -> None:
    """Raise InputError where no trace can be written to `folder`, whatever it holds; changes nothing.

    UnicodeEncodeError for a name that is not UTF-8, which Arrow does not take.
    """
    str(folder.absolute()).encode()
    _refuse_url(folder)
    with _writing(folder):
        _refuse_trace(folder.absolute().parent)
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder} is a file; {ELSEWHERE}")
        for entry in folder.iterdir() if folder.exists() else ():
            if entry.is_symlink():
                raise InputError(f"{entry} is a symbolic link, through which nothing is written: {ELSEWHERE}")
        base = folder
        while not base.exists():
            base = base.parent
    try:
        with tempfile.TemporaryFile(dir=base):
            pass
    except OSError as error:
        raise InputError(f"cannot write {folder}: {base}: {error.strerror}; {ELSEWHERE}") from error


def check_file(path: Path, overwrite: bool = False, read: Path | None = None) -> None:
    """Raise InputError where a file cannot be written at `path`, or where one would be replaced unasked.

    Nor does it take the place of another command's results, or of the file that is `read` for it.
    """
    _refuse_url(path)
    with _writing(path):
        _refuse_trace(path.parent)
        mode = _mode(path)
    if mode is not None:
        if stat.S_ISDIR(mode):
            raise InputError(f"cannot write {path}: it is a folder; name a file in it")
        if not stat.S_ISREG(mode):
            raise InputError(f"cannot write {path}: it is {_kind(mode)}, and is left alone; name another file")
        if of := marked(path.parent).get(path.name):
            raise InputError(f"{path} was written by {of}: it is left alone; name another file")
        if not overwrite:
            raise InputError(f"{path} exists: replace it with --overwrite, or name another file")
        if read is not None and read.exists() and path.samefile(read):
            raise InputError(f"{path} is read and cannot be written at the same time; name another file")
    with replacing(path, keep=False) as part:
        part.touch()


@contextmanager
def claimed(folder: Path, maker: str, names: Iterable[str]) -> Iterator[None]:
    """Keep `folder`, which is made, for the command `maker` to write files and folders of these names.

    No other process writes there meanwhile. Afterwards the marker lists what is there; a new, empty folder goes.
    InputError as `claim`, and where another process writes there.
    """
    _check_folder(folder)
    with only_writer(folder):
        claim(folder, maker, names)
        try:
            yield
        finally:
            with suppress(InputError):  # it lists too much, then
                _mark(folder, {name: of for name, of in marked(folder).items() if os.path.lexists(folder / name)})


def claim(folder: Path, maker: str, names: Iterable[str]) -> None:
    """Make `folder`, and mark files and folders of these names (`a`, `a/b`) in it as of the command `maker`.

    InputError where it cannot be written to, is a trace or within one, or where something of such a name is there that
    this command did not write.
    """
    _check_folder(folder)
    with _writing(f"to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        held = marked(folder)
        for name in (wanted := list(names)):
            _refuse_other(folder / name, maker, held.get(name))
    now = {**held, **dict.fromkeys(wanted, maker)}
    if now != held:
        _mark(folder, now)


def _check_folder(folder: Path) -> None:
    """Raise InputError where `folder` cannot hold results, as it is a trace, lies in one, or is an address.

    UnicodeEncodeError for a name that is not UTF-8, which Arrow does not take: before all runs, not after them.
    """
    str(folder.absolute()).encode()
    _refuse_url(folder)
    with _writing(f"to {folder}"):
        _refuse_trace(folder)


def _refuse_other(path: Path, maker: str, of: str | None) -> None:
    """Raise InputError for what is at `path`, unless `maker` wrote it."""
    mode = _mode(path)
    if mode is None:
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise InputError(f"{path} is {_kind(mode)}, through which nothing is written: remove it, or {ELSEWHERE}")
    if of != maker:
        by = f"was written by {of}" if of else f"was not written by {maker}"
        raise InputError(f"{path} {by}: it is left alone; {ELSEWHERE}")


def marked(folder: Path) -> dict[str, str]:
    """Return the names in `folder` that are ours, each with the command that wrote it; none that leads out of it."""
    try:
        held = json.loads((folder / MARKER).read_bytes()) if (folder / MARKER).is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(held, dict):
        return {}
    return {name: of for name, of in held.items() if isinstance(of, str) and _is_within(Path(name))}


def _is_within(path: Path) -> bool:
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _mark(folder: Path, names: Mapping[str, str]) -> None:
    """Write the marker; none where nothing is ours."""
    with _writing(f"to {folder}"):
        if not names:
            (folder / MARKER).unlink(missing_ok=True)
            return
        with replacing(folder / MARKER) as part:
            part.write_text(json.dumps(names, indent=1) + "\n", encoding="utf-8")


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Make `folder`, and lock it against other writers meanwhile; folders that were made and stayed empty go.

    Raises InputError if another process writes there, or it cannot be written.
    """
    with _writing(f"to {folder}"):
        made = [place for place in (folder, *folder.parents) if not place.exists()]
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with _locked(folder / LOCK, f"to {folder}"):
            yield
    finally:
        with suppress(OSError):
            for place in made:
                place.rmdir()


def is_trace(folder: Path) -> bool:
    """Whether the folder holds a trace, whole or growing."""
    parts = (sorted((folder / name).glob("part-*"))[:1] for name in (GROWING, ROUTING))
    return any(map(is_of_trace, [folder / REQUESTS, *(file for first in parts for file in first)]))


def is_of_trace(file: Path) -> bool:
    """Whether it is one of the files of a trace, of any version."""
    try:
        return file.is_file() and KEY in (pq.read_schema(str(file.absolute())).metadata or {})
    except (OSError, pa.ArrowException, UnicodeError):
        return False


def _refuse_url(path: Path) -> None:
    """Raise InputError for `s3://bucket/name`, of which a path has made `s3:/bucket/name`."""
    if _URL.match(str(path)):
        raise InputError(f"{path} is an address, and only folders here are written to: name one, and upload it")


_URL = re.compile(r"[a-z][a-z0-9+.-]+:/", re.IGNORECASE)


def _refuse_trace(folder: Path) -> None:
    """Raise InputError where `folder` is a trace, or lies in one."""
    try:
        inner = folder.resolve()
    except RuntimeError as error:
        raise InputError(f"cannot write {folder}: its links lead in a circle; {ELSEWHERE}") from error
    for place in (inner, *inner.parents):
        if is_trace(place):
            where = f"{folder} is a trace" if place == inner else f"{folder} lies in the trace {place}"
            raise InputError(f"{where}: nothing else is written there; {ELSEWHERE}")


def _mode(path: Path) -> int | None:
    """Return the mode of what is at `path`, of a link its own; None where nothing is."""
    try:
        return path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None


def _kind(mode: int) -> str:
    return KINDS.get(stat.S_IFMT(mode), "no plain file")
