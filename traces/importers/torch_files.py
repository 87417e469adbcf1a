"""What SGLang's recorder dumps as .pt: passes (mode per_token) or counts (mode stat), told apart by their keys."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from traces.errors import InputError
from traces.importers.counts import read_stat
from traces.importers.dump import Counts, Dump, each_file
from traces.importers.recorder import read_passes
from traces.importers.source import Source

READERS: dict[str, Callable[[Source, list[tuple[Path, dict[str, Any]]]], Dump | Counts]] = {
    "records": read_passes,
    "logical_count": read_stat,
}


def read(source: Source) -> Dump | Counts:
    """Read a .pt, or a folder of those of all ranks. Raises InputError."""
    if source.load_pt is None:
        raise InputError(f"{source.path} is a torch file, which only `moe-trace import` can read")
    files = [(path, _content(path, source.load_pt(path))) for path in each_file(source.path, ".pt")]
    for key, reader in READERS.items():
        if all(key in content for _, content in files):
            return reader(source, files)
    raise InputError(f"{source.path} is no dump of SGLang's recorder: it has neither `records` nor `logical_count`")


def _content(path: Path, content: Any) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise InputError(f"{path} is no dump of SGLang's recorder: it holds a {type(content).__name__}")
    return content
