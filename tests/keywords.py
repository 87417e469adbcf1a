"""Write keywords of public functions as types: `python -m tests.keywords` renews `keywords.py` of sim and replay."""

from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from replay.device_choice import DeviceChoice
from sim.experiment import Experiment, options_of

ROOT = Path(__file__).parents[1]

FILES = {
    "sim/keywords.py": '''"""The keywords of `simulate` and `sweep` as types: the fields of `Experiment`.

`python -m tests.keywords` writes this file.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict


class RunKeywords(TypedDict, total=False):
    """Options of a run."""

{}
''',
    "replay/keywords.py": '''"""The keywords of `replay` as types: those of a run, and the fields of `DeviceChoice`.

`python -m tests.keywords` writes this file.
"""

from pathlib import Path

from sim.keywords import RunKeywords


class ReplayKeywords(RunKeywords, total=False):
    """Options of a run on a device."""

{}
''',
}


def written() -> dict[str, str]:
    """Return the content of both files."""
    described = zip(FILES.items(), (Experiment, DeviceChoice), strict=True)
    return {file: text.format(_fields(kind)) for (file, text), kind in described}


def _fields(described: type) -> str:
    """Return a line for each keyword; trace and device are parameters with names."""
    hints, options = get_type_hints(described), options_of(described)
    lines = []
    for name in (name for name in options if name not in ("trace", "device")):
        kinds = _parts(hints[name])
        if read := options[name].read:  # makes the field's value of others
            kinds += _parts(get_type_hints(read)["value"])
        if options[name].resolved or Path in kinds:
            kinds += [str, Path]
        kinds.sort(key=lambda kind: kind is NoneType)
        lines.append(f"    {name}: {' | '.join(dict.fromkeys(map(_name, kinds)))}")
    return "\n".join(lines)


def _parts(kind: Any) -> list[Any]:
    return [kind] if isinstance(kind, type) else list(get_args(kind))


def _name(kind: Any) -> str:
    if kind is NoneType:
        return "None"
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind).rpartition("abc.")[2]


if __name__ == "__main__":
    for file, text in written().items():
        (ROOT / file).write_text(text, encoding="utf-8")
