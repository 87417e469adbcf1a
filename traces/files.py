"""Files of other people and programs: opened only if they are plain files, and read as TOML in one place.

To open a FIFO waits for whoever writes to it, and a device may never end: both are refused before they are opened.
"""

import stat
import tomllib
from pathlib import Path
from typing import Any

from traces.errors import InputError

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
"""What is no plain file, by its format in `stat`."""


def plain(path: Path) -> Path:
    """Return `path`, or raise InputError for what is there, where links lead, and is no plain file.

    What is not there passes: who opens it says what is missing.
    """
    try:
        mode = path.stat().st_mode
    except OSError:
        return path
    if not stat.S_ISREG(mode):
        raise InputError(f"{path} is {KINDS.get(stat.S_IFMT(mode), 'something else')}, not a file that can be read")
    return path


def expanded(path: Path | str) -> Path:
    """Return the path with a home in place of `~`; as it stands where there is no such home."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file. Raise InputError, beginning with the path, where it has none."""
    try:
        with plain(path).open("rb") as file:
            text = file.read().decode("utf-8-sig")  # editors may begin a file with its mark
            if "\\u0000" in text or "\\U00000000" in text:
                raise ValueError("it holds a NUL, which no name or path has")
            return tomllib.loads(text)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    except RecursionError:
        raise InputError(f"{path}: cannot be read as TOML: it is nested too deeply") from None
    except ValueError as error:  # of TOML, of UTF-8, or of a number with thousands of digits
        raise InputError(f"{path}: cannot be read as TOML: {error}") from error
