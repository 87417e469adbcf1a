"""The keywords of `replay` as types: those of a run, and the fields of `DeviceChoice`.

`python -m tests.keywords` writes this file.
"""

from pathlib import Path

from sim.keywords import RunKeywords


class ReplayKeywords(RunKeywords, total=False):
    """Options of a run on a device."""

    store: Path | str | None
    lanes: int | None
    threads: int | None
    host_dedup: int | None
    dense: str
    verify: bool
