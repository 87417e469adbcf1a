"""Files as rows: CSV and Parquet, JSON and JSON lines, and imatrix.

That is a GGUF file with NAME.counts [experts] for each tensor of experts (llama.cpp, tools/imatrix/imatrix.cpp); its
older format, .dat, has means by expert but no counts.
"""

import csv
import io
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd

from traces.errors import InputError
from traces.facts import parse_json
from traces.importers.cells import whole
from traces.importers.source import Source
from traces.importers.words import fact

TENSOR = re.compile(r"blk\.(\d+)\.ffn_(gate|up|gate_up|down)_exps\.weight\.counts")
CUT = re.compile(r"(\d+)")
ARRAYS = (".npz", ".npy", ".pt")
"""What the names of files of arrays end in (`traces.importers`)."""
OTHER = re.compile(r"readme|license|notice|\.(md|png|py|txt|ipynb|sh|toml)$|^\.", re.IGNORECASE)
"""Files of a folder that are no dumps."""


def files_of(path: Path) -> list[Path]:
    """Return `path`, or the files of the folder `path` and its folders that may be dumps, layer 2 before layer 10."""
    if not path.is_dir():
        return [path]
    found = [one for one in path.rglob("*") if one.is_file() and not OTHER.search(one.name)]
    return sorted(found, key=lambda one: [int(part) if part.isdigit() else part for part in CUT.split(str(one))])


def records_of(path: Path, raw: bytes) -> list[Any]:
    """Return the JSON values of a file: one, those of a list, or one a line. Raises InputError."""
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        lines = enumerate(filter(bytes.strip, raw.split(b"\n")))
        return [parse_json(line, f"{path} answer {number}") for number, line in lines]
    return value if isinstance(value, list) and value and isinstance(value[0], dict) else [value]


def frame_of(source: Source, path: Path, raw: bytes) -> pd.DataFrame:
    """Return a file that is no JSON as rows. Raises InputError for what is of no known kind."""
    if raw.startswith((b"PAR1", b"GGUF")):
        frame = pd.read_parquet(io.BytesIO(raw)) if raw.startswith(b"PAR1") else _imatrix(path)
        return frame.set_axis(range(1, len(frame) + 1))
    if 0 < int.from_bytes(raw[4:8], "little") < 256 and re.match(rb"blk\.\d+\.|output|token_embd", raw[8:32]):
        raise InputError(f"{path} is an imatrix of the older format, with no counts by expert: write it again as GGUF")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{path} is of no known kind: {', '.join(KINDS)}") from None
    return _csv(source, path, text)


def _csv(source: Source, path: Path, text: str) -> pd.DataFrame:
    """Return a table of any delimiter; header comments state facts. Without a header: layer, expert, count."""
    lines = list(io.StringIO(text, newline=""))
    _state(source, [line for line in lines[:4096] if line.startswith("#")])
    head = next((line for line in lines if line.strip() and not line.startswith("#")), "")
    delimiter = max("\t,;|", key=head.count)
    first = lines.index(head) if head else 0  # behind it a row may begin with #
    notes = [
        line[0] == "#" and (n < first or line.count(delimiter) != head.count(delimiter)) for n, line in enumerate(lines)
    ]
    cells = ("\n" if note else line for line, note in zip(lines, notes, strict=True))
    reader = csv.reader(cells, delimiter=delimiter, skipinitialspace=True, strict=True)
    try:
        rows = [(reader.line_num, row) for row in reader if any(row) or len(row) > 1]
    except csv.Error as error:
        raise InputError(f"{path}, row {reader.line_num} is no row of a table: {error}") from None
    names = rows[0][1] if rows else []
    if names and names[0].strip().isdecimal():
        if len(names) not in (2, 3):
            raise InputError(f"{path} has {len(names)} columns without names: write a line with their names first")
        names = ["layer", "expert", "count"][: len(names)]
    else:
        rows = rows[1:]
    odd = next(
        (f": row {line} has {len(row)} cells for {len(names)} names" for line, row in rows if len(row) != len(names)),
        "",
    )
    if odd or not rows:
        raise InputError(f"{path} is no table with columns{odd}")
    names = [name if name not in names[:i] else f"{name}.{i}" for i, name in enumerate(names)]
    return pd.DataFrame([row for _, row in rows], [line for line, _ in rows], names, dtype=object)


def _state(source: Source, comments: list[str]) -> None:
    """Take what header comments state as `name=value`: facts, and the bytes of the experts of each layer."""
    sizes: dict[int, int] = {}
    for line in comments:
        pairs = dict(re.findall(r"([\w.]+)\s*[=:]\s*(\S+)", line))
        if {"layer", "expert_bytes"} <= pairs.keys():
            layer, size = (int(whole(pairs[name], f"{line.strip()}: {name}", 0)) for name in ("layer", "expert_bytes"))
            sizes[layer] = size
            continue
        for name, value in pairs.items():
            if fact(name) == "model":
                source.stated.setdefault("model", re.sub(r"\.gguf$", "", re.split(r"[/\\]", value)[-1]))
            elif (known := fact(name)) and value.isdigit():
                source.stated.setdefault(known, int(value))
    if sizes:
        source.stated["expert_bytes_by_layer"] = sizes
        source.found.append(f"bytes of an expert of {len(sizes)} layers, from the header")


def _imatrix(path: Path) -> pd.DataFrame:
    """Return the counts of an imatrix: of one of the tensors of each layer, as all count the same tokens."""
    import gguf  # the extra `gguf`

    counted = {int(name[1]): one.data for one in gguf.GGUFReader(path).tensors if (name := TENSOR.fullmatch(one.name))}
    if not counted:
        raise InputError(f"{path} has no counts by expert: it is no imatrix of an MoE model")
    held = [(layer, e, n) for layer, data in sorted(counted.items()) for e, n in enumerate(np.ravel(data))]
    return pd.DataFrame(held, columns=["layer", "expert", "count"])


KINDS = ("JSON", "JSON lines", "CSV", "Parquet", "imatrix", *ARRAYS)
"""All kinds of files that are read, by the names that people know."""
