"""What a command does about finished cells of an earlier run: keep them, drop them, or refuse to mix with them."""

from collections.abc import Iterator, Sized
from contextlib import contextmanager
from pathlib import Path

from terminal import console
from traces.errors import InputError


def require_resume(cells: int, folder: Path, resume: bool) -> None:
    if cells and not resume:
        raise InputError(
            f"{folder} holds {cells} finished cells: continue with --resume, drop them with --overwrite, "
            "or name another folder with --out"
        )


def refuse_others(others: int, folder: Path, run: str) -> None:
    if others:
        raise InputError(
            f"{folder} holds {others} cells that this {run} does not have (other options, files or code): "
            "drop all with --overwrite, or name another folder with --out"
        )


@contextmanager
def keeping(command: str, cells: Sized, where: Path) -> Iterator[None]:
    """Say in what ends a run early which finished cells are kept, and where."""

    def kept() -> str:
        return f" ({len(cells)} finished cells are kept in {where}: continue with --resume)" if len(cells) else ""

    try:
        yield
    except KeyboardInterrupt:
        console.fail(command, f"interrupted{kept()}", 130)
    except InputError as error:
        raise InputError(f"{error}{kept()}") from error
