"""Files that are there whole or not at all, whatever ends the program while it writes them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from traces.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]


def writable(folder: Path, names: Iterable[str]) -> None:
    """Make `folder` and see that files of these names can be written there; InputError if not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error.strerror or error}") from error
    for name in names:
        if (folder / name).is_dir():
            raise InputError(f"cannot write {folder / name}: a folder of that name is in the way")
        with replacing(folder / name, keep=False) as file:
            file.touch()


@contextmanager
def replacing(path: Path, keep: bool = True) -> Iterator[Path]:
    """A file beside `path` that takes its place once it is whole; nothing is left of it otherwise.

    InputError where the disk is full, or the folder cannot be written to.
    """
    if not path.name:
        raise InputError("a file to write needs a name")
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        if keep:
            part.replace(path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def write_rows(rows: Rows, schema: pa.Schema, path: Path) -> None:
    """Rows as a Parquet file of `schema`, whole or not at all."""
    write_table(pa.Table.from_pylist(list(rows), schema=schema), path)


def write_table(table: pa.Table, path: Path) -> None:
    """A table as a Parquet file, whole or not at all."""
    with replacing(path) as file:
        pq.write_table(table, file)


def write_figure(figure: "Figure", path: Path) -> None:
    """A figure as a PNG, whole or not at all; names in it that hold a $ are no formulas."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)
    with replacing(path) as file:
        figure.savefig(file, format="png", dpi=150)


def save(folder: Path, tables: Mapping[str, tuple[Rows, pa.Schema]], figures: Mapping[str, "Figure"]) -> list[Path]:
    """Write tables (rows and schema) and figures by their names; the files. InputError where that cannot be."""
    writable(folder, [*tables, *figures])
    for name, (rows, schema) in tables.items():
        write_rows(rows, schema, folder / name)
    for name, figure in figures.items():
        write_figure(figure, folder / name)
    return [folder / name for name in (*tables, *figures)]
