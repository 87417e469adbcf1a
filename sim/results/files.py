"""Tables and figures as files of results: written whole or not at all, and read by one function."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from traces.errors import InputError, missing_extra
from traces.output import claim, replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]

RESULTS_FILE, REQUESTS_FILE = "results.parquet", "requests.parquet"

A_SWEEP = "name a folder that moe-sim sweep has written, of several sweeps in one the folder of one"


def write_rows(rows: Rows, schema: pa.Schema, path: Path) -> None:
    write_table(pa.Table.from_pylist(list(rows), schema=schema), path)


def write_table(table: pa.Table, path: Path) -> None:
    with writing(path, table.schema) as writer:
        writer.write_table(table)


@contextmanager
def writing(path: Path, schema: pa.Schema) -> Iterator[pq.ParquetWriter]:
    """A Parquet file for tables of `schema`, whole or not at all; its pages have checksums."""
    with replacing(path) as file, pq.ParquetWriter(file, schema, write_page_checksum=True) as writer:
        yield writer


def read(path: Path, schema: pa.Schema, more: bool = False) -> pa.Table:
    """Return the columns of `schema` of a table of results, if `more` the others. Raise InputError if it is not one."""
    if not path.is_file():
        raise InputError(f"{path.parent} holds no {path.name}: {A_SWEEP}")
    try:
        others = [field for field in pq.read_schema(path) if field.name not in schema.names] if more else []
        wanted = pa.schema([*schema, *others])
        options = {"partitioning": None, "page_checksum_verification": True}
        return pq.read_table(path.absolute(), columns=wanted.names, **options).cast(wanted)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InputError(
            f"{path} is damaged, or of another version of moe-sim: run it again with --overwrite"
        ) from error


def write_toml(heading: str, values: Mapping[str, Any], path: Path, overwrite: bool = True) -> None:
    """Write values below a heading of comments, whole or not at all."""
    import tomli_w  # which a machine with a GPU need not have

    with replacing(path, overwrite=overwrite) as file:
        file.write_text(heading + tomli_w.dumps(values), encoding="utf-8")


def write_figure(figure: "Figure", path: Path) -> None:
    """Write a figure whole or not at all, as its name says (.png, .pdf, .svg); texts with a $ are no formulas."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)
    if layout := figure.get_layout_engine():
        layout.execute(figure)
        figure.set_layout_engine("none")  # else it is found again, twice
    with replacing(path) as file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a box stands for it
        figure.savefig(file, format=path.suffix[1:].lower(), dpi=150)


def write_figures(figures: Mapping[str, Callable[[], "Figure"]], folder: Path) -> list[Path]:
    """Draw figures and write each as a PNG of its name; return the files. Without matplotlib: warn, and write none."""
    if figures and not find_spec("matplotlib"):
        warnings.warn(f"{', '.join(figures)} not drawn: {missing_extra('matplotlib')}", stacklevel=2)
        return []
    for name, draw in figures.items():
        write_figure(draw(), folder / name)
    return [folder / name for name in figures]


def save(
    folder: Path,
    maker: str,
    tables: Mapping[str, tuple[Rows, pa.Schema]],
    figures: Mapping[str, Callable[[], "Figure"]],
) -> list[Path]:
    """Write tables (rows and schema) and figures by their names, as the command `maker` does; the files.

    InputError where that cannot be, or would replace what it did not write (`traces.output`).
    """
    claim(folder, maker, [*tables, *figures])
    for name, (rows, schema) in tables.items():
        write_rows(rows, schema, folder / name)
    return [*(folder / name for name in tables), *write_figures(figures, folder)]
