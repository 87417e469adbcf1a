"""Other tools' dumps as traces: a module for each format, which reads, and one that checks and builds.

A format is a line of FORMATS; `auto` takes the first that recognises the dump. Importers refuse damaged input, and
return what they assumed, a line each.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from traces.errors import InputError, unknown
from traces.importers import counts, plain, recorder, sglang, vllm
from traces.importers.answers import answers
from traces.importers.build import aggregate_of, trace_of
from traces.importers.dump import Counts, Dump
from traces.importers.source import Options, Source
from traces.trace import Trace

__all__ = ["AUTO", "FORMATS", "Options", "import_dump"]

AUTO = "auto"


@dataclass(frozen=True)
class Format:
    """One kind of dump."""

    about: str
    read: Callable[[Source], Dump | Counts]
    suffix: str = ""  # of its file, or of one in its folder
    is_answer: Callable[[dict[str, Any]], bool] | None = None  # of a server, whose answers are .json or .jsonl
    fits: Callable[[Source], bool] = lambda source: True  # what else must hold of a file with the suffix

    def recognises(self, source: Source) -> bool:
        """Return whether a dump is of this kind, by name and first content."""
        path = source.path
        suffixes = {one.suffix for one in path.iterdir()} if path.is_dir() else {path.suffix}
        if {".json", ".jsonl"} & suffixes and not {".npy", ".npz"} & suffixes:
            return self.is_answer is not None and any(self.is_answer(one.body) for one in islice(answers(path), 1))
        return bool(self.suffix) and self.suffix in suffixes and self.fits(source)


FORMATS = {
    "npz": Format("plain arrays: experts[tokens, layers, k] and offsets", plain.read_npz, ".npz"),
    "npy": Format("experts[tokens, layers, k], offsets in X.offsets.npy", plain.read_npy, ".npy", fits=plain.fits),
    "vllm": Format("vLLM: a .npy for each request, or answers, .json or .jsonl", vllm.read, ".npy", vllm.is_answer),
    "sglang": Format("SGLang: answers, .json or .jsonl", sglang.read, is_answer=sglang.is_answer),
    "sglang-pt": Format("SGLang: dumps of its recorder, .pt", recorder.read, ".pt"),
    "csv": Format("llama.cpp: counts as layer,expert[,count]", counts.read_csv, ".csv"),
}
"""In the order in which they are tried."""


def import_dump(
    path: Path,
    meta: Path | None = None,
    options: Options | None = None,
    format: str = AUTO,
    load_pt: Callable[[Path], Any] | None = None,
) -> tuple[Trace, list[str]]:
    """Read a dump as a trace; also return what was assumed, a line each.

    meta: a JSON with `model`, `experts`, `phase`, `requests`, ... (`traces.importers.source.Facts`). format: a key of
    FORMATS, or "auto". load_pt: reads a torch file as dicts, lists and numpy arrays (this package knows no torch).
    Dumps without sequences give a trace of EAMs only. Raises InputError.
    """
    if not path.exists():
        raise InputError(f"no file {path} to import")
    source = Source.of(path, meta, options or Options(), load_pt)
    kind = _format(source, format)
    dump = kind.read(source)
    if not kind.is_answer and any(request.start for request in dump.requests):
        raise InputError(f"{path} is of no server, and only servers leave leading tokens out: leave `start` out")
    return trace_of(dump, source) if isinstance(dump, Dump) else aggregate_of(dump, source), source.notes


def _format(source: Source, name: str) -> Format:
    if name != AUTO:
        if name not in FORMATS:
            raise unknown("format", name, [AUTO, *FORMATS])
        return FORMATS[name]
    for known in FORMATS.values():
        if known.recognises(source):
            return known
    offer = "; ".join(f"{name} ({known.about})" for name, known in FORMATS.items())
    raise InputError(f"{source.path} is no dump of a known format; --format takes {offer}")
