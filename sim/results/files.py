"""Tables and figures as files of results, each there whole or not at all."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from traces.commands import console
from traces.errors import missing_extra
from traces.output import claim, replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]

Drawn = Callable[[], "Figure"]
"""What draws a figure."""


def write_rows(rows: Rows, schema: pa.Schema, path: Path) -> None:
    """Rows as a Parquet file of `schema`, whole or not at all."""
    write_table(pa.Table.from_pylist(list(rows), schema=schema), path)


def write_table(table: pa.Table, path: Path) -> None:
    """A table as a Parquet file, whole or not at all."""
    with writing(path, table.schema) as writer:
        writer.write_table(table)


@contextmanager
def writing(path: Path, schema: pa.Schema) -> Iterator[pq.ParquetWriter]:
    """A Parquet file for tables of `schema`, whole or not at all; its pages have checksums."""
    with replacing(path) as file, pq.ParquetWriter(file, schema, write_page_checksum=True) as writer:
        yield writer


def read_table(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """A Parquet file, or some of its columns. OSError, ValueError or ArrowException where it cannot be read, or where a
    page has changed since it was written."""
    return pq.read_table(
        path.absolute(), columns=columns and list(columns), partitioning=None, page_checksum_verification=True
    )


def write_figure(figure: "Figure", path: Path) -> None:
    """A figure as a PNG, whole or not at all; names in it that hold a $ are no formulas."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)
    with replacing(path) as file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a box stands for it
        figure.savefig(file, format="png", dpi=150)


def write_figures(figures: Mapping[str, "Drawn"], folder: Path) -> list[Path]:
    """Draw figures and write each as a PNG of its name; return the files. Without matplotlib: warn, and write none."""
    if figures and not find_spec("matplotlib"):
        console.warn(f"{', '.join(figures)} not drawn: {missing_extra('matplotlib')}")
        return []
    for name, draw in figures.items():
        write_figure(draw(), folder / name)
    return [folder / name for name in figures]


def save(
    folder: Path, maker: str, tables: Mapping[str, tuple[Rows, pa.Schema]], figures: Mapping[str, "Drawn"]
) -> list[Path]:
    """Write tables (rows and schema) and figures by their names, as the command `maker` does; the files.

    InputError where that cannot be, or would replace what it did not write (`traces.output`).
    """
    claim(folder, maker, [*tables, *figures])
    for name, (rows, schema) in tables.items():
        write_rows(rows, schema, folder / name)
    return [*(folder / name for name in tables), *write_figures(figures, folder)]
