"""Other tools' dumps as traces.

Four shapes of data are read: rows (`files`), nested records (`tree`), arrays (`plain`), and what servers answer or
SGLang records (`answers`, `recorder`). Rows and records name their columns by `words` and become one long table
(`table`). Behind all, `traces.defects` checks and `build` makes the trace.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from traces.arrays import read_npy, read_npz
from traces.defects import Routing
from traces.errors import InputError, located
from traces.files import unpacked, unpacked_name
from traces.importers import answers, plain, recorder, tree
from traces.importers.build import aggregate_of, traces_of
from traces.importers.dump import Again, Counts
from traces.importers.files import ARRAYS, files_of, frame_of, records_of
from traces.importers.source import Options, Source
from traces.importers.table import routing_of
from traces.importers.words import Columns, format_of
from traces.trace import Trace, concatenate

__all__ = ["Options", "Source", "import_dump", "read_dump"]


def import_dump(
    path: Path,
    meta: Path | None = None,
    options: Options | None = None,
    load_pt: Callable[[Path], Any] | None = None,
) -> tuple[Trace, list[str]]:
    """Read a dump as a trace, of EAMs only where it has no sequences; also return what was assumed, a line each.

    meta: a JSON (`traces.importers.source.Facts`). load_pt: reads a torch file as dicts, lists and numpy arrays (this
    package knows no torch). Raises InputError.
    """
    source = Source.of(path, meta, options or Options(), load_pt)
    return concatenate(list(read_dump(source))), list(dict.fromkeys(source.notes))


def read_dump(source: Source) -> Iterator[Trace]:
    """Yield the dump as traces, one behind the other: one, unless it is large and of arrays. Raises InputError.

    What was found, assumed and is wrong is added to the source meanwhile.
    """
    if not source.path.exists():
        raise InputError(f"no file {source.path} to import")
    dump = _read(source)
    if isinstance(dump, Counts):
        yield aggregate_of(dump, source)
    else:
        yield from traces_of([dump] if isinstance(dump, Routing) else dump, source)


def _read(source: Source) -> Routing | Counts | Again:
    files = files_of(source.path)
    arrays = [[path for path in files if path.suffix == kind] for kind in (".npz", ".npy")]
    others = [path for path in files if unpacked_name(path).suffix.lower() != ".json"]  # beside others it states facts
    chosen = next(filter(None, (*arrays, others, files)), ())
    if not chosen:
        raise InputError(f"{source.path} holds no files that could be dumps")
    loaded = [(path, _content(source, path)) for path in chosen]
    first = loaded[0][1][0] if isinstance(loaded[0][1], list) else None
    if recorder.reads(first):
        return recorder.read(source, [(path, content) for path, (content,) in loaded])
    if answers.reads(first):
        return answers.read(source, loaded)
    if plain.reads(first):
        return plain.read(source, loaded)
    frames = [(path, _rows(source, path, held)) for path, held in loaded]
    frames = [one for one in frames if len(one[1])] or [(frames[0][0], pd.DataFrame(loaded[0][1], dtype=object))]
    return routing_of(frames, _known(source, loaded[-1][1]))


def _content(source: Source, path: Path) -> Any:
    """Return a file as rows or as a list of records."""
    readers = dict(zip(ARRAYS, (read_npz, read_npy, source.load_pt), strict=True))
    if (read := readers.get(".pt" if path.suffix == ".pth" else path.suffix)) is not None:
        return [read(path)]
    raw = unpacked(path)
    return records_of(path, raw) if raw.lstrip()[:1] in (b"{", b"[") else frame_of(source, path, raw)


def _known(source: Source, held: Any) -> Source:
    """Return the source with what FORMATS says of a dump with these names."""
    names = held.columns if isinstance(held, pd.DataFrame) else held[-1] if held and isinstance(held[-1], dict) else ()
    if (found := format_of(names)) is None:
        return source
    kind, declared = found
    source.found.append(kind)
    if declared.note:
        source.notes.append(declared.note)
    source.stated.setdefault("phase", declared.phase)
    return replace(source, columns=Columns({**declared.columns, **source.columns.stated}))


def _rows(source: Source, path: Path, held: Any) -> pd.DataFrame:
    """Return records as flat rows, each file's by its own format; rows with columns of several layers are records."""
    lines: Any = range(1, len(held) + 1)
    if isinstance(held, pd.DataFrame):
        if not tree.nested(dict.fromkeys(held.columns)):
            return held
        lines, held = held.index, held.to_dict("records")
    with located(str(path)):
        found = list(tree.rows(held, _known(source, held).columns, source.stated))
    return pd.DataFrame([row for _, row in found], [lines[number] for number, _ in found], dtype=object)
