"""Other tools' dumps as traces.

Four shapes of data are read: rows (`files`), nested records (`tree`), arrays (`plain`), and what servers answer or
SGLang records (`answers`, `recorder`). Rows and records name their columns by `words` and become one long table
(`table`). Behind all, `traces.defects` checks and `build` makes the trace. A format of known words needs nothing here;
one whose words mean something else is an entry of `words.FORMATS`.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from traces.errors import InputError
from traces.files import unpacked, unpacked_name
from traces.importers import answers, plain, recorder, tree
from traces.importers.build import aggregate_of, trace_of
from traces.importers.dump import Counts, Dump
from traces.importers.files import files_of, frame_of, records_of
from traces.importers.source import Options, Source
from traces.importers.table import routing_of
from traces.importers.words import Columns, format_of
from traces.trace import Trace

__all__ = ["Options", "Source", "import_dump", "read_dump"]


def import_dump(
    path: Path,
    meta: Path | None = None,
    options: Options | None = None,
    load_pt: Callable[[Path], Any] | None = None,
) -> tuple[Trace, list[str]]:
    """Read a dump as a trace; also return what was assumed, a line each.

    meta: a JSON with `model`, `experts`, `phase`, `requests`, ... (`traces.importers.source.Facts`). load_pt: reads a
    torch file as dicts, lists and numpy arrays (this package knows no torch). Dumps without sequences give a trace of
    EAMs only. Raises InputError.
    """
    source = Source.of(path, meta, options or Options(), load_pt)
    return read_dump(source), source.notes


def read_dump(source: Source) -> Trace:
    """Return the dump as a trace; what was found, assumed and is wrong is added to the source. Raises InputError."""
    if not source.path.exists():
        raise InputError(f"no file {source.path} to import")
    dump = _read(source)
    return trace_of(dump, source) if isinstance(dump, Dump) else aggregate_of(dump, source)


def _read(source: Source) -> Dump | Counts:
    paths = files_of(source.path)
    kind = {path: unpacked_name(path).suffix.lower() for path in paths}
    kinds = set(kind.values()) - {".json"} or {".json"}
    paths = [path for path in paths if kind[path] in kinds]
    if not paths:
        raise InputError(f"{source.path} holds no files that could be dumps")
    if kinds == {".npz"}:
        return plain.read_npz(source, paths)
    if kinds == {".npy"}:
        return plain.read_npy(source, paths)
    loaded: list[tuple[str, Any]] = []  # name, and a frame or records
    for path in paths:
        if kind[path] in (".pt", ".pth"):
            assert source.load_pt
            loaded.append((path.stem, [source.load_pt(path)]))
        elif (raw := unpacked(path)).lstrip()[:1] in (b"{", b"["):
            loaded.append((unpacked_name(path).stem, records_of(path, raw)))
        else:
            loaded.append((unpacked_name(path).stem, frame_of(source, path, raw)))
    first = loaded[0][1][0] if isinstance(loaded[0][1], list) else None
    if recorder.is_recording(first):
        return recorder.read(source, [(path, records[0]) for path, (_, records) in zip(paths, loaded, strict=True)])
    if answers.is_answer(first):
        return answers.read(
            source,
            [
                (f"{path} answer {i}", f"{path.stem}-{i}", one)
                for path, (_, records) in zip(paths, loaded, strict=True)
                for i, one in enumerate(records)
            ],
        )
    frames = [(name, frame) for name, held in loaded if len(frame := _rows(source, held)) or len(loaded) == 1]
    return routing_of(frames, _known(source, loaded[-1][1]))


def _known(source: Source, held: Any) -> Source:
    """Return the source with what FORMATS says of a dump with these names."""
    names = held.columns if isinstance(held, pd.DataFrame) else held[-1] if held and isinstance(held[-1], dict) else ()
    if (found := format_of(names)) is None:
        return source
    kind, declared = found
    source.says(kind)
    if declared.note and declared.note not in source.notes:
        source.notes.append(declared.note)
    source.stated.setdefault("phase", declared.phase)
    return replace(source, columns=Columns({**declared.columns, **source.columns.stated}))


def _rows(source: Source, held: Any) -> pd.DataFrame:
    """Return records as flat rows; rows with columns of several layers are records."""
    columns = _known(source, held).columns
    if isinstance(held, pd.DataFrame):
        if not tree.nested(dict.fromkeys(held.columns)):
            return held
        held = tree.with_lists(held)
    elif not any(not isinstance(one, dict) or tree.nested(one) for one in held):  # flat already
        routed = [one for one in held if tree.routes(one, columns)]
        for one in held if len(routed) < len(held) else ():
            tree.state(one, source.stated)
        return pd.DataFrame(routed or held)
    return pd.DataFrame(list(tree.rows(held, columns, source.stated)))
