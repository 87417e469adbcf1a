"""Other tools' dumps as traces: a module for each format, which reads, and one that checks and builds.

A format is a line of FORMATS; `auto` takes the first whose sniffer recognises the dump. Importers refuse damaged
input with the file, the row and the reason, and return what they assumed, a line each.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traces.errors import InputError, unknown
from traces.importers import counts, plain, sglang, torch_files, vllm
from traces.importers.answers import answers, is_file
from traces.importers.build import aggregate_of, trace_of
from traces.importers.dump import Counts, Dump
from traces.importers.source import Options, Source, read_json
from traces.trace import Trace

__all__ = ["AUTO", "FORMATS", "Options", "import_dump"]

AUTO = "auto"


@dataclass(frozen=True)
class Format:
    """One kind of dump."""

    about: str
    fits: Callable[[Source], bool]  # by name and first content; never raises for a dump of another kind
    read: Callable[[Source], Dump | Counts]
    answers: bool = False  # of a server, which may leave out leading tokens


def _ends(suffix: str) -> Callable[[Source], bool]:
    """Whether a file, or a file in a folder, has this suffix."""

    def fits(source: Source) -> bool:
        path = source.path
        return path.suffix == suffix if not path.is_dir() else any(one.suffix == suffix for one in path.iterdir())

    return fits


def _has_offsets(source: Source) -> bool:
    beside = plain.offsets_beside(source.path)
    return source.path.suffix == ".npy" and ("offsets" in source.facts or beside.is_file())


def _answers(recognised: Callable[[dict[str, Any]], bool]) -> Callable[[Source], bool]:
    """Whether the first answer in a .json or .jsonl is recognised."""

    def fits(source: Source) -> bool:
        if not is_file(source.path):
            return False
        first = next(answers(source.path), None)
        return first is not None and recognised(first.body)

    return fits


def _vllm(source: Source) -> bool:
    return _ends(".npy")(source) or _answers(vllm.is_answer)(source)


FORMATS = {
    "npz": Format("plain arrays: experts[tokens, layers, k] and offsets", _ends(".npz"), plain.read_npz),
    "npy": Format("experts[tokens, layers, k], offsets in X.offsets.npy", _has_offsets, plain.read_npy),
    "vllm": Format("vLLM: a .npy for each request, or answers, .json or .jsonl", _vllm, vllm.read, answers=True),
    "sglang": Format("SGLang: answers, .json or .jsonl", _answers(sglang.is_answer), sglang.read_answers, answers=True),
    "sglang-pt": Format("SGLang: dumps of its recorder, .pt", _ends(".pt"), torch_files.read),
    "csv": Format("llama.cpp: counts as layer,expert[,count]", _ends(".csv"), counts.read_csv),
}
"""In the order in which they are tried."""


def import_dump(
    path: Path,
    meta: Path | None = None,
    options: Options | None = None,
    format: str = AUTO,
    load_pt: Callable[[Path], Any] | None = None,
) -> tuple[Trace, list[str]]:
    """Read a dump as a trace; also what was assumed, a line each.

    meta: a JSON with `model`, `experts`, `phase`, `requests`, ...; it names no fact that the dump contradicts.
    format: a key of FORMATS, or "auto". load_pt: reads a torch file as dicts, lists and numpy arrays (this
    package knows no torch). Dumps without sequences give a trace of EAMs only. Raises InputError.
    """
    if not path.exists():
        raise InputError(f"no file {path} to import")
    facts = read_json(meta, "to take the meta from") if meta else {}
    if not isinstance(facts, dict):
        raise InputError(f"{meta} holds no JSON object")
    source = Source(path, facts, str(meta or path), options or Options(), load_pt)
    found = _format(source, format)
    read = found.read(source)
    if not found.answers and any(request.start for request in read.requests):
        raise InputError(f"{path} is of no server, and only servers leave leading tokens out: leave `start` out")
    made = trace_of(read, source) if isinstance(read, Dump) else aggregate_of(read, source)
    source.note_misspelt()
    return made, source.notes


def _format(source: Source, name: str) -> Format:
    if name != AUTO:
        if name not in FORMATS:
            raise unknown("format", name, [AUTO, *FORMATS])
        return FORMATS[name]
    for known in FORMATS.values():
        if known.fits(source):
            return known
    offer = "; ".join(f"{name} ({known.about})" for name, known in FORMATS.items())
    raise InputError(f"{source.path} is no dump of a known format; --format takes {offer}")
